"""Every path alone: the same step as a loop over paths, through the unmodified model of transformers.

Nothing here merges paths: a path is a row of tokens, and the loss reads the fields of its ``TokenPath``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan_tree.certify.numbers import Numbers, Scores, recorded
from titan_tree.components.lora import is_transposed, merged
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf.names import model_name
from titan_tree.models.hf.snapshot_files import CONFIG, read_json
from titan_tree.models.pretrained import import_transformers, save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import CHECKPOINTED
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree


class Reference(ABC):
    """A model that reads one path at a time.

    Attributes:
        module: the model, on its device.
        layers: its layers, in forward order.
    """

    module: nn.Module
    layers: list[nn.Module]

    @abstractmethod
    def score(self, path: TokenPath, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probs and entropies of a path's tokens, [T - 1] each, and of targets, with gradients.

        Args:
            targets: [2, S] int64, pairs of an edge of the path and a token id.
        """

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all parameters on the CPU, by the names of the model on trees."""

    def step(self, paths: Sequence[TokenPath], loss: TreeLoss) -> Numbers:
        """Returns the numbers of a training step on the paths, one after another."""
        batch, sizes = rows(paths, loss.spec.reads_targets), [len(path) - 1 for path in paths]
        edge, id = batch.edge_label.new_empty(2, 0) if batch.edge_targets is None else batch.edge_targets
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        counts = torch.searchsorted(edge, bounds).diff().tolist()  # of the targets of each path
        first = bounds[:-1].repeat_interleave(torch.tensor(counts))
        targets = torch.stack([edge - first, id]).split(counts, dim=1)
        with torch.no_grad(), recorded(self.layers) as record:
            scores = [self.score(*each) for each in zip(paths, targets, strict=True)]
        hidden = [record[number :: len(self.layers)] for number in range(len(self.layers))]
        leaves = [torch.cat(values).requires_grad_() for values in zip(*scores, strict=True)]
        batch = batch.to(leaves[0].device).with_target_logprobs(leaves[2])
        value, _ = loss(leaves[0], batch, loss.normalizer(paths), leaves[1])
        gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
        derivatives = [d.split(n) for d, n in zip(gradients, (sizes, sizes, counts), strict=True)]
        for path, of_targets, *of_path in zip(paths, targets, *derivatives, strict=True):
            if any(d.any() for d in of_path):
                torch.autograd.backward(self.score(path, of_targets), of_path)
        logprobs = [of_path.detach().cpu() for of_path, *_ in scores]
        return Numbers(value.item(), self.gradients(), Scores(hidden, logprobs))


class TransformersReference(Reference):
    """The unmodified model of transformers.

    Args:
        folder: the snapshot.
        model: the model on trees, whose names the gradients get; only its structure is used.
        weights: those of the model on trees, on the CPU, of which only the factors of LoRA are used. The
            weights of the snapshot contain their updates.
        dtype: dtype of the weights and of the computation.
    """

    def __init__(
        self,
        folder: Path,
        model: TreeModel,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.weights = model, weights
        images = model.visual is not None
        self.module: Any = import_transformers().unmodified(folder, dtype, images).to(device)
        base = self.module.base_model
        self.layers = list((base.language_model if images else base).layers)
        if model.visual is not None:
            base.visual.requires_grad_(any(p.requires_grad for p in model.visual.parameters()))
        if self.module.supports_gradient_checkpointing:  # it needs the mode of training; there is no dropout
            name = "activation_checkpointing_enable"  # older versions have another name for it
            enable = getattr(self.module, name, None) or self.module.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self.module.train()

    def score(self, path: TokenPath, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.from_numpy(path.tokens).long().to(self.module.device)
        images = self._images(path) if path.images else {}
        logits = self.module(input_ids=tokens[None], use_cache=False, **images).logits[0, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / path.temperature
        if path.sampling_mask is not None:
            kept = torch.zeros(logits.shape, dtype=torch.bool)
            for token, ids in enumerate(path.sampling_mask.by_token()[1:]):
                kept[token, torch.from_numpy(ids).long() if len(ids) else slice(None)] = True
            logits = logits.masked_fill(~kept.to(logits.device), -torch.inf)
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logits.dtype).min)).sum(-1)
        edge, id = targets.to(logprobs.device)
        return logprobs.gather(1, tokens[1:, None])[:, 0], entropy, logprobs[edge, id]

    def _images(self, path: TokenPath) -> dict[str, Tensor]:
        """Returns what the processor of transformers makes of a path's images.

        The model of transformers finds images by the placeholder's id, and counts positions by itself.
        """
        from titan_tree.models.vision import patches  # needs transformers

        config, where = self.module.config, f"path {path.id or '?'}: images"
        if self.model.image_token_id is None:  # the flavor "debug"
            config.image_token_id = int(path.tokens[path.images[0][0]])
        is_image = np.zeros(len(path), bool)
        for start, image in path.images:
            if is_image[max(0, start - 1)]:
                raise UserError(
                    f"{where}: expected text between images, without which transformers takes them for one, "
                    f"got one that begins at token {start}, right after another; certify other paths"
                )
            is_image[start : start + len(image)] = True
        if (differs := (path.tokens == config.image_token_id) != is_image).any():
            raise UserError(
                f"{where}: expected the id {config.image_token_id} (image_token_id of config.json) at their "
                f"tokens and nowhere else, got {path.tokens[differs][0]} at token {differs.argmax()}"
            )
        c = config.vision_config
        sizes = c.patch_size, c.spatial_merge_size, c.temporal_patch_size
        of_images = [patches(torch.from_numpy(image.pixels), *sizes) for _, image in path.images]
        pixels, grids = zip(*of_images, strict=True)
        inputs = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
        inputs["mm_token_type_ids"] = torch.from_numpy(is_image)[None].int()
        return {name: tensor.to(self.module.device) for name, tensor in inputs.items()}

    def gradients(self) -> dict[str, Tensor]:
        found = {
            name: torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu()
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }
        nested = "" if self.model.visual is None else ".language_model"
        named = _named(self.model, found, self.module.base_model_prefix + nested)
        if self.model.lora is None:
            return named
        scaling, own = self.model.lora.scaling, {}
        for name in [name for name in named if f"{name}_lora_A" in self.weights]:
            pair = [self.weights[f"{name}_lora_{f}"].to(named[name].dtype).requires_grad_() for f in "AB"]
            transposed = is_transposed(self.model.get_submodule(name.rpartition(".")[0]))
            update = merged(torch.zeros_like(named[name]), pair[0], pair[1], scaling, transposed)
            for factor, gradient in zip("AB", torch.autograd.grad(update, pair, named[name]), strict=True):
                own[f"{name}_lora_{factor}"] = gradient
        return own


class OwnReference(Reference):
    """titan_tree's own model on the CPU, for a model that transformers does not have."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        training = dataclasses.replace(config.training, compile=False, activation_checkpoint="none")
        table = dataclasses.replace(config.model, attention="auto", recurrence="auto")
        model = build_parallel_model(table, training, ParallelConfig(), OneRank(), config.lora)
        model.load_state_dict(weights)
        model.execution = dataclasses.replace(model.execution, dtype=dtype)
        self.module, self.layers = model.to(dtype), list(model.layers)

    def score(self, path: TokenPath, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = TreeBatch.from_trees([TokenTree.from_paths([path])], "all")
        out = self.module(dataclasses.replace(batch, edge_targets=targets), entropy=True)
        return out.logprobs, out.entropy, out.target_logprobs

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.module.named_parameters()
            if p.requires_grad
        }


def _named(model: TreeModel, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors of a model of transformers by the names of ``model``."""
    if not isinstance(model, Decoder):
        hf_name = import_transformers().hf_name
        names = [name.replace(CHECKPOINTED, "") for name, _ in model.named_parameters()]
        return {n: tensors[hf_name(n, prefix)] for n in names if hf_name(n, prefix) in tensors}
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = model_name(name)
        packed = next((end for end in model.packed if name.endswith(end)), None)
        if packed is None:
            named[name] = tensor
            continue
        ends, parts = model.packed[packed], model.unpack(name, tensor)
        named |= {name.removesuffix(packed) + end: p for end, p in zip(ends, parts, strict=True)}
    return named


def snapshot(model: TreeModel, config: Config, weights: Mapping[str, Tensor], folder: str) -> Path:
    """Returns a snapshot with the weights of the model: that of the configuration, or one made in ``folder``.

    Args:
        weights: all weights of the model in fp32, on the CPU.
    """
    source = config.model.hf_path
    if source and model.lora is None and "text_config" not in read_json(Path(source) / CONFIG):
        return Path(source)
    path = Path(folder) / "snapshot"
    save_pretrained(model, path, dict(weights))
    return path


def rows(paths: Sequence[TokenPath], targets: bool = False) -> TreeBatch:
    """Returns a batch whose pairs are all tokens of all paths, each with an edge of its own.

    What the loss reads of a token comes from its ``TokenPath`` alone.
    """
    batch = TreeBatch.from_trees([TokenTree.from_paths([path]) for path in paths], "all", targets)
    joined: dict[str, Any] = {"weight": torch.tensor([path.weight for path in paths])}
    for name in ("loss_mask", *PER_TOKEN):
        values = [getattr(path, name) for path in paths]
        if all(value is not None for value in values):
            joined[name] = torch.from_numpy(np.concatenate([value[1:] for value in values]))
    counted = joined["loss_mask"] > 0
    for name in joined.keys() & {*PER_TOKEN}:
        joined[name] = torch.where(counted, joined[name], 0.0)
    pairs = dataclasses.replace(batch.pairs, edge=torch.arange(len(counted)), **joined)
    label = torch.from_numpy(np.concatenate([path.tokens[1:] for path in paths])).long()
    return dataclasses.replace(batch, edge_label=label, pairs=pairs)
