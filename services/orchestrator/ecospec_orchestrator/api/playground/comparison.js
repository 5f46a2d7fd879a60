// Two finished runs in one table, and whether their texts are the same.

import { table } from "./dom.js";
import { number } from "./words.js";

// Label, figure, its scale, and whether a ratio says anything.
const ROWS = [
  ["Tokens per second", "tokensPerSecond", 1, true],
  ["Tokens per step", "tokensPerStep", 1, true],
  ["Experts per layer and step", "expertsPerStep", 1, true],
  ["Experts per layer and token", "expertsPerToken", 1, true],
  ["MB read per token", "bytesPerToken", 1e-6, true],
  ["Steps without a draft, %", "stepsWithoutDraft", 100, false],
];

/** Fills the section; hides it as long as there are not two answers with figures. */
export function compare(section, runs) {
  const figures = runs.map((run) => run.figures());
  section.hidden = runs.length < 2 || figures.includes(null) || runs.some((run) => run.state !== "done");
  if (section.hidden) return;
  const [a, b] = figures;
  const rows = ROWS.map(([label, name, scale, compared]) => {
    const ratio = compared ? a[name] / b[name] : NaN;
    return [label, number(a[name] * scale), number(b[name] * scale), Number.isFinite(ratio) ? `${number(ratio)}\u00d7` : "\u2013"];
  });
  section.querySelector("table").replaceWith(table("Means over all steps", ["", ...runs.map((run) => run.name), "First to second"], rows));
  const same = runs[0].text === runs[1].text;
  const verdict = section.querySelector(".verdict");
  verdict.dataset.same = same;
  verdict.textContent = same
    ? "\u2713 Both texts are the same, character for character: speculation changes the speed and nothing else."
    : "\u2715 The texts differ, which speculation must never cause: please report this with the prompt and the settings.";
}
