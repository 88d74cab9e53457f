"""The merge report, on trees that are small enough to read."""

import io
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.support.datasets import REAL_DATA, sample_reader
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.divergence import (
    DROPPED_THOUGHT,
    EMPTY_BLOCK,
    ENDS,
    OTHER_TEXT,
    OTHER_TOKENS,
    RETOKENIZED,
    branch_points,
    render_picture,
    render_report,
)
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

WORDS = ["<s>", " the", " there", "re", " cat", " sat", " on", " dog", " c", "at", "<think>", "</think>"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def tree_of(*texts):
    """Returns a tree of paths written as words; ``|`` separates tokens."""
    return TokenTree.from_paths([TokenPath([WORDS.index(word) for word in t.split("|")]) for t in texts])


def test_branch_points_are_other_texts_and_ends_of_paths():
    tree = tree_of("<s>| the| cat| sat| on", "<s>| the| cat| sat", "<s>| the| dog")
    fork, end = branch_points(tree, decode)
    assert (fork.depth, fork.n_paths, fork.n_ending, fork.before) == (2, 3, 0, "<s> the")
    assert [(c.token, c.text, c.n_paths, c.n_tokens, c.reason) for c in fork.children] == [
        (4, " cat sat on", 2, 3, ""),
        (7, " dog", 1, 1, OTHER_TEXT),
    ]
    assert fork.reasons == [OTHER_TEXT]
    assert (end.depth, end.n_paths, end.n_ending, end.before) == (4, 2, 1, "<s> the cat sat")
    assert [(c.text, c.n_paths, c.reason) for c in end.children] == [(" on", 1, "")]
    assert end.reasons == [ENDS]


def test_the_same_text_in_other_tokens_is_retokenization():
    tree = tree_of("<s>| the|re| cat| sat", "<s>| there| cat", "<s>| dog")
    (point,) = branch_points(tree, decode)
    assert [(c.text, c.reason) for c in point.children] == [
        (" there cat sat", ""),
        (" there cat", RETOKENIZED),
        (" dog", OTHER_TEXT),
    ]
    assert point.reasons == [OTHER_TEXT, RETOKENIZED]


def test_retokenization_is_found_between_any_two_children():
    tree = tree_of("<s>| dog| sat| on| the", "<s>| c|at| on", "<s>| cat| on")
    (point,) = branch_points(tree, decode)
    assert sorted(c.reason for c in point.children) == ["", OTHER_TEXT, RETOKENIZED]


def test_words_that_only_begin_alike_are_not_retokenization():
    """ "c" and "cat" begin alike, but the texts differ inside the longer first token."""
    (point,) = branch_points(tree_of("<s>| c| on", "<s>| cat"), decode)
    assert point.reasons == [OTHER_TEXT]


def test_paths_without_a_common_token_diverge_at_the_root():
    (point,) = branch_points(tree_of(" the", " dog| sat"), decode)
    assert (point.node, point.depth, point.n_paths, point.n_ending, point.before) == (-1, 0, 2, 0, "")
    assert [c.text for c in point.children] == [" dog sat", " the"]


def test_a_chain_and_duplicates_have_no_branch_points():
    assert branch_points(tree_of("<s>| the", "<s>| the"), decode) == []


def test_without_a_tokenizer_ids_are_shown():
    (point,) = branch_points(tree_of("<s>| the|re", "<s>| there"))
    assert point.before == "0"
    assert [(c.text, c.reason) for c in point.children] == [("1 3", ""), ("2", OTHER_TOKENS)]


def test_text_before_a_branch_point_follows_the_path():
    """It comes from the parent node, not from the preceding sibling in the token array."""
    tree = tree_of("<s>| the| cat| sat", "<s>| the| dog", "<s>| on| cat", "<s>| on| c")
    last = branch_points(tree, decode)[-1]
    assert last.before == "<s> on"
    assert [c.text for c in last.children] == [" cat", " c"]


def tree_of_turns(*texts):
    """Returns a tree of prompts and completions: the loss counts the words after ``=``."""
    paths = []
    for text in texts:
        prompt, completion = ([WORDS.index(word) for word in part.split("|")] for part in text.split("="))
        paths.append(TokenPath(prompt + completion, [0] * len(prompt) + [1] * len(completion)))
    return TokenTree.from_paths(paths)


THOUGHTS = {
    # The second sample has the first one's turn in its history, without the thought.
    "dropped": (["<s>=<think>| the|</think>| cat", "<s>| cat= sat| on"], DROPPED_THOUGHT),
    "dropped, heavier": (["<s>=<think>| the| dog| on|</think>| cat", "<s>| cat= sat"], DROPPED_THOUGHT),
    "empty": (["<s>=<think>|</think>| cat", "<s>| cat= sat| on| dog"], EMPTY_BLOCK),
    "empty, in the prompt": (["<s>|<think>|</think>= cat", "<s>| cat= sat| on| dog"], EMPTY_BLOCK),
    "only the end kept": (["<s>=<think>| the|</think>| cat", "<s>|</think>| cat= sat| on"], DROPPED_THOUGHT),
    "written without an empty think block": (
        ["<s>=<think>|</think>| cat", "<s>= cat", "<s>| cat= sat| on"],
        OTHER_TEXT,
    ),
    "next thought dropped as well": (
        ["<s>=<think>| the|</think>| cat|<think>| on|</think>| sat", "<s>| cat| sat= on"],
        DROPPED_THOUGHT,
    ),
    "block kept": (["<s>|<think>= the|</think>| cat", "<s>|<think>|</think>| cat= sat| on"], DROPPED_THOUGHT),
    "same turn, other tokens": (["<s>=<think>| the|</think>| c|at", "<s>| cat= sat| on"], DROPPED_THOUGHT),
    "another turn": (["<s>=<think>| the|</think>| cat", "<s>| dog= sat| on"], OTHER_TEXT),
    "written without a thought": (
        ["<s>=<think>| the|</think>| cat", "<s>= cat", "<s>| cat= sat| on"],
        OTHER_TEXT,
    ),
    "another thought": (["<s>|<think>= the|</think>| cat", "<s>|<think>| on|</think>| cat= sat"], OTHER_TEXT),
    "no end": (["<s>=<think>| the| cat", "<s>| cat= sat| on"], OTHER_TEXT),
    "nothing after it": (["<s>=<think>| the|</think>", "<s>| cat= sat| on"], OTHER_TEXT),
}


@pytest.mark.parametrize(("texts", "reason"), THOUGHTS.values(), ids=THOUGHTS)
def test_dropped_thoughts(texts, reason):
    points = branch_points(tree_of_turns(*texts), decode)
    assert points[0].depth == 1 + all(text.startswith("<s>|<think>") for text in texts)
    assert [child.reason for child in points[0].children] == ["", reason]
    assert all(point.reasons == [ENDS] for point in points[1:])
    reversed_points = branch_points(tree_of_turns(*texts[::-1]), decode)
    assert [point.reasons for point in reversed_points] == [point.reasons for point in points]


def test_a_dropped_thought_counts_more_than_an_empty_think_block():
    tree = tree_of_turns("<s>=<think>|</think>| cat", "<s>=<think>| the|</think>| cat", "<s>| cat= sat| on")
    assert [(p.depth, p.reasons) for p in branch_points(tree, decode)] == [
        (1, [DROPPED_THOUGHT]),
        (2, [OTHER_TEXT]),
    ]


def dropped_thoughts(tree):
    """Returns the shared prefixes of those samples of one trajectory that are no prefixes of each other.

    Later samples of a trajectory repeat earlier ones, so only a dropped thought makes them diverge.
    """
    places = set()
    for i, earlier in enumerate(tree.paths):
        for later in tree.paths[i + 1 :]:
            if later.id.rpartition("/")[0] == earlier.id.rpartition("/")[0]:
                n = min(len(earlier), len(later))
                differs = np.flatnonzero(earlier.tokens[:n] != later.tokens[:n])
                if len(differs):
                    places.add(tuple(earlier.tokens[: differs[0]].tolist()))
    return places


def reported(tree, decode, reason):
    """Returns the tokens before each branch point with this reason."""
    places = set()
    for point in branch_points(tree, decode):
        if reason in point.reasons:
            through = next(
                p for p in range(len(tree.paths)) if tree.node_offsets[point.node] in tree.indices_of(p)
            )
            places.add(tuple(tree.paths[through].tokens[: point.depth].tolist()))
    return places


@pytest.mark.parametrize(
    ("template", "settings", "number"),
    [("chatml", {}, 0), ("chatml", {"keep_reasoning": False}, 384 // 8), ("qwen3", {}, 64 // 8)],
)
def test_dropped_thoughts_of_the_demo(template, settings, number):
    tokenizer = TreeTokenizer.byte_level(template)
    reader = sample_reader("demo", tokenizer, sample=settings)
    found = 0
    for _, group in zip(range(8), reader.files.groups(), strict=False):
        tree = TokenTree.from_paths(reader.paths(group))
        places = reported(tree, tokenizer.decode, DROPPED_THOUGHT)
        assert places == dropped_thoughts(tree)
        found += len(places)
    assert found == number


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
def test_dropped_thoughts_of_real_rollouts():
    """100 tasks of one trajectory each with 210 turns, so 110 turns have a later one."""
    for template, settings, expected in (
        ("chatml", {"keep_reasoning": False}, {DROPPED_THOUGHT: 110}),
        ("qwen3", {}, {ENDS: 110}),  # the user speaks once
    ):
        tokenizer = TreeTokenizer.byte_level(template)
        reader = sample_reader(REAL_DATA / "webdancer_think.jsonl.gz", tokenizer, sample=settings)
        trees = (TokenTree.from_paths(reader.paths(group)) for group in reader.files.groups())
        points = [point for tree in trees for point in branch_points(tree, tokenizer.decode)]
        assert Counter(reason for point in points for reason in point.reasons) == expected


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
def test_empty_thought_blocks_of_real_rollouts():
    """ToolBench has no thoughts. Qwen3's template shows an empty think block in the last turn only."""
    tokenizer = TreeTokenizer.byte_level("qwen3")
    reader = sample_reader(REAL_DATA / "toolbench_dfsdt.jsonl.gz", tokenizer)
    counts = Counter()
    for group in islice(reader.files.groups(), 5):
        tree = TokenTree.from_paths(reader.paths(group))
        assert reported(tree, tokenizer.decode, EMPTY_BLOCK) == dropped_thoughts(tree)
        counts.update(r for point in branch_points(tree, tokenizer.decode) for r in point.reasons)
    assert counts == {EMPTY_BLOCK: 22, OTHER_TEXT: 17}


def rendered(what):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_renderings_show_the_branch_points():
    tree = tree_of("<s>| the|re| cat", "<s>| there| cat| on", "<s>| there| cat", "<s>| dog")
    text = rendered(render_report(tree, decode))
    assert "4 paths, 2 branch points" in text
    assert f"1 x {RETOKENIZED}" in text
    assert '1 token deep, 4 paths  "<s>"' in text
    assert "1 path ending here" in text
    assert f'" dog"  token 7  {OTHER_TEXT}' in text
    picture = rendered(render_picture(tree, decode)).splitlines()
    assert picture[0] == "8 tokens, 4 paths"
    assert picture[1] == '└── 1 token, 4 paths  "<s>"'
    assert len(picture) == 1 + tree.stats.n_nodes


def test_control_characters_do_not_reach_the_terminal():
    def odd(ids):
        return "".join("\x1b[31m\x9b\u202e\n" if i == 1 else WORDS[i] for i in ids)

    tree = tree_of("<s>| the| cat", "<s>| dog| the", "<s>| dog")
    for shown in (rendered(render_report(tree, odd)), rendered(render_picture(tree, odd))):
        assert "\\u001b[31m\\x9b\\u202e\\n" in shown
        assert all(char.isprintable() or char == "\n" for char in shown)


def test_lines_of_the_report_fit_the_terminal():
    def wide(ids):
        return "".join(f"日\n{WORDS[i]}" for i in ids)

    thoughts, _ = THOUGHTS["dropped, heavier"]
    long = "<s>= the" + "| cat| sat| on" * 8
    for tree in (
        tree_of_turns(*thoughts),
        tree_of("<s>| the|re| cat", "<s>| there| cat| on"),
        tree_of_turns(long[:-4], long),
    ):
        for width in (80, 100):
            lines = render_report(tree, wide, width).plain.splitlines()
            assert max(map(cell_len, lines)) <= width, lines
