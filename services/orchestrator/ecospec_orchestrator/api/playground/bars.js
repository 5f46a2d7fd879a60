// Distinct experts per layer: what this step read, what plain decoding reads, what was predicted.

import { svg } from "./dom.js";
import { number } from "./words.js";

const HEIGHT = 130;
const LEFT = 26;
const BOTTOM = 18;
const TOP = 6;

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** A round step that cuts `most` into about four. */
function tick(most) {
  const rough = Math.max(1, most / 4);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
}

/** width: CSS pixels; most: top of the scale, the same for all steps of a run so that they can be compared. */
export function drawBars(step, width, most) {
  const { read, plain, predicted } = step.experts;
  const every = tick(most);
  const top = Math.max(every, Math.ceil(most / every) * every);
  const slot = (width - LEFT) / read.length;
  const bar = Math.max(1, Math.min(slot * 0.72, 22));
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const middle = (layer) => LEFT + (layer + 0.5) * slot;
  const drawing = svg("svg", {
    role: "img",
    width,
    height: HEIGHT,
    viewBox: `0 0 ${width} ${HEIGHT}`,
    "aria-label":
      `Distinct experts per layer: ${number(mean(read))} on average in this step, from ${Math.min(...read)} to ${Math.max(...read)}; ` +
      `${number(mean(plain))} in a step of plain decoding${predicted ? `; ${number(mean(predicted.experts))} predicted` : ""}.`,
  });
  for (let value = 0; value <= top; value += every) {
    drawing.append(
      svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { class: "axis", x: LEFT - 5, y: y(value) + 4, "text-anchor": "end", text: value }),
    );
  }
  const labelled = Math.ceil(28 / slot);
  read.forEach((experts, layer) => {
    drawing.append(
      svg(
        "g",
        {},
        svg("title", { text: `Layer ${layer}: ${experts} experts read, ${plain[layer]} by plain decoding${predicted ? `, ${predicted.experts[layer]} predicted` : ""}` }),
        svg("rect", { class: "hit", x: LEFT + layer * slot, y: TOP, width: slot, height: HEIGHT - TOP - BOTTOM }),
        svg("rect", { class: "read", x: middle(layer) - bar / 2, y: y(experts), width: bar, height: y(0) - y(experts), rx: Math.min(2, bar / 3) }),
        svg("line", { class: "plain", x1: middle(layer) - slot * 0.46, x2: middle(layer) + slot * 0.46, y1: y(plain[layer]), y2: y(plain[layer]) }),
        ...(predicted ? [svg("circle", { class: "predicted", cx: middle(layer), cy: y(predicted.experts[layer]), r: Math.min(3, slot * 0.3) })] : []),
      ),
    );
    if (layer % labelled === 0) drawing.append(svg("text", { class: "axis", x: middle(layer), y: HEIGHT - 4, "text-anchor": "middle", text: layer }));
  });
  return drawing;
}
