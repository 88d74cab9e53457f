"""InPlaceModel: runs a model of transformers on trees that stays the model of another framework.

A ``TransformersModel`` takes a model's layers away. Frameworks that shard, save and synchronize a model
themselves need it as it is: every module in its place, parameters by their names, and ``forward`` and
``generate`` for everything else. Here only the ``forward`` of the model, of its layers and of its output
projection are replaced. They answer calls without a tree as before.

    layer(...) -> hooks, such as FSDP2's -> the pass over the tree -> checkpointing -> TransformersBlock

A block may be compiled. Calls without a tree never reach it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from titan_tree.components.edge_statistics import Statistic
from titan_tree.errors import UserError
from titan_tree.models.transformers.attention_function import KEYWORD, NAMES
from titan_tree.models.transformers.blocks import LayerPass, Survey, TransformersBlock
from titan_tree.models.transformers.transformers_model import TransformersModel
from titan_tree.models.tree_model import Execution, ModelOutput
from titan_tree.models.vision import patches
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.images import NO_TOWER
from titan_tree.tree.layout import TreeLayout

CALL = "tree_call"  # argument of the model and of its output projection: what to run inside of it


class InPlaceModel(TransformersModel):
    """A model of transformers on trees, which stays usable by itself.

    Without a tree, its attention is transformers' "sdpa" or "eager", whichever it had and supports.

    Its calls go through the model's own ``forward``, and through that of its output projection. Hooks of
    FSDP2 therefore gather the weights, in whatever units a framework has sharded them.

    Args:
        model: a supported model, before it is sharded or wrapped by PEFT. It may be on "meta".
        attention: backend of ``TreeAttention``.
    Raises:
        UserError: the model cannot run on trees.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto") -> None:
        computes_plain = model.config._attn_implementation != "eager" and model._supports_sdpa
        super().__init__(model, attention)
        model.set_attn_implementation(NAMES["sdpa" if computes_plain else "eager"])
        # In tuples, because they are not submodules: they contain this model's modules.
        self._model: tuple[PreTrainedModel] = (model,)
        self._root: tuple[nn.Module] = (model,)
        self._device: torch.device | int | str | None = None
        self.head: nn.Module = model.get_output_embeddings()
        _run_calls_inside(model)
        _run_calls_inside(self.head)

    def wrapped_by(
        self,
        root: nn.Module,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | int | str | None = None,
    ) -> None:
        """Sets the module that all calls go through.

        Args:
            root: contains the model, and passes it keyword arguments that it does not know, such as an FSDP2
                module or a PeftModel.
            compute_dtype: dtype of the activations; None: that of the weights.
            device: device of the computation; None: that of the weights, which FSDP2 may keep on the host.
        Raises:
            UserError: the output projection has been replaced.
        """
        if (head := self._model[0].get_output_embeddings()) is not self.head:
            raise UserError(
                f"model: lm_head: expected the linear that it was, got {type(head).__name__}; leave lm_head "
                "out of the modules that adapters change"
            )
        self._root, self._device, self.execution = (root,), device, Execution(compute_dtype)

    @property
    def root(self) -> nn.Module:
        return self._root[0]

    @property
    def keeps_features(self) -> bool:
        """False: hooks and autocast of the model's owner may change what the tower returns."""
        return False

    def forward(self, batch: TreeBatch, **options: Any) -> ModelOutput:  # type: ignore[override]
        """Scores the batch's edges, see ``TreeModel``."""
        return self.root(**{CALL: functools.partial(super().forward, batch, **options)})

    def cast_ends(self) -> tuple[Tensor, Tensor]:
        """Returns empty tensors of the right dtype: only the modules themselves have gathered weights."""
        weight = self.embedding_weight
        device = weight.device if self._device is None else self._device
        empty = torch.empty(0, dtype=self.execution.dtype or weight.dtype, device=device)
        return empty, empty

    def score_edges(
        self, hidden: Tensor, head: Tensor, batch: TreeBatch, entropy: bool, statistics: Collection[Statistic]
    ) -> ModelOutput:
        score, module = super().score_edges, self.head

        def run(hidden: Tensor) -> ModelOutput:
            weight = module.get_parameter("weight").to(hidden.dtype)  # FSDP2 may have cast it already
            return score(hidden, weight, batch, entropy, statistics)

        return module(hidden, **{CALL: run})  # FSDP2 follows the gradient of its argument

    def _tower(self, model: Any) -> Any:
        return getattr(model.base_model, "visual", None)

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Runs the model's own tower on all images at once, see ``TreeModel``.

        Args:
            pixels: [H, W, 3] uint8 for each image, or [rows, columns, values of the patches of a token] as
                processors of transformers return them.
        """
        if self.visual is None:
            raise UserError(NO_TOWER)
        tower: Any = self.visual
        c, merge = tower.config, tower.config.spatial_merge_size
        parts = [
            patches(x, c.patch_size, merge, c.temporal_patch_size)
            if x.dtype == torch.uint8
            else (
                x.reshape(-1, x.shape[2] // merge**2),
                torch.tensor([[1, merge * len(x), merge * x.shape[1]]]),
            )
            for x in pixels
        ]
        device = self.embedding_weight.device
        values, grids = (torch.cat(each).to(device) for each in zip(*parts, strict=True))
        out = tower(values.to(tower.dtype), grid_thw=grids)
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]

    def _take_layers(self, base: Any) -> None:
        blocks = [TransformersBlock(layer, self.attention, self.recurrence) for layer in base.layers]
        self.layers = nn.ModuleList(blocks)
        for index, block in enumerate(blocks):
            _run_in_pass(index, block)

    def _new_pass(self, layout: TreeLayout, rows: Sequence[Tensor]) -> LayerPass:
        return _InPlacePass(layout, rows, self.first_rows)


class _InPlacePass(LayerPass):
    """One pass over all layers, which recompute their activations where transformers would."""

    def run(
        self,
        index: int,
        block: Any,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        layer = block.layer
        # In older versions, the call of the layer checkpoints, so this runs within.
        is_ours = layer.gradient_checkpointing and type(layer).__call__ is nn.Module.__call__
        if is_ours and layer.training:
            block = functools.partial(layer._gradient_checkpointing_func, block)
        return super().run(index, block, hidden, positional, named)


def _run_in_pass(index: int, block: TransformersBlock) -> None:
    """Replaces the ``forward`` of a block's layer: in a pass over a tree, the pass runs the block."""
    layer: Any = block.layer

    @functools.wraps(layer.forward)
    def forward(*positional: Any, **named: Any) -> object:
        current: LayerPass | Survey | None = named.pop(KEYWORD, None)
        if current is None:
            return type(layer).forward(layer, *positional, **named)
        return current.run(index, block, positional[0], positional[1:], named)

    layer.forward = forward


def _run_calls_inside(module: nn.Module) -> None:
    """Replaces a module's ``forward``: given a function as ``CALL``, it runs this function instead."""
    plain = module.forward

    @functools.wraps(plain)
    def forward(*positional: object, **named: Any) -> object:
        call: Callable[..., object] | None = named.pop(CALL, None)
        return plain(*positional, **named) if call is None else call(*positional)

    module.forward = forward
