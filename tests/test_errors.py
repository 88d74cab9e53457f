"""Messages of UserErrors stay on one line and cannot control a terminal."""

import pickle
import unicodedata

from titan_tree.errors import UserError, printable


def test_no_character_that_controls_a_terminal_is_printed() -> None:
    every = "".join(map(chr, range(0x20000)))
    shown = printable(every)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode("utf-8")  # no lone surrogates
    assert len(shown.splitlines()) == 1


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("", "a b", "naïve 你好 🙂", r"C:\new"):
        assert printable(text) is text


def test_an_error_that_quotes_data_is_one_printable_line() -> None:
    error = UserError("a.jsonl:3: id: got \x1b[2J\r\n\x00\ud800\u202etxt")
    assert str(error) == r"a.jsonl:3: id: got \x1b[2J\r\n\x00\ud800\u202etxt"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # as from a worker process
