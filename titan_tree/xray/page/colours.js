// Colours: one scale per way to colour the tree, for light and dark pages.

const KINDS = {
  system: "#8a92a8",
  tools: "#b8a36a",
  user: "#5b8fc7",
  assistant: "#4aa382",
  thought: "#9b80c4",
};
Object.assign(KINDS, { tool: "#d98f54", other: "#a9a9a4", image: "#c77b9b" });
export const kindColour = (kind) => KINDS[kind] ?? KINDS.other;

// For ranks and partitions, whose neighbours must differ.
export const labelColour = (number) => `hsl(${(number * 137.5 + 20) % 360} 48% 55%)`;

const THEMES = {
  light: {
    none: "#e7e5e0",
    low: "#dfe9f1",
    high: "#12507f",
    minus: "#c4542f",
    zero: "#f0e6c8",
    plus: "#1d7f8c",
  },
  dark: {
    none: "#2c2e33",
    low: "#223442",
    high: "#9bd3ff",
    minus: "#f0815a",
    zero: "#4a4638",
    plus: "#4cc3cf",
  },
};

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const hex = (rgb) => "#" + rgb.map((x) => Math.round(x).toString(16).padStart(2, "0")).join("");

function mix(a, b, share) {
  const [from, to] = [channels(a), channels(b)];
  return hex(from.map((x, i) => x + (to[i] - x) * share));
}

// Black or white, whichever is read better on a colour.
export function inkOn(colour) {
  const [r, g, b] = channels(colour);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#15171a" : "#ffffff";
}

// A scale maps a value to a colour; NaN is "none". stops are the colours of the legend from its left to its right end.
function ramp(colours, low, high, shape = (x) => x) {
  const [from, to] = [shape(low), shape(high)];
  const at = (share) => {
    const place = Math.min(Math.max(share, 0), 1) * (colours.length - 1);
    const left = Math.min(Math.floor(place), colours.length - 2);
    return mix(colours[left], colours[left + 1], Math.round((place - left) * 32) / 32); // few colours: fewer changes of fill
  };
  return {
    colour: (value) => at(to > from ? (shape(value) - from) / (to - from) : 0.5),
    stops: [0, 0.25, 0.5, 0.75, 1].map(at),
    ends: [low, high],
  };
}

function range(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const x of values) {
    if (!Number.isFinite(x)) continue;
    low = Math.min(low, x);
    high = Math.max(high, x);
  }
  return low <= high ? [low, high] : [0, 0];
}

const CREDIT = "a reward or an advantage of every sample";

// Each measure: name on its button, one line that explains it, what it needs, value of each segment, and its scale.
export const MEASURES = {
  reuse: {
    title: "Reuse",
    about: "model calls through each token, which a tree computes once",
    values: (tree) => tree.data.calls,
    scale: (theme, values) => ramp([theme.low, theme.high], 1, range(values)[1], Math.log),
  },
  mask: {
    title: "Loss mask",
    about: "tokens that the loss of any sample counts",
    values: (tree) => tree.data.trained,
    classes: (theme) => [
      ["context", theme.none],
      ["trained", theme.plus],
    ],
  },
  kind: {
    title: "Kind",
    about: "the kind of message",
    values: (tree) => tree.data.kind,
    classes: (theme, kinds) => kinds.map((kind) => [kind, kindColour(kind)]),
  },
  reward: {
    title: "Reward",
    about: "mean reward of the samples through each token",
    needs: "rewards",
    values: (tree) => tree.reward,
    scale: (theme, values) => ramp([theme.minus, theme.zero, theme.plus], ...range(values)),
  },
  logprob: {
    title: "Log-prob",
    about: "mean log-prob of trained tokens, in nats",
    needs: "log-probs",
    values: (tree) => (tree.data.logprob ?? []).map((x) => x ?? NaN),
    scale: (theme, values) => ramp([theme.minus, theme.zero, theme.plus], range(values)[0], 0),
  },
  advantage: {
    title: "Advantage",
    about: "mean advantage of the samples that train each token",
    needs: CREDIT,
    values: (tree, credit) => credit?.advantage ?? [],
    scale: (theme, values) => symmetric(theme, values),
  },
  net: {
    title: "Net weight",
    about: "advantage × sample weight, added over the samples that train a token",
    needs: CREDIT,
    values: (tree, credit) => credit?.net ?? [],
    scale: (theme, values) => symmetric(theme, values),
  },
  agreement: {
    title: "Cancellation",
    about: "|sum| / sum of |advantage × weight| over samples: 0 where they cancel, 1 where they agree",
    needs: CREDIT,
    values: (tree, credit) => credit?.agreement ?? [],
    scale: (theme) => ramp([theme.minus, theme.zero, theme.plus], 0, 1),
  },
};

function symmetric(theme, values) {
  const most = Math.max(...range(values).map(Math.abs));
  return ramp([theme.minus, theme.zero, theme.plus], -most, most);
}

// Returns the colour of each segment, and what the legend shows: classes, or a scale, or neither without values.
export function colouring(name, tree, credit, kinds, isDark) {
  const theme = isDark ? THEMES.dark : THEMES.light;
  const values = MEASURES[name].values(tree, credit);
  const classes = MEASURES[name].classes?.(theme, kinds);
  const hasValues = values.some((x) => Number.isFinite(x));
  const scale = classes || !hasValues ? null : MEASURES[name].scale(theme, values);
  const colourOf = (x) => (classes ? classes[x][1] : Number.isFinite(x) ? scale.colour(x) : theme.none);
  const colours = Array.from(tree.tokens, (_, i) => colourOf(values[i]));
  return { colours, values, classes, scale, none: theme.none };
}
