"""What chat templates leave out is refused, and answers end where an engine stops."""

import dataclasses
import json

import pytest

from tests.components.tree_tokenizer.test_templates import hf_folder
from tests.support.cases import for_each
from tests.support.tokenizer_files import published_template
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.hf_files import write_ends
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import AddedToken, byte_vocabulary
from titan_tree.errors import UserError

CONTROL = ("<user>", "<assistant>", "<tool>", "<end>", "<eos>")
ASK, SAY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"k": "v"}}]}
RESULT = {"role": "tool", "content": "R"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"properties": {"k": {"type": "string"}}}},
}
TEXT = "{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
PROMPT = "{{ '<assistant>' if add_generation_prompt }}"
LOOP = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"


def tokenizer_of(template, stops=()):
    added = tuple(AddedToken(token, 300 + i, special=True) for i, token in enumerate(CONTROL))
    vocabulary = dataclasses.replace(byte_vocabulary(), added=added)
    return TreeTokenizer(vocabulary, ChatTemplate.load(template), None, stops)


def trained(tokenizer, messages, tools=None, **options):
    paths = tokenizer.samples(messages, tools, **options)
    return [tokenizer.decode(path.tokens[path.loss_mask > 0]) for path in paths]


ENDED = LOOP + TEXT + "<end>\n{% endfor %}" + PROMPT  # as ChatML
OPEN = LOOP + TEXT + "{% endfor %}" + PROMPT  # as GLM-4.5: the next role's mark is the end
CLOSED = LOOP + TEXT + "<end>\n{% endfor %}{{ '<assistant>' if add_generation_prompt else '<eos>' }}"  # Phi-3
RETURNS = (
    LOOP + TEXT + "{{ '<eos>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}" + PROMPT
)  # as gpt-oss
TWICE = (
    LOOP + TEXT + "<end>{% endfor %}{{ '<assistant>' if add_generation_prompt else '<end>' }}"
)  # and of a text
CALLED = '<call>{"name": "f", "arguments": {"k": "v"}}</call>'


@for_each(
    ("template", "stops", "ends"),  # the ends of a call and of an answer
    [
        (ENDED, [], ("<end>", "<end>")),
        (ENDED, ["<end>", "<eos>"], ("<end>", "<end>")),
        (ENDED, ["<eos>"], ("<end>", "<end>")),  # a base model that learns the template
        (OPEN, [], ("<tool>", "<user>")),
        (OPEN, ["<user>", "<tool>", "<eos>"], ("<tool>", "<user>")),
        (CLOSED, ["<eos>"], ("<end>", "<end>")),  # no answer trains two ends
        (CLOSED, ["<eos>", "<end>"], ("<end>", "<end>")),
        (TWICE, ["<end>"], ("<end>", "<end>")),
        (TWICE, [], ("<end>", "<end>")),
        (RETURNS, ["<eos>"], ("<eos>", "<eos>")),
        (RETURNS, [], ("<eos>", "<eos>")),
        (
            OPEN.replace("<{{ m.role }}>", "{{ m.role }}: ").replace("<assistant>", "assistant: "),
            [],
            ("", ""),
        ),
    ],
)
def test_an_answer_ends_where_an_engine_stops(template, stops, ends, caplog):
    tokenizer = tokenizer_of(template, stops)
    call, answer = (f"{text}{end}" for text, end in zip((CALLED, "A"), ends, strict=True))
    assert trained(tokenizer, [ASK, CALL, RESULT, SAY, ASK, SAY]) == [call, answer, answer]
    assert trained(tokenizer, [ASK, CALL, RESULT]) == [call]
    assert trained(tokenizer, [ASK, CALL]) == [call]
    assert trained(tokenizer, [ASK, SAY], turns="whole") == [answer]
    assert trained(tokenizer, [ASK, {**SAY, "finish_reason": "length"}]) == ["A"]
    assert ("answers have no end" in caplog.text) == (ends == ("", ""))


def test_the_added_end_is_that_of_the_next_prompt():
    """The second prompt goes on behind the first sample, so the tree shares all of it."""
    tokenizer = tokenizer_of(OPEN)
    first, second = tokenizer.samples([ASK, SAY, ASK, SAY])
    assert second.tokens[: len(first)].tolist() == first.tokens.tolist()
    assert trained(tokenizer, [ASK, SAY, ASK, SAY], turns="whole") == ["A<user>A<user>"]
    said_call = {**SAY, "content": "<call>f</call>"}  # calls in the text: the role that follows decides
    assert trained(tokenizer, [ASK, said_call, RESULT, SAY]) == ["<call>f</call><tool>", "A<user>"]
    system = {"role": "system", "content": "S"}  # an engine does not stop at its mark
    assert trained(tokenizer, [ASK, SAY, system, ASK, SAY]) == ["A<user>", "A<user>"]
    parts = [{**SAY, "finish_reason": "continued"}, SAY]
    assert trained(tokenizer_of(ENDED), [ASK, *parts]) == ["A", "A<end>"]


def without(kind):
    """Returns a template that leaves out messages of a kind."""
    return ENDED.replace("<{{ m.role }}>", "{% if not (" + kind + ") %}<{{ m.role }}>").replace(
        "<end>\n", "<end>\n{% endif %}"
    )


@for_each(
    ("template", "messages", "tools", "lost"),
    [
        (ENDED.replace("t | tojson", "t.function.name"), [ASK, SAY], [TOOL], "tools[0].description"),
        (ENDED.replace("t | tojson", "t.name"), [ASK, SAY], [TOOL], "tools[0].name"),
        (
            ENDED.replace("t | tojson", "t.function.name ~ t.function.description"),
            [ASK, SAY],
            [TOOL],
            "tools[0].parameters",
        ),
        (without("m.role == 'tool'"), [ASK, CALL, RESULT, SAY], None, "messages[2] (tool) content"),
        (
            without("m.role == 'system'"),
            [RESULT | {"role": "system"}, ASK, SAY],
            None,
            "messages[0] (system)",
        ),
        (
            without("m.role == 'system' and not loop.first"),
            [ASK, RESULT | {"role": "system"}, SAY],
            None,
            "messages[1] (system) content",
        ),
        (
            without("m.role == 'user' and not loop.last"),
            [ASK, SAY, ASK, SAY],
            None,
            "messages[0] (user) content",
        ),
        (
            ENDED.replace("in m.tool_calls", "in m.tool_calls if loop.last"),
            [ASK, {**CALL, "content": "B"}, RESULT, SAY],
            None,
            "messages[1] (assistant) tool_calls[0].name",
        ),
    ],
)
def test_what_the_template_leaves_out_of_the_prompt_is_refused(template, messages, tools, lost):
    tokenizer = tokenizer_of(template)
    for turns in ("each", "last"):
        with pytest.raises(UserError) as error:
            tokenizer.samples(messages, tools, turns=turns)
        assert str(error.value).startswith(f"{lost}"), error.value
        assert "leaves this out of the prompt" in str(error.value)


@for_each(
    ("part", "cut", "lost"),
    [
        ("{{ m.content }}", "{{ m.content[:2000] }}", "messages[0] (user) content"),
        ("{{ m.content }}", "{{ m.content | truncate(90000) }}", "messages[0] (user) content"),
        ("{{ m.content }}", "{{ m.content[-2000:] }}", "messages[0] (user) content"),
        (
            "{{ m.content }}",
            "{{ m.content[:9000] ~ '...' ~ m.content[-9000:] }}",
            "messages[0] (user) content",
        ),
        ("{{ m.content }}", "{{ m.content.splitlines()[:500] | join('\n') }}", "messages[0] (user) content"),
        (
            "{{ m.content }}",
            "{{ m.content[:5] if m.role == 'tool' else m.content }}",
            "messages[2] (tool) content",
        ),
        (
            "{{ m.content }}",
            "{{ m.content[:99] if m.role == 'tool' and messages | length - loop.index > 1 else m.content }}",
            "messages[2] (tool) content",
        ),
        (
            "c.function | tojson",
            "(c.function | tojson)[:99]",
            "messages[1] (assistant) tool_calls[0].arguments",
        ),
        ("t | tojson", "(t | tojson)[:9000]", "tools[0].description"),
    ],
)
def test_a_template_that_cuts_long_texts_is_refused(part, cut, lost):
    tokenizer = tokenizer_of(ENDED.replace(part, cut))
    with pytest.raises(UserError) as error:
        tokenizer.samples([ASK, CALL, RESULT, SAY, ASK, SAY], [TOOL], turns="last")
    assert str(error.value) == (
        f"{lost}: the chat template (text) cuts long texts in the prompt, so samples would be trained "
        "without what the model read; choose a data.template that shows them whole"
    )


@for_each(
    "content",
    [
        "m.content | wordwrap(40) | upper",
        "raise_exception('long') if m.content | length > 9 else m.content",
        "m.content[:200000]",  # as long as no text is longer
    ],
)
def test_a_template_may_change_or_refuse_long_texts_but_not_cut_them(content):
    tokenizer = tokenizer_of(ENDED.replace("m.content", content))
    assert trained(tokenizer, [ASK, CALL, RESULT, SAY])[1] == "A<end>"
    if "200000" in content:
        for longer in ({**RESULT, "content": "R" * 200_001}, {**RESULT, "content": "R" * 900_000}):
            with pytest.raises(UserError, match=r"messages\[2\] \(tool\) content: .* cuts long texts"):
                tokenizer.samples([ASK, CALL, longer, SAY])


def test_a_kind_of_conversation_is_probed_once(monkeypatch):
    tokenizer, requests = tokenizer_of(ENDED), []
    request = ChatTemplate._request

    def counted(self, name, *arguments):
        requests.append(name)
        return request(self, name, *arguments)

    monkeypatch.setattr(ChatTemplate, "_request", counted)
    conversation = [ASK, CALL, RESULT, SAY, ASK, SAY]
    numbers = []
    for _ in range(3):
        tokenizer.samples(conversation, [TOOL])
        numbers.append(len(requests))
        requests.clear()
    assert numbers == [8, 1, 1]


def test_thoughts_of_earlier_turns_may_be_missing():
    source = ENDED.replace("{{ m.content }}", "{{ m.thinking if loop.last }}{{ m.content }}")
    thought = {**SAY, "reasoning_content": "T"}
    assert trained(tokenizer_of(source), [ASK, thought, ASK, thought]) == ["TA<end>", "TA<end>"]
    two = source.replace("{{ m.thinking", "{{ m.reasoning_content if loop.first }}{{ m.thinking")
    assert trained(tokenizer_of(two), [ASK, thought, ASK, thought]) == ["TA<end>", "TA<end>"]


PRINTED = (
    "{% for c in m.tool_calls %}{{ c.function.name }}CONDITION{{ '=' + c.function.arguments }}{% endfor %}"
)


@for_each(
    "template",
    [
        PRINTED.replace("CONDITION", ""),  # text alone, as DeepSeek
        PRINTED.replace("'=' +", "'=' ~").replace("CONDITION", ""),  # an object would be printed as Python's
        "{% if m.content is none %}" + PRINTED.replace("CONDITION", "") + "{% endif %}",
    ],
)
def test_calls_are_given_in_the_form_that_the_template_shows(template):
    content = "{{ m.content or '' if not m.tool_calls }}"
    tokenizer = tokenizer_of(LOOP + content + template + "<end>{% endfor %}" + PROMPT)
    for arguments in ({"k": "v"}, '{"k": "v"}', '{"k":"v"}', '{"k" : 1.10}', "{}"):
        call = {**CALL, "content": None, "tool_calls": [{"name": "f", "arguments": arguments}]}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        assert trained(tokenizer, [ASK, call, RESULT, SAY]) == [f"f={text}<end>", "A<end>"]


@for_each("arguments", ["", None])
def test_empty_arguments_are_an_empty_object(arguments):
    call = {**CALL, "tool_calls": [{"name": "f", "arguments": arguments}]}
    empty = '<call>{"name": "f", "arguments": {}}</call><end>'
    assert trained(tokenizer_of(ENDED), [ASK, call]) == [empty]
    cut = {**call, "finish_reason": "length"}
    begun = '<tool_call>\n{"name": "f", "arguments": '
    assert trained(TreeTokenizer.byte_level(), [ASK, cut]) == [begun]


@for_each(
    ("content", "options", "text"),
    [
        ("{{ m.content }}", {}, "B\nC"),  # as vLLM
        ("{{ m.content }}", {"part_separator": " "}, "B C"),  # as SGLang
        (
            "{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}",
            {},
            "BC",
        ),
        ("{{ m.content | tojson }}", {}, '"B\\nC"'),
    ],
)
def test_text_parts_are_joined_as_the_template_does_or_by_a_line_feed(content, options, text):
    tokenizer = tokenizer_of(ENDED.replace("{{ m.content }}", content))
    parts = {**ASK, "content": [{"type": "text", "text": text} for text in "BC"]}
    (path,) = tokenizer.samples([parts, SAY], **options)
    assert f"<user>{text}<end>" in tokenizer.decode(path.tokens)


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_for_tools_renders_conversations_with_tools(where, tmp_path):
    from transformers import AutoTokenizer

    folder = hf_folder(tmp_path, "chat_template.jinja")
    plain = TreeTokenizer.from_hf(folder)
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    if where == "chat_template.jinja":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(source)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        templates = {"default": (folder / "chat_template.jinja").read_text(), "tool_use": source}
        config["chat_template"] = [{"name": name, "template": t} for name, t in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").unlink()
    ours, theirs = TreeTokenizer.from_hf(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, [TOOL]):
        assert ours.render([ASK], tools) == theirs.apply_chat_template([ASK], tools=tools, tokenize=False)
    assert ours.fingerprint() != plain.fingerprint()
    assert TreeTokenizer.from_hf(folder, "chatml").render([ASK], [TOOL]).startswith("<|im_start|>system")


def test_the_files_of_a_folder_say_where_engines_stop(tmp_path):
    folder = hf_folder(tmp_path, "chat_template.jinja")
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    prompt = "{{ '<assistant>' if add_generation_prompt }}"
    (folder / "chat_template.jinja").write_text(source.replace("}}{% e", "}}<s><user>{% e") + prompt)
    assert trained(TreeTokenizer.from_hf(folder), [ASK, SAY]) == ["A<s><user>"]
    (folder / "generation_config.json").write_text('{"eos_token_id": [257]}')
    tokenizer = TreeTokenizer.from_hf(folder)
    assert tokenizer.decode([257]) == "<s>"
    assert trained(tokenizer, [ASK, SAY]) == ["A<s>"]

    for wrong in ("<s>", [[257]], {"a": 257}, [None]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(UserError, match="eos_token_id: expected an integer or a list of integers, got"):
            TreeTokenizer.from_hf(folder)


@for_each(
    "source",
    [
        ENDED,
        ENDED.replace("{{ m.content", "{{ 'T' ~ m.thinking if m.thinking }}{{ m.content").replace(
            "t>' if", "t>T' if"
        ),
        "{{ raise_exception('no system') if messages[0].role != 'system' }}" + ENDED,
        "{{ strftime_now('%Y') }}" + ENDED,
    ],
)
def test_exports_end_where_the_template_does(source, tmp_path):
    """Also if the template needs a thought to continue its own prompt, a system message or a date."""
    tokenizer = tokenizer_of(source)
    write_ends(tokenizer, {}, tmp_path)
    content = json.loads((tmp_path / "generation_config.json").read_text())
    assert content == {"eos_token_id": [tokenizer.special_tokens["<end>"]]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("phi3", "tools[0].name"),
        ("lfm2", "messages[1] (assistant) tool_calls[0].name"),
        ("smolvlm", "tools[0].name"),
    ],
)
def test_published_templates_without_calls_are_refused(name, lost):
    tokenizer = TreeTokenizer.byte_level(published_template(name))
    with pytest.raises(UserError, match=r"leaves this out of the prompt") as error:
        tokenizer.samples([ASK, {**SAY, "content": "f()"} if name != "lfm2" else CALL, ASK, SAY], [TOOL])
    assert str(error.value).startswith(lost)
