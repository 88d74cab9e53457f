// The page: connects the lists, the tree and the panel.

import { colouring, kindColour, labelColour, MEASURES } from "./colours.js";
import { chip, count, find, make, percent, plural, short, table } from "./elements.js";
import { Icicle } from "./icicle.js";
import { fillOverview } from "./overview.js";
import {
  hasAdvantages,
  hasCredit,
  hasLogprobs,
  hasRewards,
  isNumber,
  kinds,
  meanReward,
  overlap,
  payload,
  reasons,
  run,
  size,
  trees,
  UNIT,
} from "./payload.js";
import { curve, drawPlots } from "./plots.js";
import { Tree } from "./tree.js";

const MOST_ROWS = 200; // rows of a list that are shown at once
const PICTURE = 256; // pixels of the longer side of a picture
const MAIN_CURVES = ["loss", "validation_nll", "reward", "grad_norm", "lr"]; // others are folded
const isDark = matchMedia("(prefers-color-scheme: dark)");
const icicle = new Icicle(find("tree"), showTip, showPanel);
const state = {
  tree: 0, // the number of the tree that is shown
  measure: "reuse",
  estimator: null,
  overlay: "", // "", "partitions N" or "rank N"
  showText: true,
  sort: ["n_tree", -1],
  listed: MOST_ROWS,
};
let current = null; // the tree that is shown,
let values = null; // the advantages of its turns under the chosen estimator,
let credit = null; // what they do to its segments,
let look = null; // and its colouring
const compared = new Map(); // estimator -> what it does to the segments of the tree

const textOf = (i) => (state.showText && current.data.text?.[i]) || "";
const kindOf = (i) => kinds[current.data.kind[i]];
const lineOf = (i) => textOf(i).replace(/\s+/g, " ").trim().slice(0, 90) || size(current.tokens[i]);
const labelOf = (i) => textOf(i) || (state.showText && current.data.text ? "" : `${kindOf(i)}, ${lineOf(i)}`);
const imageOf = (i) => payload.images?.[current.data.image?.[i]];
const kindChip = (i) => make("span.kind", chip(kindColour(kindOf(i))), kindOf(i));

// Shows the next branch with a reason, in this tree or a later one.
function nextPlace(reason) {
  for (let step = 0; step <= trees.length; step++) {
    const number = (state.tree + step) % trees.length;
    const after = step ? -1 : icicle.pinned;
    const place = trees[number].reason.findIndex((x, i) => i > after && x === reason);
    if (place < 0) continue;
    chooseTree(number);
    icicle.jump(place);
    return;
  }
}

// The list of trees.

const COLUMNS = {
  id: ["tree", (tree) => tree.id, String],
  n_tree: ["size", (tree) => tree.n_tree, count],
  por: ["POR", overlap, percent],
  reward: ["reward", meanReward, (x) => short(Number(x.toPrecision(2)))],
  loss: ["loss", (tree) => tree.loss ?? null, short],
  rank: [
    "rank",
    (tree) => tree.rank?.[overlayKey("rank")] ?? null,
    (x) => make("span", chip(labelColour(x)), String(x)),
  ],
};

// The number in the name of the overlay, if it is of this kind.
const overlayKey = (kind) => (state.overlay.startsWith(kind) ? state.overlay.split(" ")[1] : null);

function fillTrees() {
  const columns = Object.keys(COLUMNS).filter((name) =>
    trees.some((tree) => COLUMNS[name][1](tree) !== null),
  );
  if (!columns.includes(state.sort[0])) state.sort = ["n_tree", -1];
  const [by, direction] = state.sort;
  const keys = trees.map((tree) => COLUMNS[by][1](tree) ?? -Infinity);
  const compare = (a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : 0);
  const order = trees.map((_, i) => i).sort((a, b) => direction * compare(a, b) || a - b);
  const head = (name) => {
    const onclick = () => {
      state.sort = [name, name === by ? -direction : name === "id" ? 1 : -1];
      fillTrees();
    };
    return make("th", { onclick }, COLUMNS[name][0] + (name !== by ? "" : direction < 0 ? " ↓" : " ↑"));
  };
  const cell = (name, tree) => {
    const x = COLUMNS[name][1](tree);
    return make("td", { title: name === "id" ? String(x) : "" }, x === null ? "–" : COLUMNS[name][2](x));
  };
  const rows = order.slice(0, state.listed).map((i) => {
    const cells = columns.map((name) => cell(name, trees[i]));
    return make(`tr${i === state.tree ? ".chosen" : ""}`, { onclick: () => chooseTree(i) }, cells);
  });
  find("tree-heads").replaceChildren(...columns.map(head));
  find("tree-rows").replaceChildren(...rows);
  find("trees-title").textContent = plural(trees.length, "tree");
  find("more-trees").hidden = trees.length <= state.listed;
  find("more-trees").textContent = `${count(trees.length - state.listed)} more`;
}

function chooseTree(number) {
  if (number === state.tree) return;
  state.tree = number;
  update();
  showPanel(-1);
}

// Colours, estimators and overlays.

function fillControls() {
  const missing = { logprob: !hasLogprobs, reward: !hasRewards };
  for (const name of ["advantage", "net", "agreement"]) missing[name] = !hasCredit;
  for (const [name, { title, about }] of Object.entries(MEASURES)) {
    const disabled = missing[name] ?? false;
    const onclick = () => {
      state.measure = name;
      update();
    };
    const note = disabled ? `${about}: the data has no such numbers` : about;
    find("measures").append(make("button", { id: `by-${name}`, title: note, disabled, onclick }, title));
  }

  const estimators = hasAdvantages ? [["given", "given in the data"]] : [];
  if (hasRewards)
    for (const [name, about] of Object.entries(payload.estimators))
      estimators.push([name, `${name} · ${about}`]);
  find("estimator").append(...estimators.map(([value, title]) => make("option", { value }, title)));
  find("estimator").onchange = (event) => {
    state.estimator = event.target.value;
    update();
  };
  find("estimator-row").hidden = !hasCredit;
  if (hasCredit) state.estimator = estimators[0][0];

  const numbers = (column) => [...new Set(trees.flatMap((tree) => Object.keys(tree[column] ?? {})))];
  const overlays = [
    ["", "none"],
    ...numbers("partitions").map((x) => [`partitions ${x}`, `partitions of ${count(x)} ${UNIT}s`]),
    ...numbers("rank").map((x) => [`rank ${x}`, plural(Number(x), "rank")]),
  ];
  find("overlay").append(...overlays.map(([value, title]) => make("option", { value }, title)));
  find("overlay").onchange = (event) => {
    state.overlay = event.target.value;
    update();
  };
  find("overlay-row").hidden = overlays.length === 1;
  find("controls").hidden = !hasCredit && overlays.length === 1;

  find("zoom-in").onclick = () => icicle.zoomBy(1.6);
  find("zoom-out").onclick = () => icicle.zoomBy(1 / 1.6);
  find("fit").onclick = () => icicle.fit();
  find("more-trees").onclick = () => {
    state.listed += 5 * MOST_ROWS;
    fillTrees();
  };
  find("hide-text").onchange = (event) => {
    state.showText = !event.target.checked;
    update();
    showPanel(icicle.pinned);
    fillSamples();
  };
}

// Shows the tree again after any change of the state.
function update() {
  if (current?.data !== trees[state.tree]) {
    current = new Tree(trees[state.tree]);
    compared.clear();
  }
  values = state.estimator && current.advantages(state.estimator);
  credit = values && current.credit(values);
  look = colouring(state.measure, current, credit, kinds, isDark.matches);
  for (const button of find("measures").children)
    button.classList.toggle("chosen", button.id === `by-${state.measure}`);
  icicle.show(current, { colours: look.colours, label: labelOf, unit: `${UNIT}s`, overlay: overlayRows() });
  fillLegend();
  fillTrees();
  fillBranchPoints();
  fillCancellations();
}

// What the overlay marks: [segment, first token, end token, number of the partition or rank].
function overlayRows() {
  const { data, tokens } = current;
  const rank = data.rank?.[overlayKey("rank")];
  if (isNumber(rank)) return data.tokens.map((_, i) => [i, 0, tokens[i], rank]);
  return data.partitions?.[overlayKey("partitions")] ?? [];
}

function overlayFacts() {
  const sizes = [];
  const add = (number, more) => (sizes[number] = (sizes[number] ?? 0) + more);
  const ranks = overlayKey("rank");
  if (ranks) for (const { rank, n_tree } of trees) rank && add(rank[ranks], n_tree);
  else for (const [, first, end, number] of overlayRows()) add(number, end - first);
  if (!sizes.length) return "";
  const most = Math.max(...sizes.map((x) => x ?? 0));
  if (!ranks) return `${plural(sizes.length, "partition")}, the largest of ${size(most)}`;
  const mean = sizes.reduce((sum, x) => sum + (x ?? 0), 0) / Number(ranks);
  return `The fullest of ${ranks} ranks has ${size(most)}, ${(most / mean).toFixed(2)} times the mean.`;
}

function fillLegend() {
  const { about } = MEASURES[state.measure];
  const key = (colour, text) => make("span.key", chip(colour), text);
  const isCredit = ["advantage", "net", "agreement"].includes(state.measure);
  const parts = [];
  if (isCredit && credit && !credit.grossBelow.some((x) => x > 0))
    parts.push(`Under ${state.estimator}, every advantage of this tree is 0: there is nothing to compare.`);
  else if (look.classes) {
    const sums = look.classes.map(() => 0);
    look.values.forEach((x, i) => (sums[x] += current.tokens[i]));
    look.classes.forEach(
      ([name, colour], i) => sums[i] && parts.push(key(colour, `${name} ${count(sums[i])}`)),
    );
  } else if (look.scale) {
    const { stops, ends } = look.scale;
    const ramp = make("b.ramp", { style: { background: `linear-gradient(90deg, ${stops})` } });
    parts.push(make("span.key", short(ends[0]), ramp, short(ends[1])));
    if (isCredit || state.measure === "logprob") parts.push(key(look.none, "not trained"));
  } else parts.push(`This tree has no such colours: they need ${MEASURES[state.measure].needs}.`);
  find("legend").replaceChildren(...parts, make("span.faint", about), make("span", overlayFacts()));
}

// Hover and panel.

function facts(i) {
  const { data, tokens, depth, reward } = current;
  const rows = [
    [`${UNIT}s`, count(tokens[i])],
    ["position", `${count(depth[i])} – ${count(depth[i] + tokens[i])}`],
    ["samples through it", count(data.paths[i])],
    ["model calls through it", count(data.calls[i])],
    ["in the loss", data.trained[i] ? "yes" : "no"],
  ];
  const add = (name, value) => rows.push([name, value]);
  if (imageOf(i)) add("pixels", imageOf(i).size.join(" x "));
  if (!Number.isNaN(reward[i])) add("mean reward", short(reward[i]));
  if (isNumber(data.logprob?.[i])) add("mean log-prob", short(data.logprob[i]));
  if (credit && data.trained[i]) {
    add("advantage", short(credit.advantage[i]));
    add(`net weight per ${UNIT}`, short(credit.net[i]));
    add("agreement of samples", short(credit.agreement[i]));
  }
  if (credit?.grossBelow[i])
    add("net from here on", `${short(credit.netBelow[i])} of ${short(credit.grossBelow[i])}`);
  const numbers = new Set(overlayRows().flatMap(([segment, , , number]) => (segment === i ? [number] : [])));
  if (numbers.size) add(state.overlay.split(" ")[0], [...numbers].join(", "));
  if (data.reason[i] >= 0) add("diverges by", reasons[data.reason[i]][0]);
  return table(rows);
}

// What a segment holds: its text, or its image.
function contentOf(i, text) {
  const image = imageOf(i);
  if (!image || !state.showText) return text;
  if (!image.picture) return make("p.faint", "no picture, see the notes above");
  const [width, height] = image.size.map((x) => (x * PICTURE) / Math.max(...image.size)); // known before it loads
  return make("img", { src: image.picture, alt: textOf(i), width, height });
}

function showTip(i, event) {
  const tip = find("tip");
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.replaceChildren(kindChip(i), facts(i), contentOf(i, make("p.snippet", textOf(i).slice(0, 160))));
  const stage = find("stage").getBoundingClientRect();
  const [x, y] = [event.clientX - stage.left, event.clientY - stage.top];
  const isRight = x + 16 + tip.offsetWidth > stage.width;
  tip.style.left = `${isRight ? Math.max(x - tip.offsetWidth - 12, 0) : x + 16}px`;
  tip.style.top = `${Math.max(Math.min(y + 16, stage.height - tip.offsetHeight - 4), 0)}px`;
}

const HELP =
  "A box is a run of tokens that the same samples share; its area is what training every leaf alone computes. " +
  "Click a box to keep it here. Wheel: zoom, with Shift only along tokens, with Alt only along leaves. " +
  "Drag: move. Double click: show a branch. Keys: arrows walk, Enter shows a branch, 0 shows all.";

function showPanel(i) {
  if (i >= 0) return showSegment(i);
  const { data, samples, rows, n } = current;
  const sizes = [
    [`distinct ${UNIT}s`, count(data.n_tree)],
    ["of one path per leaf", count(data.n_leaf)],
    ["of all samples", count(data.n_flat)],
    ["of all model calls", count(data.n_calls)],
    ["POR", percent(overlap(data))],
    ["samples", count(samples.length)],
    ["leaves", count(rows)],
    ["segments", count(n)],
    ["mean reward", short(meanReward(data))],
  ];
  find("panel").replaceChildren(make("h2", String(data.id)), table(sizes), make("p.faint", HELP));
}

function showSegment(i) {
  const path = current.pathTo(i);
  const steps = path.slice(-MOST_ROWS).map((k) => {
    const parts = [chip(kindColour(kindOf(k))), make("span", lineOf(k))];
    return make(`li${k === i ? ".chosen" : ""}`, { onclick: () => icicle.jump(k) }, parts);
  });
  const own = new Map(); // sample -> its advantage in this segment
  current.turns.forEach((turn, t) => values && turn.segments.includes(i) && own.set(turn.sample, values[t]));
  const through = current.samplesThrough(i);
  const samples = through.slice(0, MOST_ROWS).map((number) => {
    const { id, reward, weight } = current.samples[number];
    const cells = [id, short(reward), short(weight), short(own.get(number))];
    return make(
      "tr",
      cells.map((text) => make("td", { title: text }, text)),
    );
  });
  const heads = ["sample", "reward", "weight", "advantage"].map((head) => make("th", head));
  find("panel").replaceChildren(
    make("button.close", { title: "close (Esc)", onclick: () => icicle.pin(-1) }, "×"),
    make("h2", kindChip(i)),
    facts(i),
    contentOf(i, make("pre", textOf(i))),
    ...comparison(i),
    make("h3", `Path from the root, ${plural(path.length, "segment")}`),
    ...moreThan(path),
    make("ol.path", steps),
    make("h3", `${plural(through.length, "sample")} through it`),
    make("table", make("thead", make("tr", heads)), make("tbody", samples)),
    ...moreThan(through),
  );
  find("panel").scrollTop = 0;
  find("panel").querySelector(".path").scrollTop = 1e9; // its end is what was chosen
}

// The net weight of a segment under every estimator. A click chooses the estimator.
function comparison(i) {
  const rows = [];
  for (const name of hasRewards ? Object.keys(payload.estimators) : []) {
    if (!compared.has(name)) {
      const found = current.advantages(name);
      compared.set(name, found && current.credit(found));
    }
    if (!compared.get(name)) return [];
    const { net, netBelow } = compared.get(name);
    const onclick = () => {
      state.estimator = find("estimator").value = name;
      update();
      showSegment(i);
    };
    const cells = [name, short(net[i]), short(netBelow[i])].map((text) => make("td", text));
    rows.push(make(`tr.link${name === state.estimator ? ".chosen" : ""}`, { onclick }, cells));
  }
  if (![...compared.values()].some((credit) => credit.grossBelow[i])) return [];
  const heads = ["estimator", `net per ${UNIT}`, "net from here on"].map((head) => make("th", head));
  const body = make("tbody", rows);
  return [
    make("h3", "Credit under each estimator"),
    make("table.compared", make("thead", make("tr", heads)), body),
  ];
}

// Lists of places.

function fillList(id, items, row) {
  const rows = items.length ? items.slice(0, MOST_ROWS).map(row) : [make("p.faint", "none in this tree")];
  find(id).replaceChildren(...rows, ...moreThan(items));
}

function moreThan(items) {
  return items.length > MOST_ROWS ? [make("p.faint", `${count(items.length - MOST_ROWS)} more`)] : [];
}

function placeRow(i, ...cells) {
  const onclick = () => {
    icicle.jump(i);
    find("stage").scrollIntoView({ behavior: "smooth", block: "nearest" });
  };
  return make("div.place", { onclick }, make("span.number", `at ${count(current.depth[i])}`), cells);
}

function fillBranchPoints() {
  const { data, offset, end } = current;
  const behind = (i) => offset[end[i]] - offset[i];
  const places = data.reason.flatMap((reason, i) => (reason < 0 ? [] : [i]));
  places.sort((a, b) => behind(b) - behind(a));
  fillList("branch-points", places, (i) => {
    const reason = make("span.reason", reasons[data.reason[i]][0]);
    return placeRow(i, make("span.number", size(behind(i))), reason, make("span.snippet", lineOf(i)));
  });
}

// A branch point loses what its branches pull in opposite directions: the sum of their |net| less the |net| of all.
function fillCancellations() {
  find("cancel-about").textContent = credit
    ? `Branches that pull in opposite directions under ${state.estimator}: their net weights, summed over trained ${UNIT}s.`
    : "needs a reward or an advantage of every sample";
  const points = [];
  for (let i = -1; credit && i < current.n; i++) {
    const children = current.children(i);
    const nets = children.map((c) => credit.netBelow[c]);
    const sum = nets.reduce((a, b) => a + b, 0);
    const lost = nets.reduce((a, b) => a + Math.abs(b), 0) - Math.abs(sum);
    if (lost > 1e-9) points.push({ place: children[0], nets, lost });
  }
  points.sort((a, b) => b.lost - a.lost);
  fillList("cancellations", points, ({ place, nets, lost }) => {
    const most = Math.max(...nets.map(Math.abs));
    const signs = nets.slice(0, 24).map((x) => {
      const width = `${4 + (30 * Math.abs(x)) / most}px`;
      return make(`i.${x < 0 ? "minus" : "plus"}`, { title: short(x), style: { width } });
    });
    return placeRow(place, make("span.number", `cancels ${short(lost)}`), make("span.signs", signs));
  });
}

// A run's folder.

function fillRun() {
  if (!run) return;
  find("run").hidden = find("trained").hidden = false;
  const others = Object.keys(run.curves).filter((name) => !MAIN_CURVES.includes(name));
  const draw = (names) => names.map((name) => curve(name, run.curves[name]));
  find("curves").append(...draw(MAIN_CURVES.filter((name) => name in run.curves)));
  const more = find("more-curves");
  more.hidden = !others.length;
  more.querySelector("summary").textContent = `${count(others.length)} more`;
  more.querySelector("div").append(...draw(others));
  more.ontoggle = drawPlots; // a folded plot has no width
  if (!Object.keys(run.curves).length) find("curves").append(make("p.faint", "none yet: no value differs between steps"));
  fillSamples();
}

function fillSamples() {
  const shown = (text) => (state.showText ? text : "·".repeat(Math.min(text.length, 80)));
  const samples = (run?.samples ?? []).map(({ title, excerpts }) => {
    const parts = excerpts.map(([text, trained]) => make(trained ? "mark" : "span", shown(text)));
    return make("details", make("summary", title), make("pre", parts));
  });
  find("samples").replaceChildren(...samples);
}

function fillPage() {
  find("name").textContent = payload.name;
  const notes = payload.notes.map((note) => make("p.faint", note));
  find("sentences").replaceChildren(...payload.sentences.map((sentence) => make("p", sentence)), ...notes);
  state.tree = trees.reduce((best, tree, i) => (tree.n_flat > trees[best].n_flat ? i : best), 0);
  fillOverview(nextPlace);
  fillControls();
  fillRun();
  update();
  showPanel(-1);
  drawPlots();
}

isDark.addEventListener("change", () => {
  update();
  drawPlots();
});
let resizing;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(drawPlots, 150);
});
fillPage();

// For tests and the console.
window.xray = {
  Tree,
  payload,
  state,
  icicle,
  chooseTree,
  tree: () => current,
  credit: () => credit,
  look: () => look,
};
