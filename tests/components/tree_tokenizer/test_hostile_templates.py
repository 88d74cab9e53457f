"""Hostile chat templates: each one is refused in one line that names it, with bounded time and memory."""

import json
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.trip import TRIP
from titan_tree.components.tree_tokenizer import TreeTokenizer, limits
from titan_tree.config import DataConfig
from titan_tree.data.sample_reader import SampleReader
from titan_tree.errors import UserError

BIG = "{% set b = 'x' * 1000000 %}"  # near the limit
DOUBLE = "{% set n = namespace(s='xx', l=[1], d=9) %}{% for i in range(99) %}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}"
REPEATS = "repeats loops and macros more than 16,384 times"
LARGE = "larger than 1,048,576 characters"

TEMPLATES = [  # source, words of the error
    # Time
    (FOREVER + "{% endfor %}{% endfor %}", REPEATS),
    (FOREVER + "{% for k in range(9) %}{{ k }}{% endfor %}{% endfor %}{% endfor %}", REPEATS),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}", REPEATS),
    ("{% for a in [[[]]] * 9999 recursive %}{{ loop([a] * 9999) }}{% endfor %}", ""),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}"
     "{% endmacro %}{{ n() }}", "RecursionError"),
    ("{% block a %}{{ self.a() }}{% endblock %}", "RecursionError"),
    ("{{ range(10**9) }}", "Range too big"),
    ("{{ range(99999) | list * 99999 }}", LARGE),
    ("{{ 9 ** 999999999 }}", "more than 131,072 bits"),
    (DOUBLE + "{% set n.d = n.d * n.d %}{% endfor %}", "more than 131,072 bits"),
    ("{{ 1.5 | round(10**9, 'ceil') }}", "round: a number is larger than 100,000"),
    ("{{ 2 ** 60000 }}", "Exceeds the limit"),
    # Size
    ("{{ 'x' * 10**10 }}", LARGE),
    ("{{ 10**10 * 'x' }}", LARGE),
    ("{{ [1] * 10**10 }}", LARGE),
    ("{{ (1, 2) * 10**10 }}", LARGE),
    (DOUBLE + "{% set n.s = n.s + n.s %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s = n.s ~ n.s %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s = [n.s, n.s] | join %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.s = n.s.replace('x', 'xx') %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.l = n.l + n.l %}{% endfor %}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ '' ~ n.l }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | string }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | pprint }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | upper }}", LARGE),
    (DOUBLE + "{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l }}", LARGE),
    (DOUBLE + "{% set n.l = {'a': n.l, 'b': n.l}.values() %}{% endfor %}{{ n.l }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ '%s' % n.l }}", LARGE),
    (DOUBLE + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ '{}'.format(n.l) }}", LARGE),
    ("{{ [['x' * 9999] * 9999] | join('-') }}", LARGE),
    (BIG + "{% for i in range(9) %}{{ b }}{% endfor %}", LARGE),
    (BIG + "{{ b }}{{ b }}", LARGE),
    (BIG + "{% macro m() %}{{ b }}{{ b }}{% endmacro %}{{ m() }}", LARGE),
    (BIG + "{% filter upper %}{{ b }}{{ b }}{% endfilter %}", LARGE),
    (BIG + "{% set n = namespace(l=[]) %}{% for i in range(999) %}{% set n.l = [n.l, b[1:]] %}{% endfor %}",
     "more than 16,777,216 characters in all"),
    (BIG + "{% for i in range(9999) %}{% if b.count('y') %}{% endif %}{% endfor %}", "characters in all"),
    (BIG + "{{ b.replace('', 'yy') }}", LARGE),
    (BIG + "{{ b | replace('x', 'yy') }}", LARGE),
    (BIG + "{{ b.join('xxx') }}", LARGE),
    ("{{ ('-' * 9999).join(['x'] * 99999) }}", LARGE),
    ("{{ (['x'] * 99999) | join('-' * 9999) }}", LARGE),
    ("{{ ('\\n' * 99999) | indent(9999) }}", LARGE),
    ("{{ ('x ' * 99999) | wordwrap(1, wrapstring='y' * 9999) }}", LARGE),
    ("{{ 'x' | center(10**10) }}", "center: a number is larger than 100,000"),
    ("{{ 'x'.center(10**10) }}", "center: a number is larger"),
    ("{{ 'x'['center'](10**10) }}", "center: a number is larger"),
    ("{{ ('x' | attr('center'))(10**10) }}", "center: a number is larger"),
    ("{{ ['x'] | map('center', 10**10) | list }}", "center: a number is larger"),
    ("{{ 'x'.ljust(10**10) }}{{ 'x'.rjust(10**10) }}", "ljust: a number is larger"),
    ("{{ 'x'.zfill(10**10) }}", "zfill: a number is larger"),
    ("{{ [1] | batch(10**10, 'x') | list }}", "batch: a number is larger"),
    ("{{ [1] | slice(10**10) | list }}", "slice: a number is larger"),
    ("{{ '%10000000000d' % 1 }}", "a format has a computed width, or one above 9,999"),
    ("{{ '%*d' % (10**10, 1) }}", "a format has a computed width"),
    ("{{ '%.10000000000f' % 1 }}", "a format has a computed width"),
    ("{{ '%10000000000d' | format(1) }}", "a format has a computed width"),
    ("{{ '{:10000000000}'.format(1) }}", "a format has a computed width"),
    ("{{ '{:{}}'.format(1, 99999) }}", "a format has a computed width"),
    ("{{ {'a': [1]} | tojson(indent=10**9) }}", "tojson: the indent or the separators are too long"),
    ("{{ 'x'.expandtabs(10**10) }}", "unsafe"),
    ("{{ 'x'.translate({120: 'y' * 99}) }}", "unsafe"),
    ("{{ 'x'.encode().center(10**10) }}", "unsafe"),
    ("{{ (1).to_bytes(10**10, 'big') }}", "unsafe"),
    ("{{ lipsum(10**10) }}", "'lipsum' is undefined"),
    # Attributes and files
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ ''['__class__'].x }}", "unsafe"),
    ("{{ ('' | attr('__class__')).x }}", "unsafe"),
    ("{{ '{0.__class__}'.format('') }}{{ '{0.__class__.__mro__}'.format(3) }}", ""),
    ("{{ raise_exception.__globals__.x }}", "unsafe"),
    ("{{ messages.append({}) }}", "unsafe"),
    ("{{ messages[0].update(role='x') }}", "unsafe"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ("{% include 'x' %}", "no loader"),
    ("{% import 'x' as y %}", "no loader"),
    ("{% extends '/etc/passwd' %}{{ a }}", "no loader"),
    ("{% autoescape true %}{{ a }}{% endautoescape %}", "autoescape is not supported"),
    # Other errors
    ("{{ raise_exception('one\\n\\x1b[31mtwo') }}", "one [31mtwo"),
    ("{{ raise_exception() }}", "TypeError"),
    ("{{ messages | nothing }}", "No filter named 'nothing'"),
    ("{{ messages is nothing }}", "No test named 'nothing'"),
    ("{{ missing.field }}", "'missing' is undefined"),
    ("{{ 3 | text }}", "expects a string"),
    ("{{ messages.content.text() }}", "no attribute 'content'"),
    ("{{ tools | tojson(sort_keys=1) }}{{ {1: 2, 'a': 3} | tojson(sort_keys=true) }}", "TypeError"),
    ("{{ strftime_now(3) }}", "TypeError"),
    ("{% for %}", "line 1"),
    ("{{ a", "line 1"),
    ("{{ " + "(" * 5000, "RecursionError"),
    ("{{ " + "not " * 5000 + "a }}", "RecursionError"),
    ("{{ a }}" * 99_999, "expected at most 262,144 characters"),
]  # fmt: skip


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REPEATS", 1 << 14)
    monkeypatch.setattr(limits, "MAX_SIZE", 1 << 20)
    monkeypatch.setattr(limits, "MAX_TOTAL", 1 << 24)


@pytest.mark.usefixtures("small_limits")
@for_each(("source", "words"), TEMPLATES)
def test_a_hostile_template_is_refused_in_one_line(source: str, words: str) -> None:
    message = refusal(source)
    assert message.startswith("chat template (text)")
    assert words in message


def test_a_template_has_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0)
    assert "it runs for more than 0 seconds" in refusal(FOREVER + "{% endfor %}{% endfor %}")


def test_an_error_of_a_template_names_the_record(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TRIP}) + "\n")
    reader = SampleReader(DataConfig(files=str(file)), TreeTokenizer.byte_level("{{ 'x' * 10**10 }}"))
    with pytest.raises(UserError, match=r"a\.jsonl:1: chat template \(text\): a value is larger"):
        reader.paths(next(reader.groups()))


def test_a_file_that_is_no_template_is_refused_in_one_line(tmp_path: Path) -> None:
    latin = tmp_path / "latin.jinja"
    latin.write_bytes(b"{{ '\xe9' }}")
    for path in (latin, tmp_path, tmp_path / "none", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(UserError, match=r"^chat template ") as error:
            TreeTokenizer.byte_level(path)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "template", [3, [3], [{"name": "default"}], [{"name": "default", "template": 3}], {"a": 1}, [[]]]
)
def test_a_template_of_a_wrong_type_is_refused_in_one_line(tmp_path: Path, template: object) -> None:
    config = {"chat_template": template, "bos_token": {"a": 1}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        TreeTokenizer.from_hf(tmp_path)
    assert str(error.value).isprintable()


def refusal(source: str) -> str:
    """Returns the message of the UserError that a template raises: one short line."""
    with pytest.raises(UserError) as error:
        TreeTokenizer.byte_level(source).samples(TRIP)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 300
    return message
