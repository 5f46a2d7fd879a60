// What the server's short names mean, in sentences.

const POLICIES = {
  none: "Plain decoding (AR)",
  likelihood: "Likelihood (EAGLE-3)",
  ecospec: "EcoSpec (the paper)",
  goodput: "Goodput",
};

const NOT_SPECULATED = {
  request: "Nothing was drafted: plain decoding was asked for.",
  policy: "Nothing was drafted: this policy never does.",
  drafting_does_not_pay: "Nothing was drafted: the tokens that drafts have brought lately are worth less than the time they take.",
  no_node_pays: "Candidates were drafted, and none was worth the experts that it would make the model read.",
  nothing_drafted: "Nothing was drafted: there was nothing to draft for in this step.",
};

const PREDICTION = {
  does_not_pay: "The expert predictor was not asked: its answers have lately been worth less than the wait.",
  cannot_matter: "The expert predictor was not asked: no answer could have changed the choice.",
};

export const policyName = (name) => POLICIES[name] ?? name;

export const milliseconds = (seconds) => `${number(1000 * seconds)} ms`;

export const count = (amount, noun, plural = `${noun}s`) => `${amount} ${amount === 1 ? noun : plural}`;

/** At most three digits that matter. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, useGrouping: false });
}

export const megabytes = (bytes) => `${number(bytes / 1e6)} MB`;

/** A token that can be seen. */
export function visible(text) {
  return text === "" ? "\u2205" : text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll(" ", "\u00b7");
}

export const kindOf = (candidate) => (candidate.accepted ? "accepted" : candidate.chosen ? "rejected" : "candidate");

/** Why the policy did what it did in this step. */
export function why(step) {
  const { policy, candidates, tokens } = step;
  const sentences = [];
  if (policy.not_speculated === null) {
    const chosen = candidates.filter((each) => each.chosen).length;
    const accepted = candidates.filter((each) => each.accepted).length;
    sentences.push(
      `${count(candidates.length, "candidate")} drafted, ${chosen} verified, ${accepted} accepted: ${count(tokens.length, "token")} in ${milliseconds(step.seconds.step)}.`,
    );
  } else {
    sentences.push(NOT_SPECULATED[policy.not_speculated] ?? `Nothing was verified: ${policy.not_speculated}.`);
    sentences.push(`${count(tokens.length, "token")} in ${milliseconds(step.seconds.step)}.`);
  }
  if (policy.probe) sentences.push("This step was a look whether drafting pays again.");
  if (policy.expected_tokens !== null && policy.expected_seconds !== null) {
    sentences.push(
      `The policy expected ${count(number(policy.expected_tokens), "token")} in ${milliseconds(policy.expected_seconds)}; a plain step would take ${milliseconds(policy.plain_seconds)}.`,
    );
  }
  if (PREDICTION[policy.prediction] && candidates.length) sentences.push(PREDICTION[policy.prediction]);
  if (policy.prediction_failed) sentences.push(`The expert predictor gave no answer (${policy.prediction_failed}), so the choice was made without it.`);
  if (policy.decided_by !== policy.name) sentences.push(`For want of measured costs, ${policyName(policy.decided_by)} decided.`);
  if (step.batch.requests > 1) sentences.push(`The step served ${step.batch.requests} requests together.`);
  return sentences.join(" ");
}

/** What the step read against plain decoding. */
export function cost(step) {
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const read = mean(step.experts.read);
  const plain = mean(step.experts.plain);
  const each = read / (step.batch.tokens / step.batch.requests);
  const sentences = [
    `${number(read)} experts per layer for ${count(step.batch.tokens, "token")}` +
      (step.batch.requests === 1 ? `, ${number(each)} a token, where plain decoding reads ${number(plain)}.` : `, where plain decoding reads ${number(plain)} for ${step.batch.requests}.`),
    `${megabytes(step.bytes.read)} in all; plain decoding of as many tokens: about ${megabytes(step.bytes.plain_estimated)}.`,
  ];
  const { predicted } = step.experts;
  if (predicted && predicted.pairs.predicted) {
    const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "\u2013");
    const { pairs } = predicted;
    sentences.push(`Of the experts predicted for the drafts, ${share(pairs.both, pairs.predicted)} were used, and ${share(pairs.both, pairs.actual)} of those used were predicted.`);
  }
  return sentences.join(" ");
}

/** For how much of the step there was a prediction: the last level of the tree may be verified without one. */
export function predictedOf(step) {
  const rows = step.batch.requests + step.batch.nodes;
  const known = step.experts.predicted?.rows ?? 0;
  return known < rows ? `predicted, for ${known} of ${rows} tokens` : "predicted";
}
