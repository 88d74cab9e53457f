"""Images of rows, as processors of transformers give them: the patches of all images, one after another.

B rows of T tokens, P patches of all images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from titan_tree.errors import UserError, shorten
from titan_tree.integrations.tree_view import TreeView
from titan_tree.tree.images import Image, PathImages


@dataclass(frozen=True, eq=False)
class ProcessedImage(Image):
    """An image with one "pixel" per token: [rows, columns, normalized values of its patches] float32."""

    patch: int = 1
    may_be_scored: ClassVar[bool] = True  # TRL's SFT trains on placeholders, too

    def __post_init__(self) -> None: ...


def row_images(
    view: TreeView,
    inputs: Mapping[str, Tensor],
    types: Tensor | None,
    pixel_values: Tensor | None,
    grids: Tensor | None,
) -> list[PathImages] | None:
    """Returns the images of each row, see ``TokenPath``; None: there are none.

    As in the model, the images of the batch take its placeholders in their order.

    Args:
        inputs: see ``Forests.get``.
        types: [B, T], mm_token_type_ids: 1 at placeholders of images, and 0 elsewhere.
        pixel_values: [P, values of a patch].
        grids: [images, 3], image_grid_thw: frames, and patches in height and width.
    Raises:
        UserError: an argument is missing, has another shape, or does not fit the tokens or the model.
    """
    if pixel_values is None and grids is None and (types is None or not types.any()):
        return None
    if view.visual is None or "positions" in inputs:
        got = "a model without tower" if view.visual is None else "padding-free rows"
        raise UserError(f"pixel_values: expected padded rows of a model with images, got {got}")
    if pixel_values is None or grids is None or types is None:
        raise UserError(
            "model: expected pixel_values, image_grid_thw and mm_token_type_ids together, as the processors "
            "of Qwen3-VL and Qwen3.5 return them, got only some of them"
        )
    tower: Any = view.visual
    tokens, types = inputs["tokens"], types.cpu()
    real = inputs.get("real", torch.ones_like(types, dtype=torch.bool))
    is_image = (tokens == view.image_token_id) & real
    if (differs := (types != is_image) & real).any():
        row, token = differs.nonzero()[0].tolist()
        raise UserError(
            f"mm_token_type_ids: expected 1 at placeholders of images, token id {view.image_token_id}, and 0 "
            f"elsewhere, got {types[row, token]} at token id {tokens[row, token]} in row {row}; set the "
            "tokenizer's padding_side = 'left', do not sample placeholders, and leave out videos"
        )
    number, start = is_image.nonzero()[:, 0].tolist(), (real.cumsum(1) - 1)[is_image].tolist()
    places = list(zip(number, start, strict=True))
    found: list[list[tuple[int, Image]]] = [[] for _ in tokens]
    stop = 0
    for image in _images(pixel_values, grids.tolist(), tower.config.spatial_merge_size):
        row, first = places[stop] if stop < len(places) else (0, 0)
        stop += len(image)
        if places[stop - 1 : stop] != [(row, first + len(image) - 1)]:
            raise UserError(
                f"pixel_values: expected an image of {len(image)} placeholders, as image_grid_thw says, in "
                f"one row, got another number from token {first} of row {row}; does max_length cut an image?"
            )
        found[row].append((first, image))
    if stop != len(places):
        raise UserError(f"pixel_values: expected images of {len(places)} placeholders in all, got {stop}")
    return [tuple(images) for images in found]


def _images(pixel_values: Tensor, grids: Sequence[Sequence[int]], merge: int) -> list[ProcessedImage]:
    """Returns all images. Those of equal values are one object, which is hashed once."""
    sizes = [frames * height * width for frames, height, width in grids]
    if sum(sizes) != len(pixel_values) or any(frames != 1 for frames, *_ in grids):
        raise UserError(
            f"image_grid_thw: expected images of one frame, of {len(pixel_values)} patches in all, got "
            f"{shorten(grids)}"
        )
    known: dict[tuple[int, ...], list[tuple[Tensor, ProcessedImage]]] = {}
    images = []
    for values, (_, height, width) in zip(pixel_values.split(sizes), grids, strict=True):
        same_size = known.setdefault((height, width), [])
        image = next((image for other, image in same_size if torch.equal(other, values)), None)
        if image is None:
            pixels = values.detach().float().cpu().reshape(height // merge, width // merge, -1)
            image = ProcessedImage(pixels.numpy())
            same_size.append((values, image))
        images.append(image)
    return images
