// The page: reads the payload, and connects the lists, the tree and the panel.

import { colouring, kindColour, labelColour, MEASURES } from "./colours.js";
import { advantages, defaults, ESTIMATORS } from "./estimators.js";
import { Icicle } from "./icicle.js";
import { Tree } from "./tree.js";

const MOST_ROWS = 200; // rows of a list that are shown at once

const find = (id) => document.getElementById(id);
const count = (x) => Math.round(x).toLocaleString("en");
const unit = () => (payload.tokenizer === "bytes" ? "byte" : "token");
const noun = (x, word = unit()) => `${count(x)} ${word}${x === 1 ? "" : "s"}`;
const compact = (x) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 2 }).format(x);
const percent = (x) => (100 * x).toFixed(1) + "%";

// Four significant digits, as short as possible.
function short(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  if (Number.isInteger(x) || Math.abs(x) >= 1e4) return count(x);
  return Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
}

// make("div.card", { onclick }, child, ...): an element. Texts are never read as HTML.
function make(selector, ...parts) {
  const [tag, ...classes] = selector.split(".");
  const element = document.createElement(tag);
  element.className = classes.join(" ");
  for (const part of parts.flat()) {
    if (part === null || part === undefined) continue;
    if (typeof part === "object" && !(part instanceof Node)) {
      const { style, ...others } = part;
      Object.assign(element, others);
      Object.assign(element.style, style);
    } else element.append(part);
  }
  return element;
}

async function readPayload() {
  const bytes = Uint8Array.from(atob(find("payload").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const payload = await readPayload();
const isDark = matchMedia("(prefers-color-scheme: dark)");
const known = new Map(); // trees that were shown
const state = { tree: 0, measure: "reuse", estimator: null, options: {}, overlay: "", showText: true, sort: ["n_tree", -1], listed: MOST_ROWS };
let credit = null; // of the tree that is shown, under the chosen estimator
let look = null; // its colouring
const icicle = new Icicle(find("tree"), showTip, showPanel);

const tree = () => {
  if (!known.has(state.tree)) known.set(state.tree, new Tree(payload.trees[state.tree]));
  return known.get(state.tree);
};
const textOf = (i) => (state.showText && tree().data.text?.[i]) || "";
const kindOf = (i) => payload.kinds[tree().data.kind[i]];
const reasonOf = (i) => payload.reasons[tree().data.reason[i]]?.[0];
const colourOf = (i) => kindColour(kindOf(i));

// Overview.

function bars(title, about, rows, onclick) {
  const most = Math.max(...rows.map(([, value]) => value), 1);
  const lines = rows.map(([label, value, note, colour], i) =>
    make(
      `div.bar${onclick ? ".link" : ""}`,
      onclick ? { onclick: () => onclick(i), title: "show the next place" } : null,
      make("span.label", label),
      make("span.track", make("i", { style: { width: `${(100 * value) / most}%`, background: colour } })),
      make("span.value", note),
    ),
  );
  return make("div.card", make("h2", title), make("p.faint", about), ...lines);
}

function histogram(title, about, values, edges, label) {
  const heights = edges.slice(1).map((edge, i) => values.filter((x) => x >= edges[i] && (x < edge || i === edges.length - 2)).length);
  const box = make("div.plot");
  const card = make("div.card", make("h2", title), make("p.faint", about), box);
  const indices = heights.map((_, i) => i + 0.5);
  plots.push(() => {
    box.replaceChildren();
    const style = getComputedStyle(document.body);
    const axis = { stroke: style.getPropertyValue("--faint"), grid: { show: false }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
    new uPlot(
      {
        width: box.clientWidth,
        height: 104,
        legend: { show: false },
        cursor: { show: false },
        padding: [6, 20, 0, 0],
        scales: { x: { time: false, range: [0, heights.length] }, y: { range: [0, Math.max(...heights) * 1.05 || 1] } },
        axes: [
          { ...axis, size: 20, gap: 2, space: 44, incrs: [1, 2, 5, 10], values: (_, at) => at.map((i) => (Number.isInteger(i) ? label(edges[i]) : "")) },
          { ...axis, size: 34, gap: 2, space: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 1e4], values: (_, at) => at.map((x) => x || "") },
        ],
        series: [{}, { fill: style.getPropertyValue("--accent"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.86] }) }],
      },
      [indices, heights],
      box,
    );
  });
  return card;
}

const plots = [];
const drawPlots = () => plots.forEach((plot) => plot());

function fillOverview() {
  const { totals, trees } = payload;
  const steps = [
    ["each model call", totals.n_calls],
    ["each sample", totals.n_flat],
    ["each leaf path", totals.n_leaf],
    ["as a tree", totals.n_tree],
  ].filter(([, value], i, all) => value && value !== all[i - 1]?.[1]);
  const rows = steps.map(([label, value]) => [label, value, `${count(value)} · ${(value / totals.n_tree).toFixed(1)}×`, label === "as a tree" ? "var(--accent)" : "var(--bar)"]);
  const about = `${noun(totals.groups, "group")}, ${noun(totals.samples, "sample")}`;
  const repeats = payload.kinds.map((kind, i) => [kind, payload.repeats[i], count(payload.repeats[i]), kindColour(kind)]).filter(([, x]) => x);
  repeats.sort((a, b) => b[1] - a[1]);
  const reasons = payload.reasons.map(([reason, points, tokens]) => [reason, points, `${count(points)} · ${compact(tokens)}`, "var(--bar)"]);
  const sizes = trees.map((tree) => tree.n_tree);
  const [first, last] = [Math.min, Math.max].map((end) => Math.floor(4 * Math.log10(sizes.reduce((a, b) => end(a, b)))));
  const edges = Array.from({ length: last - first + 4 }, (_, i) => 10 ** ((first - 1 + i) / 4)); // four bins per power of ten
  find("overview").append(
    bars(unit() === "byte" ? "Bytes to compute" : "Tokens to compute", about, rows),
    bars("What repeats", "if each model call is a sample of its own", repeats.slice(0, 6)),
    bars("Why branches part", `branch points · ${unit()}s behind them`, reasons.slice(0, 6), nextPlace),
    histogram("Overlap of trees", "POR: the share of leaf tokens saved", trees.map(overlap), Array.from({ length: 21 }, (_, i) => i / 20), (x) => x.toFixed(1)),
    histogram("Size of trees", `distinct ${unit()}s`, sizes, edges, compact),
  );
}

// Shows the next branch with a reason, in this tree or a later one.
function nextPlace(reason) {
  for (let step = 0; step <= payload.trees.length; step++) {
    const number = (state.tree + step) % payload.trees.length;
    const after = step || icicle.pinned < 0 ? -1 : icicle.pinned;
    const place = payload.trees[number].reason.findIndex((x, i) => i > after && x === reason);
    if (place >= 0) return chooseTree(number), icicle.jump(place);
  }
}

// The list of trees.

const overlap = (tree) => (tree.n_leaf ? 1 - tree.n_tree / tree.n_leaf : 0);
const rewardOf = new Map(payload.trees.map((tree) => {
  const rewards = tree.samples.map((sample) => sample.reward).filter((x) => typeof x === "number");
  return [tree, rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null];
}));
const meanReward = (tree) => rewardOf.get(tree);
const COLUMNS = {
  id: ["tree", (tree) => tree.id, String],
  n_tree: ["size", (tree) => tree.n_tree, count],
  por: ["POR", overlap, percent],
  reward: ["reward", meanReward, (x) => short(Number(x.toPrecision(2)))],
  loss: ["loss", (tree) => tree.loss ?? null, short],
};

function fillTrees() {
  const { trees } = payload;
  const columns = Object.keys(COLUMNS).filter((name) => trees.some((tree) => COLUMNS[name][1](tree) !== null));
  const ranks = state.overlay.startsWith("rank ") ? state.overlay.slice(5) : null;
  const [by, direction] = state.sort;
  const value = by === "rank" ? (tree) => tree.rank?.[ranks] ?? -1 : COLUMNS[by][1];
  const keys = trees.map(value);
  const order = trees.map((_, i) => i);
  order.sort((a, b) => direction * ((keys[a] ?? -Infinity) < (keys[b] ?? -Infinity) ? -1 : (keys[a] ?? -Infinity) > (keys[b] ?? -Infinity) ? 1 : 0) || a - b);
  const heads = [...columns.map((name) => [name, COLUMNS[name][0]]), ...(ranks ? [["rank", "rank"]] : [])];
  const sortBy = (name) => {
    state.sort = [name, name === by ? -direction : name === "id" ? 1 : -1];
    fillTrees();
  };
  const table = find("trees").querySelector("table");
  table.tHead.replaceChildren(
    make("tr", ...heads.map(([name, title]) => make("th", { onclick: () => sortBy(name) }, title + (name === by ? (direction < 0 ? " ↓" : " ↑") : "")))),
  );
  table.tBodies[0].replaceChildren(
    ...order.slice(0, state.listed).map((i) => {
      const cells = columns.map((name) => {
        const x = COLUMNS[name][1](trees[i]);
        return make("td", { title: name === "id" ? String(x) : "" }, x === null ? "–" : COLUMNS[name][2](x));
      });
      if (ranks) cells.push(make("td", make("b.chip", { style: { background: labelColour(trees[i].rank?.[ranks]) } }), short(trees[i].rank?.[ranks])));
      return make(`tr${i === state.tree ? ".chosen" : ""}`, { onclick: () => chooseTree(i) }, ...cells);
    }),
  );
  find("trees-title").textContent = noun(trees.length, "tree");
  const more = find("more-trees");
  more.hidden = order.length <= state.listed;
  more.textContent = `${count(order.length - state.listed)} more`;
  more.onclick = () => ((state.listed += 5 * MOST_ROWS), fillTrees());
}

function chooseTree(number) {
  if (number === state.tree && icicle.tree) return;
  state.tree = number;
  update();
  showPanel(-1);
}

// Colours, estimators and overlays.

function fillControls() {
  const hasLogprobs = payload.trees.some((tree) => tree.logprob?.some((x) => x !== null));
  const hasRewards = payload.trees.some((tree) => meanReward(tree) !== null);
  const isGiven = payload.trees.some((tree) => tree.samples.some((sample) => sample.advantage));
  const hasCredit = hasRewards || isGiven;
  const missing = { logprob: !hasLogprobs, reward: !hasRewards, advantage: !hasCredit, net: !hasCredit, agreement: !hasCredit };
  find("measures").append(
    ...Object.entries(MEASURES).map(([name, { title, about }]) =>
      make("button", { title: missing[name] ? `${about}: the data has no such numbers` : about, disabled: missing[name] ?? false, id: `by-${name}`, onclick: () => ((state.measure = name), update()) }, title),
    ),
  );
  const names = [...(isGiven ? [["given", "given in the data"]] : []), ...(hasRewards ? Object.entries(ESTIMATORS).map(([name, { title }]) => [name, title]) : [])];
  find("estimator").append(...names.map(([value, title]) => make("option", { value }, value === "given" ? title : `${value} · ${title}`)));
  find("estimator").onchange = (event) => chooseEstimator(event.target.value);
  find("estimator-row").hidden = !hasCredit;
  if (hasCredit) chooseEstimator(names[0][0]);
  const partitions = new Set(payload.trees.flatMap((tree) => Object.keys(tree.partitions ?? {})));
  const ranks = new Set(payload.trees.flatMap((tree) => Object.keys(tree.rank ?? {})));
  const overlays = [["", "none"], ...[...partitions].map((x) => [`partitions ${x}`, `partitions of ${count(x)} ${unit()}s`]), ...[...ranks].map((x) => [`rank ${x}`, `${x} ranks`])];
  find("overlay").append(...overlays.map(([value, title]) => make("option", { value }, title)));
  find("overlay").onchange = (event) => {
    state.overlay = event.target.value;
    if (state.sort[0] === "rank") state.sort = ["n_tree", -1];
    fillTrees();
    update();
  };
  find("overlay-row").hidden = overlays.length === 1;
  find("controls").hidden = !hasCredit && overlays.length === 1;
  const zooms = { in: () => icicle.zoomBy(1.6), out: () => icicle.zoomBy(1 / 1.6), fit: () => icicle.fit() };
  for (const button of find("zoom").children) button.onclick = zooms[button.dataset.zoom];
  find("hide-text").onchange = (event) => {
    state.showText = !event.target.checked;
    update();
    showPanel(icicle.pinned);
    fillRun();
  };
}

function chooseEstimator(name) {
  state.estimator = name;
  find("estimator").value = name;
  state.options = name === "given" ? {} : defaults(name);
  find("options").replaceChildren(
    ...Object.entries(state.options).map(([option, value]) => {
      const isSwitch = typeof value === "boolean";
      const onchange = (event) => {
        state.options[option] = isSwitch ? event.target.checked : Number(event.target.value);
        update();
      };
      const input = isSwitch ? { type: "checkbox", checked: value } : { type: "number", step: 0.05, value };
      return make("label", make("input", { ...input, onchange, id: `option-${option}` }), ` ${option}`);
    }),
  );
  update();
}

function update() {
  const current = tree();
  const values = state.estimator && advantages(current, state.estimator, state.options);
  credit = values ? current.credit(values) : null;
  look = colouring(state.measure, current, credit, payload.kinds, isDark.matches);
  const nothing = look ?? colouring("mask", current, null, payload.kinds, isDark.matches);
  for (const button of find("measures").children) button.classList.toggle("chosen", button.id === `by-${state.measure}`);
  icicle.show(current, { colours: look ? look.colours : nothing.colours.map(() => nothing.none), label: labelOf, unit: unit(), overlay: overlayRows(current) });
  fillLegend(current);
  fillTrees();
  fillPartings(current);
  fillCancellations(current);
}

const labelOf = (i) => textOf(i) || (state.showText && tree().data.text ? "" : `${kindOf(i)}, ${noun(tree().tokens[i])}`);

// What the overlay marks: [segment, first token, end token, number of the partition or rank].
function overlayRows({ data, n, tokens }) {
  const [what, key] = state.overlay.split(" ");
  if (what === "partitions") return data.partitions?.[key] ?? [];
  if (what === "rank" && data.rank) return Array.from({ length: n }, (_, i) => [i, 0, tokens[i], data.rank[key]]);
  return [];
}

function overlayFacts(current) {
  const [what, key] = state.overlay.split(" ");
  const sizes = [];
  const add = (number, size) => (sizes[number] = (sizes[number] ?? 0) + size);
  if (what === "partitions") for (const [, first, end, number] of overlayRows(current)) add(number, end - first);
  if (what === "rank") for (const { rank, n_tree } of payload.trees) if (rank) add(rank[key], n_tree);
  if (!sizes.length) return "";
  const most = Math.max(...sizes.map((size) => size ?? 0));
  if (what === "partitions") return `${noun(sizes.length, "partition")}, the largest of ${noun(most)}`;
  const mean = sizes.reduce((sum, size) => sum + (size ?? 0), 0) / Number(key);
  return `The fullest of ${key} ranks has ${noun(most)}, ${(most / mean).toFixed(2)} times the mean.`;
}

function fillLegend(current) {
  const { about } = MEASURES[state.measure];
  const isCredit = ["advantage", "net", "agreement"].includes(state.measure);
  const needs = state.measure === "logprob" ? "log-probs" : isCredit ? "a reward or an advantage of every sample" : "rewards";
  const parts = [];
  if (isCredit && credit && !credit.grossBelow.some((x) => x > 0))
    parts.push(make("span", `Under ${state.estimator}, every advantage of this tree is 0: there is nothing to compare.`));
  else if (!look) parts.push(make("span", `This tree has no such colours: they need ${needs}.`));
  else if (look.classes) {
    const sums = look.classes.map(() => 0);
    look.values.forEach((x, i) => (sums[x] += current.tokens[i]));
    look.classes.forEach(([name, colour], i) => sums[i] && parts.push(make("span.key", make("b.chip", { style: { background: colour } }), `${name} ${count(sums[i])}`)));
  } else {
    const { stops, ends } = look.scale;
    parts.push(make("span.key", short(ends[0]), make("b.ramp", { style: { background: `linear-gradient(90deg, ${stops})` } }), short(ends[1])));
    if (!["reuse", "reward"].includes(state.measure)) parts.push(make("span.key", make("b.chip", { style: { background: look.none } }), "not trained"));
  }
  find("legend").replaceChildren(...parts, make("span.faint", about), make("span", overlayFacts(current)));
}

// Hover and panel.

function facts(i) {
  const current = tree();
  const { data, tokens, depth } = current;
  const rows = [
    [`${unit()}s`, count(tokens[i])],
    ["position", `${count(depth[i])} – ${count(depth[i] + tokens[i])}`],
    ["samples through it", count(data.paths[i])],
    ["model calls through it", count(data.calls[i])],
    ["in the loss", data.trained[i] ? "yes" : "no"],
  ];
  if (!Number.isNaN(current.reward[i])) rows.push(["mean reward", short(current.reward[i])]);
  if (typeof data.logprob?.[i] === "number") rows.push(["mean log-prob", short(data.logprob[i])]);
  if (credit && data.trained[i]) {
    rows.push(["advantage", short(credit.advantage[i])], ["net weight per token", short(credit.net[i])], ["agreement of samples", short(credit.agreement[i])]);
  }
  if (credit && credit.grossBelow[i]) rows.push(["net of what follows", `${short(credit.netBelow[i])} of ${short(credit.grossBelow[i])}`]);
  if (state.overlay) {
    const labels = [...new Set(overlayRows(current).filter(([k]) => k === i).map((row) => row[3]))];
    if (labels.length) rows.push([state.overlay.split(" ")[0], labels.join(", ")]);
  }
  if (reasonOf(i)) rows.push(["parts because", reasonOf(i)]);
  return make("dl", ...rows.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

const kindChip = (i) => make("span.kind", make("b.chip", { style: { background: colourOf(i) } }), kindOf(i));

function showTip(i, event) {
  const tip = find("tip");
  tip.hidden = i < 0;
  if (i < 0) return;
  const text = textOf(i);
  tip.replaceChildren(kindChip(i), facts(i), ...(text ? [make("p.snippet", text.slice(0, 160))] : []));
  const stage = find("stage").getBoundingClientRect();
  const [x, y] = [event.clientX - stage.left, event.clientY - stage.top];
  tip.style.left = `${x + 16 + tip.offsetWidth > stage.width ? Math.max(x - tip.offsetWidth - 12, 0) : x + 16}px`;
  tip.style.top = `${Math.max(Math.min(y + 16, stage.height - tip.offsetHeight - 4), 0)}px`;
}

const line = (i) => textOf(i).replace(/\s+/g, " ").trim().slice(0, 90) || noun(tree().tokens[i]);

function showPanel(i) {
  const panel = find("panel");
  const current = tree();
  const go = (k) => ({ onclick: () => icicle.jump(k) });
  if (i < 0) {
    const { n_tree, n_leaf, n_flat, n_calls } = current.data;
    const rows = [[`distinct ${unit()}s`, count(n_tree)], ["of one path per leaf", count(n_leaf)], ["of all samples", count(n_flat)], ["of all model calls", count(n_calls)], ["POR", percent(overlap(current.data))], ["samples", count(current.samples.length)], ["leaves", count(current.rows)], ["segments", count(current.n)], ["mean reward", short(meanReward(current.data))]];
    const help = "A box is a run of tokens that the same samples share; its area is what training every leaf alone computes. Click a box to keep it here. Wheel: zoom, with Shift only along tokens, with Alt only along leaves. Drag: move. Double click: show a branch. Keys: arrows walk, Enter shows a branch, 0 shows all.";
    panel.replaceChildren(make("h2", String(current.data.id)), make("dl", ...rows.flatMap(([a, b]) => [make("dt", a), make("dd", b)])), make("p.faint", help));
    return;
  }
  const path = current.pathTo(i);
  const through = current.samplesThrough(i);
  const values = credit && advantages(current, state.estimator, state.options);
  const own = new Map(); // sample -> its advantage in this segment
  if (values) current.turns.forEach((turn, t) => turn.segments.includes(i) && own.set(turn.sample, values[t]));
  const heads = ["sample", "reward", "weight", "advantage"];
  const samples = through.slice(0, MOST_ROWS).map((sample) => {
    const number = current.samples.indexOf(sample);
    return make("tr", make("td", sample.id ?? `#${number}`), ...[sample.reward, sample.weight, own.get(number)].map((x) => make("td", short(x))));
  });
  panel.replaceChildren(
    make("button.close", { title: "close (Esc)", onclick: () => icicle.pin(-1) }, "×"),
    make("h2", kindChip(i)),
    facts(i),
    ...(textOf(i) ? [make("pre", textOf(i))] : []),
    make("h3", `Path from the root, ${noun(path.length, "segment")}`),
    make("ol.path", ...path.map((k) => make(`li${k === i ? ".chosen" : ""}`, go(k), make("b.chip", { style: { background: colourOf(k) } }), make("span", line(k))))),
    make("h3", `${noun(through.length, "sample")} through it`),
    make("table", make("thead", make("tr", ...heads.map((head) => make("th", head)))), make("tbody", ...samples)),
    ...moreThan(through),
  );
  panel.scrollTop = 0;
  panel.querySelector(".path").scrollTop = 1e9; // its end is what was chosen
}

// Lists of places.

function placeRow(i, ...cells) {
  return make("div.place", { onclick: () => (icicle.jump(i), find("stage").scrollIntoView({ behavior: "smooth", block: "nearest" })) }, ...cells);
}

const moreThan = (rows) => (rows.length > MOST_ROWS ? [make("p.faint", `${count(rows.length - MOST_ROWS)} more`)] : []);
const shown = (box, rows) =>
  find(box).replaceChildren(...(rows.length ? rows.slice(0, MOST_ROWS).map((row) => row()) : [make("p.faint", "none in this tree")]), ...moreThan(rows));

function fillPartings(current) {
  const places = current.data.reason.flatMap((reason, i) => (reason < 0 ? [] : [i]));
  const below = (i) => current.offset[current.end[i]] - current.offset[i];
  places.sort((a, b) => below(b) - below(a));
  shown("partings", places.map((i) => () => placeRow(i, make("span.reason", reasonOf(i)), make("span.number", `at ${count(current.depth[i])}`), make("span.number", noun(below(i))), make("span.snippet", line(i)))));
}

// A branch point loses what its branches pull in opposite directions: the sum of their |net weights| less that of all.
function fillCancellations(current) {
  find("cancel-about").textContent = credit
    ? `Branch points whose branches pull in opposite directions, under ${state.estimator}: net weight of each branch, summed over its trained tokens.`
    : "needs a reward or an advantage of every sample";
  const points = [];
  for (let i = -1; credit && i < current.n; i++) {
    const children = current.children(i);
    if (children.length < 2) continue;
    const nets = children.map((c) => credit.netBelow[c]);
    const lost = nets.reduce((sum, x) => sum + Math.abs(x), 0) - Math.abs(nets.reduce((sum, x) => sum + x, 0));
    if (lost > 1e-9) points.push({ children, nets, lost });
  }
  points.sort((a, b) => b.lost - a.lost);
  shown("cancellations", points.map(({ children, nets, lost }) => () => {
    const most = Math.max(...nets.map(Math.abs));
    const signs = nets.slice(0, 24).map((x) => make(`i.${x < 0 ? "minus" : "plus"}`, { title: short(x), style: { width: `${4 + (30 * Math.abs(x)) / most}px` } }));
    return placeRow(children[0], make("span.number", `at ${count(current.depth[children[0]])}`), make("span.number", `cancels ${short(lost)}`), make("span.signs", ...signs));
  }));
}

// A run's folder.

function fillRun() {
  const { run } = payload;
  if (!run) return;
  find("run").hidden = false;
  find("samples").replaceChildren(
    ...(run.samples ?? []).map(({ title, pieces }) =>
      make("details", make("summary", title), make("pre", ...pieces.map(([text, trained]) => make(trained ? "mark" : "span", state.showText ? text : "·".repeat(Math.min(text.length, 80)))))),
    ),
  );
}

function fillCurves() {
  for (const [name, series] of Object.entries(payload.run?.curves ?? {})) {
    const box = make("div.plot");
    const title = make("h3", name);
    find("curves").append(make("div", title, box));
    plots.push(() => {
      box.replaceChildren();
      const style = getComputedStyle(document.body);
      const axis = { stroke: style.getPropertyValue("--faint"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false }, font: `11px ${style.fontFamily}` };
      const accent = style.getPropertyValue("--accent");
      const setCursor = ({ cursor: { idx }, data }) => (title.textContent = idx === null || idx === undefined ? name : `${name} ${short(data[1][idx])} at ${count(data[0][idx])}`);
      const options = { width: box.clientWidth, height: 130, legend: { show: false }, hooks: { setCursor: [setCursor] }, scales: { x: { time: false } }, axes: [{ ...axis, size: 26 }, { ...axis, size: 52 }], series: [{}, { stroke: accent, width: 1.5 }] };
      new uPlot(options, series, box);
    });
  }
}

function fillPage() {
  find("name").textContent = payload.name;
  find("sentences").append(...payload.sentences.map((sentence) => make("p", sentence)));
  find("sentences").append(...payload.notes.map((note) => make("p.faint", note)));
  state.tree = payload.trees.reduce((best, tree, i) => (tree.n_flat > payload.trees[best].n_flat ? i : best), 0);
  fillOverview();
  fillControls();
  fillCurves();
  fillRun();
  update();
  showPanel(-1);
  drawPlots();
}

isDark.addEventListener("change", () => (update(), drawPlots()));
let resizing;
addEventListener("resize", () => (clearTimeout(resizing), (resizing = setTimeout(drawPlots, 150))));
fillPage();
window.xray = { Tree, advantages, payload, state, icicle, tree, choose: chooseTree, colours: () => look, credit: () => credit }; // for tests and the console
