"""Writes a byte tokenizer as the files that ``AutoTokenizer`` of the library transformers reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from titan_tree.components.tree_tokenizer.tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.vocabulary import byte_characters

# The filter that only titan_tree's templates have, see templates.py.
TEXT_FILTER = re.compile(r"\s*\|\s*text\b")
CONVERSATION = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


def write_byte_tokenizer(tokenizer: TreeTokenizer, folder: Path) -> bool:
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
        (path,) = tokenizer.samples(CONVERSATION, turns="last")
        end = int(path.tokens[np.flatnonzero(path.loss_mask)[-1]])
        if (content := tokenizer.decode([end])) in tokenizer.control_tokens:
            config |= {"eos_token": content, "pad_token": content}
            _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": end})
    _write(folder / "tokenizer.json", spec)
    _write(folder / "tokenizer_config.json", config)
    return True


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
