"""TreeView: an InPlaceModel in mixed precision, and ``row_scores``: differentiable scores of a RowForest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from transformers import PreTrainedModel

from titan_tree.components.edge_statistics import Statistic
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.forward import forward_passes, join_outputs
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.errors import UserError
from titan_tree.integrations.rows import Rows
from titan_tree.models.block import LayerOutput
from titan_tree.models.transformers.attention_function import NAMES
from titan_tree.models.transformers.in_place import InPlaceModel
from titan_tree.models.transformers.support import check_supported
from titan_tree.models.tree_model import Execution, ModelOutput
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import ModelLimits


class TreeView(InPlaceModel):
    """A model of transformers on trees, in mixed precision if ``autocast`` says so.

    Args:
        model: the original, which PEFT may have changed, but not replaced. If FSDP2 shards it, collective.
        autocast: dtype of mixed precision; None: the layers compute in the dtype of the weights.
    Raises:
        UserError: the model cannot run on trees, or would no longer generate as before.
    """

    quantization = ("bitsandbytes",)  # in 4 bits, as for QLoRA; only its layers know of it

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None = None) -> None:
        _check_modules(model)
        units = _units(model)  # TRL shards a reference model in its constructor
        for unit in units:
            unit.unshard()
        super().__init__(model)
        for unit in units:
            unit.reshard()
        self.autocast, self.execution = autocast, Execution(autocast)

    def forward(self, batch: TreeBatch, **options: Any) -> ModelOutput:  # type: ignore[override]
        # accelerate wraps the model's own forward in autocast, but edge_logprobs chooses its precision.
        with torch.autocast(self._device_type, enabled=False):
            return super(InPlaceModel, self).forward(batch, **options)

    def run_layers(self, *args: Any, **kwargs: Any) -> LayerOutput:
        with torch.autocast(self._device_type, self.autocast, enabled=self.autocast is not None):
            return super().run_layers(*args, **kwargs)

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        if _units(self):
            raise UserError("pixel_values: expected none with FSDP2, with which images have not been tested")
        with torch.autocast(self._device_type, self.autocast, enabled=self.autocast is not None):
            return super().encode(pixels)

    @property
    def _device_type(self) -> str:
        return self.embedding_weight.device.type


@dataclass(frozen=True)
class RowForest:
    """Rows as the inputs of a model. Several models, or one in several steps, can score them.

    Args:
        rows: the rows.
        batch: all of them, on the device of the models.
        partitions: the forest in partitions of at most ``max_tokens``, on the host; (): there is no maximum.
    """

    rows: Rows
    batch: TreeBatch
    partitions: Sequence[TreeBatch] = ()

    @staticmethod
    def make(rows: Rows, view: TreeView, max_tokens: int | None = None) -> RowForest:
        """Returns the forest of ``rows``, in partitions if it has more than ``max_tokens`` tokens.

        Raises:
            UserError: a row is longer than the paths for which the layers are exact.
        """
        for path in rows.tree.paths:
            path.check_limits(ModelLimits(view.longest_path))
        device = view.embedding_weight.device
        on_host = rows.batch()
        rows, batch = replace(rows, index=rows.index.to(device)), on_host.to(device)
        if max_tokens is None:
            return RowForest(rows, batch)
        plan = TreePartitioner("auto", max_tokens).plan(rows.tree, view.costs())
        partitions = TreeBatch.from_plan(plan, edges="loss") if len(plan) > 1 else [on_host]
        return RowForest(rows, batch, partitions)


def row_scores(
    view: TreeView, forest: RowForest, entropy: bool = False, statistics: Collection[Statistic] = ()
) -> dict[str, Tensor]:
    """Returns "logprobs", on request "entropy", and ``statistics`` for every token, as ``Rows.by_token``.

    Log-probs and entropies are differentiable. Partitions are scored without gradients first. The backward
    pass runs them again, forward and backward. Memory then holds the activations of one chain of partitions.

    Ranks may have different numbers of partitions. With FSDP2, each rank therefore gathers all weights before
    the first partition, and a forest of one partition runs like the others.
    """
    batch, units = forest.batch, _units(view)
    if len(forest.partitions) > 1 or (forest.partitions and units):
        num_edges = len(batch.edge_label)
        with _gathered(units):
            parameters = [p for p in view.parameters() if p.requires_grad]
            values: Sequence[Tensor] = _Partitions.apply(
                view, forest.partitions, num_edges, entropy, statistics, *parameters
            )
        for unit in units:
            unit.reshard()
    else:
        values = _columns(view(batch, entropy=entropy, statistics=statistics))
    names = ["logprobs", *(["entropy"] if entropy else []), *map(str, statistics)]
    return {name: forest.rows.by_token(value, batch) for name, value in zip(names, values, strict=True)}


def _columns(out: ModelOutput) -> list[Tensor]:
    """Returns log-probs, entropies if there are any, and statistics, [E] each."""
    return [x for x in (out.logprobs, out.entropy) if x is not None] + list(out.statistics.values())


class _Partitions(torch.autograd.Function):
    """Scores of a tree in partitions. Differentiating them runs nested forward and backward passes."""

    @staticmethod
    def forward(
        ctx: Any,
        view: TreeView,
        partitions: Sequence[TreeBatch],
        num_edges: int,
        entropy: bool,
        statistics: Collection[Statistic],
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns log-probs, entropies on request, and ``statistics``, [E] each."""
        ctx.view, ctx.partitions, ctx.parameters = view, partitions, parameters
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None
        ctx.device = view.embedding_weight.device
        outputs = forward_passes(view, partitions, ctx.device, entropy=entropy, statistics=statistics)
        columns = _columns(join_outputs(outputs, num_edges))
        ctx.mark_non_differentiable(*columns[1 + entropy :])
        ctx.entropy = entropy
        return tuple(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by_name = dict(zip(("logprobs", "entropy")[: 1 + ctx.entropy], gradients, strict=False))
        wanted = {name: gradient for name, gradient in by_name.items() if gradient is not None}

        def loss(batch: TreeBatch, out: ModelOutput) -> Tensor:
            edges = batch.edge_number
            return torch.stack([(g[edges] * getattr(out, name)).sum() for name, g in wanted.items()]).sum()

        # FSDP2 sums gradients and frees gathered weights when the backward pass of all parameters has ended.
        with torch.enable_grad(), _gathered(_units(ctx.view)), _leaves(ctx.view) as leaves:
            train_micro_batch(ctx.view, ctx.partitions, loss, ctx.device, entropy="entropy" in wanted)
        return (None,) * 5 + tuple(leaves[id(parameter)].grad for parameter in ctx.parameters)


def _units(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of a model whose weights FSDP2 gathers together, such as layers."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def _gathered(units: Sequence[FSDPModule]) -> Iterator[None]:
    """Gathers all weights. Passes within the context then run without communication between ranks.

    FSDP2 takes these passes for the recomputation of a layer during its backward pass, in which the hooks of
    the layer neither free weights nor sum gradients.
    """
    states = [unit._get_fsdp_state() for unit in units]
    for unit, state in zip(units, states, strict=True):
        unit.unshard()
        state._training_state = TrainingState.PRE_BACKWARD
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE


@contextmanager
def _leaves(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replaces trained parameters by leaves that share their memory, and yields these by the former's ids.

    Backward passes of partitions add to the gradients of the leaves. A parameter itself therefore gets its
    gradient once, as hooks of distributed wrappers expect.
    """
    leaves: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    replaced.append((module, name, parameter))
                    setattr(module, name, leaves.setdefault(id(parameter), nn.Parameter(parameter.detach())))
        yield leaves
    finally:
        for module, name, parameter in replaced:
            setattr(module, name, parameter)


def _check_modules(model: PreTrainedModel) -> None:
    """Raises UserError if a module of the model is not what TransformersModel takes it for."""
    name = getattr(model.config, "name_or_path", "") or "model"
    check_supported(model.config, name, TreeView.quantization)
    if getattr(getattr(model.config, "quantization_config", None), "load_in_8bit", False):
        raise UserError(
            f"{name}: load_in_8bit: expected 4 bits on trees, because LLM.int8 chooses outliers by all "
            "tokens of a batch; set load_in_4bit"
        )
    implementation = model.config._attn_implementation
    if implementation not in NAMES:
        raise UserError(
            f"{name}: attn_implementation: expected 'sdpa' or 'eager', with which the model generates while "
            f"titan_tree scores its rows, got {implementation!r}; load the model with one of them"
        )
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"{name}: output projection: expected torch.nn.Linear, got {type(head).__name__}; leave it out "
            "of target_modules and modules_to_save of PEFT"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise UserError(
                f"{name}: {path}: expected no dropout, because a token of a tree has one mask for all of its "
                f"paths, got p = {module.p:g}; set disable_dropout=True, or lora_dropout=0.0 with PEFT"
            )
