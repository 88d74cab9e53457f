"""Reads images of data files as the processor of Qwen3-VL and Qwen3.5 does."""

from __future__ import annotations

import base64
import io
import math
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from titan_tree.components.tree_tokenizer.messages import IMAGE_TOKEN
from titan_tree.config.files import regular
from titan_tree.data.readers import Record
from titan_tree.data.readers.chat import with_parts
from titan_tree.errors import UserError, shorten
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath

PATCH = 32  # pixels of a token: patches of 16 pixels, merged 2 x 2
MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216  # after resizing, as in the snapshots of Qwen3-VL and Qwen3.5
MAX_RATIO = 200  # of the longer to the shorter side
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # others may run programs, such as EPS
FIELDS = ("start", "image", "hash")  # of an entry of a record's images
PART_FIELDS = ("type", "image", "hash")  # of a part of a message

Loaded = dict[str, Image]  # by absolute path or data: URL, and by key


def record_images(
    entries: object, folder: str, loaded: Loaded, placeholders: Sequence[int] = ()
) -> list[tuple[int, Image]]:
    """Returns the field ``images`` of a record of token ids as TokenPath takes it.

    Args:
        entries: a list of ``{"start"?: index of the first token, "image": source, "hash"?: Image.key}``.
        folder: the folder of the data file.
        loaded: images that other records have read; it grows. Equal pixels are one array.
        placeholders: where tokens of images may be, in order. An image without a start begins at the first
            one behind the image before it.

    Raises:
        UserError: a malformed entry, an unreadable image, or another hash.
    """
    if not isinstance(entries, list):
        raise UserError(f"images: expected a list of objects, got {shorten(entries)}")
    images: list[tuple[int, Image]] = []
    stop = 0
    for index, entry in enumerate(entries):
        where = f"images[{index}]"
        start = entry.get("start") if isinstance(entry, dict) else None
        if start is None and (following := bisect_left(placeholders, stop)) < len(placeholders):
            start = placeholders[following]
        if not isinstance(entry, dict) or type(start) is not int:
            raise UserError(
                f'{where}: expected {{"start": integer, "image": path}}, or {IMAGE_TOKEN} of data.tokenizer '
                f"in tokens[{stop}:], got {shorten(entry)}"
            )
        images.append((start, _image(entry, FIELDS, where, folder, loaded)))
        stop = start + len(images[-1][1])
    return images


def with_loaded_images(messages: Any, folder: str, loaded: Loaded) -> Any:
    """Returns the messages of a record with images in place of their sources; other mistakes stay in them.

    Args:
        messages: their contents may have parts ``{"type": "image", "image": source, "hash"?: Image.key}``.
        folder, loaded: see ``record_images``.

    Raises:
        UserError: an unreadable image, another hash, or an unknown field of such a part.
    """

    def loaded_part(part: Any, index: int, where: str) -> Any:
        if not isinstance(part, dict) or part.get("type") != "image":
            return part
        image = _image(part, PART_FIELDS, f"{where}.content[{index}]", folder, loaded)
        return {"type": "image", "image": image}

    if not isinstance(messages, list):
        return messages
    return [
        with_parts(message, partial(loaded_part, where=f"messages[{index}]"))
        for index, message in enumerate(messages)
    ]


def _image(entry: Record, fields: tuple[str, ...], where: str, folder: str, loaded: Loaded) -> Image:
    """Returns the image of an entry, which may have these fields."""
    if unknown := [name for name in entry if name not in fields and entry[name] is not None]:
        raise UserError(f"{where}.{unknown[0][:60]}: unknown field; expected {', '.join(fields)}")
    try:
        image = load_image(entry.get("image"), folder, loaded)
    except UserError as error:
        raise UserError(f"{where}.image: {error}") from None
    if entry.get("hash") not in (None, image.key):
        raise UserError(
            f"{where}.hash: expected {image.key}, that of the resized pixels, got {shorten(entry['hash'])}; "
            "the file has changed or was resized otherwise; remove hashes of engines, which are not checked"
        )
    return image


def check_placeholders(path: TokenPath) -> None:
    """Raises UserError if ids of image tokens also occur outside of the path's images."""
    is_lone = np.isin(path.tokens, [path.tokens[start] for start, _ in path.images])
    for start, image in path.images:
        is_lone[start : start + len(image)] = False
    if is_lone.any():
        token = int(is_lone.argmax())
        sizes = ", ".join(f"{image.rows} x {image.columns}" for _, image in path.images)
        raise UserError(
            f"images: expected the token id {path.tokens[token]} only in images, of {sizes} tokens after "
            f"resizing, got it at token {token}, too; give the files in the sizes that the sampler gave them"
        )


def load_image(source: object, folder: str, loaded: Loaded | None = None) -> Image:
    """Returns an image as RGB, resized as transformers' processor of Qwen3-VL resizes it with Pillow.

    The orientation of photos is applied. What is transparent becomes white, as in that processor and in
    vLLM. Of an animation, the first picture is read.

    Args:
        source: the path of a file, relative to ``folder``; a ``data:image/...;base64,`` URL; an object
            ``{"bytes", "path"}`` of the library datasets, which has the content of a file, its path, or both;
            or an Image.
        loaded: see ``record_images``.

    Raises:
        UserError: Pillow is missing; another URL; a missing, damaged, too large or too long image.
    """
    if isinstance(source, Image):
        return source
    content = None
    if isinstance(source, dict):
        content, source = source.get("bytes"), source.get("path")
        if isinstance(content, bytes):
            source = f"data:image/*;base64,{base64.b64encode(content).decode()}"
    if not isinstance(source, str) or not source:
        raise UserError(f"expected the path of an image or a data: URL, got {shorten(source)}")
    is_url = source.startswith("data:")
    if not is_url and (scheme := re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", source)):
        raise UserError(f"expected a path or a data: URL, got {scheme[0]}...; download the image first")
    loaded = {} if loaded is None else loaded
    name = source if is_url else os.path.abspath(os.path.join(folder, source))
    if name not in loaded:
        if not isinstance(content, bytes):
            content = _decoded(source) if is_url else _read(name)
        file = io.BytesIO(content)
        image = Image(_resized(file, _short(name)), PATCH, name)
        loaded[name] = loaded.setdefault(image.key, image)
    return loaded[name]


def _short(name: str) -> str:
    length = 40 if name.startswith("data:") else 300
    return name if len(name) <= length else f"{name[:length]}..."


def _decoded(url: str) -> bytes:
    """Returns the bytes of a data: URL."""
    head, _, text = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise UserError(f"expected data:image/png;base64,... , got {shorten(head)}")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"{_short(url)}: expected base64: {error}") from None


def _read(file: str) -> bytes:
    try:
        with open(file, "rb", opener=regular) as opened:
            return bytes(opened.read())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{_short(file)}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _resized(file: io.BytesIO, name: str) -> np.ndarray:
    """Returns the pixels [H, W, 3] of an image file after resizing."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps
    except ImportError:
        raise UserError(
            "reading images needs the package pillow; run pip install 'titan_tree[images]'"
        ) from None
    try:
        picture = ImageOps.exif_transpose(Pillow.open(file, formats=FORMATS))
        height, width = resized_size(picture.height, picture.width)
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            picture = picture.convert("RGBA")
            picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture)
        return np.array(picture.convert("RGB").resize((width, height), Pillow.Resampling.BICUBIC))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:  # decoders of damaged files raise errors of many kinds
        reason = str(error).partition(" <_io")[0]  # the file is bytes in memory, whose address says nothing
        raise UserError(f"{name}: expected an image ({', '.join(FORMATS)}): {reason}") from None


@lru_cache(256)  # a context repeats its images in every turn, and rollouts of a task share some
def png_url(image: Image) -> str:
    """Returns the pixels as a data: URL, without loss."""
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.fromarray(image.pixels).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def resized_size(height: int, width: int) -> tuple[int, int]:
    """Returns height and width after resizing: multiples of PATCH, in ``MIN_PIXELS`` to ``MAX_PIXELS``.

    A size that it may have returned stays, even if rounding has made its sides more unequal: files of
    rollouts have such images.

    Raises:
        UserError: one side is more than ``MAX_RATIO`` times the other.
    """
    is_resized = height % PATCH == width % PATCH == 0 and MIN_PIXELS <= height * width <= MAX_PIXELS
    if is_resized and max(height, width) <= 1.5 * MAX_RATIO * min(height, width):
        return height, width
    if max(height, width) > MAX_RATIO * min(height, width):
        raise UserError(
            f"expected sides of at most {MAX_RATIO} : 1, got {width} x {height} pixels; crop the image"
        )
    rows, columns = round(height / PATCH), round(width / PATCH)
    if rows * columns * PATCH**2 > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows, columns = (max(1, math.floor(side / shrink / PATCH)) for side in (height, width))
    elif rows * columns * PATCH**2 < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = (math.ceil(side * grow / PATCH) for side in (height, width))
    return rows * PATCH, columns * PATCH
