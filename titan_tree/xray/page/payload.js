// The payload, and what is known of whole trees.

import { find, plural } from "./elements.js";

async function readPayload() {
  const bytes = Uint8Array.from(atob(find("payload").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

export const payload = await readPayload();
export const { trees, kinds, totals, reasons, run } = payload;
export const UNIT = payload.tokenizer === "bytes" ? "byte" : "token";
export const size = (x) => plural(x, UNIT);
export const overlap = (tree) => (tree.n_leaf ? 1 - tree.n_tree / tree.n_leaf : 0);
export const isNumber = (x) => typeof x === "number";
const meanRewards = new Map(
  trees.map((tree) => {
    const rewards = tree.samples.map((sample) => sample.reward).filter(isNumber);
    return [tree, rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null];
  }),
);
export const meanReward = (tree) => meanRewards.get(tree);
export const hasRewards = trees.some((tree) => meanReward(tree) !== null);
export const hasAdvantages = trees.some((tree) => tree.samples.some((sample) => sample.advantage));
export const hasLogprobs = trees.some((tree) => tree.logprob?.some(isNumber));
export const hasCredit = hasRewards || hasAdvantages;
