// One tree of the payload: where its segments lie, and what is known about each of them.
// The payload is described in titan_tree/xray/payload.py. n segments, parents before children, depth first.

export class Tree {
  constructor(data) {
    const n = data.tokens.length;
    Object.assign(this, { data, n, parent: data.parent, tokens: data.tokens, samples: data.samples });
    this.depth = new Float64Array(n); // position of the first token on its paths
    this.offset = new Float64Array(n + 1); // index of the first token in the tree
    this.row = new Int32Array(n); // the first leaf below, and one past the last one
    this.rowEnd = new Int32Array(n);
    this.end = new Int32Array(n); // one past the last segment of the subtree
    let leaves = 0;
    this.longest = 0;
    for (let i = 0; i < n; i++) {
      const p = this.parent[i];
      this.depth[i] = p < 0 ? 0 : this.depth[p] + this.tokens[p];
      this.offset[i + 1] = this.offset[i] + this.tokens[i];
      this.longest = Math.max(this.longest, this.depth[i] + this.tokens[i]);
      this.row[i] = leaves;
      if (i + 1 === n || this.parent[i + 1] !== i) leaves++;
    }
    this.rows = leaves;
    for (let i = n - 1; i >= 0; i--) {
      this.end[i] ||= i + 1; // a leaf
      this.rowEnd[i] ||= this.row[i] + 1;
      const p = this.parent[i];
      if (p < 0) continue;
      this.end[p] ||= this.end[i]; // its last child comes first here
      this.rowEnd[p] ||= this.rowEnd[i];
    }
    const known = this.sumUp((sample) => (sample.reward === null ? 0 : 1));
    this.reward = this.sumUp((sample) => sample.reward ?? 0).map((sum, i) => sum / known[i]); // NaN: none known
  }

  // Adds a value of every sample to all segments on its path.
  sumUp(value) {
    const sums = new Float64Array(this.n);
    for (const sample of this.samples) sums[sample.segment] += value(sample);
    return this.addUp(sums);
  }

  // Adds to each segment the values of all segments below it.
  addUp(sums) {
    for (let i = this.n - 1; i >= 0; i--) if (this.parent[i] >= 0) sums[this.parent[i]] += sums[i];
    return sums;
  }

  children(i) {
    const found = [];
    for (let c = i + 1, end = i < 0 ? this.n : this.end[i]; c < end; c = this.end[c]) found.push(c);
    return found;
  }

  pathTo(i) {
    const path = [];
    for (; i >= 0; i = this.parent[i]) path.unshift(i);
    return path;
  }

  samplesThrough(i) {
    return this.samples.flatMap(({ segment }, number) =>
      segment >= i && segment < this.end[i] ? [number] : [],
    );
  }

  // The turns of all samples in order, with their segments.
  get turns() {
    if (this._turns) return this._turns;
    this._turns = [];
    this.samples.forEach(({ turns, weight }, sample) =>
      turns.forEach(([first, last]) => {
        const segments = [];
        for (let i = last; i !== this.parent[first]; i = this.parent[i]) segments.push(i);
        this._turns.push({ sample, weight, segments });
      }),
    );
    return this._turns;
  }

  // The advantage of each turn under an estimator or as given in the data, or null if a sample has none.
  advantages(name) {
    if (name !== "given") return this.data.advantages?.[name] ?? null;
    const known = this.samples.every((sample) => sample.advantage);
    return known ? this.samples.flatMap((sample) => sample.advantage) : null;
  }

  // What the advantages of the turns do to each segment and to all that follows it. Sums run over samples and
  // their trained tokens.
  credit(values) {
    const [sum, count, net, gross] = [0, 0, 0, 0].map(() => new Float64Array(this.n));
    this.turns.forEach((turn, t) => {
      for (const segment of turn.segments) {
        const tokens = this.tokens[segment];
        sum[segment] += values[t] * tokens;
        count[segment] += tokens;
        net[segment] += values[t] * turn.weight * tokens;
        gross[segment] += Math.abs(values[t] * turn.weight * tokens);
      }
    });
    const ratio = (numerator, denominator) => numerator.map((x, i) => x / denominator[i]); // 0 / 0: NaN
    return {
      advantage: ratio(sum, count),
      net: net.map((x, i) => (count[i] ? x / this.tokens[i] : NaN)), // per token
      agreement: ratio(net.map(Math.abs), gross),
      netBelow: this.addUp(net.slice()),
      grossBelow: this.addUp(gross.slice()),
    };
  }
}
