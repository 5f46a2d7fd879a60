// Elements without strings of markup: the page's policy forbids those.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element; `attributes` may hold `text`, all else is set as an attribute unless it is null, undefined or false. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, the same way. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, { text, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** A table: a header row, then rows whose first cell is their header. */
export function table(caption, head, rows) {
  const cells = (row) => row.map((cell, at) => el(at ? "td" : "th", { scope: at ? null : "row", text: cell }));
  return el(
    "table",
    {},
    el("caption", { text: caption }),
    el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", { scope: "col", text: cell })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
  );
}
