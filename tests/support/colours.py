"""An environment that shows a square of one colour, and rewards its name."""

import base64
import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as Pillow

from titan_tree.rl.environment import Reply
from titan_tree.tree.images import Image

RGB = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
SIDE = 64  # pixels, which are 2 x 2 tokens


def square(name: str, side: int = SIDE, noise: int = 0) -> Image:
    """Returns a square of a colour. Squares of different ``noise`` differ in one pixel."""
    pixels = np.full((side, side, 3), RGB[name], np.uint8)
    pixels[0, 0, 0] ^= noise
    return Image(pixels)


def url(image: Image) -> str:
    """Returns an image as a data: URL, which is read with at least 64 tokens."""
    file = io.BytesIO()
    Pillow.fromarray(image.pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(image: Any, text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


class ColourEpisode:
    """One turn. A right answer has reward 1."""

    def __init__(self, draw: random.Random) -> None:
        self.name = draw.choice(list(RGB))
        self.prompt = [shown(square(self.name), "?")]

    def reply(self, turns: Sequence[str]) -> Reply:
        return Reply(None, float(turns[-1] == self.name[0]))


class Colours:
    """Demonstrations name a random colour."""

    def episode(self, draw: random.Random) -> ColourEpisode:
        return ColourEpisode(draw)

    def demonstrations(self, draw: random.Random) -> list[list[dict[str, Any]]]:
        episode = ColourEpisode(draw)
        return [[*episode.prompt, {"role": "assistant", "content": name[0]}] for name in RGB]


class PagesEpisode:
    """Three turns, whatever the model says. The second one sees another image than other rollouts do.

    The third turn has a context of its own, with the first image again, from a file.
    """

    def __init__(self, draw: random.Random) -> None:
        self.prompt = [shown(square("red"), "a")]

    def reply(self, turns: Sequence[str]) -> Reply:
        if len(turns) == 1:
            # As many tokens for all rollouts, but another pixel for each length of the turn.
            return Reply([shown(square("blue", noise=len(turns[0]) % 256), "b", "tool")])
        if len(turns) == 2:
            return Reply([shown(url(square("green")), "c")], new_context=True)
        return Reply(None, float(sum(map(ord, "".join(turns))) % 3))


class Pages:
    def episode(self, draw: random.Random) -> PagesEpisode:
        return PagesEpisode(draw)
