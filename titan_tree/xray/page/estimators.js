// The estimators of titan_tree/data/advantages.py, in the browser. Each takes the turns of a tree and the reward of
// each rollout, and returns the advantage of each turn. tests/xray/test_page.py compares both.

const mean = (values) => values[0] + values.reduce((sum, x) => sum + (x - values[0]), 0) / values.length;

function normalized(rewards, std = true) {
  const center = mean(rewards);
  const squares = rewards.reduce((sum, x) => sum + (x - center) ** 2, 0);
  const scale = std ? (rewards.length > 1 ? Math.sqrt(squares / (rewards.length - 1)) : 0) + 1e-6 : 1;
  return rewards.map((x) => (x - center) / scale);
}

function groupBy(items, key) {
  const groups = new Map();
  items.forEach((item, i) =>
    groups.has(key(item)) ? groups.get(key(item)).push(i) : groups.set(key(item), [i]),
  );
  return groups;
}

// For each key of the turns, the mean over its rollouts of a value of their turns.
function meansBy(turns, key, value) {
  const means = new Map();
  for (const [name, members] of groupBy(turns, key)) {
    const byRollout = new Map(members.map((t) => [turns[t].rollout, value(turns[t])]));
    means.set(name, { value: mean([...byRollout.values()]), rollouts: byRollout.size });
  }
  return means;
}

const byNode = (turn) => turn.node;
const byState = (turn) => turn.state;
const perRollout = (turns, values) => turns.map((turn) => values[turn.rollout]);

// The value of each turn: the mean reward of the rollouts that took it, and of those that took any turn from its state.
function turnValues(turns, rewards) {
  const reward = (turn) => rewards[turn.rollout];
  const nodes = meansBy(turns, byNode, reward);
  const states = meansBy(turns, byState, reward);
  return { nodes, states, gap: (turn) => nodes.get(turn.node).value - states.get(turn.state).value };
}

function gigpo(turns, rewards, { omega, gamma, std }) {
  const whole = normalized(rewards, std);
  const left = new Map();
  const returns = new Array(turns.length);
  for (let t = turns.length - 1; t >= 0; t--) {
    const { rollout } = turns[t];
    returns[t] = gamma ** (left.get(rollout) ?? 0) * rewards[rollout];
    left.set(rollout, (left.get(rollout) ?? 0) + 1);
  }
  const result = perRollout(turns, whole);
  for (const members of groupBy(turns, byState).values())
    normalized(
      members.map((t) => returns[t]),
      std,
    ).forEach((x, i) => (result[members[i]] += omega * x));
  return result;
}

function treeRL(turns, rewards) {
  const { nodes, gap } = turnValues(turns, rewards);
  const root = mean(rewards);
  return turns.map((turn) => {
    const { value, rollouts } = nodes.get(turn.node);
    return (value - root + gap(turn)) / Math.sqrt(rollouts);
  });
}

function spo(turns, rewards, { std }) {
  const { gap } = turnValues(turns, rewards);
  const variances = meansBy(turns, byState, (turn) => gap(turn) ** 2);
  return turns.map((turn) => gap(turn) / (std ? Math.sqrt(variances.get(turn.state).value) + 1e-8 : 1));
}

function treeGRPO(turns, rewards) {
  const result = normalized(rewards);
  const first = new Map();
  for (const turn of turns) if (!first.has(turn.rollout)) first.set(turn.rollout, turn.node);
  const rollouts = [...first.keys()];
  for (const members of groupBy(rollouts, (rollout) => first.get(rollout)).values()) {
    const own = normalized(members.map((i) => rewards[rollouts[i]]));
    members.forEach((i, k) => (result[rollouts[i]] += own[k]));
  }
  return perRollout(turns, result);
}

function treePO(turns, rewards, { weighted }) {
  const { nodes } = turnValues(turns, rewards);
  const above = rewards.map(() => new Map([[null, { value: mean(rewards), rollouts: rewards.length }]]));
  for (const turn of turns)
    if (nodes.get(turn.node).rollouts > 1) above[turn.rollout].set(turn.node, nodes.get(turn.node));
  const result = rewards.map((reward, i) => {
    let [sum, total] = [0, 0];
    for (const { value, rollouts } of above[i].values()) {
      const weight = weighted ? rollouts : 1;
      sum += weight * (reward - value);
      total += weight;
    }
    return sum / total;
  });
  return perRollout(turns, result);
}

// Names, options and defaults are those of data.advantage and data.advantage_options. "once" is an option of all.
export const ESTIMATORS = {
  group: {
    title: "GRPO: (R − mean) / std",
    run: (turns, rewards) => perRollout(turns, normalized(rewards)),
  },
  mean: {
    title: "Dr. GRPO: R − mean",
    run: (turns, rewards) => perRollout(turns, normalized(rewards, false)),
  },
  loo: {
    title: "RLOO: R − mean of the others",
    run: (turns, rewards) => {
      const factor = rewards.length / Math.max(rewards.length - 1, 1);
      return perRollout(
        turns,
        normalized(rewards, false).map((x) => x * factor),
      );
    },
  },
  gigpo: {
    title: "GiGPO: GRPO + the turn among turns from its state",
    options: { omega: 1, gamma: 0.95, std: true },
    run: gigpo,
  },
  tree_rl: { title: "TreeRL: (V(u) − V(root) + V(u) − V(par)) / √n", run: treeRL },
  tree_grpo: { title: "Tree-GRPO: GRPO in the group + in the rollout's tree", run: treeGRPO },
  spo: { title: "SPO: V(u) − V(par), once per turn", options: { std: false }, once: true, run: spo },
  tree_po: {
    title: "TreePO: mean of R − V(a) over shared turns a",
    options: { weighted: true },
    run: treePO,
  },
};

export const defaults = (name) => ({ ...ESTIMATORS[name].options, once: ESTIMATORS[name].once ?? false });

// Returns the advantage of each turn of a tree, or null if a sample has no reward.
export function advantages(tree, name, options) {
  if (name === "given") {
    const known = tree.samples.every((sample) => sample.advantage);
    return known ? tree.turns.map((turn) => tree.samples[turn.sample].advantage[turn.index]) : null;
  }
  const rewards = [];
  for (const { rollout, reward } of tree.samples) {
    if (typeof reward !== "number") return null;
    rewards[rollout] = reward;
  }
  const all = { ...defaults(name), ...options };
  const result = ESTIMATORS[name].run(tree.turns, rewards, all);
  if (!all.once) return result;
  const counts = new Map(); // paths that count the turn
  for (const [node, members] of groupBy(tree.turns, byNode))
    counts.set(node, new Set(members.map((t) => tree.turns[t].sample)).size);
  return result.map((x, t) => x / counts.get(tree.turns[t].node));
}
