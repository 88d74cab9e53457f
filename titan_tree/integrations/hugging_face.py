"""TRL's trainers on token trees: the rows of a batch share the computation of their common prefixes.

    TreeGRPOTrainer(...)       GRPO; takes the arguments of trl.GRPOTrainer
    score_on_trees(trainer)    any trainer that scores rows by TRL's fused head, such as SFT and DPO

In TRL 1.16, these trainers score rows by one call, ``model(input_ids, attention_mask, labels,
fused_lm_head=True)``. titan_tree answers this call with a forward pass over the forest of the rows. Losses,
metrics, generation, PEFT and checkpoints stay TRL's. No other file imports trl.

GRPO scores the rows of an optimizer step in its first micro-batch. TRL then computes the loss of each
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
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.integrations.rows import Rows

try:
    import trl
    from trl.trainer.utils import FusedCausalLMOutput

    from titan_tree.integrations.tree_view import TreeView, row_scores  # needs transformers
except ImportError as error:
    raise UserError(
        f"titan_tree.integrations.trl needs the package trl ({error}); run pip install 'titan_tree[trl]'"
    ) from None

VERSION = "1.16.0"
if trl.__version__ != VERSION:
    raise UserError(
        f"titan_tree.integrations.trl: expected trl {VERSION}, got {trl.__version__}; run pip install "
        "'titan_tree[trl]'"
    )

MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16}
# Settings of TRL's configurations that must be off, and why or what to do.
REFUSED_SETTINGS = {
    "use_liger_kernel": "titan_tree has kernels of its own",
    "torch_compile": "trees have other sizes in every step",
    "neftune_noise_alpha": "a token of a tree has one noise for all of its paths",
    "activation_offloading": "use gradient_checkpointing or max_tokens",
    "label_smoothing_factor": "it needs logits of all tokens",
}
# Arguments of the fused head that do not change what it returns.
IGNORED = {"use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class TreeGRPOTrainer(trl.GRPOTrainer):
    """GRPO on token trees: current, old and reference log-probs share prefixes. TRL does everything else.

    All rows of an optimizer step are one forest. ``per_device_train_batch_size`` only says over which rows
    TRL computes a loss. If TRL generates within an optimizer step, each generation is a forest.

    Args:
        args, kwargs: those of trl.GRPOTrainer.
        max_tokens: maximum tokens of one forward pass, see ``score_on_trees``.
    Raises:
        UserError: see ``score_on_trees``.
    """

    def __init__(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        score_on_trees(self, max_tokens)
        self._scored: list[tuple[Tensor, Tensor]] = []  # log-probs and entropies of the next micro-batches
        self._left = 0  # micro-batches of this optimizer step that have no scores yet

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL does. What an interrupted call has left of a step is forgotten."""
        self._scored, self._left = [], 0
        return super().train(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
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
        score = super()._get_per_token_logps_and_entropies
        if not torch.is_grad_enabled():  # old and reference log-probs, evaluation
            return score(model, input_ids, attention_mask, logits_to_keep, None, compute_entropy, **kwargs)
        if not self._scored:
            self._left = self._left or self.current_gradient_accumulation_steps
            buffered: Any = self._buffered_inputs
            start = self._step % len(buffered)
            parts = buffered[start : start + self._left]
            self._left -= len(parts)
            ids, mask = (
                torch.cat([torch.cat([part[f"prompt_{x}"], part[f"completion_{x}"]], 1) for part in parts])
                for x in ("ids", "mask")
            )
            with _reduced(model) if self._left == 0 else nullcontext():
                logprobs, entropies, _ = score(model, ids, mask, logits_to_keep, None, True, **kwargs)
            self._scored = list(zip(*(_parts(x, len(input_ids)) for x in (logprobs, entropies)), strict=True))
        return *self._scored.pop(0), None


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


def score_on_trees(trainer: Any, max_tokens: int | None = None) -> None:
    """Makes a trainer of TRL score its rows on token trees. Call it once, before ``trainer.train()``.

    It replaces the forward method of the trainer's model, and of its reference model, for calls of TRL's
    fused head. All other calls, such as those of ``generate``, run as before. Logs get two more metrics, the
    means over forward passes of this rank: tree/row_tokens and tree/distinct_tokens.

    Args:
        trainer: such as trl.SFTTrainer or trl.DPOTrainer. Padding-free and packed batches work, too.
        max_tokens: maximum tokens of one forward pass. A larger forest runs in partitions, forward once more
            in the backward pass. None runs every micro-batch in one pass.
    Raises:
        UserError: the trainer does not use the fused head, or the model or a setting cannot be used on trees.
    """
    _check_trainer(trainer)
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    if max_tokens is not None and checkpointing.get("use_reentrant"):
        raise UserError(
            "score_on_trees: gradient_checkpointing_kwargs: expected use_reentrant = False with max_tokens, "
            "because reentrant checkpointing hides the keys that partitions read"
        )
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"score_on_trees: max_tokens: expected at least 2, got {max_tokens}")

    def log(row_tokens: int, distinct_tokens: int) -> None:
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        metrics["tree/row_tokens"].append(float(row_tokens))
        metrics["tree/distinct_tokens"].append(float(distinct_tokens))

    dtype = MIXED_PRECISION[trainer.accelerator.mixed_precision]
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            inner = trainer.accelerator.unwrap_model(model)
            _replace_head(
                inner.get_base_model() if hasattr(inner, "get_base_model") else inner, max_tokens, dtype, log
            )


def _replace_head(
    model: Any, max_tokens: int | None, dtype: torch.dtype | None, log: Callable[[int, int], None]
) -> None:
    """Replaces the fused head of a model of transformers."""
    fused = getattr(model, "_original_forward", model.forward)  # accelerate may have wrapped it
    options = inspect.getclosurevars(fused).nonlocals
    if "cast_lm_head_to_fp32" not in options:
        raise UserError(
            "score_on_trees: expected a model that scores rows by TRL's fused head, got "
            f"{type(model).__name__} without it; pass a new trainer for SFT, DPO, KTO or RLOO, and only once"
        )
    if options["cast_lm_head_to_fp32"]:
        raise UserError("cast_lm_head_to_fp32: expected False on trees, whose logits are fp32 in any case")
    head = _TreeHead(TreeView(model, dtype), options["temperature"], options["outputs"], max_tokens, log)
    stock = model.forward

    @functools.wraps(stock)  # ``generate`` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return head(*args, **kwargs) if fused_lm_head else stock(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


class _TreeHead:
    """Returns what TRL's fused head returns, from a forward pass over the forest of the rows.

    Args:
        view: the model.
        temperature: divides the logits.
        outputs: fields of FusedCausalLMOutput that the trainer needs.
        max_tokens: see ``score_on_trees``.
        log: gets the tokens of the rows and the tokens that were computed.
    """

    def __init__(
        self,
        view: TreeView,
        temperature: float,
        outputs: tuple[str, ...],
        max_tokens: int | None,
        log: Callable[[int, int], None],
    ) -> None:
        self.view, self.temperature, self.max_tokens, self.log = view, temperature, max_tokens, log
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
    ) -> FusedCausalLMOutput:
        """Scores rows.

        Args:
            input_ids: [B, T], or [1, T] with all rows one after another if position_ids are given.
            labels: [B, T], the token itself or -100.
            attention_mask, position_ids: exactly one of them, [B, T].
            num_items_in_batch: divisor of the loss; None: the number of labels.
        """
        if unknown := sorted(name for name in others.keys() - IGNORED if others[name] is not None):
            raise UserError(f"model: {', '.join(unknown)}: expected text rows without it; remove the setting")
        rows = self._rows(input_ids, labels, attention_mask, position_ids)
        self.log(rows.tree.stats.n_flat, len(rows.tree))
        values = row_scores(self.view, rows, self.entropy, self.statistics, self.max_tokens)
        logprobs, *columns = (value.view(input_ids.shape)[:, :-1] for value in values.values())
        mask = labels[:, 1:] != -100
        divisor = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        fields = dict(zip([*(["entropy"] if self.entropy else []), *self.statistics], columns, strict=True))
        return FusedCausalLMOutput(
            loss=-logprobs.sum() / divisor, log_probs=logprobs, label_mask=mask, **fields
        )

    def _rows(
        self, tokens: Tensor, labels: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Rows:
        tokens, labels = tokens.cpu(), labels.cpu()
        scored = labels != -100
        if not torch.equal(tokens[scored], labels[scored]):
            raise UserError("labels: expected the token itself or -100, got other tokens; check the collator")
        if attention_mask is not None and position_ids is None:
            rows = Rows.padded(tokens, attention_mask, scored, self.temperature)
        elif position_ids is not None and attention_mask is None and len(tokens) == 1:
            offsets = _offsets(position_ids[0].cpu())
            rows = Rows.jagged(tokens[0], offsets, scored[0], self.temperature)
        else:
            raise UserError(
                "model: expected rows with an attention_mask, or one padding-free row with position_ids, got "
                f"{'both' if position_ids is not None else 'neither'} and {len(tokens)} rows"
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


def _check_trainer(trainer: Any) -> None:
    """Raises UserError if a setting of the trainer cannot be used on trees."""

    def refuse(setting: str, expected: object, got: object, reason: str) -> None:
        raise UserError(
            f"{type(trainer).__name__}: {setting}: expected {expected} on trees, got {got}: {reason}"
        )

    for name, reason in REFUSED_SETTINGS.items():
        if value := getattr(trainer.args, name, None):
            refuse(name, "none", value, reason)
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        if getattr(trainer, name):
            refuse(name, False, True, "several ranks need DistributedDataParallel")
    if (parallelism := trainer.accelerator.parallelism_config) is not None and parallelism.total_size > 1:
        refuse("parallelism_config", "none", parallelism, "several ranks need DistributedDataParallel")
    if trainer.accelerator.mixed_precision not in MIXED_PRECISION:
        refuse(
            "mixed precision", "bf16 or none", trainer.accelerator.mixed_precision, "it has not been tested"
        )
    if callable(trainer.compute_loss_func):  # with some versions of transformers, TRL sets it to a string
        refuse("compute_loss_func", "none", "a function", "it needs logits of all tokens")
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
        refuse("peft_config", "adapters of layers", "prompt learning", "it adds tokens to every row")
