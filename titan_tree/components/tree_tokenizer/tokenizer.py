"""TreeTokenizer: a model's tokenizer and chat template, loaded from local files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from titan_tree.components.tree_tokenizer.encoders import Spans, make_encoder
from titan_tree.components.tree_tokenizer.messages import (
    Message,
    images_of,
    normalize_messages,
    refuse_not_finite,
    text_before_calls_as_reasoning,
    without_images,
)
from titan_tree.components.tree_tokenizer.probes import find_call_form, find_separator
from titan_tree.components.tree_tokenizer.samples import ConversationSamples, Turns
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.tool_calls import has_parts, ordered_results, readable_arguments
from titan_tree.components.tree_tokenizer.vocabulary import (
    QWEN_PATTERN,
    NormalForm,
    TokenizerJson,
    Vocabulary,
    byte_vocabulary,
    read_hf,
    read_json,
    read_tiktoken,
)
from titan_tree.config.plugins import calling, import_attribute, is_import_string
from titan_tree.errors import SNAPSHOT, UserError, errors_at, missing_snapshot, shorten
from titan_tree.tree.paths import TokenPath

Tools = Sequence[dict[str, object]]
TEMPLATE_NAMES = ("default", "tool_use")
STOP_FILES = ("generation_config.json", "config.json")
# Keys of tokenizer_config.json that chat templates read as variables.
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TreeTokenizer:
    """Turns text and conversations into token ids and training samples.

    ``load`` makes one from a name; it chooses among ``from_hf``, ``from_tiktoken`` and ``byte_level``. Their
    argument ``template`` is the name of a built-in chat template ("chatml" or "qwen3"), a .jinja file, or
    Jinja text.

    Added tokens inside messages, such as ``<think>``, become their ids. Control tokens, such as
    ``<|im_end|>``, do so under the template of a published model and under "qwen3", as in Hugging Face. Under
    "chatml" they are plain text. Other templates can use the filter ``text`` to the same end (templates.py).

    Args:
        vocabulary: the tokens and how text is split.
        template: the chat template. Without one, ``render`` and ``samples`` raise UserError.
        tool_template: the chat template of conversations with tools. Default: ``template``.
        stops: tokens at which an engine stops. The template may have others.

    Attributes:
        special_tokens: added token -> id, see ``AddedToken``.
        control_tokens: those of them that are control tokens, such as ``<|im_end|>``.
        vocab_size: largest id + 1. A model's embedding may have more rows.
        template_fields: the fields of messages, tool calls and tools that the chat template reads by name.
            Empty without a template.
        template_variables: the variables that the chat template reads. Empty without a template.
    """

    def __init__(
        self,
        vocabulary: Vocabulary | TokenizerJson,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        stops: Iterable[str] = (),
    ) -> None:
        self._encoder = make_encoder(vocabulary)
        self._vocabulary = vocabulary
        self._fingerprint: str | None = None
        self._template, self._tool_template = template, tool_template
        self._stops = frozenset(stops)
        self.special_tokens: dict[str, int] = self._encoder.special_tokens
        self.control_tokens: frozenset[str] = self._encoder.control_tokens
        self.vocab_size: int = self._encoder.vocab_size
        templates = [t for t in (template, tool_template) if t is not None]
        self.template_fields: frozenset[str] = frozenset().union(*(t.fields for t in templates))
        self.template_variables: frozenset[str] = frozenset().union(*(t.variables for t in templates))

    @staticmethod
    def load(name: str | Path, template: str | Path | None = None) -> TreeTokenizer:
        """Loads a tokenizer by its name.

        Args:
            name: "byte" for ``byte_level``, a .tiktoken or .tiktoken.gz file for ``from_tiktoken``, a
                Hugging Face folder for ``from_hf``, or "module:name" for a function of your own, which gets
                ``template`` and returns a TreeTokenizer.
            template: the chat template. Default: the folder's own, and "chatml" without a folder.

        Raises:
            UserError: a missing or malformed file, or own code that returns something else.
        """
        if template == "":
            raise UserError("template: expected chatml, qwen3 or a file, got an empty name; leave it out")
        if name == "byte":
            return TreeTokenizer.byte_level(template or "chatml")
        if str(name).endswith((".tiktoken", ".tiktoken.gz")):
            return TreeTokenizer.from_tiktoken(name, template=template or "chatml")
        if Path(name).expanduser().is_dir():  # a folder may have the name of code
            return TreeTokenizer.from_hf(name, template)
        if is_import_string(name):
            return _own_tokenizer(str(name), template)
        raise UserError(f"{name}: {missing_snapshot(name, f'{SNAPSHOT}, a .tiktoken file or byte')}")

    @staticmethod
    def from_hf(folder: str | Path, template: str | Path | None = None) -> TreeTokenizer:
        """Loads a Hugging Face folder with ``tokenizer.json``.

        Args:
            folder: may also contain tokenizer_config.json and chat_template.jinja.
            template: a chat template that replaces the folder's own.

        Raises:
            UserError: a missing or malformed file, or a tokenizer that the library ``tokenizers`` rejects.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise UserError(f"{folder}: {missing_snapshot(folder)}")
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if os.path.lexists(config_file) else {}
        tokens = {name: config[name] for name in TEMPLATE_TOKENS if config.get(name)}
        constants = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
        found = (
            _templates_in_folder(folder, config, config_file, constants)
            if template is None
            else {"default": ChatTemplate.load(template, constants)}
        )
        chat, with_tools = (found.get(name) for name in TEMPLATE_NAMES)
        made = TreeTokenizer(read_hf(folder), chat, with_tools)
        ends = {id for name in STOP_FILES for id in stop_ids(folder / name)}
        made._stops = frozenset(t for t, id in made.special_tokens.items() if id in ends)
        if isinstance(token := constants.get("eos_token"), str):
            made._stops |= {token}
        return made

    @staticmethod
    def from_tiktoken(
        rank_file: str | Path,
        *,
        special_tokens: Mapping[str, int] | None = None,
        pattern: str = QWEN_PATTERN,
        normal_form: NormalForm | None = "NFC",
        template: str | Path = "chatml",
    ) -> TreeTokenizer:
        """Loads a ``.tiktoken`` rank file, plain or gzip. The defaults fit Qwen 1 to 3.

        Args:
            rank_file: one base64 token and its rank per line.
            special_tokens: added token -> id. All are control tokens except those that Qwen3 does not mark
                as special, such as ``<think>``. Default: Qwen3's, with ids that follow the ranks.
            pattern: regular expression that splits text into the pieces that BPE encodes.
            normal_form: Unicode normal form of the text, or None to leave it unchanged.
            template: the chat template.

        Raises:
            UserError: a missing or malformed file (the error names the line), or an added token whose id a
                rank already has.
        """
        vocabulary = read_tiktoken(Path(rank_file), special_tokens, pattern, normal_form)
        return TreeTokenizer(vocabulary, ChatTemplate.load(template))

    @staticmethod
    def byte_level(template: str | Path = "chatml") -> TreeTokenizer:
        """Makes a tokenizer without files: the 256 bytes and Qwen3's added tokens."""
        return TreeTokenizer(byte_vocabulary(), ChatTemplate.load(template))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the ids that Hugging Face's ``tokenizers`` gives with ``add_special_tokens=False``.

        Args:
            text: valid Unicode.
            special: whether control tokens in the text become their ids, or are encoded as plain text. Other
                added tokens always become theirs.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        return [id for ids in self._encoder.encode(Spans([(text, special)])) for id in ids.tolist()]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Returns the text of the ids, added tokens included. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id that the vocabulary does not have.
        """
        return self._encoder.decode(ids)

    @property
    def byte_vocabulary(self) -> Vocabulary | None:
        """The vocabulary, if its tokens are single bytes; else None."""
        vocabulary = self._vocabulary
        return vocabulary if isinstance(vocabulary, Vocabulary) and len(vocabulary.tokens) == 256 else None

    @property
    def template_source(self) -> str | None:
        """The text of the chat template, or None without one."""
        return self._template.source if self._template else None

    def fingerprint(self) -> str:
        """Returns a hash of all that ids depend on, so that stored ids can be matched with their tokenizer.

        Returns:
            SHA-256 of the vocabulary, the split pattern, the normal forms, the template's text and constants,
            and, if messages cannot hold control tokens, which tokens these are. It has 64 hexadecimal digits,
            and is equal in every process and version of Python.
        """
        if self._fingerprint is None:
            content = _content(self._vocabulary, self._template, self._tool_template)
            if self._template and self._template.has_text_spans:
                content["control tokens"] = sorted(self._encoder.control_tokens)
            text = json.dumps(content, sort_keys=True)
            self._fingerprint = hashlib.sha256(text.encode()).hexdigest()
        return self._fingerprint

    def render(
        self,
        messages: object,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Returns the conversation's text as the chat template renders it.

        Args:
            messages: the conversation, in a form that ``messages.normalize_messages`` accepts.
            tools: JSON schemas of the tools.
            add_generation_prompt: whether the text ends with the header of the assistant's next message.
            variables: template variables, such as ``enable_thinking`` of Qwen3.

        Raises:
            UserError: a malformed message, a variable that the template does not read, or an error in the
                template.
        """
        template = self._chat_template(tools)
        normal, _ = self._normal_messages(messages, tools, variables)
        return template.plain(template.render(normal, tools, add_generation_prompt, variables))

    def _normal_messages(
        self,
        messages: object,
        tools: Tools | None,
        variables: Mapping[str, object],
        separator: str | None = None,
    ) -> tuple[list[Message], list[list[object]]]:
        """Returns checked messages that the chat template renders as they were meant, and their images."""
        template, where = self._chat_template(_checked(tools)), "messages"
        if separator is None and isinstance(messages, list | tuple) and any(map(has_parts, messages)):
            template.separator = separator = template.separator or find_separator(template, variables)
        normal = normalize_messages(messages, where, "\n" if separator is None else separator)
        normal = ordered_results(normal, "tool_call_id" in template.fields, where)
        images = [[part["image"] for part in images_of(message["content"])] for message in normal]
        normal = list(map(without_images, normal))
        if template.call_form is None and any("tool_calls" in message for message in normal):
            find_call_form(template, normal, tools, variables)

        def render(messages: Sequence[Message]) -> str:
            return template.render(messages, tools, False, variables)

        return readable_arguments(normal, render, where), images

    def samples(
        self,
        messages: object,
        tools: Tools | None = None,
        *,
        turns: Turns = "each",
        text_before_calls_is_reasoning: bool = False,
        part_separator: str | None = None,
        **variables: object,
    ) -> list[TokenPath]:
        """Returns the training samples of a conversation; none if it has no assistant message.

        The prompt of a turn is the text that the template renders before it; the completion is the rest of
        the turn. The loss mask is 1 on completions up to the token at which an engine stops, and 0 elsewhere.
        Prompts and completions are encoded separately, so each completion starts at a token boundary.

        An answer that was cut off is trained up to its last character, without an end. Filtered answers, and
        those with ``weight`` 0, have loss mask 0. endings.py describes the field ``finish_reason``.

        The token ``<|image_pad|>``, by which the template shows an image, becomes ``len(image)`` tokens.

        Args:
            messages: the conversation, in a form that ``messages.normalize_messages`` accepts, with images as
                ``{"type": "image", "image": Image}``.
            tools: JSON schemas of the tools.
            turns: "each" makes one sample per assistant turn, which ends with that turn. "last" makes one
                sample of the last turn. "whole" makes one sample of all messages, with loss on every
                assistant turn; it needs a template that does not change a turn when more messages follow.
            text_before_calls_is_reasoning: whether the text before an assistant's tool calls is its
                reasoning, as in data of agents without a reasoning channel.
            part_separator: what stands between the text parts of a message. Default: what the template puts
                there, or a line feed, as in vLLM, if it reads only text. In SGLang, it is a blank.
            variables: template variables, such as ``keep_reasoning`` of chatml.

        Raises:
            UserError: what ``render`` raises, an unknown ``turns``, a template that renders a turn
                differently from its own generation prompt, or leaves out what the model read or wrote, an
                image that is not loaded, text that contains the token of images where it takes effect, an
                empty answer that is trained, or a trained one next to another one that does not say how it
                ended.
        """
        normal, images = self._normal_messages(messages, tools, variables, part_separator)
        if text_before_calls_is_reasoning:
            normal = text_before_calls_as_reasoning(normal)
        template = self._chat_template(tools)
        samples = ConversationSamples(self._encoder, template, normal, tools, variables, self._stops, images)
        return samples.paths(turns)

    def _chat_template(self, tools: Tools | None) -> ChatTemplate:
        if tools and self._tool_template is not None:
            return self._tool_template
        if self._template is None:
            raise UserError(
                "the tokenizer's folder has no chat template; set data.template to chatml, qwen3 or a file"
            )
        return self._template


def _own_tokenizer(name: str, template: str | Path | None) -> TreeTokenizer:
    """Returns what the function "module:name" makes of a chat template.

    A subclass may encode or render in another way. The vocabulary does not show this, so it defines its own
    fingerprint.
    """
    with errors_at(name):
        make = import_attribute(name)
    with calling(f"data.tokenizer: {name!r}, called with (data.template)"):
        made = make(template) if callable(make) else make
    if not isinstance(made, TreeTokenizer):
        raise UserError(
            f"{name}: expected a function of the chat template that returns a TreeTokenizer, "
            f"got {shorten(made)}"
        )
    if type(made) is not TreeTokenizer and type(made).fingerprint is TreeTokenizer.fingerprint:
        raise UserError(
            f"{name}: expected {type(made).__name__} to define fingerprint(), because stored token ids are "
            "compared by it; define it, or return a plain TreeTokenizer"
        )
    return made


def _templates_in_folder(
    folder: Path, config: Mapping[str, object], config_file: Path, constants: Mapping[str, object]
) -> dict[str, ChatTemplate]:
    """Returns those of a folder's chat templates that have one of ``TEMPLATE_NAMES``, as transformers does.

    They are in chat_template.jinja and additional_chat_templates, or else in tokenizer_config.json.
    """
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if os.path.lexists(file := folder / "chat_template.jinja"):
        files["default"] = file
    if files:
        return {
            name: ChatTemplate.load(file, constants) for name, file in files.items() if name in TEMPLATE_NAMES
        }
    template = config.get("chat_template")
    named: dict[object, object] = {"default": template}
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    found = {}
    for name, text in named.items():
        if text is not None and not isinstance(text, str):
            raise UserError(f"{config_file}: chat_template: expected Jinja text, got {shorten(text)}")
        if text and name in TEMPLATE_NAMES:
            found[str(name)] = ChatTemplate(text, str(config_file), constants)
    return found


def stop_ids(file: Path) -> list[int]:
    """Returns the ids at which an engine stops, as generation_config.json or config.json says.

    Raises:
        UserError: the file cannot be read, or they are no integers.
    """
    found = read_json(file).get("eos_token_id") if os.path.lexists(file) else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(id) is not int for id in ids):
        raise UserError(
            f"{file}: eos_token_id: expected an integer or a list of integers, got {shorten(found)}"
        )
    return ids


def _checked(tools: Tools | None) -> Tools | None:
    if tools is not None and not (
        isinstance(tools, list | tuple) and all(isinstance(t, dict) for t in tools)
    ):
        raise UserError(f"tools: expected a list of JSON schemas (objects), got {shorten(tools)}")
    refuse_not_finite(tools, "tools")
    return tools


def _content(
    vocabulary: Vocabulary | TokenizerJson, template: ChatTemplate | None, with_tools: ChatTemplate | None
) -> dict[str, object]:
    """Returns what a fingerprint depends on, as JSON values."""
    content: dict[str, object] = {"template": template and (template.source, template.constants)}
    if with_tools is not None:
        content["template for tools"] = with_tools.source
    if isinstance(vocabulary, TokenizerJson):
        content["tokenizer"] = vocabulary.spec
    else:
        content |= {
            "tokens": sorted((id, token.hex()) for token, id in vocabulary.tokens.items()),
            "ranks": sorted((rank, token.hex()) for token, rank in vocabulary.ranks.items()),
            "added": sorted((token.id, token.content, token.normalized) for token in vocabulary.added),
            "pattern": vocabulary.pattern,
            "normal_forms": vocabulary.normal_forms,
        }
    return content
