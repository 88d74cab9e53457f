"""TreeDataset: each group once per epoch, on one rank, in micro-batches that fit; exact resume."""

import json
import math
import os
import random
from collections import Counter
from itertools import islice

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader, tree_dataset
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.token_store import write_store
from titan_tree.errors import UserError
from titan_tree.tree.paths import ModelLimits, TokenPath

NUM_GROUPS = 11


@pytest.fixture
def file(tmp_path):
    """Groups of 1 to 4 paths. Every path starts with 9 9 and a token that names its group."""
    r, lines = random.Random(0), []
    for group in range(NUM_GROUPS):
        for _ in range(r.randint(1, 4)):
            tail = [r.randrange(2) for _ in range(r.randint(0, 6))]
            lines.append({"tokens": [9, 9, 100 + group, *tail], "group_id": group})
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def group_of(tree):
    (group,) = {path.id.split("/")[0] for path in tree.paths}
    return int(group)


def tokens(trees):
    """Returns the multiset of paths of some trees."""
    return Counter(tuple(path.tokens.tolist()) for tree in trees for path in tree.paths)


def steps(dataset, number):
    """Returns the trees of the next ``number`` optimizer steps."""
    return [[tree for micro in step for tree in micro] for step in islice(dataset, number)]


def as_data(step):
    """Returns a step as plain data, for comparisons."""
    return [[(tree.tokens.tolist(), [path.id for path in tree.paths]) for tree in micro] for micro in step]


def naive_trie_size(paths):
    return len({tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)})


def test_each_group_becomes_one_tree_once_per_epoch(file):
    dataset = tree_dataset(file, global_batch_groups=NUM_GROUPS, max_tokens=64)
    for step in islice(dataset, 3):
        trees = [tree for micro in step for tree in micro]
        assert sorted(map(group_of, trees)) == list(range(NUM_GROUPS))
        assert tokens(trees) == Counter(tuple(r["tokens"]) for r in records(file))
        assert all(sum(map(len, micro)) <= 64 for micro in step)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_group_j_of_a_global_batch_goes_to_rank_j_modulo_world_size(file, world_size):
    options = {"global_batch_groups": 4, "max_tokens": 64, "shuffle_buffer": 0}
    ranks = [
        steps(tree_dataset(file, rank=rank, world_size=world_size, **options), 6)
        for rank in range(world_size)
    ]
    for step in range(6):
        batch = [(4 * step + j) % NUM_GROUPS for j in range(4)]  # file order; a batch may span two epochs
        for rank in range(world_size):
            assert sorted(map(group_of, ranks[rank][step])) == sorted(batch[rank::world_size])


def test_a_global_batch_larger_than_the_file_repeats_groups(file):
    trees = steps(tree_dataset(file, global_batch_groups=2 * NUM_GROUPS + 1, max_tokens=64), 1)[0]
    counts = Counter(map(group_of, trees))
    assert sorted(counts.values()) == [2] * (NUM_GROUPS - 1) + [3]


def test_each_epoch_has_another_order_of_groups(file):
    def epochs(**options):
        dataset = tree_dataset(file, global_batch_groups=1, max_tokens=64, **options)
        order = [group_of(tree) for (tree,) in steps(dataset, 3 * NUM_GROUPS)]
        return [order[i : i + NUM_GROUPS] for i in range(0, len(order), NUM_GROUPS)]

    assert epochs(shuffle_buffer=0) == epochs(shuffle_buffer=1) == [list(range(NUM_GROUPS))] * 3
    for size in (3, 100):
        orders = epochs(shuffle_buffer=size)
        assert all(sorted(order) == list(range(NUM_GROUPS)) for order in orders)
        assert len({tuple(order) for order in [*orders, list(range(NUM_GROUPS))]}) == 4
        assert orders == epochs(shuffle_buffer=size)
        assert orders != epochs(shuffle_buffer=size, seed=1)


@pytest.mark.parametrize("merge", ["group", "batch"])
@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_resume_is_exact(file, merge, at):
    """Resume works across epochs (11 groups, 3 per step), from JSON, and on another number of ranks."""

    def dataset(rank=0, world_size=1):
        return tree_dataset(
            file,
            merge=merge,
            global_batch_groups=3,
            max_tokens=40,
            shuffle_buffer=4,
            rank=rank,
            world_size=world_size,
        )

    expected = [as_data(step) for step in islice(dataset(), at + 5)]
    first = dataset()
    for _ in islice(first, at):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = dataset()
    second.load_state_dict(state)
    assert [as_data(step) for step in islice(second, 5)] == expected[at:]

    ranks = []
    for rank in range(2):
        ranks.append(dataset(rank, 2))
        ranks[-1].load_state_dict(state)
    for step, *parts in zip(expected[at:], *ranks, strict=False):
        both = [tree for part in parts for micro in as_data(part) for tree in micro]
        assert sorted(both) == sorted(tree for micro in step for tree in micro)


@pytest.mark.parametrize("change", ["rewrite", "replace", "remove"])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    path = tmp_path / "data.jsonl"
    content = "".join(json.dumps({"tokens": [1, 2, i]}) + "\n" for i in range(6))
    path.write_text(content)
    os.utime(path, (1e9, 1e9))
    status = os.stat(path)
    steps = iter(tree_dataset(path, global_batch_groups=2, max_tokens=64, shuffle_buffer=0))
    next(steps)
    new = path if change == "rewrite" else tmp_path / "new"
    new.write_text(content.replace("2", "3"))  # of the same size
    now = f"{status.st_size} bytes of .*, inode {os.stat(new).st_ino}"
    if change == "replace":  # also with the same time
        os.utime(new, ns=(status.st_mtime_ns, status.st_mtime_ns))
        new.rename(path)
    if change == "remove":
        path.unlink()
        now = "missing"
    message = (
        rf"{path}: it has changed since this command began to read it \(was {status.st_size} bytes of .*, "
        rf"inode {status.st_ino}, is {now}\); restore it, and write new data under another name"
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        next(steps)


def test_checksums_depend_on_every_token_and_the_position(tmp_path):
    def checksums(text: str, first: int = 0) -> list[int]:
        path = tmp_path / "data.jsonl"
        path.write_text(text)
        dataset = tree_dataset(path, global_batch_groups=2, max_tokens=64, shuffle_buffer=0, epochs=1)
        dataset.is_compared, dataset.group = True, first
        return [dataset.checksum for _ in dataset]

    lines = "".join(json.dumps({"tokens": [1, 2, i], "weight": 0.5}) + "\n" for i in range(6))
    expected = checksums(lines)
    assert len(set(expected)) == 3
    assert checksums(lines, first=2) == expected[1:]
    other = checksums(lines.replace("[1, 2, 3]", "[1, 7, 3]"))
    assert [a == b for a, b in zip(expected, other, strict=True)] == [True, False, True]
    other = checksums(lines.replace('4], "weight": 0.5', '4], "weight": 0.25'))
    assert [a == b for a, b in zip(expected, other, strict=True)] == [True, True, False]


def test_a_new_iterator_continues_after_the_last_item(file):
    options = {"global_batch_groups": 2, "max_tokens": 64, "shuffle_buffer": 4}
    dataset = tree_dataset(file, **options)
    pieces = [as_data(step) for n in (1, 4, 2) for step in islice(dataset, n)]
    assert pieces == [as_data(step) for step in islice(tree_dataset(file, **options), 7)]


class CountingTokenizer:
    template_fields = frozenset()

    def __init__(self):
        self.calls = 0

    def samples(self, messages, tools=None):
        self.calls += 1
        return [TokenPath(list(messages[0]["content"].encode()))]


def test_resume_and_other_ranks_do_not_tokenize(tmp_path):
    file = tmp_path / "chats.jsonl"
    line = {"messages": [{"role": "user", "content": "hello"}]}
    file.write_text("".join(json.dumps(line) + "\n" for _ in range(40)))
    tokenizer = CountingTokenizer()
    dataset = tree_dataset(file, tokenizer, global_batch_groups=4, max_tokens=64, rank=1, world_size=2)
    dataset.load_state_dict({"epoch": 2, "group": 20, "seed": 0, "shuffle_buffer": 256})
    steps(dataset, 1)
    assert tokenizer.calls == 2
    assert dataset.position() == {"epoch": 2, "group": 24}


def test_a_changed_template_is_refused_on_resume(tmp_path):
    data, template = tmp_path / "data.jsonl", tmp_path / "chat.jinja"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    data.write_text(json.dumps({"messages": messages}) + "\n")

    def dataset(text):
        template.write_text(f"{{% for m in messages %}}{text}{{{{ m.content }}}}{{% endfor %}}")
        return tree_dataset(data, TreeTokenizer.byte_level(template))

    state = json.loads(json.dumps(dataset("a").state_dict()))
    dataset("a").load_state_dict(state)
    with pytest.raises(UserError, match=r"data\.tokenizer: the vocabulary or the chat template has changed"):
        dataset("b").load_state_dict(state)
    del state["tokenizer"]  # of an older version
    dataset("b").load_state_dict(state)


def test_resume_is_refused_if_the_order_or_the_data_changed(file):
    state = tree_dataset(file, seed=1).state_dict()
    with pytest.raises(
        UserError,
        match=r"data.seed: the checkpoint was written with 1, but it is now 0, .*; set data.seed = 1",
    ):
        tree_dataset(file).load_state_dict(state)
    state = tree_dataset(file).state_dict()
    tree_dataset(file).load_state_dict(json.loads(json.dumps(state)))
    content = file.read_text()
    file.write_text(content + content.splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"groups\.jsonl: [\d,]+ bytes, but [\d,]+ when the checkpoint was"):
        tree_dataset(file).load_state_dict(state)
    file.write_text(content.replace("101", "100", 1))
    with pytest.raises(UserError, match=r"groups\.jsonl: its content changed since .* \(checksum \w{8}, was"):
        tree_dataset(file).load_state_dict(state)
    other = file.with_name("other.jsonl")
    other.write_text(content)
    tree_dataset(other).load_state_dict(state)  # the same data under another name
    with pytest.raises(UserError, match=r"data\.files: 2 files, but the checkpoint was written with 1"):
        tree_dataset([str(file), str(other)]).load_state_dict(state)
    file.write_text(content)
    dataset = tree_dataset(file)
    dataset.load_state_dict(dataset.state_dict() | {"group": NUM_GROUPS + 1})
    with pytest.raises(UserError, match="11 groups, but the checkpoint was written after 12 groups"):
        next(iter(dataset))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [12, 30, 10_000])
def test_merge_batch_shares_prefixes_across_groups(file, world_size, max_tokens):
    options = {"merge": "batch", "global_batch_groups": NUM_GROUPS, "max_tokens": max_tokens}
    parts = [
        steps(tree_dataset(file, rank=rank, world_size=world_size, **options), 2)
        for rank in range(world_size)
    ]
    paths = [r["tokens"] for r in records(file)]
    for step in zip(*parts, strict=True):
        trees = [tree for part in step for tree in part]
        assert tokens(trees) == Counter(map(tuple, paths))
        assert all(len(tree) <= max_tokens for tree in trees)
        if max_tokens == 10_000:
            assert [len(tree) for tree in trees] == [naive_trie_size(paths)]


def test_flat_layout_makes_one_tree_per_path(file):
    for merge in ("group", "batch"):
        options = {"merge": merge, "layout": "flat", "global_batch_groups": NUM_GROUPS, "max_tokens": 64}
        trees = [
            tree
            for rank in range(2)
            for tree in steps(tree_dataset(file, rank=rank, world_size=2, **options), 1)[0]
        ]
        assert all(len(tree.paths) == 1 for tree in trees)
        assert tokens(trees) == Counter(tuple(r["tokens"]) for r in records(file))


def test_leaf_layout_makes_one_row_per_leaf(file):
    """A row is as long as its longest path, and contains the paths that are prefixes of it."""
    options = {"global_batch_groups": NUM_GROUPS, "max_tokens": 64}
    (trees,), (rows,) = (
        steps(tree_dataset(file, layout=layout, **options), 1) for layout in ("tree", "leaf")
    )
    assert all(len(row) == row.stats.longest_path for row in rows)
    leaves = [path for tree in trees for path in leaf_paths(tree.paths)]
    assert Counter(tuple(row.tokens.tolist()) for row in rows) == Counter(leaves)
    assert sum(map(len, rows)) == sum(tree.stats.n_leaf for tree in trees)
    assert tokens(rows) == tokens(trees)
    assert len(rows) < sum(len(tree.paths) for tree in trees)


@pytest.mark.parametrize("merge", ["group", "batch"])
def test_longest_keeps_the_first_longest_path_of_each_group_and_its_prefixes(file, tmp_path, merge):
    """So it is with files and with a token store of all their paths, in the order of the file."""
    expected = []
    for group in range(NUM_GROUPS):
        paths = [r["tokens"] for r in records(file) if r["group_id"] == group]
        longest = sorted(paths, key=len, reverse=True)[0]  # sorting is stable
        prefixes = [path for path in paths if longest[: len(path)] == path]
        expected.append([path for i, path in enumerate(prefixes) if path not in prefixes[:i]])
    options = {"paths": "longest", "merge": merge, "global_batch_groups": NUM_GROUPS, "max_tokens": 64}
    with_others = sample_reader(file)
    store = tmp_path / "store"
    write_store(
        store,
        ((group.id, with_others.paths(group)) for group in with_others.files.groups()),
        {"sample": {}, "advantage": "given", "tokenizer": None},
    )
    for source in (file, store):
        reader = sample_reader(source, paths="longest")
        kept = [[path.tokens.tolist() for path in reader.paths(group)] for group in reader.files.groups()]
        assert kept == expected
        (trees,) = steps(tree_dataset(source, **options), 1)
        assert tokens(trees) == Counter(tuple(path) for paths in expected for path in paths)
    assert any(len(paths) > 1 for paths in expected)
    assert sum(map(len, expected)) < len(records(file))


@pytest.mark.parametrize("merge", ["group", "batch"])
def test_edge_weights_do_not_depend_on_the_layout(file, merge):
    """Compared with sets of prefixes. Trees of 20 tokens divide the paths of a merged batch."""
    options = {"merge": merge, "global_batch_groups": NUM_GROUPS, "max_tokens": 20, "shuffle_buffer": 0}
    found = []
    for layout in ("tree", "leaf", "flat"):
        (trees,) = steps(tree_dataset(file, weighs_edges=True, layout=layout, **options), 1)
        paths = {path.id: path for tree in trees for path in tree.paths}
        found.append({name: (p.edge_weight.tolist(), p.is_first.tolist()) for name, p in paths.items()})
    assert found[0] == found[1] == found[2]
    assert len(trees) > NUM_GROUPS
    owner = {name: name.split("/")[0] if merge == "group" else "" for name in paths}
    edges = {
        name: [(owner[name], *path.tokens[:n].tolist()) for n in range(2, len(path) + 1)]
        for name, path in sorted(paths.items(), key=lambda item: int(item[0].split("/")[1]))  # file order
    }
    users = Counter(edge for of_path in edges.values() for edge in of_path)
    first = {edge: name for name in reversed(edges) for edge in edges[name]}
    for name, of_path in edges.items():
        edge_weight, is_first = found[0][name]
        assert edge_weight[1:] == [users[edge] for edge in of_path]
        assert is_first[1:] == [first[edge] == name for edge in of_path]


def leaf_paths(paths):
    """Returns the different paths that are no prefixes of others."""
    different = {tuple(path.tokens.tolist()) for path in paths}
    return [p for p in different if not any(q != p and q[: len(p)] == p for q in different)]


@pytest.mark.parametrize("options", [{}, {"merge": "batch"}, {"layout": "flat"}])
def test_group_advantages_do_not_depend_on_merge_and_layout(options):
    """Three of the demo's four trials earn 1: mean 0.75, standard deviation 0.5."""
    dataset = tree_dataset("demo", TreeTokenizer.byte_level(), advantage="group", **options)
    paths = [path for tree in steps(dataset, 1)[0] for path in tree.paths]
    assert len({path.id.split("/")[0] for path in paths}) == 8
    for path in paths:
        expected = (-0.75 if "trial3" in path.id else 0.25) / (0.5 + 1e-6)
        assert path.advantage.tolist() == pytest.approx([expected] * len(path))


@pytest.mark.parametrize("options", [{}, {"layout": "flat"}, {"merge": "batch"}], ids=str)
def test_larger_trees_are_micro_batches_of_their_own_if_allowed(file, options):
    """No path is lost, and smaller trees are packed as usual."""
    options = {"global_batch_groups": NUM_GROUPS, "shuffle_buffer": 0, **options}
    whole = next(iter(tree_dataset(file, max_tokens=10_000, **options)))
    packed = next(iter(tree_dataset(file, max_tokens=8, allow_larger=True, **options)))
    sizes = [[len(tree) for tree in trees] for trees in packed]
    assert any(len(trees) == 1 and trees[0] > 8 for trees in sizes)
    assert all(len(trees) == 1 or sum(trees) <= 8 for trees in sizes)

    def lists(micro_batches):
        trees = [tree for micro_batch in micro_batches for tree in micro_batch]
        return sorted(path.tokens.tolist() for tree in trees for path in tree.paths)

    assert lists(packed) == lists(whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_tokens": 8},
            r":\d+: the tree of group \d+, \d+ paths, has \d+ tokens, more than data.max_tokens = 8",
        ),
        ({"max_tokens": 3, "layout": "flat"}, r"path \d+/\d+ has \d+ tokens, more than data.max_tokens = 3"),
        ({"max_tokens": 3, "merge": "batch"}, r"path \d+/\d+ has \d+ tokens, more than data.max_tokens = 3"),
        ({"limits": ModelLimits(vocab_size=105)}, "expected ids below"),
        ({"limits": ModelLimits(max_positions=3)}, "but the model has 3 positions"),
        ({"merge": "all"}, "data.merge: expected one of group, batch, got 'all'"),
        ({"advantage": "grpo"}, "data.advantage: expected one of given, group, mean, .* got 'grpo'"),
        ({"advantage": "group"}, r"groups.jsonl:\d+: reward: expected a finite number"),
        ({"layout": "chain"}, "data.layout: expected one of tree, leaf, flat"),
        ({"paths": "first"}, "data.paths: expected one of all, longest, got 'first'"),
        ({"global_batch_groups": 0}, "data.global_batch_groups: expected at least 1, got 0"),
    ],
)
def test_wrong_settings_and_samples_that_do_not_fit_are_errors(file, options, message):
    with pytest.raises(UserError, match=message):
        steps(tree_dataset(file, **{"global_batch_groups": NUM_GROUPS, **options}), 1)


def test_weights_repeat_and_leave_out_groups(tmp_path):
    """2.5 draws a group two or three times per epoch, 0.5 once or never. A resumed run draws the same."""
    files = []
    for name, first in (("often", 0), ("once", 100), ("seldom", 200)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"tokens": [1, first + i]}) + "\n" for i in range(40)))
        files.append(str(path))

    def dataset():
        weights = [2.5, 1.0, 0.5]
        return tree_dataset(files, epochs=3, weights=weights, global_batch_groups=7, shuffle_buffer=5)

    whole = dataset()
    left = whole.steps_left(whole.reader.files.sizes())
    steps, positions = [], []
    for step in whole:
        steps.append(as_data(step))
        positions.append(whole.position())
    assert len(steps) == left
    counts = Counter(tokens[1] for step in steps for micro in step for tokens, _ in micro)
    often, once, seldom = ([counts[first + i] for i in range(40)] for first in (0, 100, 200))
    assert set(often) <= set(range(6, 10))
    assert set(once) == {3}
    assert set(seldom) <= set(range(4))
    assert sum(often) == pytest.approx(300, abs=30)
    assert sum(seldom) == pytest.approx(60, abs=25)

    resumed = dataset()
    resumed.load_state_dict(whole.state_dict() | positions[9])
    assert [as_data(step) for step in resumed] == steps[10:]
    with pytest.raises(UserError, match=r"data\.weights: expected one weight for each of the 3 entries"):
        tree_dataset(files, weights=[1.0])
    for weight in (0.0, -1.0, 1e7, math.nan, math.inf):
        with pytest.raises(UserError, match=r"data\.weights: .* a number > 0 and at most 1e6"):
            tree_dataset(files, weights=[weight, 1.0, 1.0])


def test_an_epoch_without_groups_is_refused(tmp_path):
    file = tmp_path / "groups.jsonl"
    file.write_text('{"tokens": [1, 2]}\n')
    endless = tree_dataset(file, weights=[1e-9])
    with pytest.raises(UserError, match=r"data\.weights: epoch 1 contains no group of data\.files"):
        next(iter(endless))
    three = tree_dataset(file, weights=[0.5], epochs=30)
    with pytest.raises(UserError, match=r"data\.weights: epoch \d+ contains no group"):
        three.steps_left(three.reader.files.sizes())


@for_each("seed", range(20))
def test_num_steps_is_the_number_of_steps_on_every_rank(tmp_path, seed):
    draw = random.Random(seed)
    files = []
    for number in range(draw.randrange(1, 4)):
        files.append(str(tmp_path / f"{number}.jsonl"))
        lines = [
            {"tokens": [number, line, 5], "group_id": f"{number}/{line // 2}"}
            for line in range(draw.randrange(4, 12))
        ]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "weights": draw.choice([None, [draw.choice([0.9, 1.0, 2.3]) for _ in files]]),
        "merge": draw.choice(["group", "batch"]),
        "layout": draw.choice(["tree", "flat"]),
        "global_batch_groups": draw.randrange(1, 9),
        "shuffle_buffer": draw.randrange(6),
        "epochs": draw.randrange(1, 4),
    }
    ranks = [tree_dataset(files, rank=rank, world_size=3, **settings) for rank in range(3)]
    expected = ranks[0].steps_left(ranks[0].reader.files.sizes())
    steps = [list(rank) for rank in ranks]
    assert [len(of_rank) for of_rank in steps] == [expected] * 3
    done = draw.randrange(expected)
    resumed = tree_dataset(files, **settings)
    assert len(list(resumed.steps(done))) == done
    state = resumed.state_dict()
    resumed = tree_dataset(files, **settings)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == expected - done
