"""Image: pixels that take the place of placeholder tokens. Image rows name them in trees and batches.

The tokens of an image all have one placeholder id, so ids cannot tell two images apart. An image token is
therefore identified by the image's ``key`` and its index in the image. The R tokens of distinct images, one
image after another, are the *image rows*: ``TokenTree.image_row`` has the row of each token of a tree.

The *position rule* is that of Qwen's vision models (mRoPE, ``get_rope_index`` in transformers). Each token
has three positions: time, height and width. A text token increases all three by 1. The tokens of an image
have the position that a text token would have in place of the first one, plus their row (height) and column
(width) in the image. An image increases the positions behind it by the larger one of its numbers of rows and
columns, not by its number of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.tree.path_fields import wrong

PathImages = tuple[tuple[int, "Image"], ...]  # (index of the image's first token, image), in order


NO_TOWER = (
    "model: expected paths without images, because the model has no tower; set model.vision to "
    '"frozen" or "train", or remove the images'
)


class ImageLimits(NamedTuple):
    """What a model reads of images."""

    patch: int | None  # pixels of a token in each direction; None: it has no tower
    token_id: int | None = None  # the placeholder of image tokens; None: it is not checked

    def check(self, tokens: np.ndarray, images: PathImages) -> None:
        """Raises UserError if the model cannot read an image, or a placeholder is not in an image."""
        is_lone = tokens == (-1 if self.token_id is None else self.token_id)
        for start, image in images:
            is_lone[start : start + len(image)] = False
            if self.patch is None:
                raise UserError(NO_TOWER)
            if image.patch != self.patch:
                raise UserError(
                    f"image: expected {self.patch} pixels per token in each direction (patch_size times "
                    f"spatial_merge_size of config.json), got {image.patch}; resize it for this model"
                )
        if is_lone.any():
            raise UserError(
                f"images: expected token id {self.token_id}, the model's image_token_id, only in images, got "
                f"it at token {int(is_lone.argmax())}, too; list all images of the sample"
            )


@dataclass(frozen=True, eq=False)
class Image:
    """An image as a model reads it. It takes the place of ``len(image)`` tokens, row by row.

    Args:
        pixels: [H, W, 3] uint8, red, green and blue, already resized: H and W are multiples of ``patch``. The
            array is not copied, so it must not change afterwards.
        patch: pixels of one token in each direction, ``patch_size * spatial_merge_size`` of the model.
        source: the file or data: URL that has these pixels; "" if none is known.

    Raises:
        UserError: the pixels have another type or shape.
    """

    pixels: np.ndarray
    patch: int = 32
    source: str = ""
    may_be_scored: ClassVar[bool] = False  # whether a loss may count the placeholders

    def __post_init__(self) -> None:
        pixels, patch = self.pixels, self.patch
        is_array = isinstance(pixels, np.ndarray)
        if not is_array or pixels.dtype != np.uint8 or pixels.shape[2:] != (3,):
            got = f"{pixels.dtype} of shape {pixels.shape}" if is_array else type(pixels).__name__
            raise UserError(f"Image: pixels: expected an array [height, width, 3] of uint8, got {got}")
        if not isinstance(patch, int | np.integer) or patch < 1:
            raise UserError(f"Image: patch: expected a number of pixels, got {shorten(patch)}")
        height, width, _ = pixels.shape
        if not height or not width or height % patch or width % patch:
            raise UserError(
                f"Image: expected height and width in multiples of {patch} pixels, got {height} x {width}; "
                "resize the image"
            )

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return self.rows * self.columns

    @property
    def rows(self) -> int:
        return int(self.pixels.shape[0]) // self.patch

    @property
    def columns(self) -> int:
        return int(self.pixels.shape[1]) // self.patch

    @property
    def num_positions(self) -> int:
        """By how much the image increases the positions behind it."""
        return max(self.rows, self.columns)

    @cached_property
    def key(self) -> str:
        """A hash of everything that the model reads. Images are equal if their keys are."""
        height, width, _ = self.pixels.shape
        sha = hashlib.sha256(f"{height} {width} {self.patch} ".encode())
        sha.update(np.ascontiguousarray(self.pixels).data)
        return sha.hexdigest()


def path_images(value: object, tokens: np.ndarray, loss_mask: np.ndarray) -> PathImages:
    """Returns the images of a path; see ``TokenPath``.

    Args:
        value: pairs (index of the image's first token, Image).
        tokens, loss_mask: [T] each.
    """
    expected = "(index of the image's first token, Image)"
    if not isinstance(value, list | tuple):
        raise wrong("images", f"a list of {expected}", shorten(value))
    images: list[tuple[int, Image]] = []
    stop = 0
    for number, entry in enumerate(value):
        field = f"images[{number}]"
        start, image = entry if isinstance(entry, list | tuple) and len(entry) == 2 else (None, None)
        if not isinstance(start, int | np.integer) or isinstance(start, bool) or not isinstance(image, Image):
            raise wrong(field, expected, shorten(entry))
        if start < stop:
            which = "the end of the image before it" if number else "the beginning of the path"
            raise wrong(field, f"an image that begins at token {stop} or later, {which}", f"token {start}")
        images.append((int(start), image))
        stop = int(start) + len(image)
        size = f"{image.rows} x {image.columns}"
        if stop > len(tokens):
            raise UserError(
                f"{field}: expected all tokens, {start} to {stop - 1}, of an image of {size} tokens, got a "
                f"path of {len(tokens):,} tokens, which cuts it; remove the image and all of its tokens"
            )
        ids = tokens[start:stop]
        if (differs := ids != ids[0]).any():
            at = int(differs.argmax())
            raise wrong(
                field,
                f"one placeholder id at tokens {start} to {stop - 1} of an image of {size} tokens",
                f"{ids[0]} at token {start} and {ids[at]} at token {start + at}",
            )
        if image.may_be_scored:
            continue
        is_trained = loss_mask[start:stop] > 0
        is_trained[: max(0, 1 - int(start))] = False  # nothing predicts the first token
        if is_trained.any():
            token = int(start) + int(is_trained.argmax())
            raise wrong(field, "loss mask 0 at its tokens", f"{loss_mask[token]:g} at token {token}")
    return tuple(images)


def distinct_images(images: Iterable[Image]) -> tuple[Image, ...]:
    """Returns the first one of equal images, in the order given."""
    by_key: dict[str, Image] = {}
    for image in images:
        by_key.setdefault(image.key, image)
    return tuple(by_key.values())


def first_rows(images: Sequence[Image]) -> dict[str, int]:
    """Returns the first row of each of the distinct ``images``, by key."""
    first, rows = {}, 0
    for image in images:
        first[image.key] = rows
        rows += len(image)
    return first


def renumbered_rows(
    image_row: np.ndarray, images: Sequence[Image], new_images: Sequence[Image]
) -> np.ndarray:
    """Returns ``image_row`` [N] int32, the rows of ``images``, as rows of ``new_images``.

    The new images must include those of the rows. Images that they lack have no rows.
    """
    first = first_rows(new_images)
    rows = np.full(sum(map(len, images)) + 1, -1, np.int32)  # the last entry is for -1: text
    stop = 0
    for image in images:
        start, stop = stop, stop + len(image)
        if image.key in first:
            rows[start:stop] = first[image.key] + np.arange(len(image))
    renumbered: np.ndarray = rows[image_row]
    return renumbered


def mrope_positions(
    image_row: np.ndarray, images: Sequence[Image], node_offsets: np.ndarray, node_parent: np.ndarray
) -> np.ndarray:
    """Returns the positions of a tree's tokens in time, height and width, [3, N] int32.

    Args:
        image_row: [N] int32, the image row of each token; -1: text.
        images: the distinct images of the tree.
        node_offsets, node_parent: [K + 1] and [K], the nodes of the tree.
    """
    index = [np.divmod(np.arange(len(image), dtype=np.int32), image.columns) for image in images]
    # By how much each row's token increases the positions behind it. The last token of an image does so for
    # the whole image, so the sum over a token's ancestors is the same for all tokens of an image.
    steps = [np.append(np.zeros(len(image) - 1, np.int32), np.int32(image.num_positions)) for image in images]
    # In each table, the last entry is for -1: text.
    row_index = np.concatenate([*(row for row, _ in index), [0]])[image_row]
    column_index = np.concatenate([*(column for _, column in index), [0]])[image_row]
    step = np.concatenate([*steps, [1]])[image_row]
    before = np.cumsum(step) - step
    ends = np.append(before, before[-1] + step[-1])[node_offsets]
    increase = np.diff(ends).tolist()  # by each node
    at_start = [0] * len(increase)
    for node, parent in enumerate(node_parent.tolist()):
        at_start[node] = at_start[parent] + increase[parent] if parent >= 0 else 0
    time = before + np.repeat(np.array(at_start) - ends[:-1], np.diff(node_offsets))
    return np.stack([time, time + row_index, time + column_index]).astype(np.int32)
