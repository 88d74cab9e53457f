"""PrefixEncoder equals encoding from the beginning; ChatEnvironment equals Jinja's own sandbox."""

import json
import random

import jinja2
import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.conversations import MERGES
from tests.support.plain_samples import plain_environment
from tests.support.tokenizer_files import PIPELINES
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.encoders import BytePairEncoder, LibraryEncoder, Spans, TextEncoder
from titan_tree.components.tree_tokenizer.samples import PrefixEncoder
from titan_tree.components.tree_tokenizer.sandbox import JSON_TEXTS, ChatEnvironment, JsonTexts
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import (
    QWEN_PATTERN,
    AddedToken,
    TokenizerJson,
    Vocabulary,
)

ADDED = ("<a>", "<a>b", "x<a>yy", "<<")  # added tokens that contain one another; the last is no control token


def overlapping_encoder() -> BytePairEncoder:
    tokens = {bytes([b]): b for b in range(256)}
    tokens |= {merge.encode(): 256 + index for index, merge in enumerate(MERGES)}
    added = tuple(AddedToken(token, 300 + index, special=token != "<<") for index, token in enumerate(ADDED))
    added += (AddedToken("xy", 310, normalized=True), AddedToken("yy", 311, normalized=True, special=False))
    return BytePairEncoder(Vocabulary(tokens, tokens, added, QWEN_PATTERN, ("NFC",)))


def encoder_of(pipeline: str) -> TextEncoder:
    if pipeline == "byte level":
        return overlapping_encoder()
    return LibraryEncoder(TokenizerJson(json.loads(PIPELINES[pipeline]().to_str()), "(made here)"))


@pytest.mark.parametrize("pipeline", ["byte level", *PIPELINES])
@pytest.mark.parametrize(
    "source", ["{{ messages }}", "{{ messages | text }}"], ids=["one span", "text spans"]
)
def test_texts_that_begin_alike_are_encoded_as_if_alone(source, pipeline):
    """Texts are cut anywhere, also inside added tokens, and continued in another way."""
    rng = random.Random(0)
    encoder, template = encoder_of(pipeline), ChatTemplate(source, "(text)")
    pieces = [*ADDED, *"xyab<> \n", "\ufdd0<a>\ufdd1" if "text" in source else "", "\u0301", "word"]
    reused = 0
    for _ in range(300):
        prompts, text = PrefixEncoder(encoder, template), ""
        for _ in range(8):
            text = text[: rng.randrange(len(text) // 2, len(text) + 1)]
            if text.count("\ufdd0") > text.count("\ufdd1"):
                text += "\ufdd1"
            text += "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
            before = prompts._ids
            expected = encoder.encode(Spans(template.spans(text)))
            ids = prompts.encode(text)
            assert ids.tolist() == np.concatenate([np.empty(0, np.int32), *expected]).tolist(), text
            assert ids.dtype == np.int32
            reused += prompts._cuts[-1].num_ids > 0 and len(before) > 0
    assert reused > 1000


def test_only_new_text_is_encoded(monkeypatch):
    encoder, template = overlapping_encoder(), ChatTemplate("{{ messages }}", "(text)")
    seen = []
    cut = BytePairEncoder.encode_pieces
    monkeypatch.setattr(BytePairEncoder, "encode_pieces", lambda *a: seen.append(a[1].text) or cut(*a))
    prompts = PrefixEncoder(encoder, template)
    for text in (
        "one<a>two<a>three",
        "one<a>two<a>three four",
        "one<a>two<a>threw<a>",
        "one<a>two<a>",
        "<a>",
    ):
        prompts.encode(text)
    assert seen == ["one<a>two<a>three", "<a>three four", "<a>threw<a>", "<a>two<a>", "<a>"]


OBJECTS = {
    "message": {
        "role": "user",
        "items": 1,
        "format": 2,
        "_x": 3,
        "content": "a{0}",
        "none": None,
        "clear": 4,
    },
    "messages": [{"role": "a"}, {"role": "b"}],
    "text": "a{0.role}b",
    "number": 3,
}


EXPRESSIONS = [
    "message.role", "message.items", "message.format", "message._x", "message.none", "message.missing",
    "message.clear", "message.update(a=1)", "message['role']", "message['items']",
    "messages|selectattr('role')|map(attribute='role')|list", "message.get('role')", "message.__class__",
    "message|attr('role')", "message|attr('keys')", "text.upper()", "text.format(message)",
    "text.format_map(message)", "text.nothing", "text.__class__", "text|attr('')",
    "text.split('a', maxsplit=1)", "'{0.__class__}'.format(message)", "messages.append(1)", "messages.0.role",
    "messages[0].role", "messages[9].role", "messages.sort()", "number.real", "number.nothing",
    "range(3).start", "namespace(a=1).a", "namespace(a=1)._Namespace__attrs", "namespace(a=1).b",
    "namespace(a='x'.format).a(1)", "namespace(a=1).__class__", "namespace.mro", "namespace(a=none).a",
    "dict(a=1).a", "dict.fromkeys('ab')", "cycler(1, 2).next()", "joiner('x')()",
    "[message, message]|map(attribute='role')|join", "messages|map('tojson')|join", "message|tojson",
    "messages|tojson ~ messages|tojson(2)", "message|tojson(indent=1) ~ message|tojson(indent='\t')",
    "message|tojson(separators=[',', ':'])", "message|tojson(true, sort_keys=true)", "text|tojson(1, 1, 1)",
    "message|tojson(indent=missing)", "message|tojson(nothing=1)", "range|tojson", "range(99)|list|tojson",
]  # fmt: skip


@for_each("expression", EXPRESSIONS)
def test_expressions_have_the_values_and_errors_of_the_sandbox(expression):
    source = "{{ " + expression + " }}"
    loops = "{% for message in messages %}{{ loop.index ~ loop.last ~ loop.previtem ~ loop.changed(1) }}"
    source = f"{source}{loops}{{{{ loop.nothing ~ loop['_x'] ~ loop.length ~ text.upper() }}}}{{% endfor %}}"
    results = []
    for environment in (plain_environment(), ChatEnvironment()):
        try:
            result = environment.from_string(source).render(**OBJECTS, **{JSON_TEXTS: JsonTexts()})
        except Exception as error:
            result = type(error), str(error).lstrip("_")  # the plain one has to_json, not _to_json
        results.append(result)
    assert results[0] == results[1]


def test_a_template_cannot_change_a_message():
    """Jinja's own sandbox allows ``dict.update``."""
    message = {"role": "user", "content": "hi"}
    plain = plain_environment().from_string("{{ dict.update(message, role='x') }}")
    plain.render(message=dict(message))
    for change in (
        "dict.update(messages[0], role='x')",
        "dict|attr('pop')(messages[0], 'role')",
        "messages.clear()",
    ):
        with pytest.raises(jinja2.exceptions.SecurityError):
            ChatEnvironment().from_string("{{ " + change + " }}").render(messages=[message])
    assert message == {"role": "user", "content": "hi"}


def test_json_texts_stay_small(monkeypatch):
    """Objects that the template makes are forgotten when the limit is reached."""
    monkeypatch.setattr("titan_tree.components.tree_tokenizer.sandbox.JSON_CHARACTERS", 100)
    texts = JsonTexts()
    for i in range(50):
        assert texts.dumps({"a": i, "b": "xxxxxxxxx"}, False, None, None, False) == (
            f'{{"a": {i}, "b": "xxxxxxxxx"}}'
        )
        assert len(texts._texts) <= 4
    source = (
        "{% for i in range(50) %}{{ {'a': i, 'b': 'x' * 9} | tojson }}{% endfor %}{{ messages[0].content }}"
    )
    expected = "".join(f'{{"a": {i}, "b": "xxxxxxxxx"}}' for i in range(50)) + "?"
    assert TreeTokenizer.byte_level(source).render([{"role": "user", "content": "?"}]) == expected
