"""TreeTokenizer: the tokenizer and the chat template of a model, without the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_tree.components.tree_tokenizer.bpe import BytePairEncoder
from titan_tree.components.tree_tokenizer.messages import normalize_messages, text_before_calls_as_reasoning
from titan_tree.components.tree_tokenizer.samples import Turns, conversation_paths
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.components.tree_tokenizer.vocabulary import (
    QWEN_PATTERN,
    NormalForm,
    Vocabulary,
    byte_vocabulary,
    read_hf,
    read_json,
    read_tiktoken,
)
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

Tools = Sequence[dict[str, Any]]
# Tokens of tokenizer_config.json that chat templates read by these names.
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TreeTokenizer:
    """Text and conversations -> token ids and training samples.

    Made by ``load``, or by ``from_hf``, ``from_tiktoken`` or ``byte_level``, among which it chooses.
    ``template``, there, is the name of a built-in chat template ("chatml", "qwen3"), a .jinja file, or Jinja
    text.

    Control tokens inside messages: with the template of a published model (or "qwen3") they act as control
    tokens, for so they do in Hugging Face, whose ids these are. Under "chatml" they are plain text, and so
    is what any template passes through the filter ``text`` (templates.py).

    Attributes:
        special_tokens: added token -> id.
        vocab_size: largest id + 1. A model's embedding may have more rows.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None) -> None:
        self._encoder = BytePairEncoder(vocabulary)
        self._template = template
        self.special_tokens: dict[str, int] = self._encoder.special_tokens
        self.vocab_size: int = self._encoder.vocab_size

    @staticmethod
    def load(name: str | Path, template: str | Path | None = None) -> TreeTokenizer:
        """``byte_level`` for "byte", ``from_tiktoken`` for a .tiktoken[.gz] file, ``from_hf`` for a folder.

        Args:
            template: None: the folder's own; "chatml" for the other two.

        Raises:
            UserError: as those.
        """
        if name == "byte":
            return TreeTokenizer.byte_level(template or "chatml")
        if str(name).endswith((".tiktoken", ".tiktoken.gz")):
            return TreeTokenizer.from_tiktoken(name, template=template or "chatml")
        return TreeTokenizer.from_hf(name, template)

    @staticmethod
    def from_hf(folder: str | Path, template: str | Path | None = None) -> TreeTokenizer:
        """From a Hugging Face folder with ``tokenizer.json`` (byte-level BPE).

        Args:
            folder: may also hold tokenizer_config.json and chat_template.jinja.
            template: instead of the folder's own, which ``render`` and ``samples`` need otherwise.

        Raises:
            UserError: a missing or malformed file, or a tokenizer that could not be reproduced exactly.
        """
        folder = Path(folder)
        config_file = folder / "tokenizer_config.json"
        config = read_json(config_file) if config_file.is_file() else {}
        if template is None:
            template = _own_template(folder, config, config_file)
        tokens = {name: config[name] for name in TEMPLATE_TOKENS if config.get(name)}
        constants = {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items()}
        chat = ChatTemplate.load(template, constants) if template is not None else None
        return TreeTokenizer(read_hf(folder), chat)

    @staticmethod
    def from_tiktoken(
        rank_file: str | Path,
        *,
        special_tokens: Mapping[str, int] | None = None,
        pattern: str = QWEN_PATTERN,
        normal_form: NormalForm | None = "NFC",
        template: str | Path = "chatml",
    ) -> TreeTokenizer:
        """From a ``.tiktoken`` rank file, plain or gzip. The defaults are those of Qwen 1 to 3.

        Args:
            special_tokens: control token -> id. None: Qwen3's, from the first id after the ranks on.
            pattern: regular expression that splits text into what BPE encodes.
            normal_form: Unicode normal form of the text, or None.

        Raises:
            UserError: a missing or malformed file, naming the line, or special tokens with taken ids.
        """
        vocabulary = read_tiktoken(Path(rank_file), special_tokens, pattern, normal_form)
        return TreeTokenizer(vocabulary, ChatTemplate.load(template))

    @staticmethod
    def byte_level(template: str | Path = "chatml") -> TreeTokenizer:
        """The 256 bytes and Qwen3's control tokens: needs no file. ``decode(encode(text)) == text``."""
        return TreeTokenizer(byte_vocabulary(), ChatTemplate.load(template))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of ``text``; equal to those of ``tokenizers`` with ``add_special_tokens=False``.

        Args:
            special: strings of ``special_tokens`` become their ids; otherwise they are plain text.
        """
        return [id for ids in self._encoder.encode(text, special) for id in ids.tolist()]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Text of the ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        return self._encoder.decode(ids)

    def render(
        self,
        messages: object,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The conversation as the chat template writes it.

        Args:
            messages: see ``titan_tree.components.tree_tokenizer.messages.normalize_messages``.
            tools: JSON schemas of the tools.
            add_generation_prompt: end with the header of the assistant's next message.
            variables: template variables, such as ``enable_thinking`` of Qwen3.

        Raises:
            UserError: a malformed message; a variable the template does not read; the template's own errors.
        """
        normal = normalize_messages(messages, "messages")
        template = self._chat_template()
        return template.plain(template.render(normal, _checked(tools), add_generation_prompt, variables))

    def samples(
        self,
        messages: object,
        tools: Tools | None = None,
        *,
        turns: Turns = "each",
        text_before_calls_is_reasoning: bool = False,
        **variables: Any,
    ) -> list[TokenPath]:
        """The training samples of a conversation; none where the assistant says nothing.

        A turn's prompt is what the template renders before it, and its completion the rest; the loss mask is
        1 on the completion, up to and including its end-of-turn token, and 0 elsewhere. Prompt and completion
        are encoded apart: what the model writes starts at a token boundary.

        Args:
            turns: "each": a sample per assistant turn, which ends there. "last": of the last turn alone.
                "whole": one sample of all messages, the mask on every turn; refused where the template
                changes a turn once others follow.
            text_before_calls_is_reasoning: take what an assistant writes before its tool calls as reasoning,
                for data of agents without a reasoning channel.
            variables: template variables, such as ``keep_reasoning`` of chatml.

        Raises:
            UserError: as ``render``, and where the template renders a turn differently from its own
                generation prompt.
        """
        normal = normalize_messages(messages, "messages")
        if text_before_calls_is_reasoning:
            normal = text_before_calls_as_reasoning(normal)
        return conversation_paths(
            self._encoder, self._chat_template(), normal, _checked(tools), turns, variables
        )

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError(
                "tokenizer: its folder holds no chat template; name one (chatml, qwen3 or a file)"
            )
        return self._template


def _own_template(folder: Path, config: Mapping[str, Any], config_file: Path) -> str | Path | None:
    """chat_template.jinja, or else chat_template of tokenizer_config.json: a text, or several by name."""
    if (file := folder / "chat_template.jinja").is_file():
        return file
    own = config.get("chat_template")
    if isinstance(own, list):
        own = next((entry.get("template") for entry in own if entry.get("name") == "default"), None)
    if own is not None and not isinstance(own, str):
        raise UserError(f"{config_file}: chat_template: expected Jinja text, got {own!r:.60}")
    return own


def _checked(tools: Tools | None) -> Tools | None:
    if tools is not None and not (
        isinstance(tools, list | tuple) and all(isinstance(t, dict) for t in tools)
    ):
        raise UserError(f"tools: expected a list of JSON schemas (objects), got {tools!r:.60}")
    return tools
