"""treeify: makes a trainer of transformers or TRL compute on token trees. See docs/trl.md.

    treeify(trainer)

TRL 1.16 scores rows by one call, ``model(input_ids, attention_mask, labels, fused_lm_head=True)``. titan_tree
answers this call with a forward pass over the forest of the rows. The Trainer of transformers is made to use
the same call. Losses, metrics, generation, PEFT and checkpoints stay those of the trainer.

GRPO and RLOO score the rows of an optimizer step in its first micro-batch. TRL then computes the loss of each
micro-batch on its part of the scores:

    micro-batch 1        forward pass over the forest -> scores; loss on detached scores -> their gradient
    micro-batches 2 ..   loss on detached scores -> their gradient
    the last one         loss on scores -> their gradient + the collected one -> backward pass of the forest

The last backward pass is the only one that reaches parameters. Reduction over ranks, scaling and clipping of
gradients therefore work as in one micro-batch. Rows stay in TRL's order.

B rows of T tokens, padding included.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from titan_tree.distributed.compiling import compile_modules
from titan_tree.errors import UserError
from titan_tree.integrations.rows import Rows

try:
    from transformers import Trainer, TrainerCallback
    from transformers.utils import ModelOutput

    from titan_tree.integrations.tree_view import RowForest, TreeView, row_scores
    from titan_tree.models.transformers.attention_function import NAMES
except ImportError as error:
    raise UserError(
        f"titan_tree.integrations.hugging_face: {error}; run pip install 'titan_tree[transformers]', or "
        "'titan_tree[trl]'"
    ) from None

TRL = "1.16.0"
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16}
# Settings of a trainer's arguments that must be off: why, and what to do.
REFUSED_SETTINGS = {
    "use_liger_kernel": "titan_tree has kernels of its own; leave it out",
    "torch_compile": "treeify compiles the layers itself; leave it out",
    "neftune_noise_alpha": "a token of a tree has one noise for all of its paths; leave it out",
    "use_transformers_continuous_batching": "it needs attention of transformers; leave it out",
    "activation_offloading": "use gradient_checkpointing or max_tokens",
    "label_smoothing_factor": "it needs logits of all tokens; leave it out",
}
# Arguments of the fused head that do not change what it returns.
IGNORED = {"use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def treeify(trainer: Any, max_tokens: int | None = None, compile: bool | None = None) -> None:
    """Makes a trainer score its rows on token trees. Call it once, before ``trainer.train()``.

    It replaces the forward method of the trainer's model, and of its reference model, for calls of the fused
    head. All other calls, such as those of ``generate``, run as before. Logs get two more metrics, the means
    over forward passes of this rank: tree/row_tokens and tree/distinct_tokens.

    Args:
        trainer: transformers.Trainer with a causal language model and its own loss, or TRL's trainer of SFT,
            DPO, KTO, GRPO or RLOO. Padding-free and packed batches work, too.
        max_tokens: maximum tokens of one forward pass. A larger forest runs in partitions, forward once more
            in the backward pass. None runs every forest in one pass.
        compile: whether torch.compile compiles the layers, only for passes over trees. None: on a GPU.
    Raises:
        UserError: the trainer has a loss of its own, or the model or a setting cannot be used on trees.
    """
    _check_trainer(trainer)
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"treeify: max_tokens: expected at least 2, got {max_tokens}")
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    if max_tokens is not None and checkpointing.get("use_reentrant"):
        raise UserError(
            "treeify: gradient_checkpointing_kwargs: expected use_reentrant = False with max_tokens, because "
            "reentrant checkpointing hides the keys that partitions read"
        )
    log = _metrics_of(trainer)
    forests = _Forests(max_tokens, 1 + (getattr(trainer.args, "steps_per_generation", None) or 1))
    dtype = MIXED_PRECISION[trainer.accelerator.mixed_precision]
    for wrapped in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        model = _unwrapped(trainer, wrapped)
        if model.config._attn_implementation in NAMES.values():
            raise UserError(
                f"treeify: {type(trainer).__name__}: expected a model that treeify has not changed yet; call "
                "it once for a trainer, and load the model again for a new one"
            )
        options = _head_options(trainer, model)
        head = _Head(TreeView(model, dtype), forests, log, **options)
        _add_head(model, head)
        if trainer.args.device.type == "cuda" if compile is None else compile:
            compile_modules(head.view, head.view.layers, fullgraph=False)
    if hasattr(trainer, "_get_per_token_logps_and_entropies"):
        _StepForests(trainer)
    elif _has_stock_loss(trainer):
        _use_head(trainer)


def _unwrapped(trainer: Any, model: Any) -> Any:
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _has_stock_loss(trainer: Any) -> bool:
    return type(trainer).compute_loss is Trainer.compute_loss


def _head_options(trainer: Any, model: Any) -> dict[str, Any]:
    """Returns the temperature and the outputs of the fused head, which TRL has added to its models."""
    fused = getattr(model, "_original_forward", model.forward)  # accelerate may have wrapped it
    options = inspect.getclosurevars(fused).nonlocals
    if "cast_lm_head_to_fp32" in options:
        if (installed := version("trl")) != TRL:
            raise UserError(
                f"treeify: expected trl {TRL}, got {installed}; run pip install 'titan_tree[trl]'"
            )
        if options["cast_lm_head_to_fp32"]:
            raise UserError(
                "cast_lm_head_to_fp32: expected False on trees, whose logits are fp32 in any case"
            )
        return {"temperature": options["temperature"], "outputs": options["outputs"]}
    if not _has_stock_loss(trainer):
        raise UserError(
            f"treeify: {type(trainer).__name__}: expected a trainer of transformers, or of TRL for SFT, DPO, "
            "KTO, GRPO or RLOO; others have losses of their own, so train them without treeify"
        )
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        raise UserError(
            f"treeify: loss_function: expected ForCausalLMLoss of transformers, got {loss}; use a "
            "causal language model"
        )
    return {"temperature": 1.0, "outputs": ("log_probs",)}


def _add_head(model: Any, head: _Head) -> None:
    """Lets ``head`` answer the calls of the fused head of a model of transformers."""
    stock = model.forward

    @functools.wraps(stock)  # ``generate`` and Trainer read the signature
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return head(*args, **kwargs) if fused_lm_head else stock(*args, **kwargs)

    model.forward = forward


def _use_head(trainer: Any) -> None:
    """Makes a trainer with the loss of transformers call the fused head. Evaluation wants logits of rows."""
    stock = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        head = {} if return_outputs else {"fused_lm_head": True}
        return stock(model, inputs | head, return_outputs, num_items_in_batch)

    trainer.compute_loss = compute_loss


def _metrics_of(trainer: Any) -> Callable[[int, int], None]:
    """Returns a function that takes the tokens of rows and of their forest, and logs their means."""
    own: dict[str, list[float]] = defaultdict(list)
    is_trl = hasattr(trainer, "_metrics")

    def add(row_tokens: int, distinct_tokens: int) -> None:
        metrics = trainer._metrics["train" if trainer.model.training else "eval"] if is_trl else own
        metrics["tree/row_tokens"].append(float(row_tokens))
        metrics["tree/distinct_tokens"].append(float(distinct_tokens))

    if not is_trl:
        plain = trainer.log

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            plain(logs | {name: sum(values) / len(values) for name, values in own.items()}, *args, **kwargs)
            own.clear()

        trainer.log = log
    return add


@dataclass
class TreeOutput(ModelOutput):
    """The fields of TRL's FusedCausalLMOutput: values [B, T - 1] of the next tokens."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class _Head:
    """Returns what TRL's fused head returns, from a forward pass over the forest of the rows.

    Args:
        view: the model.
        forests: those of all models of the trainer.
        log: gets the tokens of the rows and the tokens that were computed.
        temperature: divides the logits.
        outputs: fields of TreeOutput that the trainer needs.
    """

    def __init__(
        self,
        view: TreeView,
        forests: _Forests,
        log: Callable[[int, int], None],
        temperature: float,
        outputs: tuple[str, ...],
    ) -> None:
        self.view, self.forests, self.log, self.temperature = view, forests, log, temperature
        self.entropy = "entropy" in outputs
        self.statistics: Any = [name for name in outputs if name not in ("log_probs", "entropy")]

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> TreeOutput:
        """Scores rows.

        Args:
            input_ids: [B, T], or [1, T] with all rows one after another if position_ids are given.
            labels: [B, T], the token itself or -100.
            attention_mask, position_ids: at most one of them, [B, T]. Neither: all tokens are real.
            num_items_in_batch: divisor of the loss; None: the number of labels.
        """
        if unknown := sorted(name for name in others.keys() - IGNORED if others[name] is not None):
            raise UserError(f"model: {', '.join(unknown)}: expected text rows without it; remove the setting")
        scored = labels != -100
        if ((labels != input_ids) & scored).any():
            raise UserError("labels: expected the token itself or -100, got other tokens; check the collator")
        inputs = {
            "tokens": input_ids.int(),
            "scored": scored,
            "real": None if attention_mask is None else attention_mask.bool(),
            "positions": None if position_ids is None else position_ids.int(),
        }
        forest, order = self.forests.get(
            self.view, {name: x.cpu() for name, x in inputs.items() if x is not None}, self.temperature
        )
        self.log(forest.rows.tree.stats.n_flat, len(forest.rows.tree))
        values = row_scores(self.view, forest, self.entropy, self.statistics)
        logprobs, *columns = (value.view(input_ids.shape)[order, :-1] for value in values.values())
        mask = scored[:, 1:]
        divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        fields = dict(zip([*(["entropy"] if self.entropy else []), *self.statistics], columns, strict=True))
        return TreeOutput(loss=-logprobs.sum() / divisor, log_probs=logprobs, label_mask=mask, **fields)


class _Forests:
    """The forests of the last calls. Rows that come again, in any order, have the forest that they had.

    The old, current and reference log-probs of a step, and all iterations over it, then share one layout.

    Args:
        max_tokens: see ``treeify``.
        size: the number of forests to keep.
    """

    def __init__(self, max_tokens: int | None, size: int) -> None:
        self.max_tokens, self.size = max_tokens, size
        self._kept: dict[object, RowForest] = {}

    def get(
        self, view: TreeView, inputs: Mapping[str, Tensor], temperature: float
    ) -> tuple[RowForest, Tensor]:
        """Returns the forest of rows, and for each of them its index among the rows of the forest, [B].

        Args:
            inputs: the arguments of ``_rows``, on the host.
        """
        data = torch.cat([x.contiguous().view(torch.uint8) for x in inputs.values()], 1)
        rows = [row.tobytes() for row in data.numpy()]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        key = (*inputs, inputs["tokens"].shape, temperature, *(rows[i] for i in order))
        if (forest := self._kept.pop(key, None)) is None:
            in_order = {name: x[order] for name, x in inputs.items()}
            forest = RowForest.make(_rows(temperature=temperature, **in_order), view, self.max_tokens)
            while len(self._kept) >= self.size:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = forest  # the last one is the newest
        return forest, torch.tensor(order).argsort().to(forest.batch.tokens.device)


def _rows(
    tokens: Tensor,
    scored: Tensor,
    real: Tensor | None = None,
    positions: Tensor | None = None,
    temperature: float = 1.0,
) -> Rows:
    """Returns the rows of a call, see ``_Head``.

    Args:
        tokens, positions: [B, T] int32.
        scored, real: [B, T] bool: whether a token has a label, and whether it is none of the padding.
    Raises:
        UserError: labels or positions are not what trees can score.
    """
    if positions is None:
        rows = Rows.padded(tokens, torch.ones_like(scored) if real is None else real, scored, temperature)
    elif real is None and len(tokens) == 1:
        rows = Rows.jagged(tokens[0], _offsets(positions[0]), scored[0], temperature)
    else:
        raise UserError(
            "model: expected rows with an attention_mask, or one padding-free row with position_ids, got "
            f"position_ids, {'no' if real is None else 'an'} attention_mask and {len(tokens)} rows"
        )
    if len(rows.index) != scored[:, 1:].sum():
        raise UserError(
            "labels: expected -100 for padding and for the first token of each row, which nothing "
            "predicts; check the collator"
        )
    return rows


def _offsets(positions: Tensor) -> Tensor:
    """Returns the first token of each row, and the end of the last one, from the positions [T] of tokens."""
    starts = (positions == 0).nonzero()[:, 0]
    offsets = torch.cat([starts, torch.tensor([len(positions)])])
    expected = torch.cat([torch.arange(int(size)) for size in offsets.diff()] or [positions[:0]])
    if not torch.equal(positions, expected.to(positions.dtype)):
        raise UserError("position_ids: expected 0, 1, 2, ... in each row, got other positions")
    return offsets


class _StepForests(TrainerCallback):
    """Scores the rows of an optimizer step of GRPO or RLOO in its first micro-batch, as one forest.

    ``per_device_train_batch_size`` then only says over which rows TRL computes a loss. If TRL generates
    within an optimizer step, each generation is a forest.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.scored: list[tuple[Tensor, Tensor]] = []  # log-probs and entropies of the next micro-batches
        self.score = trainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = self.scores
        self.set_mode = trainer.model.train
        trainer.model.train = self.train
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Forgets what an interrupted call of ``train`` has left of a step."""
        self.scored = []
        self.left = self.trainer.current_gradient_accumulation_steps  # micro-batches without scores

    def train(self, mode: bool = True) -> Any:
        """Sets the mode of all modules, as ``Module.train``. For a micro-batch with scores, no module runs.

        The Trainer calls it in every micro-batch. A visit of all modules would let the GPU wait.
        """
        model = self.trainer.model
        return model if mode and model.training and self.scored else self.set_mode(mode)

    def scores(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores all rows at once. Rows to train on get their scores from the forest of their optimizer step.

        Args:
            batch_size: has no effect.
        """
        if not torch.is_grad_enabled():  # old and reference log-probs, evaluation
            return self.score(
                model, input_ids, attention_mask, logits_to_keep, None, compute_entropy, **kwargs
            )
        if not self.scored:
            buffered = self.trainer._buffered_inputs
            start = self.trainer._step % len(buffered)
            parts = buffered[start : start + self.left]
            self.left -= len(parts)
            ids, mask = (
                torch.cat([torch.cat([part[f"prompt_{x}"], part[f"completion_{x}"]], 1) for part in parts])
                for x in ("ids", "mask")
            )
            with _reduced(model) if self.left == 0 else nullcontext():
                logprobs, entropies, _ = self.score(model, ids, mask, logits_to_keep, None, True, **kwargs)
            self.scored = list(zip(*(_parts(x, len(input_ids)) for x in (logprobs, entropies)), strict=True))
        return *self.scored.pop(0), None


def _parts(values: Tensor, rows: int) -> list[Tensor]:
    """Returns the values of each micro-batch. Backward passes of all but the last one only collect gradients.

    Args:
        values: [B, T] of all micro-batches. Their backward pass is part of the last micro-batch's, and gets
            the collected gradients, too.
        rows: of a micro-batch.
    """
    leaf = values.detach().requires_grad_()
    values.register_hook(lambda gradient: gradient if leaf.grad is None else gradient + leaf.grad)
    return [*leaf.split(rows)[:-1], values.split(rows)[-1]]


@contextmanager
def _reduced(model: Any) -> Iterator[None]:
    """Lets the backward pass of what the model computes in here reduce gradients over ranks.

    DistributedDataParallel decides it in the forward pass, which is within ``no_sync`` of the first
    micro-batch. The backward pass is in the last micro-batch, without ``no_sync``.
    """
    before = getattr(model, "require_backward_grad_sync", None)
    try:
        if before is not None:
            model.require_backward_grad_sync = True
        yield
    finally:
        if before is not None:
            model.require_backward_grad_sync = before


def _check_trainer(trainer: Any) -> None:
    """Raises UserError if a setting of the trainer cannot be used on trees."""

    def refuse(setting: str, expected: object, got: object, reason: str) -> None:
        raise UserError(
            f"{type(trainer).__name__}: {setting}: expected {expected} on trees, got {got}: {reason}"
        )

    if hasattr(trainer, "rollout_queue"):
        raise UserError(
            f"treeify: {type(trainer).__name__}: TRL's asynchronous trainers compute on trees by themselves; "
            "call train() without treeify"
        )
    for name, reason in REFUSED_SETTINGS.items():
        if value := getattr(trainer.args, name, None):
            refuse(name, "none", value, reason)
    several_ranks = "train with DistributedDataParallel or FSDP2"
    if trainer.is_deepspeed_enabled:
        refuse("is_deepspeed_enabled", False, True, several_ranks)
    if trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        if plugin.fsdp_version != 2:
            refuse("fsdp_version", 2, plugin.fsdp_version, several_ranks)
        if hasattr(plugin.cpu_offload, "pin_memory"):  # only CPUOffloadPolicy has it
            refuse("fsdp_offload_params", False, True, "it has not been tested; set it to false")
    if any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters()):
        refuse("model", "whole weights", "sharded ones", "call treeify before the model is sharded")
    if (parallelism := trainer.accelerator.parallelism_config) is not None and parallelism.total_size > 1:
        refuse("parallelism_config", "none", parallelism, several_ranks)
    if trainer.accelerator.mixed_precision not in MIXED_PRECISION:
        got = trainer.accelerator.mixed_precision
        refuse("mixed precision", "bf16 or none", got, "its loss scaling has not been tested; set bf16=True")
    if callable(trainer.compute_loss_func):  # with some versions of transformers, TRL sets it to a string
        refuse("compute_loss_func", "none", "a function", "it needs logits of all tokens; leave it out")
    config = trainer.model.config.get_text_config()
    if getattr(trainer, "aux_loss_enabled", False) or getattr(config, "output_router_logits", False):
        refuse(
            "output_router_logits",
            False,
            True,
            "the router's loss would count distinct tokens instead of rows; set router_aux_loss_coef=0.0",
        )
    adapters = getattr(trainer.model, "peft_config", {}).values()
    if any(adapter.is_prompt_learning for adapter in adapters):
        refuse(
            "peft_config", "adapters of layers", "prompt learning", "it adds tokens to every row; use LoRA"
        )
