"""Writes files of a tokenizer: the ends of answers for engines, and a byte tokenizer for transformers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from titan_tree.components.tree_tokenizer.messages import Message
from titan_tree.components.tree_tokenizer.tokenizer import STOP_FILES, TreeTokenizer, stop_ids
from titan_tree.components.tree_tokenizer.vocabulary import byte_characters, read_json
from titan_tree.errors import UserError

logger = logging.getLogger(__name__)

# The filter that only titan_tree's templates have, see templates.py.
TEXT_FILTER = re.compile(r"\s*\|\s*text\b")
SYSTEM, THOUGHT = {"role": "system", "content": "system"}, {"reasoning_content": "thought"}
QUESTION, ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "tool", "arguments": {"a": "b"}}]}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {"name": "tool", "description": "tool", "parameters": {}},
}


def template_ends(tokenizer: TreeTokenizer, variables: Mapping[str, Any]) -> list[int]:
    """Returns the ids at which answers of the chat template end: of text, and of calls if it shows calls."""
    ends = []
    date = {"date": "2025-12-31"} if "date" in tokenizer.template_variables else {}
    # Some templates need a thought to continue their own prompt, or a system message, or show no tools.
    answers: list[tuple[Message, Sequence[Message] | None]] = [(ANSWER, None), (CALL, [TOOL]), (CALL, None)]
    for (answer, tools), thought, system in product(answers, ({}, THOUGHT), ([], [SYSTEM])):
        messages = [*system, QUESTION, answer | thought]
        try:
            (path,) = tokenizer.samples(messages, tools, **{**date, **variables, "turns": "last"})
        except UserError as error:  # the template has no such messages
            logger.debug("no end of answers: %s", error)
            continue
        end = int(path.tokens[np.flatnonzero(path.loss_mask)[-1]])
        if tokenizer.decode([end]) in tokenizer.special_tokens and end not in ends:
            ends.append(end)
    return ends


def write_ends(tokenizer: TreeTokenizer, variables: Mapping[str, Any], folder: Path) -> None:
    """Adds the ends of the template's answers to generation_config.json, so that engines stop there."""
    file = folder / "generation_config.json"
    known = next((ids for name in STOP_FILES if (ids := stop_ids(folder / name))), [])
    if more := [end for end in template_ends(tokenizer, variables) if end not in known]:
        content = read_json(file) if file.exists() else {}
        _write(file, content | {"eos_token_id": [*more, *known]})


def write_byte_tokenizer(tokenizer: TreeTokenizer, variables: Mapping[str, Any], folder: Path) -> bool:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    transformers then encodes, decodes and renders as ``tokenizer`` does. One thing differs: control tokens
    inside of messages take effect there, because its templates cannot mark text.

    Returns:
        Whether the tokenizer is one of bytes. If not, nothing is written.
    """
    vocabulary = tokenizer.byte_vocabulary
    if vocabulary is None:
        return False
    added = [
        {
            "id": token.id,
            "content": token.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": token.normalized,
            "special": token.special,
        }
        for token in vocabulary.added
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_characters(vocabulary.tokens), "merges": []},
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if (template := tokenizer.template_source) is not None:
        (folder / "chat_template.jinja").write_text(TEXT_FILTER.sub("", template), encoding="utf-8")
        for end in template_ends(tokenizer, variables)[:1]:
            config |= dict.fromkeys(("eos_token", "pad_token"), tokenizer.decode([end]))
            _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})
    _write(folder / "tokenizer.json", spec)
    _write(folder / "tokenizer_config.json", config)
    return True


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
