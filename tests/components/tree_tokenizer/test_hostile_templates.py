"""Hostile chat templates: each one is refused in one line that names it, with bounded time and memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.trip import TRIP
from titan_tree.components.tree_tokenizer import TreeTokenizer, templates
from titan_tree.components.tree_tokenizer.template_process import TemplateProcess
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.errors import UserError

TIME = "it takes more than 0.5 seconds of CPU time for a conversation"
MEMORY = "it takes more than 512 MiB of memory"
EITHER = "it takes more than "  # filling the memory takes about as long as the limit of CPU time
TEXT = "its texts of one conversation take more than 16 MiB"
NESTED = (  # lists that hold one list twice: a comparison visits 2^60 lists, within one call of C
    "{% set n = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)
DOUBLE = "{% set n = namespace(s='xx', l=[1], d=9) %}{% for i in range(99) %}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}"
OFTEN = "{%% for i in range(99999) %%}{%% set x = %s %%}{%% endfor %%}"

LIMITED = [  # source, the limit
    (NESTED + "{{ n.a == n.b }}", TIME),
    ("{{ 'x' * 10**10 }}", MEMORY),
    ("{% for i in range(2999) %}{{ 'abcdefgh' * 999 }}{% endfor %}", TEXT),
]

MORE_LIMITED = [
    (FOREVER + "{% endfor %}{% endfor %}", TIME),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}", TIME),
    (NESTED + "{{ [n.a].index(n.b) }}", TIME),
    (NESTED + "{{ {n.t: 1} | length }}", TIME),
    (NESTED + "{{ [n.t, n.t] | unique | list | length }}", TIME),
    (NESTED + "{% for x in [n.a, n.b] %}{{ loop.changed(x) }}{% endfor %}", TIME),
    ("{{ 9 ** (9 ** 9) }}", TIME),
    ("{% set l = [range(300) | list] * 150 %}" + OFTEN % "l | pprint", TIME),
    ("{% set s = 'a b ' * 800000 %}" + OFTEN % "s | wordcount", TIME),
    (DOUBLE + "{% set n.d = n.d * n.d %}{% endfor %}", TIME),
    (DOUBLE + "{% set n.s = n.s ~ n.s %}{% endfor %}", EITHER),
    (DOUBLE + "{% set n.l = n.l + n.l %}{% endfor %}", EITHER),
    ("{{ [1] * 10**10 }}", MEMORY),
    ("{{ 'x'.center(10**10) }}", MEMORY),
    ("{{ '%10000000000d' % 1 }}", ""),
    ("{{ '{:10000000000}'.format(1) }}", ""),
    ("{{ (1).to_bytes(10**10, 'big') }}", MEMORY),
    ("{{ ('%(' * 400000) % {} }}", "ValueError: incomplete format key"),
    ("{% if x %}" + "{% elif x %}a" * 19_999 + "{% endif %}", ""),
]

TEMPLATES = [  # source, words of the error
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{% macro m() %}{{ caller() }}{% endmacro %}{% macro n() %}{% call m() %}{{ n() }}{% endcall %}"
     "{% endmacro %}{{ n() }}", "RecursionError"),
    ("{% block a %}{{ self.a() }}{% endblock %}", "RecursionError"),
    ("{{ range(10**9) }}", "Range too big"),
    ("{{ 2 ** 60000 }}", "Exceeds the limit"),
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
    ("{{ dict.update(messages[0], role='x') }}", "unsafe"),
    # Other errors
    ("{{ raise_exception('one\\n\\x1b[31mtwo') }}", "one [31mtwo"),
    ("{{ raise_exception() }}", "TypeError"),
    ("{{ messages | nothing }}", "No filter named 'nothing'"),
    ("{{ messages is nothing }}", "No test named 'nothing'"),
    ("{{ missing.field }}", "'missing' is undefined"),
    ("{{ 3 | text }}", "expects a string"),
    ("{{ messages.content.text() }}", "no attribute 'content'"),
    ("{{ tools | tojson(sort_keys=1) }}{{ {1: 2, 'a': 3} | tojson(sort_keys=true) }}", "TypeError"),
    ("{{ strftime_now(3) }}", "set the variable date"),
    ("{% for %}", "line 1"),
    ("{{ a", "line 1"),
    ("{{ " + "(" * 5000, "RecursionError"),
    ("{{ " + "not " * 5000 + "a }}", "RecursionError"),
    ("{{ a }}" * 99_999, "expected at most 262,144 characters"),
]  # fmt: skip


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    """Lets templates run in a process with small limits."""
    process = TemplateProcess(seconds=0.5, memory=512 << 20, answer=16 << 20)
    monkeypatch.setattr(templates, "PROCESS", process)
    yield process
    process.stop()


@for_each(("source", "words"), TEMPLATES)
def test_a_hostile_template_is_refused_in_one_line(source: str, words: str) -> None:
    message = refusal(source)
    assert message.startswith("chat template (text)")
    assert words in message


@for_each(("source", "limit"), LIMITED)
def test_a_template_beyond_a_limit_is_refused(source: str, limit: str, process: TemplateProcess) -> None:
    assert refusal(source) == f"chat template (text): {limit}"
    assert TreeTokenizer.byte_level("{{ messages[0].content }}").render(TRIP) == "Be brief."


def test_many_slow_turns_share_the_limit(process: TemplateProcess) -> None:
    slow = "{% for m in messages %}{{ m.content }}|{% endfor %}{% for i in range(99999) %}{% endfor %}"
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 500
    with pytest.raises(UserError, match=TIME):
        TreeTokenizer.byte_level(slow).samples(turns)


@pytest.mark.slow
@for_each(("source", "limit"), MORE_LIMITED)
def test_other_templates_beyond_a_limit_are_refused(
    source: str, limit: str, process: TemplateProcess
) -> None:
    assert refusal(source).startswith(f"chat template (text): {limit}")


def test_an_error_of_a_template_names_the_record(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": TRIP}) + "\n")
    reader = SampleReader(DataConfig(files=str(file)), TreeTokenizer.byte_level("{{ 1 / 0 }}"))
    with pytest.raises(UserError, match=r"a\.jsonl:1: chat template \(text\): ZeroDivisionError"):
        reader.paths(next(reader.files.groups()))


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
