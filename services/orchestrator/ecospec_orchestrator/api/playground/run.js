// One answer as it arrives, and its figures. No page in here.

export class Run {
  /** state: "waiting", "running", "done", "stopped" or "failed"; text: all of it; steps: events of docs/step-events.md. */
  constructor(policy, name) {
    Object.assign(this, { policy, name, state: "waiting", problem: "", text: "", rest: "", steps: [], usage: null });
  }

  /** Take one chunk of the stream. */
  add(chunk) {
    this.state = "running";
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const text = choice.delta?.content ?? choice.text ?? "";
    this.text += text;
    const step = choice.ecospec?.step;
    if (step) {
      this.steps.push(step);
      // What the tokens' own pieces do not explain: text that was held back until the end.
      step.rest = text.slice(step.tokens.reduce((length, token) => length + token.text.length, 0));
    } else {
      this.rest += text;
    }
  }

  /** Means over the steps so far; null where nothing was told. */
  figures() {
    const { steps } = this;
    if (!steps.length) return null;
    const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
    const tokens = sum((step) => step.tokens.length);
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    return {
      tokens,
      tokensPerSecond: tokens / sum((step) => step.seconds.step),
      tokensPerStep: tokens / steps.length,
      expertsPerStep: sum((step) => mean(step.experts.read)) / steps.length,
      expertsPerToken: sum((step) => (mean(step.experts.read) * step.tokens.length) / step.batch.tokens) / tokens,
      bytesPerToken: sum((step) => step.bytes.read / step.batch.requests) / tokens,
      stepsWithoutDraft: steps.filter((step) => step.policy.not_speculated !== null).length / steps.length,
    };
  }
}
