// One answer as it arrives, and its figures. No page in here.

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

export class Run {
  /** state: "waiting", "running", "done", "stopped" or "failed"; text: all of it; rest: of it, what no step brought; steps: events
   * of docs/step-events.md; most: of experts that a layer read or would have read. */
  constructor(policy, name) {
    Object.assign(this, { policy, name, state: "waiting", problem: "", text: "", rest: "", steps: [], most: 0 });
    this.sums = { tokens: 0, seconds: 0, experts: 0, ownExperts: 0, ownBytes: 0, withoutDraft: 0 };
  }

  /** Take one chunk of the stream. */
  add(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    const text = choice.delta?.content ?? choice.text ?? "";
    this.text += text;
    const step = choice.ecospec?.step;
    if (!step) {
      this.rest += text;
      return;
    }
    // What the tokens' own pieces do not explain: text that was held back until the end.
    step.rest = text.slice(step.tokens.reduce((length, token) => length + token.text.length, 0));
    this.steps.push(step);
    this.most = Math.max(this.most, ...step.experts.read, ...step.experts.plain);
    const { sums } = this;
    const read = mean(step.experts.read);
    sums.tokens += step.tokens.length;
    sums.seconds += step.seconds.step;
    sums.experts += read;
    // Of a step shared with others, by its share of the tokens and of the requests.
    sums.ownExperts += (read * step.tokens.length) / step.batch.tokens;
    sums.ownBytes += step.bytes.read / step.batch.requests;
    sums.withoutDraft += step.policy.not_speculated !== null;
  }

  /** Means over the steps so far; null where none was told. */
  figures() {
    const { sums, steps } = this;
    if (!steps.length) return null;
    return {
      tokens: sums.tokens,
      tokensPerSecond: sums.tokens / sums.seconds,
      tokensPerStep: sums.tokens / steps.length,
      expertsPerStep: sums.experts / steps.length,
      expertsPerToken: sums.ownExperts / sums.tokens,
      bytesPerToken: sums.ownBytes / sums.tokens,
      stepsWithoutDraft: sums.withoutDraft / steps.length,
    };
  }
}
