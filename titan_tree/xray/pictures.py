"""The distinct images of all trees, as small pictures for the page. Their total size is bounded."""

from __future__ import annotations

import base64
import io
from typing import Any

from titan_tree.errors import count
from titan_tree.tree.images import Image

PAGE_PICTURES = 8_000_000  # characters of all pictures together
SIDE = 256  # pixels of the longer side of a picture


class Pictures:
    """Numbers distinct images, and makes pictures of them.

    Args:
        is_on: whether there are pictures. Otherwise, only sizes are kept.

    Attributes:
        images: "size" (width and height in pixels), "tokens" and "picture" of each image. The picture is a
            data: URL, or None if there is none.
    """

    def __init__(self, is_on: bool) -> None:
        self.images: list[dict[str, Any]] = []
        self._room = PAGE_PICTURES if is_on else -1
        self._missing = "--no-text leaves them out"  # why images have none
        self._numbers: dict[str, int] = {}  # by key

    def number(self, image: Image) -> int:
        """Returns the number of an image among ``images``, which grow."""
        if (number := self._numbers.setdefault(image.key, len(self.images))) == len(self.images):
            height, width, _ = image.pixels.shape
            entry = {"size": [width, height], "tokens": len(image), "picture": self._picture(image)}
            self.images.append(entry)
        return number

    def notes(self) -> list[str]:
        """Returns what the page shows of images, and what it does not."""
        shown = sum(image["picture"] is not None for image in self.images)
        held = (
            f"The page holds {count(shown, 'picture')}; nothing in them is hidden. --no-text leaves them out."
        )
        missing = f"{count(len(self.images) - shown, 'image')} without a picture: {self._missing}."
        return [held] * (shown > 0) + [missing] * (shown < len(self.images))

    def _picture(self, image: Image) -> str | None:
        if self._room < 0:
            return None
        try:
            from PIL import Image as Pillow
        except ImportError:
            self._missing = "pictures need the package pillow; run pip install 'titan_tree[images]'"
            return None
        picture, file = Pillow.fromarray(image.pixels), io.BytesIO()
        picture.thumbnail((SIDE, SIDE))
        picture.save(file, "JPEG")
        url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
        self._room -= len(url)
        if self._room >= 0:
            return url
        self._missing = f"those of a page have at most {PAGE_PICTURES / 1e6:g} MB together"
        return None
