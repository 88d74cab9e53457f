"""TreeEngine: verl's FSDP2 engine, with the rows of a mini-batch as token trees.

verl loads it by the environment variable ``VERL_USE_EXTERNAL_MODULES=titan_tree.integrations.verl``. It then
takes the place of the engine "fsdp2" of language models on NVIDIA's GPUs. Rollouts, advantages, losses,
optimizer, checkpoints and the transfer of weights stay those of verl.

    jagged rows -> Rows -> trees -> TreeStep -> log_probs and entropy per row -> verl's loss -> gradients
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.integrations.rows import RowLoss, Rows
from titan_tree.models.transformers.in_place import InPlaceModel

try:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_id
    from verl.utils.model import extract_multi_modal_inputs
    from verl.workers.config import FSDPEngineConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import postprocess_batch_func
except ImportError as error:
    raise UserError(
        f"titan_tree.integrations.verl needs verl 0.9.1 ({error}); see docs/verl.md for how to install it"
    ) from None

VERSION = "0.9.1"  # the version of verl: the engine relies on more than its public interface
if (installed := version("verl")) != VERSION:
    raise UserError(
        f"titan_tree.integrations.verl: expected verl {VERSION}, got {installed}; install that version, or "
        "unset VERL_USE_EXTERNAL_MODULES"
    )

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


@EngineRegistry.register("language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class TreeEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine, which computes every distinct token of a rank's mini-batch once.

    Forward and backward passes cover the whole mini-batch of the rank, so settings of micro-batches have no
    effect. With ``use_dynamic_bsz``, ``max_token_len_per_gpu`` is the largest number of tokens of one forward
    pass; larger trees run in partitions.

    Attributes:
        tree_model: the view of ``module`` that runs on trees.

    Raises:
        UserError: the model or a setting is not supported on trees.
    """

    tree_model: InPlaceModel

    def __init__(
        self, model_config: HFModelConfig, engine_config: FSDPEngineConfig, *others: Any, **named: Any
    ) -> None:
        _check_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, *others, **named)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        self.tree_model = InPlaceModel(module)
        return module

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_fsdp_module(module)
        self.tree_model.wrapped_by(module, self._autocast_dtype, get_device_id())
        return module

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Computes log-probs and the loss of the rank's rows and, unless ``forward_only``, its gradients.

        Args:
            data: rows as verl's engines get them, with jagged ``input_ids``.
            loss_function: called once, with all rows of the rank.
        Returns:
            "model_output" with jagged "log_probs" and, if ``calculate_entropy``, "entropy". Entry t of a row
            speaks of its token t + 1. Entries of a prompt are 0. "loss" and "metrics" are lists, as in verl.
        """
        _check_batch(data)
        budget = _token_budget(data)
        data = self._with_sizes(data)
        rows, offsets = _rows(data), data["input_ids"].offsets()
        needs_entropy = bool(_option(data, "calculate_entropy"))
        output: dict[str, Tensor] = {}
        metrics: dict[str, Any] = {}

        def compute_loss(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
            values = {"log_probs": log_probs, "entropy": entropy}
            jagged = {
                name: torch.nested.nested_tensor_from_jagged(value, offsets)
                for name, value in values.items()
                if value is not None
            }
            output.update({name: value.detach() for name, value in jagged.items()})
            if loss_function is None:
                return torch.ones((), device=log_probs.device)  # as verl reports it
            group = self.get_data_parallel_group()
            loss, loss_metrics = loss_function(model_output=jagged, data=data, dp_group=group)
            metrics.update(loss_metrics)
            return loss

        loss = RowLoss(rows, compute_loss, entropy=needs_entropy)
        step = TreeStep(
            self.tree_model,
            loss,
            get_device_id(),
            None if budget is None else TreePartitioner("auto", budget),
            reduce_gradients="every"
            if budget is None and self.engine_config.reshard_after_forward
            else "last",
        )
        prepared = step.prepare([[rows.tree]])
        if forward_only:
            batch, scores = step.score(prepared)[0]
            self.module.reshard()  # the sampling engine may need the memory
            loss(scores["logprobs"], batch, 1.0, scores.get("entropy"))
        else:
            step.run(prepared)
        result = {"loss": loss.value.item(), "metrics": metrics}
        if forward_only or _option(data, "return_model_output"):
            result["model_output"] = output
        return postprocess_batch_func([result], None, data)

    def _with_sizes(self, data: TensorDict) -> TensorDict:
        """Returns the data on the device, with the sizes that verl's losses read."""
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        data = data.copy().to(get_device_id())
        tensordict_utils.assign_non_tensor(
            data,
            sp_size=1,
            batch_num_tokens=tokens.item(),
            dp_size=self.get_data_parallel_size(),
            use_dynamic_bsz=False,  # rows stay in their order
        )
        return data


def _rows(data: TensorDict) -> Rows:
    """Returns the rows of a batch. Tokens of responses are scored; all tokens, if it knows no responses."""
    ids, scored = data["input_ids"], None
    offsets = ids.offsets()
    if "prompts" in data:
        prompts = data["prompts"]
        if prompts.is_nested:
            prompt_lengths = prompts.offsets().diff()
        else:
            prompt_lengths = data["attention_mask"][:, : prompts.shape[1]].sum(1)
        first = (offsets[:-1] + prompt_lengths).repeat_interleave(offsets.diff())
        scored = torch.arange(len(first), device=first.device) >= first
    return Rows.jagged(ids.values(), offsets, scored, data["temperature"])


def _token_budget(data: TensorDict) -> int | None:
    """Returns the largest number of tokens of a forward pass, or None without a limit."""
    if not _option(data, "use_dynamic_bsz", True):
        return None
    budget = _option(data, "max_token_len_per_gpu")
    if budget is None:
        raise UserError(
            "verl: max_token_len_per_gpu: missing, although use_dynamic_bsz is true; set "
            "actor.ppo_max_token_len_per_gpu and rollout.log_prob_max_token_len_per_gpu"
        )
    return int(budget)


def _option(data: TensorDict, name: str, default: Any = None) -> Any:
    return tensordict_utils.get_non_tensor_data(data, name, default)


def _check_settings(model: HFModelConfig, engine: FSDPEngineConfig) -> None:
    precision = (engine.mixed_precision or {}).get("param_dtype", "bf16")
    for setting, value, expected in (
        ("strategy", engine.strategy, "fsdp2"),
        ("ulysses_sequence_parallel_size", engine.ulysses_sequence_parallel_size, 1),
        ("router_replay.mode", engine.router_replay.mode, "disabled"),
        ("qat.enable", engine.qat.enable, False),
        ("pad_to_length", engine.pad_to_length, False),
        ("mixed_precision.param_dtype", "fp16" if precision in ("fp16", "float16") else "bf16", "bf16"),
        ("use_fused_kernels", engine.use_fused_kernels or model.use_fused_kernels, False),
        ("use_liger", model.use_liger, False),
        ("enable_activation_offload", model.enable_activation_offload, False),
        ("mtp.enable_train", model.mtp.enable_train, False),
    ):
        if value != expected:
            raise UserError(
                f"verl: {setting}: expected {expected!r} on token trees, got {value!r}; change it, or unset "
                "VERL_USE_EXTERNAL_MODULES to train without trees"
            )


def _check_batch(data: TensorDict) -> None:
    names = "use_fused_kernels", "distillation_use_topk", "distillation_only", "calculate_sum_pi_squared"
    for name in names:
        if _option(data, name, False):
            raise UserError(f"verl: {name}: expected false on token trees, got true; set it to false")
    has_images = extract_multi_modal_inputs(data.get("multi_modal_inputs", []))
    positions = data.get("position_ids", None)
    if has_images or (positions is not None and positions.dim() > 2):
        raise UserError("verl: multi_modal_inputs: expected text only on token trees; use verl's own engine")
