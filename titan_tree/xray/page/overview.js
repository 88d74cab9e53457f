// The overview: what is computed, what repeats, why branches diverge, and how large trees are.

import { kindColour } from "./colours.js";
import { compact, count, find, plural } from "./elements.js";
import { kinds, overlap, payload, reasons, totals, trees, UNIT } from "./payload.js";
import { bars, histogram } from "./plots.js";

// A click on a reason calls ``nextPlace`` with its number.
export function fillOverview(nextPlace) {
  const steps = [
    ["each model call", totals.n_calls],
    ["each sample", totals.n_flat],
    ["each leaf path", totals.n_leaf],
    ["as a tree", totals.n_tree],
  ].filter(([, value], i, all) => value !== all[i - 1]?.[1]);
  const computed = steps.map(([label, value], i) => {
    const text = `${count(value)} · ${(value / totals.n_tree).toFixed(1)}×`;
    return [label, value, text, i === steps.length - 1 ? "var(--accent)" : "var(--bar)"];
  });
  const repeats = kinds.map((kind, i) => [
    kind,
    payload.repeats[i],
    count(payload.repeats[i]),
    kindColour(kind),
  ]);
  repeats.sort((a, b) => b[1] - a[1]);
  const diverging = reasons.map(([reason, points, behind]) => {
    return [reason, points, `${count(points)} · ${compact(behind)}`, "var(--bar)"];
  });
  const sizes = trees.map((tree) => tree.n_tree);
  const [first, last] = [Math.min, Math.max].map((end) =>
    Math.floor(4 * Math.log10(sizes.reduce((a, b) => end(a, b)))),
  );
  const tenths = Array.from({ length: 21 }, (_, i) => i / 20);
  const powers = Array.from({ length: last - first + 4 }, (_, i) => 10 ** ((first - 1 + i) / 4)); // four per power of ten
  const about = `${plural(totals.groups, "group")}, ${plural(totals.samples, "sample")}`;
  find("overview").append(
    bars(UNIT === "byte" ? "Bytes to compute" : "Tokens to compute", about, computed),
    bars(
      "What repeats",
      "if each model call is a sample of its own",
      repeats.filter(([, x]) => x).slice(0, 6),
    ),
    bars("Why branches diverge", `branch points · ${UNIT}s after them`, diverging.slice(0, 6), nextPlace),
    histogram("Overlap of trees", "POR: the share of leaf tokens saved", trees.map(overlap), tenths, (x) =>
      x.toFixed(1),
    ),
    histogram("Size of trees", `distinct ${UNIT}s`, sizes, powers, compact),
  );
}
