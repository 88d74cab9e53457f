"""The merge report, on trees that are small enough to read."""

import io

from rich.console import Console

from titan_tree.data.report import (
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

WORDS = ["<s>", " the", " there", "re", " cat", " sat", " on", " dog", " c", "at"]


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
