// The draft tree of one step, drawn from left to right. The accepted path is the straight line along the top.

import { svg } from "./dom.js";
import { count, kindOf, visible } from "./words.js";

const HEIGHT = 38;
const ROW = 48;
const GAP = 22;
const COLUMN = { narrowest: 58, widest: 134 }; // a box and its gap; the narrowest lets five of them stand on a phone
const CHARACTER = 7.3; // of the figures' monospaced font, in user units

const percent = (share) => (share >= 0.995 ? "100 %" : share < 0.001 ? "<0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

/** Boxes with their place: column and row, the root first. */
function layout(step) {
  const boxes = [{ kind: "root", text: step.root.text, note: "so far", parent: null, children: [] }];
  for (const candidate of step.candidates) {
    const parent = boxes[candidate.parent + 1];
    const box = { kind: kindOf(candidate), text: candidate.text, note: percent(candidate.probability), candidate, parent, children: [] };
    boxes.push(box);
    parent.children.push(box);
  }
  const last = step.tokens.at(-1);
  if (last && !last.drafted) {
    const parent = boxes.findLast((box) => box.kind === "accepted") ?? boxes[0];
    const box = { kind: "target", text: last.text, note: "model", parent, children: [] };
    boxes.push(box);
    parent.children.push(box);
  }
  const rank = { target: 0, accepted: 1, rejected: 2, candidate: 3 };
  let rows = 0;
  const place = (box, column) => {
    box.column = column;
    box.children.sort((a, b) => rank[a.kind] - rank[b.kind] || b.candidate.probability - a.candidate.probability);
    if (!box.children.length) box.row = rows++;
    for (const child of box.children) place(child, column + 1);
    if (box.children.length) box.row = box.children[0].row;
  };
  place(boxes[0], 0);
  return { boxes, rows, columns: 1 + Math.max(...boxes.map((box) => box.column)) };
}

export function describe(step) {
  const kinds = step.candidates.map(kindOf);
  const accepted = step.candidates.filter((each) => each.accepted).map((each) => `\u201c${visible(each.text)}\u201d`);
  const last = step.tokens.at(-1);
  return [
    `Draft tree after \u201c${visible(step.root.text)}\u201d: ${count(kinds.length, "candidate")}, ${kinds.filter((kind) => kind !== "candidate").length} verified, ` +
      `${accepted.length} accepted${accepted.length ? `: ${accepted.join(", ")}` : ""}.`,
    last && !last.drafted ? `The model itself added \u201c${visible(last.text)}\u201d.` : "",
  ].join(" ");
}

/** available: of the page, in CSS pixels. */
export function drawTree(step, available) {
  const { boxes, rows, columns } = layout(step);
  const column = Math.max(COLUMN.narrowest, Math.min(COLUMN.widest, (available - 2) / columns));
  const gap = Math.min(GAP, column / 6);
  const width = column - gap;
  const whole = { width: columns * column - gap + 2, height: rows * ROW - (ROW - HEIGHT) + 2 };
  const x = (box) => 1 + box.column * column;
  const y = (box) => 1 + box.row * ROW;
  const fitting = Math.max(3, Math.floor((width - 11) / CHARACTER));
  const drawing = svg("svg", { role: "img", "aria-label": describe(step), width: whole.width, height: whole.height, viewBox: `0 0 ${whole.width} ${whole.height}` });
  for (const box of boxes.filter((each) => each.parent)) {
    const from = [x(box.parent) + width, y(box.parent) + HEIGHT / 2];
    const to = [x(box), y(box) + HEIGHT / 2];
    const middle = from[0] + (to[0] - from[0]) / 2;
    drawing.append(svg("path", { class: `edge ${box.kind}`, d: `M${from} C${middle},${from[1]} ${middle},${to[1]} ${to}` }));
  }
  for (const box of boxes) {
    const shown = visible(box.text);
    const mark = { accepted: "\u2713", rejected: "\u2715" }[box.kind];
    drawing.append(
      svg(
        "g",
        { class: `box ${box.kind}`, transform: `translate(${x(box)} ${y(box)})` },
        svg("title", { text: `${shown} (${box.note})` }),
        svg("rect", { width, height: HEIGHT, rx: 7 }),
        svg("text", { class: "token", x: 6, y: 16, text: shown.length > fitting ? `${shown.slice(0, fitting - 1)}\u2026` : shown }),
        svg("text", { class: "note", x: 6, y: 31, text: box.note }),
        ...(mark ? [svg("text", { class: "mark-sign", x: width - 5, y: 31, "text-anchor": "end", text: mark })] : []),
      ),
    );
  }
  return drawing;
}
