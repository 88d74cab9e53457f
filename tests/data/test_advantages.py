"""Advantages against slow implementations of the formulas, on plain lists of tokens."""

import json
import math
import random

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from titan_tree.cli import main
from titan_tree.data.advantages import advantages
from titan_tree.data.settings import ADVANTAGES
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def rollout(prompt, *parts):
    """Returns a path: the parts are turns and the environment's replies, in turn."""
    tokens, mask = list(prompt), [0] * len(prompt)
    for i, part in enumerate(parts):
        tokens += part
        mask += [1 - i % 2] * len(part)
    return TokenPath(tokens, loss_mask=mask)


PROMPT, REPLY = [1, 2], [3]
A, B, C, D, E = [10], [10, 11], [12], [13], [14]  # B begins with the token of A, but is another turn
#            A - C   1
#   prompt -{ A - D   0
#            B - E   1
#            C        0
TREE = [
    rollout(PROMPT, A, REPLY, C),
    rollout(PROMPT, A, REPLY, D),
    rollout(PROMPT, B, REPLY, E),
    rollout(PROMPT, C),
]
REWARDS = [1.0, 0.0, 1.0, 0.0]


def by_turn(name, paths=TREE, rewards=REWARDS, rollouts=None, **options):
    """Returns the advantages of each path's turns, and checks that they are constant within each turn."""
    found = []
    for path, values in zip(paths, advantages(name, paths, rewards, rollouts, **options), strict=True):
        assert values.dtype == np.float32
        assert values.shape == (len(path),)
        turns = runs(path)
        assert all((values[start:end] == values[start]).all() for start, end in turns)
        found.append([float(values[start]) for start, _ in turns])
    return found


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("mean", {}, [[0.5, 0.5], [-0.5, -0.5], [0.5, 0.5], [-0.5]]),
        ("loo", {}, [[2 / 3, 2 / 3], [-2 / 3, -2 / 3], [2 / 3, 2 / 3], [-2 / 3]]),
        ("mean", {"once": True}, [[0.25, 0.5], [-0.25, -0.5], [0.5, 0.5], [-0.5]]),
        ("spo", {"once": False}, [[0, 0.5], [0, -0.5], [0.5, 0], [-0.5]]),
        # V(u) - V(root) is 0 for A, as is V(u) - V(par); below A they are 0.5 and 0.5.
        ("tree_rl", {}, [[0, 1], [0, -1], [1, 0.5], [-1]]),
        ("tree_po", {}, [[0.5, 0.5], [-0.5, -0.5], [0.5, 0.5], [-0.5]]),
        # Discounted by 0.5 per turn, the first turns return 0.5, 0, 0.5 and 0, with mean 0.25.
        ("gigpo", {"gamma": 0.5, "std": False}, [[0.75, 1], [-0.75, -1], [0.75, 0.5], [-0.75]]),
    ],
)
def test_a_small_tree_by_hand(name, options, expected):
    assert by_turn(name, **options) == [pytest.approx(turns) for turns in expected]


def test_a_tree_whose_values_differ_from_the_root_by_hand():
    """V(root) = 3 and V(A) = 4.5, because A leads to 6 and 3; the third rollout has 0."""
    rewards, paths = [6.0, 3.0, 0.0], [*TREE[:2], TREE[3]]
    assert by_turn("spo", paths, rewards) == [[0.75, 1.5], [0.75, -1.5], [-3]]  # A counts once: 1.5 / 2
    # V(par) = 3 of values 4.5, 4.5 and 0, whose standard deviation is that of 1.5, 1.5 and -3.
    stds = math.sqrt(4.5), 1.5
    assert by_turn("spo", paths, rewards, std=True, once=False) == [
        pytest.approx([1.5 / stds[0], 1.0]),
        pytest.approx([1.5 / stds[0], -1.0]),
        pytest.approx([-3 / stds[0]]),
    ]
    root2 = math.sqrt(2)
    assert by_turn("tree_rl", paths, rewards) == [
        pytest.approx([3 / root2, 3 + 1.5]),
        pytest.approx([3 / root2, 0 - 1.5]),
        [-6],
    ]
    # (3 (R - 3) + 2 (R - 4.5)) / 5, and only the root above the third one
    assert by_turn("tree_po", paths, rewards) == [
        pytest.approx([2.4, 2.4]),
        pytest.approx([-0.6, -0.6]),
        [-3],
    ]
    plain = by_turn("tree_po", paths, rewards, weighted=False)
    assert plain == [[2.25, 2.25], [-0.75, -0.75], [-3]]
    z = 1.5 / (math.sqrt(4.5) + 1e-6)  # within the tree of A
    whole = 3 / (3 + 1e-6)  # among all
    assert by_turn("tree_grpo", paths, rewards) == [
        pytest.approx([whole + z] * 2),
        pytest.approx([-z] * 2),
        pytest.approx([-whole]),
    ]


# --- Slow implementations: no trie, every quantity found by comparing lists of tokens. ---


def runs(path):
    """Returns the turns [start, end) of a path."""
    counted = [False, *(path.loss_mask[1:] > 0).tolist()]
    starts = [t for t in range(1, len(path)) if counted[t] and not counted[t - 1]]
    return [(s, next((t for t in range(s, len(path)) if not counted[t]), len(path))) for s in starts]


class Slow:
    def __init__(self, paths, rewards, owners):
        self.paths, self.rewards, self.owners = paths, np.array(rewards), owners
        self.turns = [
            (owner, tuple(path.tokens[:start].tolist()), tuple(path.tokens[start:end].tolist()))
            for path, owner in zip(paths, owners, strict=True)
            for start, end in runs(path)
        ]

    def rollouts(self, state, action=None):
        return sorted({o for o, s, a in self.turns if s == state and action in (None, a)})

    def v(self, state, action=None):
        return self.rewards[self.rollouts(state, action)].mean()

    def z(self, values, i, std=True):
        values = np.array(values)
        scale = (values.std(ddof=1) if len(values) > 1 else 0) + 1e-6
        return (values[i] - values.mean()) / (scale if std else 1)

    def advantage(self, name, number, options):
        owner, state, action = self.turns[number]
        r, n = self.rewards[owner], len(self.rewards)
        if name == "group":
            return self.z(self.rewards, owner)
        if name == "mean":
            return r - self.rewards.mean()
        if name == "loo":
            return r - np.delete(self.rewards, owner).mean() if n > 1 else 0
        if name == "spo":
            gap = self.v(state, action) - self.v(state)
            taken = [(o, a) for o, s, a in self.turns if s == state]  # each rollout once
            values = [self.v(state, a) for _, a in {o: (o, a) for o, a in taken}.values()]
            return gap / (np.std(values) + 1e-8) if options.get("std") else gap
        if name == "tree_rl":
            v, through = self.v(state, action), len(self.rollouts(state, action))
            return (2 * v - self.rewards.mean() - self.v(state)) / math.sqrt(through)
        if name == "gigpo":

            def discounted(other):
                of = [i for i, turn in enumerate(self.turns) if turn[0] == self.turns[other][0]]
                return (
                    options.get("gamma", 0.95) ** (len(of) - 1 - of.index(other))
                    * self.rewards[self.turns[other][0]]
                )

            same = [i for i, turn in enumerate(self.turns) if turn[1] == state]
            std = options.get("std", True)
            step = self.z([discounted(i) for i in same], same.index(number), std)
            return self.z(self.rewards, owner, std) + options.get("omega", 1) * step
        own = [(s, a) for o, s, a in self.turns if o == owner]
        if name == "tree_grpo":
            tree = self.rollouts(*own[0])
            return self.z(self.rewards, owner) + self.z(self.rewards[tree], tree.index(owner))
        assert name == "tree_po"
        sets = [list(range(n)), *(self.rollouts(*node) for node in own)]
        sets = [members for i, members in enumerate(sets) if i == 0 or len(members) > 1]
        weights = [len(members) if options.get("weighted", True) else 1 for members in sets]
        differences = [r - self.rewards[members].mean() for members in sets]
        return np.dot(weights, differences) / sum(weights)

    def values(self, name, once, options):
        found = [self.advantage(name, i, options) for i in range(len(self.turns))]
        counts = [sum(t[1:] == turn[1:] for t in self.turns) for turn in self.turns]
        return [x / count if once else x for x, count in zip(found, counts, strict=True)]


def random_group(seed):
    """Returns paths, rewards and owners. A rollout is one path of all turns, or one path per turn."""
    r = random.Random(seed)
    paths, owners, rewards = [], [], []
    for owner in range(r.randint(1, 7)):
        parts = [[r.choice([5, 6]) for _ in range(r.randint(1, 2))] for _ in range(2 * r.randint(1, 3) - 1)]
        if seed % 2:
            made = [rollout([1], *parts)]
        else:  # each turn is a path, whose context is not trained
            made = []
            for end in range(1, len(parts) + 1, 2):
                context = [1, *(token for part in parts[: end - 1] for token in part)]
                made.append(rollout(context, parts[end - 1]))
        paths += made
        owners += [owner] * len(made)
        rewards.append(r.choice([0.0, 0.1, 0.7, 1.0]))
    return paths, rewards, owners


OPTIONS = {
    "gigpo": [{}, {"omega": 0.5, "gamma": 1, "std": False}],
    "spo": [{}, {"std": True}],
    "tree_po": [{}, {"weighted": False}],
}


@for_each("name", ADVANTAGES)
def test_random_trees_against_the_slow_implementation(name):
    shared = 0
    for seed in range(40):
        paths, rewards, owners = random_group(seed)
        slow = Slow(paths, rewards, owners)
        shared += len(slow.turns) - len({turn[1:] for turn in slow.turns})
        for options in OPTIONS.get(name, [{}]):
            for once in (False, True):
                got = by_turn(name, paths, rewards, owners, once=once, **options)
                want = slow.values(name, once, options)
                assert [x for turns in got for x in turns] == pytest.approx(want, rel=1e-5, abs=1e-6)
            default = by_turn(name, paths, rewards, owners, **options)
            assert default == by_turn(name, paths, rewards, owners, once=name == "spo", **options)
    assert shared > 30


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_without_differences_have_no_advantages(name):
    """Rewards of 0.1 have a rounded sum; also one rollout, no turn, and one token."""
    options = {"gamma": 1} if name == "gigpo" else {}
    for paths in (TREE, TREE[:1], [TREE[0]] * 3, [TokenPath([1])], [TokenPath([1, 2], loss_mask=[0, 0])]):
        for values in advantages(name, paths, [0.1] * len(paths), **options):
            assert (values == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_empty_group_has_no_advantages(name):
    assert advantages(name, [], []) == []


def test_wrong_arguments_are_named():
    with pytest.raises(UserError, match="unknown advantage estimator 'tree_lr'; did you mean 'tree_rl'"):
        advantages("tree_lr", TREE, REWARDS)
    with pytest.raises(
        UserError, match=r"advantage_options.omega: 'spo' has no such option; expected once, std;"
    ):
        advantages("spo", TREE, REWARDS, omega=1)
    with pytest.raises(UserError, match=r"advantage_options.omega: expected a finite number, true or false"):
        advantages("gigpo", TREE, REWARDS, omega="1")
    for rewards in (REWARDS[:3], [*REWARDS[:3], math.nan]):
        with pytest.raises(UserError, match="rewards: expected 4 finite numbers, one per rollout, got"):
            advantages("mean", TREE, rewards)


# --- The plain mean baseline on a tree ---


def gradients(paths):
    """Returns the gradients of -sum A log p over paths and their counted tokens."""
    torch.manual_seed(0)
    model = build_model("qwen3", "debug", vocab_size=16, hidden_size=32, head_dim=16)
    model.init_weights(0)
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    logprobs, pairs = model(batch).logprobs, batch.pairs
    loss = -(logprobs[pairs.edge] * pairs.advantage * pairs.loss_mask).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def test_the_mean_baseline_weighs_node_advantages_by_their_paths():
    """The sum over paths of a shared token is n (V - V(root)): outcome advantages already are global ones."""
    rewards = [6.0, 3.0, 0.0, 1.0]
    fields = [(path.tokens, path.loss_mask) for path in TREE]
    outcome = [
        TokenPath(tokens, loss_mask=mask, advantage=values)
        for (tokens, mask), values in zip(fields, advantages("mean", TREE, rewards), strict=True)
    ]
    # The same per distinct token: one path has n (V - V(root)), the others 0.
    lists, seen, nodes = [tokens.tolist() for tokens, _ in fields], set(), []
    for tokens, (_, mask) in zip(lists, fields, strict=True):
        values = []
        for t in range(len(tokens)):
            below = [r for other, r in zip(lists, rewards, strict=True) if other[: t + 1] == tokens[: t + 1]]
            is_new = tuple(tokens[: t + 1]) not in seen
            seen.add(tuple(tokens[: t + 1]))
            values.append(is_new * len(below) * (np.mean(below) - np.mean(rewards)))
        nodes.append(TokenPath(tokens, loss_mask=mask, advantage=values))
    for got, want in zip(gradients(nodes), gradients(outcome), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# --- From files ---


def write(file):
    rows = [
        {
            "group_id": 1,
            "tokens": path.tokens.tolist(),
            "loss_mask": path.loss_mask.tolist(),
            "reward": reward,
        }
        for path, reward in zip(TREE, REWARDS, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_reader_computes_them(tmp_path, name):
    reader = sample_reader(write(tmp_path / "f"), advantage=name, advantage_options={"once": True})
    (group,) = reader.files.groups()
    for path, want in zip(reader.paths(group), advantages(name, TREE, REWARDS, once=True), strict=True):
        assert path.advantage.tolist() == want.tolist()


def test_the_turns_of_a_conversation_are_one_rollout(tmp_path):
    """Two conversations share the first of two turns, and each has a path per turn."""
    from titan_tree.components.tree_tokenizer import TreeTokenizer

    file = tmp_path / "f"
    talk = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"))]
    talks = [[*talk, {"role": "user", "content": "r"}, {"role": "assistant", "content": x}] for x in "xy"]
    file.write_text(json.dumps({"trajectories": [{"messages": m, "reward": i} for i, m in enumerate(talks)]}))
    reader = sample_reader(file, TreeTokenizer.byte_level(), advantage="spo")
    (group,) = reader.files.groups()
    paths = reader.paths(group)
    assert [path.advantage[path.loss_mask > 0].tolist()[0] for path in paths] == [0, -0.5, 0, 0.5]


def rows_file(file, *rows):
    file.write_text("".join(json.dumps({"group_id": 1, **row}) + "\n" for row in rows))
    return file


def test_records_of_one_rollout_count_once(tmp_path):
    """Rewards 1 and 0 of two rollouts have mean 0.5, although three records have reward 1."""
    turns = [{"tokens": [1, *range(2, 2 + n)], "rollout_id": "a", "reward": 1} for n in (1, 2, 3)]
    reader = sample_reader(
        rows_file(tmp_path / "f", *turns, {"tokens": [1, 9], "reward": 0}), advantage="mean"
    )
    (group,) = reader.files.groups()
    assert [path.advantage.tolist()[-1] for path in reader.paths(group)] == [0.5, 0.5, 0.5, -0.5]


def test_records_of_one_rollout_have_one_reward(tmp_path):
    turns = [{"tokens": [1, 2], "rollout_id": "a", "reward": reward} for reward in (1, 0.5)]
    reader = sample_reader(rows_file(tmp_path / "f", *turns), advantage="mean")
    (group,) = reader.files.groups()
    with pytest.raises(UserError, match=r"f:2: reward: expected 1, as in .* rollout 'a', got 0.5; give all"):
        reader.paths(group)


def test_a_store_holds_the_advantages_that_it_was_made_with(tmp_path):
    store = str(tmp_path / "s.store")
    options = ["data.advantage=gigpo", "data.advantage_options.omega=0.5"]
    assert main(["ingest", str(write(tmp_path / "f")), store, *options]) == 0
    want = advantages("gigpo", TREE, REWARDS, omega=0.5)
    for settings in ({}, {"advantage": "gigpo", "advantage_options": {"omega": 0.5}}):
        reader = sample_reader(store, **settings)
        (group,) = reader.files.groups()
        assert [path.advantage.tolist() for path in reader.paths(group)] == [x.tolist() for x in want]
    for settings in ({"advantage": "gigpo"}, {"advantage": "spo"}):
        reader = sample_reader(store, **settings)
        (group,) = reader.files.groups()
        with pytest.raises(UserError, match=r"s.store: made without the advantages of .* ingest"):
            reader.paths(group)


def test_wrong_options_are_refused_before_anything_is_read(tmp_path):
    file = write(tmp_path / "f")
    with pytest.raises(UserError, match=r"advantage_options.std: 'loo' has no such option"):
        sample_reader(file, advantage="loo", advantage_options={"std": True})
    with pytest.raises(UserError, match=r"advantage_options: expected none with data.advantage = 'given'"):
        sample_reader(file, advantage_options={"once": True})
    with pytest.raises(UserError, match=r"data.advantage: expected one of .*tree_rl.* got 'trl'"):
        sample_reader(file, advantage="trl")


def leaving(turns):
    raise SystemExit(0)


def without_arguments():
    return []


def too_few(turns):
    return turns.per_path(turns.rewards)[1:]


def imaginary(turns):
    return [value * 1j for value in turns.per_path(turns.rewards)]


CALLED = r" \(data\.advantage\), called with \(turns\): "


@for_each(
    "estimator, message",
    [
        (without_arguments, rf"{CALLED}TypeError: .* takes 0 positional arguments"),
        (leaving, rf"{CALLED}.*\.py:\d+: SystemExit: 0$"),
        (lambda turns: None, rf"{CALLED}TypeError: 'NoneType'"),
        (too_few, ": expected an array of real numbers per path, one per token, of shapes"),
        (lambda turns: turns.rewards, r": .* of shapes \[\(5,\), .* got \[\(\), .* of float64; turns\.per"),
        (imaginary, r": .* of complex128; turns\.per_path and"),
    ],
)
def test_an_estimator_of_ones_own_that_fails_is_one_line(estimator, message):
    expected = f"^advantage estimator 'mine'{message}"
    with ADVANTAGES.registered("mine", estimator), pytest.raises(UserError, match=expected):
        advantages("mine", TREE, [1, 0, 1, 0])
