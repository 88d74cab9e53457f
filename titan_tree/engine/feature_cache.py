"""Keeps features of images in a frozen tower on the host from step to step. They depend on pixels alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.distributed.gradient_sync import stored_weights
from titan_tree.models.tree_model import TreeModel

MAX_BYTES = 2 << 30  # of each rank


class FeatureCache:
    """The features of the images that were used last, at most ``MAX_BYTES``. New weights empty it."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, list[Tensor]] = OrderedDict()  # by ``Image.key``; the oldest use first
        self._made_by: list[Any] = []

    def encode(self, model: TreeModel, keys: Sequence[str], pixels: Sequence[Tensor]) -> list[Tensor]:
        """Returns what ``model.encode`` does. Encodes only images whose features are missing.

        Images that run together may round in another way than alone.
        """
        tower: Any = model.visual
        weights = [(weight, part, part.detach()) for weight, part in stored_weights(tower)]
        made_by: list[Any] = [
            (id(w), w._version, id(x), x._version, x.data_ptr(), x.dtype) for w, x, _ in weights
        ]
        made_by.append(model.execution.dtype)
        if made_by != self._made_by:
            self._rows.clear()
        self._made_by, self._weights = made_by, weights  # keeps all, so that ids and addresses stay theirs
        new = [(key, image) for key, image in zip(keys, pixels, strict=True) if key not in self._rows]
        encoded: dict[str, Sequence[Tensor]] = {}  # on the device, of the new images
        if new or isinstance(tower, FSDPModule):  # ranks that share the weights make equal passes
            outputs = model.encode([image for _, image in new])
            sizes = [image.shape[0] * image.shape[1] // tower.patch**2 for _, image in new]
            for (key, _), *rows in zip(new, *(output.split(sizes) for output in outputs), strict=True):
                encoded[key], self._rows[key] = rows, list(map(_on_host, rows))
        if not keys:
            return outputs
        for key in keys:
            self._rows.move_to_end(key)
        device = model.embedding_weight.device
        found = [
            encoded[key] if key in encoded else [x.to(device, non_blocking=True) for x in self._rows[key]]
            for key in keys
        ]
        features = list(map(torch.cat, zip(*found, strict=True)))
        size = sum(x.nbytes for rows in self._rows.values() for x in rows)
        while size > MAX_BYTES:
            size -= sum(x.nbytes for x in self._rows.popitem(last=False)[1])
        return features


_CACHES: WeakKeyDictionary[nn.Module, FeatureCache] = WeakKeyDictionary()  # by tower


def cache_of(tower: nn.Module) -> FeatureCache:
    """Returns the cache of a frozen tower."""
    return _CACHES.setdefault(tower, FeatureCache())


def forget_features() -> None:
    """Makes all models encode images as if none had been seen before."""
    _CACHES.clear()


def _on_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x, non_blocking=True)
