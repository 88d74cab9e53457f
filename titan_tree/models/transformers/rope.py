"""RoPE of the types "dynamic" and "longrope", whose frequencies depend on the longest path of a batch.

transformers changes the frequencies of all tokens if one position exceeds a limit. Up to this limit they are
constant, so trees of such paths are exact. titan_tree refuses longer paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from titan_tree.errors import UserError, shorten

LIMITS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


def longest_path(config: PreTrainedConfig, where: str) -> int | None:
    """Returns the number of tokens up to which frequencies are constant, or None if they always are.

    Args:
        config: the text model's configuration, which may have a table for each type of layer.
        where: the config's source, for the message.
    Raises:
        UserError: the number is missing or wrong.
    """
    parameters, limits = getattr(config, "rope_parameters", None) or {}, []
    for table in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if (kind := table.get("rope_type")) in LIMITS:
            limit = (vars(config) if kind == "dynamic" else table).get(field := LIMITS[kind])
            if not isinstance(limit, int) or limit < 1:
                raise UserError(
                    f"{where}: {field}: expected a positive integer for RoPE of type {kind}, got "
                    f"{shorten(limit)}"
                )
            limits.append(limit)
    return min(limits, default=None)


def make_constant(rope: Any) -> None:
    """Makes a module that computes RoPE keep the frequencies of short paths for all positions."""
    kind = rope.rope_type
    rope.rope_type = dict.fromkeys(kind, "constant") if isinstance(kind, dict) else "constant"
    for name, values in list(rope.named_buffers()):
        if "original_" in name:
            setattr(rope, name.replace("original_", ""), values)


@contextmanager
def constant(rope: Any) -> Iterator[None]:
    """Makes the frequencies of ``rope`` constant within the context, whatever they were before."""
    kind, buffers = rope.rope_type, dict(rope.named_buffers())
    make_constant(rope)
    try:
        yield
    finally:
        rope.rope_type = kind
        for name, values in buffers.items():
            setattr(rope, name, values)
