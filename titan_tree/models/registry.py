"""Models by name: one entry per model file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.qwen3 import Qwen3
from titan_tree.models.qwen3_5 import Qwen35
from titan_tree.models.qwen3_5_moe import Qwen35Moe
from titan_tree.models.qwen3_moe import Qwen3Moe

MODELS: dict[str, type[Decoder]] = {
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5": Qwen35,
    "qwen3_5_moe": Qwen35Moe,
}


def build_model(name: str, flavor: str, attention: str = "auto", **overrides: Any) -> Decoder:
    """A model with fresh weights, on the default device (under ``torch.device("meta")``: without any).

    Args:
        name: a key of ``MODELS``.
        flavor: a published size of it, or "debug".
        attention: backend of ``TreeAttention``.
        overrides: fields of the model's config that differ from the flavor's.
    Raises:
        UserError: an unknown name, flavor or field, or a value that the config refuses.
    """
    if name not in MODELS:
        raise _unknown("model", name, MODELS)
    model_class = MODELS[name]
    if flavor not in model_class.flavors:
        raise _unknown(f"flavor of {name}", flavor, model_class.flavors)
    config = model_class.flavors[flavor]
    fields = [field.name for field in dataclasses.fields(config)]
    for field in overrides:
        if field not in fields:
            raise _unknown(f"field of {name}'s config", field, fields)
    model = model_class(dataclasses.replace(config, **overrides), attention)
    model.init_weights()
    return model


def _unknown(kind: str, got: str, known: Iterable[str]) -> UserError:
    close = difflib.get_close_matches(got, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return UserError(f"unknown {kind}: {got}{hint} (known: {', '.join(known)})")
