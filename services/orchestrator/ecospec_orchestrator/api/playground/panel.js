// One run on the page: its text, its figures, and one of its steps in detail.

import { drawBars } from "./bars.js";
import { el, table } from "./dom.js";
import { describe, drawTree } from "./tree.js";
import { cost, count, kindOf, number, predictedOf, visible, why } from "./words.js";

const FIGURES = [
  ["tokens/s", "Tokens per second", (figures) => number(figures.tokensPerSecond)],
  ["tokens/step", "Acceptance length: tokens per step", (figures) => number(figures.tokensPerStep)],
  ["experts/layer", "Experts read per layer and step", (figures) => number(figures.expertsPerStep)],
  ["MB/token", "Megabytes read per token", (figures) => number(figures.bytesPerToken / 1e6)],
];
const STATES = { waiting: "Waiting", running: "Answering", done: "Done", stopped: "Stopped", failed: "Failed" };
const KINDS = { accepted: "accepted", rejected: "verified, not kept", candidate: "only drafted" };

export class Panel {
  /** beside: the runs on the page, this one too; their bars share a scale. */
  constructor(run, beside) {
    this.run = run;
    this.beside = beside;
    this.selected = -1;
    this.following = true;
    this.drawing = ""; // what the pictures show
    this.shown = 0; // steps whose tokens are on the page
    this.scheduled = false;
    this.root = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    const find = (selector) => this.root.querySelector(selector);
    this.parts = {
      state: find(".state"), answer: find(".answer"), detail: find(".detail"), where: find(".where"), slider: find("input"),
      previous: find(".previous"), next: find(".next"), follow: find(".follow"), why: find(".why"), tree: find(".tree"), bars: find(".bars"),
      cost: find(".cost"), numbers: find(".numbers"), details: find("details"), legend: find(".legend"), treeLegend: find(".tree-legend"), predicted: find(".predicted-key"), predictedOf: find(".predicted-of"),
    };
    find("h2").textContent = run.name;
    this.root.setAttribute("aria-label", run.name);
    this.parts.answer.setAttribute("aria-label", `Answer with ${run.name}`);
    this.values = FIGURES.map(([short, long]) => {
      const value = el("dd", { text: "\u2013" });
      find(".figures").append(el("div", {}, el("dt", {}, el("span", { "aria-hidden": "true", text: short }), el("span", { class: "hidden-text", text: long })), value));
      return value;
    });
    this.parts.slider.addEventListener("input", () => this.select(Number(this.parts.slider.value)));
    this.parts.previous.addEventListener("click", () => this.select(this.selected - 1));
    this.parts.next.addEventListener("click", () => this.select(this.selected + 1));
    this.parts.follow.addEventListener("click", () => this.select(this.run.steps.length - 1, true));
    this.parts.answer.addEventListener("click", (event) => {
      if (event.target.dataset.step) this.select(Number(event.target.dataset.step));
    });
    this.parts.details.addEventListener("toggle", () => this.refresh());
    this.sizes = new ResizeObserver(() => this.refresh());
    this.sizes.observe(this.root);
    this.refresh();
  }

  close() {
    this.sizes.disconnect();
    this.root.remove();
  }

  /** Show one step; following goes on with the newest as more come. */
  select(at, following = false) {
    this.selected = Math.max(0, Math.min(at, this.run.steps.length - 1));
    this.following = following;
    this.refresh();
  }

  /** Draw what has changed, once per frame however many chunks come. */
  refresh() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    const { run, parts } = this;
    parts.state.textContent = STATES[run.state];
    parts.state.dataset.state = run.state;
    const figures = run.figures();
    this.values.forEach((value, at) => (value.textContent = figures ? FIGURES[at][2](figures) : "\u2013"));
    this.write();
    parts.detail.hidden = !run.steps.length;
    if (!run.steps.length) return;
    if (this.following) this.selected = run.steps.length - 1;
    this.drawStep(run.steps[this.selected]);
  }

  /** The text: one span per token, so that each can be told apart and found again. */
  write() {
    const { run, parts } = this;
    for (; this.shown < run.steps.length; this.shown++) {
      const step = run.steps[this.shown];
      const tokens = step.tokens.map((token) => el("span", { class: `tok ${token.drafted ? "drafted" : "own"}`, "data-step": this.shown, text: token.text }));
      parts.answer.append(el("span", { class: "step", "data-of": this.shown }, ...tokens));
      if (step.rest) parts.answer.append(el("span", { text: step.rest }));
    }
    if (!run.steps.length && run.rest) parts.answer.textContent = run.rest; // a server that tells no steps
    parts.legend.classList.toggle("absent", !run.steps.length);
    if (run.problem && !parts.answer.querySelector(".cut")) parts.answer.append(el("span", { class: "cut", text: ` [${run.problem}]` }));
    parts.answer.querySelector(".selected")?.classList.remove("selected");
    parts.answer.querySelector(`[data-of="${this.selected}"]`)?.classList.add("selected");
    if (this.following && run.state === "running") parts.answer.scrollTop = parts.answer.scrollHeight;
  }

  drawStep(step) {
    const { run, parts } = this;
    const last = run.steps.length - 1;
    parts.slider.max = last;
    parts.slider.value = this.selected;
    parts.slider.setAttribute("aria-valuetext", `Step ${this.selected + 1} of ${run.steps.length}: ${describe(step)}`);
    parts.where.textContent = `Step ${this.selected + 1} of ${run.steps.length}`;
    parts.previous.disabled = this.selected === 0;
    parts.next.disabled = this.selected === last;
    parts.follow.setAttribute("aria-pressed", String(this.following));
    parts.why.textContent = why(step);
    parts.cost.textContent = cost(step);
    const width = Math.max(240, parts.bars.clientWidth);
    const most = Math.max(...this.beside().map((each) => each.most));
    if (parts.details.open) parts.numbers.replaceChildren(...this.tables(step));
    const drawing = [this.selected, width, most].join();
    if (drawing === this.drawing) return;
    this.drawing = drawing;
    parts.tree.replaceChildren(drawTree(step, width));
    parts.treeLegend.classList.toggle("absent", !step.candidates.length);
    parts.predicted.hidden = !step.experts.predicted;
    parts.predictedOf.textContent = predictedOf(step);
    const overflows = parts.tree.scrollWidth > parts.tree.clientWidth;
    parts.tree.toggleAttribute("data-scrolls", overflows);
    if (overflows) parts.tree.tabIndex = 0;
    else parts.tree.removeAttribute("tabindex");
    parts.bars.replaceChildren(drawBars(step, width, most));
  }

  tables(step) {
    const found = [];
    const chance = (share) => (share === null ? "\u2013" : `${number(100 * share)} %`);
    if (step.candidates.length) {
      const of = (parent) => visible(parent < 0 ? step.root.text : step.candidates[parent].text);
      const rows = step.candidates.map((each) => [visible(each.text), of(each.parent), chance(each.probability), chance(each.target_probability), KINDS[kindOf(each)]]);
      found.push(table(count(step.candidates.length, "candidate"), ["Token", "After", "Drafted with", "By the model", "What became of it"], rows));
    }
    const { read, plain, predicted } = step.experts;
    const rows = read.map((experts, layer) => [String(layer), String(experts), String(plain[layer]), predicted ? String(predicted.experts[layer]) : "\u2013"]);
    found.push(table("Distinct experts by layer", ["Layer", "Read", "Plain decoding", "Predicted"], rows));
    return found;
  }
}
