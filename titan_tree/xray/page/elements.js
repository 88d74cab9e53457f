// Elements and numbers as text.

export const find = (id) => document.getElementById(id);

// make("div.card", { onclick }, child, ...): an element. Texts are never read as HTML.
export function make(selector, ...parts) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  element.className = classes.join(" ");
  for (const part of parts.flat()) {
    if (typeof part === "object" && !(part instanceof Node)) {
      const { style, ...others } = part;
      Object.assign(element, others);
      Object.assign(element.style, style);
    } else element.append(part);
  }
  return element;
}

export const chip = (background) => make("b.chip", { style: { background } });

export const table = (rows) =>
  make(
    "dl",
    rows.flatMap(([name, value]) => [make("dt", name), make("dd", value)]),
  );

export const count = (x) => Math.round(x).toLocaleString("en");

export const plural = (x, word) => `${count(x)} ${word}${x === 1 ? "" : "s"}`;

export const percent = (x) => (100 * x).toFixed(1) + "%";

export const compact = (x) =>
  Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 }).format(x);

// Three significant digits or more, as short as possible.
export function short(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0 || Number.isInteger(x) || Math.abs(x) >= 1e3) return count(x).replace("-0", "0");
  return Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
}
