"""treeify: makes a trainer of transformers or TRL compute on token trees. See docs/trl.md.

    treeify(trainer)

TRL scores rows by one call, ``model(input_ids, attention_mask, labels, fused_lm_head=True)``. titan_tree
answers this call with a forward pass over the forest of the rows (fused_head.py). The Trainer of transformers
is made to use the same call. GRPO and RLOO score all rows of an optimizer step at once (step_forests.py).
Losses, metrics, generation, PEFT and checkpoints stay those of the trainer.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from titan_tree.distributed.compiling import compile_modules
from titan_tree.errors import UserError

try:
    from transformers import Trainer

    from titan_tree.integrations.fused_head import Forests, FusedHead
    from titan_tree.integrations.step_forests import StepForests
    from titan_tree.integrations.tree_view import TreeView
    from titan_tree.models.lora.peft import KNOWN_FIELDS
    from titan_tree.models.transformers.attention_function import NAMES
except ImportError as error:
    raise UserError(
        f"titan_tree.integrations.hugging_face: {error}; run pip install 'titan_tree[transformers]', or "
        "'titan_tree[trl]'"
    ) from None

logger = logging.getLogger(__name__)

TESTED_TRL = ("1.15", "1.16")  # what the tests have run
# The options with which TRL adds its fused head to a model. Another one must have its default.
HEAD_OPTIONS = ("temperature", "cast_lm_head_to_fp32", "outputs")
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
# Types of PEFT's adapters that change each token by itself, so that its result is right for all of its paths.
# Others depend on rows, as prompt learning and XLORA, mix tokens (LILY), or draw random numbers (PVERA).
TOKENWISE = frozenset(
    {
        *("BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA"),
        *("IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA"),
        *("ROAD", "SHIRA", "SUPERTUNING", "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
    }
)
# Options with which LoRA is such an adapter. Activated LoRA (aLoRA), in contrast, counts from a row's end.
LORA_OPTIONS = KNOWN_FIELDS | {
    *("corda_config", "eva_config", "fan_in_fan_out", "loftq_config", "lora_bias", "lora_ga_config"),
    *("modules_to_save", "use_dora"),
}


def treeify(trainer: Any, max_tokens: int | None = None, compile: bool | None = None) -> None:
    """Makes a trainer score its rows on token trees. Call it once, before ``trainer.train()``.

    It replaces the forward method of the trainer's model, and of its reference model, for calls of the fused
    head. All other calls, such as those of ``generate``, run as before, but are refused in a training step.
    Logs get two more metrics, the means over forward passes of this rank: tree/row_tokens and
    tree/distinct_tokens.

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
    forests = Forests(max_tokens, 1 + (getattr(trainer.args, "steps_per_generation", None) or 1))
    dtype = MIXED_PRECISION[trainer.accelerator.mixed_precision]
    for wrapped in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
        model = _unwrapped(trainer, wrapped)
        if model.config._attn_implementation in NAMES.values():
            raise UserError(
                f"treeify: {type(trainer).__name__}: expected a model that treeify has not changed yet; call "
                "it once for a trainer, and load the model again for a new one"
            )
        options = _head_options(trainer, model)
        head = FusedHead(TreeView(model, dtype), forests, log, **options)
        _add_head(model, head)
        if trainer.args.device.type == "cuda" if compile is None else compile:
            compile_modules(head.view, head.view.layers, fullgraph=False)
    if hasattr(trainer, "_get_per_token_logps_and_entropies"):
        StepForests(trainer)
    elif _has_stock_loss(trainer):
        _use_head(trainer)


def _unwrapped(trainer: Any, model: Any) -> Any:
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _has_stock_loss(trainer: Any) -> bool:
    return type(trainer).compute_loss is Trainer.compute_loss


def _head_options(trainer: Any, model: Any) -> dict[str, Any]:
    """Returns the temperature and the outputs of the fused head, which TRL has added to its models."""
    forward = getattr(model, "_original_forward", model.forward)  # accelerate may have wrapped it
    forward = inspect.unwrap(forward, stop=_is_fused)
    if _is_fused(forward):
        options = inspect.getclosurevars(forward).nonlocals if inspect.isroutine(forward) else {}
        _check_trl(trainer, options)
        if options["cast_lm_head_to_fp32"]:
            raise UserError(
                "cast_lm_head_to_fp32: expected False on trees, whose logits are fp32 in any case"
            )
        return {"temperature": options["temperature"], "outputs": options["outputs"]}
    if not _has_stock_loss(trainer):
        raise UserError(
            f"treeify: {type(trainer).__name__}: expected a trainer of transformers, or of TRL "
            f"{TESTED_TRL[0]} or later for SFT, DPO, KTO, GRPO or RLOO, whose model takes fused_lm_head; "
            "others have losses of their own, so train them without treeify"
        )
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        raise UserError(
            f"treeify: loss_function: expected ForCausalLMLoss of transformers, got {loss}; use a "
            "causal language model"
        )
    return {"temperature": 1.0, "outputs": ("log_probs",)}


def _is_fused(forward: Callable[..., object]) -> bool:
    return "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters


def _check_trl(trainer: Any, options: Mapping[str, object]) -> None:
    """Raises UserError if TRL lacks what treeify reads and replaces. Warns if no test has run its version.

    Args:
        options: the options of the fused head, and whatever else it reads, by name.
    """
    add_head = getattr(import_module("trl.trainer.utils"), "add_fused_lm_head", None)
    unmet = [] if add_head else ["add_fused_lm_head in trl.trainer.utils"]
    unmet += [f"{name} in the fused head" for name in HEAD_OPTIONS if name not in options]
    for name, option in inspect.signature(add_head).parameters.items() if add_head else ():
        if name not in ("model", *HEAD_OPTIONS) and options.get(name, UserError) != option.default:
            unmet.append(f"{name} = {option.default} in the fused head")
    if score := getattr(trainer, "_get_per_token_logps_and_entropies", None):
        _, *wanted, _ = inspect.signature(StepForests.scores).parameters
        if [*inspect.signature(score).parameters][: len(wanted)] != wanted:
            unmet.append(f"{score.__name__}({', '.join(wanted)}, ...)")
        unmet += [name for name in ("_buffered_inputs", "_step") if not hasattr(trainer, name)]
    installed, tested = version("trl"), " and ".join(TESTED_TRL)
    if unmet:
        raise UserError(
            f"treeify: trl {installed}: expected {', '.join(unmet)}, as in trl {tested}; run pip install "
            f"'trl=={TESTED_TRL[-1]}.*'"
        )
    if ".".join(installed.split(".")[:2]) not in TESTED_TRL:
        _warn(f"treeify: trl {installed} has not been tested, trl {tested} have been; compare some steps")


@functools.cache
def _warn(message: str) -> None:
    """Warns once, however many models and trainers there are."""
    logger.warning(message)


def _add_head(model: Any, head: FusedHead) -> None:
    """Lets ``head`` answer the calls of the fused head of a model of transformers."""
    stock = model.forward

    @functools.wraps(stock)  # ``generate`` and Trainer read the signature
    def forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head and model.training and torch.is_grad_enabled():
            raise UserError(
                "model: expected fused_lm_head = True in training on trees, got a call on rows; use a loss "
                "of the trainer, and torch.no_grad() for other calls"
            )
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


def _check_trainer(trainer: Any) -> None:
    """Raises UserError if a setting of the trainer cannot be used on trees."""
    if not isinstance(trainer, Trainer):
        got = f"the class {trainer.__name__}" if isinstance(trainer, type) else type(trainer).__name__
        raise UserError(
            f"treeify: expected a trainer of transformers or TRL, got {got}; make a "
            "trainer of the model, and call treeify(trainer) before trainer.train()"
        )

    def refuse(setting: str, expected: object, got: object, reason: str) -> None:
        raise UserError(
            f"{type(trainer).__name__}: {setting}: expected {expected} on trees, got {got}: {reason}"
        )

    if "AsyncGRPOTrainer" in (cls.__name__ for cls in type(trainer).__mro__):
        raise UserError(
            f"treeify: {type(trainer).__name__}: TRL's AsyncGRPOTrainer computes on trees by itself; call "
            "train() without treeify"
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
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
        if kind not in TOKENWISE:
            types = ", ".join(sorted(TOKENWISE))
            refuse("peft_config", f"one of {types}", kind, "it has not been exact on trees; use LoRA")
        for option, value in adapter.to_dict().items():
            if value and "dropout" in option and option != "lora_dropout":
                refuse(f"peft_config.{option}", 0, value, "a token has one mask for all of its paths")
            if value and kind == "LORA" and option not in LORA_OPTIONS:
                refuse(f"peft_config.{option}", "none", value, "it may depend on rows; use LoRA without it")
