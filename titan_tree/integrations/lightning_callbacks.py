"""The states of Lightning's callbacks in the checkpoints of titan_tree.

A state becomes plain values, which checkpoint.json holds, and tensors, which lie beside the weights. It holds
what a callback adds to Lightning's checkpoints, too, such as the average of the weights. A tensor that is a
weight of the model is stored as its name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_tree.errors import UserError, shorten

logger = logging.getLogger(__name__)


def callback_states(
    callbacks: Iterable[Any], trainer: Any, module: Any, tensors: dict[str, Tensor]
) -> object:
    """Returns the states of callbacks as JSON values, and adds their tensors to ``tensors`` by name.

    Raises:
        UserError: a state has a value that is neither plain nor a tensor of one rank, or contains itself.
    """
    weights = module.state_dict()
    checkpoint = {"state_dict": weights, "callbacks": {}}
    for callback in callbacks:
        if state := callback.state_dict():
            checkpoint["callbacks"][callback.state_key] = state
        callback.on_save_checkpoint(trainer, module, checkpoint)
    if checkpoint["state_dict"] is weights:
        del checkpoint["state_dict"]
    names = {id(weight): name for name, weight in weights.items()}

    def plain(value: object, path: str) -> object:
        if isinstance(value, Tensor) and id(value) in names:
            return {"weight": names[id(value)]}
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            name = f"{len(tensors)} {path}"  # two paths may be equal, as those of {"a/b": x, "a": {"b": y}}
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {
                "items": [[plain(key, path), plain(item, f"{path}/{key}")] for key, item in value.items()]
            }
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}/{number}") for number, item in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UserError(
            f"lightning{path}: expected numbers, text, lists, dicts or whole tensors as a callback's state, "
            f"got {shorten(value)}; remove the callback, or set checkpoint.interval = 0"
        )

    try:
        return plain(checkpoint, "")
    except RecursionError:
        raise UserError(
            "lightning: the state of a callback contains itself, or is nested too deeply; remove the "
            "callback, or set checkpoint.interval = 0"
        ) from None


def load_callback_states(
    callbacks: Iterable[Any], trainer: Any, module: Any, saved: object, tensors: Mapping[str, Tensor]
) -> None:
    """Loads what ``callback_states`` has returned. A callback without a state there starts anew."""
    weights = module.state_dict()

    def value_of(plain: Any) -> Any:
        if isinstance(plain, list):
            return list(map(value_of, plain))
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "items":
            return {value_of(key): value_of(item) for key, item in content}
        return weights[content] if kind == "weight" else tensors[content]

    checkpoint = {"state_dict": weights, "callbacks": {}} | (value_of(saved) or {})
    states = checkpoint["callbacks"]
    for callback in callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if unknown := states.keys() - {callback.state_key for callback in callbacks}:
        logger.warning("states of callbacks that this run lacks are left out: %s", ", ".join(sorted(unknown)))
