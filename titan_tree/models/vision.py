"""The tower: the vision model of a snapshot, which turns images into features in place of embeddings.

It is the module of transformers, as ``TreeModel.visual``. An image runs once for all of its tokens in a
micro-batch. Small images run together, because one alone leaves a GPU idle. Attention stays within an image.

H, W pixels of an image, R image rows (see tree/images.py), d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from titan_tree.errors import UserError, printable, shorten
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import ConfigJson

T = TypeVar("T")
MAX_PIXELS = 1 << 21  # of images that run together: a screen of 1920 x 1088; a larger one runs alone

# The tower of the flavor "debug", whose images have 32 x 32 pixels per token, as published ones have.
DEBUG_TOWER: ConfigJson = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],  # of Qwen3-VL
}


def debug_config(model: Decoder) -> ConfigJson:
    """Returns the config.json of a model with vision, for a model of the flavor "debug"."""
    kinds = [kind for kind in model.hf_architectures if kind in MROPE_SECTIONS]
    if not kinds:
        raise UserError(
            f'model.vision: expected "off" for a {model.config.title} model, which has no tower; choose '
            "model.name = qwen3, qwen3_moe, qwen3_5 or qwen3_5_moe"
        )
    if not getattr(model.config, "norm_topk_prob", True):
        raise UserError(
            "model.overrides.norm_topk_prob: expected true with a tower, as in Qwen3-VL, got false"
        )
    return {
        "model_type": kinds[0],
        "vision_config": DEBUG_TOWER | {"out_hidden_size": model.config.hidden_size},
        "text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    }


# Dims of half a rotated head that time, height and width have by default, by model_type.
MROPE_SECTIONS = {"qwen3_5": (11, 11, 10), "qwen3_vl": (24, 20, 20)}
MROPE_SECTIONS |= {f"{kind}_moe": sizes for kind, sizes in MROPE_SECTIONS.items()}


def add_tower(model: Decoder, config: ConfigJson, where: str | Path, *, trained: bool) -> None:
    """Gives ``model`` the tower of a snapshot, without weights, on the default device.

    Args:
        config: content of the snapshot's config.json.
        where: its path, for error messages.
        trained: whether the tower is trained. Otherwise, its weights are frozen.
    Raises:
        UserError: the snapshot has no tower, or one that does not suit the model.
    """
    kind = config.get("model_type")
    if kind not in MROPE_SECTIONS or not isinstance(config.get("vision_config"), dict):
        raise UserError(
            f"{where}: vision_config: expected the tower of {' or '.join(MROPE_SECTIONS)}, got a config of "
            f'{kind!s:.60} with {shorten(config.get("vision_config"))}; set model.vision = "off"'
        )
    text = config.get("text_config") or {}
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = rope.get("mrope_section", MROPE_SECTIONS[kind])
    is_list = isinstance(sections, list | tuple) and all(type(size) is int and size >= 0 for size in sections)
    if not is_list or len(sections) != 3:
        raise UserError(
            f"{where}: mrope_section: expected the sizes of 3 sections, for time, height and width, got "
            f"{shorten(sections)}"
        )
    try:
        tower = AutoConfig.for_model(kind, vision_config=config["vision_config"]).vision_config
        visual = tower_class(MODEL_MAPPING[type(tower)])(tower)
    except Exception as error:  # transformers has no class of errors for bad files
        reason = printable(" ".join(f"{type(error).__name__}: {error}".split())[:240])
        raise UserError(f"{where}: vision_config: transformers cannot make it: {reason}") from None
    if tower.out_hidden_size != model.config.hidden_size:
        raise UserError(
            f"{where}: vision_config: expected out_hidden_size {model.config.hidden_size}, the text model's "
            f"hidden_size, got {tower.out_hidden_size}"
        )
    model.visual = visual.requires_grad_(trained)
    model.mrope_sections = tuple(sections)
    model.image_token_id = config.get("image_token_id")
    model.vision_json = {name: value for name, value in config.items() if name != "text_config"}


def tower_class(published: Any) -> Any:
    """Returns a class of transformers as one whose ``forward`` maps images to features."""

    class Tower(published):
        @property
        def patch(self) -> int:
            """Pixels of an image token in each direction."""
            return int(self.config.patch_size * self.config.spatial_merge_size)

        def forward(self, pixels: Sequence[Tensor]) -> tuple[Tensor, ...]:
            """Returns the rows of all images, [R, d], and those of each deepstack output.

            Activations are not stored: the backward pass runs the images again. Without images, an empty one
            runs, and nothing is returned of it. Ranks that share the weights thus make equal passes.

            Args:
                pixels: [H, W, 3] uint8 for each image, on any device.
            """
            device, rope = self.patch_embed.proj.weight.device, self.rotary_pos_emb
            # Snapshots do not have this constant, and a model that was on "meta" has lost it.
            rope.inv_freq = rope.compute_axial_rope_parameters(self.config, device="cpu")[0].to(device)
            images = pixels or (torch.zeros(self.patch, self.patch, 3, dtype=torch.uint8),)
            moved = [image.to(device, non_blocking=True) for image in images]
            outputs = [
                checkpoint(self.features, chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in chunks(moved, lambda image: image.shape[0] * image.shape[1])
            ]
            rows = tuple(map(torch.cat, zip(*outputs, strict=True)))
            return rows if pixels else tuple(x[:0] for x in rows)

        def features(self, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
            """Returns the rows of images that run together."""
            c = self.config
            sizes = c.patch_size, c.spatial_merge_size, c.temporal_patch_size
            x, grids = map(torch.cat, zip(*(patches(image, *sizes) for image in images), strict=True))
            # On the host, where each block reads it.
            ends = torch.tensor([0, *grids.prod(1).cumsum(0).tolist()], dtype=torch.int32, device="cpu")
            out = super().forward(x, grids.to(x.device), cu_seqlens=ends)
            return out.pooler_output, *(getattr(out, "deepstack_features", None) or ())

    return Tower


def chunks(images: Iterable[T], pixels: Callable[[T], int]) -> list[list[T]]:
    """Returns the images that run together, in their order. ``pixels`` returns the number of an image."""
    found: list[list[T]] = []
    total = MAX_PIXELS
    for image in images:
        total += pixels(image)
        if total > MAX_PIXELS:
            found.append([])
            total = pixels(image)
        found[-1].append(image)
    return found


def patches(pixels: Tensor, patch_size: int, merge: int, temporal: int) -> tuple[Tensor, Tensor]:
    """Returns what the image processor of Qwen2-VL returns for an image, bit for bit in fp32.

    Args:
        pixels: [H, W, 3] uint8.
        patch_size: pixels of a patch in each direction.
        merge: patches of a token in each direction. The patches of a token follow each other.
        temporal: number of equal frames that a patch has.
    Returns:
        The normalized patches [P, 3 temporal patch_size²], and their grid, [[1, rows, columns]].
    """
    height, width, _ = pixels.shape
    size = patch_size * merge
    if height % size or width % size:
        raise UserError(
            f"image: expected height and width in multiples of {size} pixels, got {height} x {width}; resize "
            "the image as the model's processor does"
        )
    x = ((pixels.double() * (1 / 255)).float() - 0.5) / 0.5
    x = x.view(height // size, merge, patch_size, width // size, merge, patch_size, 3)
    x = x.permute(0, 3, 1, 4, 6, 2, 5)  # rows and columns of tokens, then of patches; colour; pixels
    x = x.unsqueeze(5).expand(*x.shape[:5], temporal, *x.shape[5:])
    grid = torch.tensor([[1, height // patch_size, width // patch_size]])
    return x.reshape(-1, 3 * temporal * patch_size**2), grid
