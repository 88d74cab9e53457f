"""Builds models of a named family and size with fresh weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from titan_tree.models.decoder import Decoder
from titan_tree.registry import MODELS, unknown_name


def build_model(
    name: str, flavor: str, attention: str = "auto", gdn: str = "auto", **overrides: Any
) -> Decoder:
    """Builds a model with fresh weights on the default device, which may be "meta".

    Args:
        name: a family, a key of ``titan_tree.registry.MODELS``.
        flavor: a published size of that family, or "debug".
        attention: backend of ``TreeAttention``.
        gdn: backend of ``TreeGDN``.
        overrides: fields of the model's config that differ from the flavor's.
    Raises:
        UserError: an unknown name, flavor, backend or field, or a value that the config refuses.
    """
    model_class = MODELS[name]
    if flavor not in model_class.flavors:
        raise unknown_name(f"flavor of {name}", flavor, model_class.flavors)
    config = model_class.flavors[flavor]
    fields = [field.name for field in dataclasses.fields(config)]
    for field in overrides:
        if field not in fields:
            raise unknown_name(f"field of {name}'s config", field, fields)
    model = model_class(dataclasses.replace(config, **overrides), attention, gdn)
    model.init_weights()
    return model
