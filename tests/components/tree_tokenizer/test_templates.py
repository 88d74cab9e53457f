"""Chat templates against hand-written text and transformers; their errors."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.conversations import random_conversation
from tests.support.tokenizer_files import published_template
from tests.support.trip import (
    ASSISTANT,
    CALLS,
    QUESTION,
    QWEN3_TOOLS,
    RESULTS,
    TOOLS_JSON,
    TOOLS_TAIL,
    TRIP,
    WEATHER,
)
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.errors import UserError


def test_qwen3_renders_a_whole_conversation():
    """Only messages after the last user query have think blocks. The last message has one even if empty."""
    tokenizer = TreeTokenizer.byte_level("qwen3")
    assert tokenizer.render(TRIP, [WEATHER]) == (
        "<|im_start|>system\nBe brief.\n\n"
        + QWEN3_TOOLS
        + QUESTION
        + f"{ASSISTANT}Looking.\n{CALLS}{RESULTS}{ASSISTANT}Rain, sun.<|im_end|>\n"
        + "<|im_start|>user\nThanks!<|im_end|>\n"
        + f"{ASSISTANT}<think>\n\n</think>\n\nWelcome.<|im_end|>\n"
    )


def test_qwen3_keeps_reasoning_inside_a_tool_loop():
    """A tool result is not a user query, so reasoning since the last query stays."""
    tokenizer = TreeTokenizer.byte_level("qwen3")
    assert tokenizer.render(TRIP[1:5], add_generation_prompt=True) == (
        f"{QUESTION}{ASSISTANT}<think>\nTwo calls.\n</think>\n\nLooking.\n{CALLS}{RESULTS}{ASSISTANT}"
    )
    assert tokenizer.render(TRIP[1:2], [WEATHER], True, enable_thinking=False) == (
        f"<|im_start|>system\n{QWEN3_TOOLS}{QUESTION}{ASSISTANT}<think>\n\n</think>\n\n"
    )


def test_variables_of_qwen3_say_which_think_blocks_are_shown():
    """The first two turns have thoughts. The user speaks before the last turn, which has none."""
    tokenizer = TreeTokenizer.byte_level("qwen3")
    thoughts = ["<think>\nTwo calls.\n</think>\n\n", "<think>\nSum up.\n</think>\n\n"]
    empty = "<think>\n\n</think>\n\n"
    for variables, shown in (
        ({}, ["", "", empty]),
        ({"preserve_thinking": False, "empty_blocks": True}, ["", "", empty]),
        ({"empty_blocks": False}, ["", "", ""]),
        ({"preserve_thinking": True}, [*thoughts, empty]),
        ({"preserve_thinking": True, "empty_blocks": False}, [*thoughts, ""]),
    ):
        turns = tokenizer.render(TRIP, **variables).split(ASSISTANT)[1:]
        texts = [
            f"{block}{text}" for block, text in zip(shown, ("Looking.", "Rain", "Welcome."), strict=True)
        ]
        assert [turn[: len(text)] for turn, text in zip(turns, texts, strict=True)] == texts, variables


@pytest.mark.parametrize(
    ("content", "before_query", "after_query"),
    [
        ("<think>\nhm\n</think>\n\nyes", "yes", "<think>\nhm\n</think>\n\nyes"),
        ("\n\nyes", "\n\nyes", "<think>\n\n</think>\n\nyes"),
    ],
)
def test_qwen3_finds_think_tags_inside_content(content, before_query, after_query):
    tokenizer = TreeTokenizer.byte_level("qwen3")
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": content}
    user = "<|im_start|>user\n?<|im_end|>\n"
    assert tokenizer.render([asked, said]) == f"{user}{ASSISTANT}{after_query}<|im_end|>\n"
    assert tokenizer.render([asked, said, asked]) == f"{user}{ASSISTANT}{before_query}<|im_end|>\n{user}"


def test_reasoning_has_the_name_that_the_template_reads():
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "reasoning": "t"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        source = "{% for m in messages %}{{ m.role }}({{ m.NAME }})={{ m.content }};{% endfor %}"
        tokenizer = TreeTokenizer.byte_level(source.replace("NAME", name))
        assert tokenizer.render(messages) == "user()=?;assistant(t)=a;"


def test_raw_arguments_are_rendered_unchanged():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": '}]}
    text = '<tool_call>\n{"name": "f", "arguments": {"a": }\n</tool_call><|im_end|>\n'
    user = {"role": "user", "content": "?"}
    assert TreeTokenizer.byte_level("qwen3").render([user, call, user]).count(ASSISTANT + text) == 1
    assert TreeTokenizer.byte_level("chatml").render([user, call, user]).count(ASSISTANT + text) == 1


def test_chatml_renders_tools_and_reasoning():
    tokenizer = TreeTokenizer.byte_level()
    think = "<think>\nTwo calls.\n</think>\n\n", "<think>\nSum up.\n</think>\n\n"
    system = (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n"
        "You may call the functions described inside <tools></tools> tags:\n<tools>\n"
        + TOOLS_JSON
        + TOOLS_TAIL
    )

    def expected(first: str, second: str) -> str:
        return (
            f"{system}{QUESTION}{ASSISTANT}{first}Looking.\n{CALLS}{RESULTS}"
            f"{ASSISTANT}{second}Rain, sun.<|im_end|>\n"
            f"<|im_start|>user\nThanks!<|im_end|>\n{ASSISTANT}Welcome.<|im_end|>\n"
        )

    assert tokenizer.render(TRIP, [WEATHER]) == expected(*think)
    assert tokenizer.render(TRIP, [WEATHER], keep_reasoning=False) == expected("", "")
    assert (
        tokenizer.render(TRIP[:6], [WEATHER], keep_reasoning=False)
        == expected("", think[1]).split("<|im_start|>user\nThanks!")[0]
    )
    assert tokenizer.render(TRIP[1:2], [WEATHER], True) == (
        system.replace("Be brief.\n\n", "") + QUESTION + ASSISTANT
    )


TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "system" %}{{- raise_exception("no system messages") }}{%- endif %}
    {%- if message.content == "stop" %}{%- break %}{%- endif %}
<{{ message.role }}>
    {% generation %}{{ message.content | trim }}{% endgeneration %}

    {%- for call in message.tool_calls %} {{ call.function | tojson(indent=1) }}{% endfor %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{{- "<assistant>" ~ (style | default("")) if add_generation_prompt }}"""


def hf_folder(folder: Path, where: str) -> Path:
    """Returns the folder of a transformers tokenizer with TEMPLATE in one of its two possible places."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(alphabet | {"he": 256}, [("h", "e")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "<assistant>", "<user>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=where == "chat_template.jinja")
    assert (folder / "chat_template.jinja").is_file() == (where == "chat_template.jinja")
    return folder


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_templates_of_folders_render_as_in_transformers(where, tmp_path):
    """TEMPLATE has trimmed blocks, tojson without escapes, loop controls, generation tags and variables."""
    from transformers import AutoTokenizer

    ours = TreeTokenizer.from_hf(hf_folder(tmp_path, where))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = normalize_messages(TRIP[1:], "messages")
    messages[1]["content"] = " he said <user> <s> é\n"  # control tokens in content take effect
    for variables in ({}, {"style": " <x> "}):
        for count in range(1, 8):
            options = {"tools": [WEATHER], "add_generation_prompt": count % 2 == 0, **variables}
            expected = theirs.apply_chat_template(messages[:count], tokenize=False, **options)
            assert ours.render(messages[:count], **options) == expected
            ids = theirs.apply_chat_template(messages[:count], return_dict=False, **options)
            assert ours.encode(expected) == ids
    with pytest.raises(UserError, match=r"(chat_template\.jinja|tokenizer_config\.json): no system messages"):
        ours.render(TRIP)


def test_the_template_of_a_config_is_text_and_no_name(tmp_path):
    """Else a config could name a file of this machine, whose text would become training data."""
    file = hf_folder(tmp_path, "tokenizer_config.json") / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for text in ("chatml", str(file)):
        file.write_text(json.dumps(config | {"chat_template": text}))
        assert TreeTokenizer.from_hf(tmp_path).render([{"role": "user", "content": "Q"}]) == text
    file.write_text(json.dumps(config | {"chat_template": ""}))
    with pytest.raises(UserError, match="no chat template"):
        TreeTokenizer.from_hf(tmp_path).render([{"role": "user", "content": "Q"}])


def test_a_template_names_the_fields_it_reads():
    tokenizer = TreeTokenizer.byte_level(
        """{{ a.b["c"][0] }}{{ a.get("d") }}{% if "e" in a or "f" not in a or g == "no" %}{% endif %}
        {{ a | attr("h") }}{{ a | map(attribute="i.j") | join("no") }}
        {{ a | selectattr("k", "eq", "no") | list }}
        {{ a.split("no") }}{{ "no" | default("no") }}{% macro m(x) %}{{ x["l"] }}{% endmacro %}{{ m(a) }}"""
    )
    assert tokenizer.template_fields - {"get", "split"} == set("bcdefhijkl")
    qwen3 = TreeTokenizer.byte_level("qwen3").template_fields
    assert {"role", "content", "reasoning_content", "tool_calls", "function", "name", "arguments"} <= qwen3
    assert "tool_call_id" not in qwen3


def test_the_date_is_a_variable():
    asked = [{"role": "user", "content": "?"}]
    for source in ("{{ strftime_now('%d %b %Y') }}", "{% set now = strftime_now %}{{ now('%d %b %Y') }}"):
        tokenizer = TreeTokenizer.byte_level(source)
        assert tokenizer.render(asked, date="2025-02-03") == "03 Feb 2025"
        with pytest.raises(UserError, match=r"prints today's date; .* data.sample.date=2025-12-31"):
            tokenizer.render(asked)
        with pytest.raises(UserError, match="date: expected a day as 2025-12-31, got 'today'"):
            tokenizer.render(asked, date="today")
    given = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
    assert TreeTokenizer.byte_level(given + "{{ date_string }}").render(asked, date_string="x") == "x"
    with pytest.raises(UserError, match="reads no variable 'date'"):
        TreeTokenizer.byte_level("{{ messages }}").render(asked, date="2025-02-03")


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path):
    (tmp_path / "bom.jinja").write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    assert TreeTokenizer.byte_level(tmp_path / "bom.jinja").render(TRIP) == TRIP[0]["content"]


def test_unusable_templates_are_errors(tmp_path):
    for template, message in (
        ("nowhere.jinja", r"nowhere\.jinja: expected chatml, qwen3, a file or Jinja text, got no such file$"),
        ("Qwen3", "chat template Qwen3: .* got no such file; did you mean 'qwen3'"),
        ("{% for %}", r"\(text\), line 1: "),
        ("{{ messages[0].content.nothing.more }}", r"\(text\): 'str object' has no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ):
        with pytest.raises(UserError, match=message):
            TreeTokenizer.byte_level(template).render(TRIP)
    with pytest.raises(UserError, match="reads no variable 'keep_reasonin'"):
        TreeTokenizer.byte_level().samples(TRIP, keep_reasonin=False)
    with pytest.raises(UserError, match="tools: expected a list of JSON schemas"):
        TreeTokenizer.byte_level().render(TRIP, "weather")
    folder = hf_folder(tmp_path, "chat_template.jinja")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        TreeTokenizer.from_hf(folder).render(TRIP)
    assert TreeTokenizer.from_hf(folder, "qwen3").render(TRIP[1:2]) == QUESTION


@for_each(
    ("source", "error"),
    [
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ range(999999999) }}", "OverflowError: Range too big."),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "RecursionError: maximum recursion depth exceeded",
        ),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0] | nothing }}", "No filter named 'nothing'"),
        ("{{ '%(a)s' % {} }}", "KeyError: 'a'"),
        ("{{ 3 | text }}", "TypeError: the filter text expects a string, got int"),
        ("{{ raise_exception('one\\n\\x1b[31mtwo') }}", "one [31mtwo"),
        ("{{ " + "(" * 5000, "RecursionError: maximum recursion depth exceeded"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested blocks"),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", "block 'a' defined twice"),
        ("{{ messages | map('nothing') | list }}", "No filter named 'nothing'."),
    ],
)
def test_every_error_of_a_template_is_one_line_that_names_the_template(source, error):
    with pytest.raises(UserError) as caught:
        TreeTokenizer.byte_level(source).samples(TRIP)
    assert re.match(rf"chat template \(text\)(, line 1)?: {re.escape(error)}", str(caught.value)), (
        caught.value
    )
    assert str(caught.value).isprintable()


# Published templates, as TRL ships them


@pytest.mark.slow
def test_qwen3_renders_the_text_of_the_published_template():
    published = TreeTokenizer.byte_level(published_template("qwen3"))
    bundled, rng = TreeTokenizer.byte_level("qwen3"), random.Random(0)
    for _ in range(100):
        messages, tools = random_conversation(rng)
        for options in ({}, {"add_generation_prompt": True, "enable_thinking": False}):
            assert bundled.render(messages, tools, **options) == published.render(messages, tools, **options)


@pytest.mark.slow
def test_published_templates_treat_thoughts_as_the_page_on_templates_says():
    """The last sample of a conversation shows which thoughts of earlier turns are kept."""
    messages = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "reasoning_content": "One.", "content": "B"},
        {"role": "user", "content": "C?"},
        {"role": "assistant", "reasoning_content": "Two.", "content": "D"},
    ]
    for name, variables, kept in (
        ("qwen3", {}, False),
        ("qwen3_5_think", {}, False),
        ("qwen3_6", {}, False),
        ("qwen3_6", {"preserve_thinking": True}, True),
        ("qwen3_8", {}, True),
        ("qwen3_8", {"preserve_thinking": False}, False),
        ("gptoss", {"date": "2025-12-31"}, False),
    ):
        tokenizer = TreeTokenizer.byte_level(published_template(name))
        last = tokenizer.samples(messages, **variables)[-1]
        assert ("One." in tokenizer.decode(last.tokens), name) == (kept, name)
        assert "Two." in tokenizer.decode(last.tokens[last.loss_mask > 0]), name
    with pytest.raises(UserError, match="continuation of its own generation prompt"):
        TreeTokenizer.byte_level(published_template("deepseek_r1_distill")).samples(messages)


@pytest.mark.slow
def test_reasoning_effort_is_a_variable_of_the_published_template():
    tokenizer = TreeTokenizer.byte_level(published_template("qwen3_8"))
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}]
    texts = {
        effort: tokenizer.decode(tokenizer.samples(messages, reasoning_effort=effort)[0].tokens)
        for effort in ("xhigh", "medium", "low")
    }
    assert texts["xhigh"] == tokenizer.decode(tokenizer.samples(messages)[0].tokens)
    assert len(set(texts.values())) == 3
    with pytest.raises(UserError, match=r"Unexpected reasoning effort high\. Supported types are xhigh"):
        tokenizer.samples(messages, reasoning_effort="high")
