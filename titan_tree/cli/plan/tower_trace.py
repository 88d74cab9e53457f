"""The memory that the tower needs while it runs images. Its operators decide it, as it is not compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_tree.models.tree_model import is_trained
from titan_tree.models.vision import patches


class _Live(TorchDispatchMode):
    """Finds the most bytes of tensors besides ``known`` that exist at once, ``peak``."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage() for x in known}
        self.sizes: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)} - self.known
        self.sizes.update({storage: storage.nbytes() for storage in storages})
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


def chunk_bytes(visual: Any, images: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
    """Returns the most bytes of activations of images that run together, and of gradients if it is trained.

    Args:
        images: height and width of each.
    """
    c, trained = visual.config, is_trained(visual)
    with FakeTensorMode(), torch.device("cpu"), torch.set_grad_enabled(trained):
        tower = type(visual)._from_config(c, dtype=dtype).requires_grad_(trained)
        weights = list(tower.parameters())
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        with _Live([*weights, *(weight.grad for weight in weights)]) as live:
            sizes = c.patch_size, c.spatial_merge_size, c.temporal_patch_size
            pixels = [torch.empty(*image, 3, dtype=torch.uint8) for image in images]
            x, grids = map(torch.cat, zip(*(patches(image, *sizes) for image in pixels), strict=True))
            ends = np.cumsum([0, *(height * width // c.patch_size**2 for height, width in images)])
            tables = {
                "interp_indices": torch.empty(len(x), 4, dtype=torch.int64),
                "interp_weights": torch.empty(len(x), 4),
                "position_ids": torch.empty(len(x), 2, dtype=torch.int64),
                "cu_seqlens": ends,  # no fake tensor: the tower reads the values
            }
            out = super(type(tower), tower).forward(x, grids, **tables)
            if trained:
                rows = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
                del x, out
                torch.autograd.backward(rows, list(map(torch.empty_like, rows)))
    return live.peak
