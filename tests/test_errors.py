"""Messages of UserErrors stay on one line and cannot control a terminal."""

import base64
import json
import logging
import math
import os
import pickle
import unicodedata
import urllib.parse

import pytest

from titan_tree import errors
from titan_tree.cli import run_process
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import (
    UserError,
    hide,
    keep_secret,
    printable,
    require_unicode,
    shorten,
    warnings_hidden,
)


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


KEY = 'sk-"S/\\+é0'


@pytest.fixture
def _one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_secrets", {})
    keep_secret(KEY + "\n")


@pytest.mark.usefixtures("_one_secret")
def test_all_spellings_of_a_secret_are_hidden() -> None:
    spellings = [KEY, repr(KEY)[1:-1], json.dumps(KEY)[1:-1], urllib.parse.quote(KEY, safe=""), KEY.upper()]
    for spelling in spellings:
        assert hide(f"a {spelling} b") == "a *** b"
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(4):
            encoded = encode(f"{'u' * before}{KEY}p".encode()).decode()
            head, tail = hide(encoded).split("***")
            assert len(head) == math.ceil(before * 8 / 6)  # characters with bits of what precedes the key
            assert len(tail) == len(encoded) - (before + len(KEY.encode())) * 8 // 6
    assert str(UserError(f"got {KEY}")) == "got ***"
    assert shorten({"x" * 20 + KEY: 1}) == "{'xxxxxxxxxxxxxxxxxxxx***': 1}"
    with pytest.raises(UserError, match=r"in '\*{3}.ud800\*{3}'$"):
        require_unicode(f"{KEY}\ud800{KEY}", "answer")
    name = json.dumps("x" * 55 + KEY)
    for text in (f"{{{name}: 1, {name}: 2}}", f"{{{name}: NaN}}"):
        with pytest.raises(UserError, match=r"x\*{3}: expected") as error:
            parse_json(text.encode(), "answer")
        assert KEY[:5] not in str(error.value)


def test_short_secrets_are_ignored_and_passwords_in_urls_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_secrets", {})
    keep_secret("abc")
    assert (
        hide("abc http://me:p@ss@host:1/a@b https://me@host") == "abc http://***@host:1/a@b https://***@host"
    )


@pytest.mark.usefixtures("_one_secret")
def test_tracebacks_and_log_lines_hide_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)

    def fails() -> int:
        raise ZeroDivisionError(f"the key is {KEY}")

    run_process.exit_process(fails)
    printed = capsys.readouterr().err
    assert statuses == [1]
    assert printed.endswith("ZeroDivisionError: the key is ***\n")
    assert KEY not in printed
    run_process._Stdout().emit(logging.makeLogRecord({"msg": "the key is %s", "args": (KEY,)}))
    assert capsys.readouterr().out == "the key is ***\n"


def test_warnings_are_hidden_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("library")
    with warnings_hidden():
        logger.warning("hidden")
        logger.error("shown")
    logger.warning("shown, too")
    assert caplog.messages == ["shown", "shown, too"]
    logging.disable(logging.ERROR)  # by a caller, who also hides errors
    try:
        with warnings_hidden():
            logger.error("hidden")
        logger.error("hidden")
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.messages == ["shown", "shown, too"]
