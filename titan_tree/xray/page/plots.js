// Bars, histograms and curves. uPlot draws the last two; they are drawn again if the window or the colours change.

import { count, make, short } from "./elements.js";

const plots = [];

export const drawPlots = () => plots.forEach((draw) => draw());

// Rows are [label, value, text, colour].
export function bars(title, about, rows, onclick) {
  const most = Math.max(...rows.map(([, value]) => value), 1);
  const lines = rows.map(([label, value, text, background], i) => {
    const fill = make("i", { style: { width: `${(100 * value) / most}%`, background } });
    const parts = [make("span.label", label), make("span.track", fill), make("span.value", text)];
    if (!onclick) return make("div.bar", parts);
    return make("div.bar.link", { onclick: () => onclick(i), title: "show the next place" }, parts);
  });
  return make("div.card", make("h2", title), make("p.faint", about), lines);
}

// A bar between two edges counts the values from the left one on; the last bar has its right edge, too.
export function histogram(title, about, values, edges, label) {
  const heights = edges.slice(1).map(() => 0);
  for (const x of values)
    heights[
      Math.min(
        edges.findLastIndex((edge) => edge <= x),
        heights.length - 1,
      )
    ]++;
  const box = make("div.plot");
  addPlot(box, (style, axis) => ({
    height: 104,
    padding: [6, 20, 0, 0],
    cursor: { show: false },
    scales: {
      x: { time: false, range: [0, heights.length] },
      y: { range: [0, Math.max(...heights) * 1.05 || 1] },
    },
    axes: [
      {
        ...axis,
        size: 20,
        gap: 2,
        space: 44,
        values: (_, at) => at.map((i) => (i % 1 ? "" : label(edges[i]))),
      },
      { ...axis, size: 34, gap: 2, space: 30, values: (_, at) => at.map((x) => (x && x % 1 === 0 ? x : "")) },
    ],
    series: [
      {},
      {
        fill: style.getPropertyValue("--accent"),
        width: 0,
        points: { show: false },
        paths: uPlot.paths.bars({ size: [0.86] }),
      },
    ],
    data: [heights.map((_, i) => i + 0.5), heights],
  }));
  return make("div.card", make("h2", title), make("p.faint", about), box);
}

// The value under the pointer stands in the title. Series are [steps, values].
export function curve(name, data) {
  const [title, box] = [make("h3", name), make("div.plot")];
  const setCursor = ({ cursor: { idx } }) => {
    title.textContent = Number.isInteger(idx)
      ? `${name} ${short(data[1][idx])} at ${count(data[0][idx])}`
      : name;
  };
  addPlot(box, (style, axis) => {
    const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    return {
      height: 130,
      hooks: { setCursor: [setCursor] },
      scales: { x: { time: false } },
      axes: [
        { ...axis, grid, size: 26 },
        { ...axis, grid, size: 56, values: (_, at) => at.map(short) },
      ],
      series: [{}, { stroke: style.getPropertyValue("--accent"), width: 1.5 }],
      data,
    };
  });
  return make("div", title, box);
}

function addPlot(box, options) {
  plots.push(() => {
    const style = getComputedStyle(document.body);
    const font = `11px ${style.fontFamily}`;
    const axis = {
      stroke: style.getPropertyValue("--faint"),
      grid: { show: false },
      ticks: { show: false },
      font,
    };
    const { data, ...others } = options(style, axis);
    box.replaceChildren();
    new uPlot({ width: box.clientWidth, legend: { show: false }, ...others }, data, box);
  });
}
