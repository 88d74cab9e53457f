"""How a training sample is shown: its text, its trained tokens, its special tokens."""

import re

import numpy as np
import pytest

from tests.support.datasets import sample_reader
from titan_tree import TokenPath, TreeTokenizer, UserError
from titan_tree.data.show import CLOSE, OPEN, render_sample

TOKENIZER = TreeTokenizer.byte_level()
MARKS = re.compile(f"[{OPEN}{CLOSE}]")


def body(path, *args):
    """Returns the text below the header and the key."""
    return render_sample(path, *args).plain.split("\n\n", 1)[1]


def conversation(user, assistant, **fields):
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    (path,) = TOKENIZER.samples(messages)
    return TokenPath(path.tokens, path.loss_mask, id="a/1", **fields)


def test_a_sample_has_a_header_a_key_and_marks_around_its_trained_tokens():
    shown = render_sample(conversation("1 + 1?", "2", weight=0.25, advantage=-1.5), TOKENIZER)
    assert shown.plain.splitlines() == [
        "a/1: 28 tokens, 2 trained, weight 0.25, advantage -1.5",
        "⟦trained tokens⟧",
        "",
        "<|im_start|>user",
        "1 + 1?<|im_end|>",
        "<|im_start|>assistant",
        "⟦2<|im_end|>⟧",
    ]
    styles = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert styles["2"] == "bold"
    assert styles["user\n1 + 1?"] == "dim"
    assert styles["<|im_end|>"] == "bold magenta"  # the last one, which is trained
    assert styles["<|im_start|>"] == "dim magenta"


def test_what_is_between_the_marks_is_what_the_loss_counts():
    """On the demo, whose texts contain neither marks nor names of special tokens."""
    reader = sample_reader("demo", TOKENIZER, sample={"turns": "whole"})
    paths = [
        path
        for _, group in zip(range(4), reader.files.groups(), strict=False)
        for path in reader.paths(group)
    ]
    assert len(paths) == 16
    for path in paths:
        shown = body(path, TOKENIZER)
        assert MARKS.sub("", shown) == TOKENIZER.decode(path.tokens)
        counted = TOKENIZER.decode(path.tokens[path.loss_mask > 0])
        assert "".join(re.findall(f"{OPEN}([^{CLOSE}]*){CLOSE}", shown)) == counted


def test_the_header_shows_ranges_over_trained_tokens():
    path = TokenPath([5, 6, 7, 8], [9, 0.5, 1, 0], advantage=[7, -1, 2, 7])
    assert render_sample(path).plain.startswith(
        "sample: 4 tokens, 2 trained, loss mask 0.5 to 1, weight 1, advantage -1 to 2\n"
    )
    sampled = TokenPath([5, 6, 7], [0, 1, 1], temperature=0.7, policy_version=[1, 3, 4])
    assert "2 trained, weight 1, temperature 0.7, policy version 3 to 4\n" in render_sample(sampled).plain
    nothing = TokenPath([5, 6], [1, 0], advantage=3)  # the loss does not count a first token
    assert render_sample(nothing).plain.startswith("sample: 2 tokens, 0 trained, weight 1, advantage 3\n")
    assert OPEN not in body(nothing)


def test_without_a_tokenizer_ids_are_shown():
    assert body(TokenPath([5, 6, 70, 8], [0, 1, 1, 0])) == " 5 ⟦ 6 70 ⟧ 8"


def test_characters_of_several_tokens_stay_whole():
    """The byte tokenizer cuts é into 2 tokens, 日 into 3 and 🎉 into 4. The mask cuts them anywhere."""
    text = "é日🎉a日é🎉b"
    tokens = TOKENIZER.encode(text)
    draw = np.random.default_rng(0)
    for _ in range(50):
        mask = draw.integers(0, 2, len(tokens))
        shown = body(TokenPath(tokens, mask), TOKENIZER)
        assert MARKS.sub("", shown) == text
        assert (OPEN in shown) == bool(mask[1:].any())
    is_trained = [0, 0, 0, 1, 0]  # in the middle of 日: its bytes are tokens 2 to 4
    assert body(TokenPath(tokens[:5], is_trained), TOKENIZER) == "é⟦日⟧"


def test_bytes_that_are_no_text_do_not_hide_their_neighbors():
    tokens = [*TOKENIZER.encode("a"), 255, *TOKENIZER.encode("é\ufffd"), 0xC3, *TOKENIZER.encode("b")]
    assert body(TokenPath(tokens, np.zeros(len(tokens))), TOKENIZER) == "a\ufffdé\ufffd\ufffdb"


def test_control_characters_are_escaped_except_line_breaks_and_tabs():
    path = conversation("\x1b[31m\ta\r\n\x9b\u202eb", "ok")
    path.id = "\x1b]0;\n"
    shown = render_sample(path, TOKENIZER).plain
    assert "user\n\\x1b[31m\ta\\r\n\\x9b\\u202eb<|im_end|>" in shown
    assert shown.startswith("\\x1b]0;\\n: ")
    assert all(char.isprintable() or char in "\n\t" for char in shown)


def test_plain_text_that_looks_like_a_special_token_has_a_backslash():
    shown = render_sample(conversation("<|im_end|> <think>", "<|im_start|>"), TOKENIZER).plain
    assert "user\n\\<|im_end|> <think><|im_end|>\n" in shown
    assert "assistant\n⟦\\<|im_start|><|im_end|>⟧" in shown
    assert "⟦trained tokens⟧, \\<plain text that looks like a special token or a mark>" in shown


def test_marks_in_plain_text_have_a_backslash():
    shown = render_sample(conversation("⟦a⟧ ⟨... 9 tokens left out ...⟩", "b⟧c"), TOKENIZER).plain
    assert "user\n\\⟦a\\⟧ \\⟨... 9 tokens left out ...⟩<|im_end|>\n" in shown
    assert "assistant\n⟦b\\⟧c<|im_end|>⟧" in shown


def test_a_long_sample_keeps_the_ends_of_every_span():
    mask = np.zeros(1000)
    mask[300:600] = 1
    path = TokenPath(np.arange(1000), mask)

    def ids(*ranges):
        return "".join(f" {id}" for start, end in ranges for id in range(start, end))

    gap, longer_gap = " ⟨... 280 tokens left out ...⟩", " ⟨... 380 tokens left out ...⟩"
    assert body(path, None, 60) == (
        f"{ids((0, 10))}{gap}{ids((290, 300))}"
        f" ⟦{ids((300, 310))}{gap}{ids((590, 600))} ⟧"
        f"{ids((600, 610))}{longer_gap}{ids((990, 1000))}"
    )
    assert body(path, None, 1000) == body(path)


def test_a_sample_of_many_spans_is_shortened_as_well():
    path = TokenPath(np.arange(4000), np.arange(4000) // 10 % 2)  # 400 spans
    shown = body(path, None, 100)
    assert " 49 ⟨... 3,900 tokens left out, 1,950 of them trained ...⟩ ⟦ 3950 " in shown
    assert sum(word.isdigit() for word in shown.split()) == 100


def test_ids_that_the_tokenizer_lacks_are_an_error():
    with pytest.raises(UserError, match="expected ids of this vocabulary, got 5000"):
        render_sample(TokenPath([65, 5000]), TOKENIZER)
