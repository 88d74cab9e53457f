"""What TRL's trainers cannot run on trees is refused."""

import functools
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trl_runs import make_other, save_model

pytest.importorskip("trl")

import trl.trainer.utils
from peft import LoKrConfig, LoraConfig, PromptTuningConfig
from transformers import BitsAndBytesConfig
from trl import RLOOTrainer, SFTTrainer

from titan_tree.errors import UserError
from titan_tree.integrations import hugging_face
from titan_tree.integrations.hugging_face import treeify

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trl")]  # importing trl takes ten seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def with_attribute(path: str, value: Any) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, trainer), name, value)

    return change


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "liger": (with_attribute("args.use_liger_kernel", True), "use_liger_kernel: expected none on trees"),
    "compile": (with_attribute("args.torch_compile", True), "torch_compile: expected none on trees"),
    "noise": (with_attribute("args.neftune_noise_alpha", 5.0), "neftune_noise_alpha: expected none on trees"),
    "smoothing": (
        with_attribute("args.label_smoothing_factor", 0.1),
        "label_smoothing_factor: expected none",
    ),
    "batching": (
        with_attribute("args.use_transformers_continuous_batching", True),
        "use_transformers_continuous_batching: expected none on trees, got True: it needs attention",
    ),
    "offloading": (
        with_attribute("args.activation_offloading", True),
        "activation_offloading: expected none",
    ),
    "deepspeed": (with_attribute("is_deepspeed_enabled", True), "is_deepspeed_enabled: expected False"),
    "loss function": (
        with_attribute("compute_loss_func", print),
        "compute_loss_func: expected none on trees",
    ),
    "router": (with_attribute("aux_loss_enabled", True), "output_router_logits: expected False on trees"),
    "flash": (with_attribute("model.config._attn_implementation", "flash_attention_2"), "expected 'sdpa' or"),
    "family": (
        with_attribute("model.config.model_type", "falcon_h1"),
        "falcon_h1 cannot run on trees: each of its layers",
    ),
    "dropout": (
        with_attribute("model.config.attention_dropout", 0.1),
        "attention_dropout: expected 0 on trees",
    ),
    "module": (with_attribute("model.model.drop", torch.nn.Dropout(0.1)), "model.drop: expected no dropout"),
    "quantized": (
        with_attribute("model.config.quantization_config", {"bits": 4}),
        "expected unquantized weights",
    ),
    "8 bits": (
        with_attribute(
            "model.config.quantization_config",
            BitsAndBytesConfig(load_in_8bit=True),
        ),
        "load_in_8bit: expected 4 bits on trees",
    ),
    "twice": (
        treeify,
        "treeify: SFTTrainer: expected a model that treeify has not changed yet; call it once for a trainer",
    ),
    "plain model": (  # as in TRL 1.14
        lambda trainer: trainer.model.__dict__.pop("forward"),
        "treeify: SFTTrainer: expected a trainer of transformers, or of TRL 1.15 or later for SFT, DPO, KTO",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_on_trees_is_refused(folder: Path, name: str) -> None:
    change, message = REFUSALS[name]
    trainer = make_other(SFTTrainer, folder)
    change(trainer)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        treeify(trainer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
            "lora_dropout.default: expected no dropout",
        ),
        (
            LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
            "output projection: expected torch.nn.Linear",
        ),
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "WAVEFT on trees, got PROMPT_TUNING",
        ),
        (
            LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5]),
            "SFTTrainer: peft_config.alora_invocation_tokens: expected none on trees, got [5]",
        ),
        (LoKrConfig(target_modules=["q_proj"], rank_dropout=0.1), "peft_config.rank_dropout: expected 0 on"),
    ],
)
def test_adapters_that_cannot_run_on_trees_are_refused(folder: Path, adapter: Any, message: str) -> None:
    trainer = make_other(SFTTrainer, folder, adapter=adapter)
    with pytest.raises(UserError, match=re.escape(message)):
        treeify(trainer)


def test_a_model_in_place_of_a_trainer_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"treeify: expected a trainer .* got the class SFTTrainer; make a"):
        treeify(SFTTrainer)
    with pytest.raises(UserError, match=r"treeify: expected a trainer .* got Linear; make a trainer of the"):
        treeify(torch.nn.Linear(2, 2))


def test_fp16_is_refused(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"mixed precision: expected bf16 or none on trees, got fp16: .*; set bf16=True$"
    ):
        treeify(make_other(SFTTrainer, folder, fp16=True))


def test_wrong_rows_are_refused(folder: Path) -> None:
    trainer = make_other(SFTTrainer, folder)
    treeify(trainer)
    ids = torch.randint(3, 64, (2, 9))
    good = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "fused_lm_head": True}
    positions = torch.arange(9).repeat(2, 1)
    trainer.model(**good)
    for change, message in (
        ({"labels": ids + 1}, "labels: expected the token itself or -100"),
        ({"attention_mask": positions > 2}, "labels: expected -100 for padding"),
        ({"position_ids": positions}, "got position_ids, an attention_mask and 2 rows"),
        ({"attention_mask": None, "position_ids": positions}, "position_ids, no attention_mask and 2 rows"),
        ({"pixel_values": torch.ones(2)}, "padded rows of a model with images, got a model without tower"),
        ({"output_router_logits": True}, "output_router_logits: expected rows without it"),
        (
            {
                "input_ids": ids[:1],
                "labels": ids[:1],
                "attention_mask": None,
                "position_ids": positions[:1] + 1,
            },
            "position_ids: expected 0, 1, 2, ... in each row",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            trainer.model(**good | change)


def test_the_asynchronous_trainer_is_refused() -> None:
    """TRL 1.18 exports it. Until then, it is experimental."""
    module = "trl" if hasattr(trl, "AsyncGRPOTrainer") else "trl.experimental.async_grpo"
    cls = import_module(module).AsyncGRPOTrainer
    trainer = object.__new__(type("Mine", (cls,), {}))  # its constructor wants a server
    with pytest.raises(UserError, match=r"^treeify: Mine: TRL's AsyncGRPOTrainer computes .*; call train"):
        treeify(trainer)


def test_a_trl_without_what_treeify_reads_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(trainer: Any, message: str) -> None:
        tested = rf"^treeify: trl {version('trl')}: {message}, as in trl 1\.15 and 1\.16; run pip install"
        with pytest.raises(UserError, match=tested):
            treeify(trainer)

    trainer = make_other(SFTTrainer, folder)
    stock = trainer.model.forward
    cast_lm_head_to_fp32, outputs = False, ("log_probs",)

    def without_temperature(*args: Any, fused_lm_head: bool = False) -> Any:
        return cast_lm_head_to_fp32, outputs

    trainer.model.forward = without_temperature
    refused(trainer, "expected temperature in the fused head")

    def with_top_k(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = (),
        top_k: int = 0,
    ) -> None: ...

    trainer.model.forward = stock
    with monkeypatch.context() as patch:
        patch.setattr(trl.trainer.utils, "add_fused_lm_head", with_top_k)
        refused(trainer, "expected top_k = 0 in the fused head")
        patch.delattr(trl.trainer.utils, "add_fused_lm_head")
        refused(trainer, r"expected add_fused_lm_head in trl\.trainer\.utils")
    rloo = make_other(RLOOTrainer, folder, num_generations=4)
    score = rloo._get_per_token_logps_and_entropies
    with monkeypatch.context() as patch:
        patch.delattr(rloo, "_buffered_inputs")
        patch.setattr(rloo, score.__name__, lambda model, ids: None)
        refused(rloo, r"expected \S+\(model, input_ids, .*, compute_entropy, \.\.\.\), _buffered_inputs")
    trl.trainer.utils.add_fused_lm_head(trainer.model, outputs=("log_probs", "support"))
    with pytest.raises(UserError, match="fused head: support: trees lack this output; install an earlier"):
        treeify(trainer)


def test_an_untested_trl_gives_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hugging_face, "version", lambda _: "1.19.0")
    for beta in (0.0, 0.1):  # the second trainer has a reference model
        treeify(make_other(RLOOTrainer, folder, num_generations=4, beta=beta))
    message = "treeify: trl 1.19.0 has not been tested, trl 1.15 and 1.16 have been; compare some steps"
    assert [record.message for record in caplog.records if "treeify" in record.message] == [message]


def test_rows_in_a_training_step_are_refused(folder: Path) -> None:
    """A trainer that does not call the fused head would train without trees."""
    trainer = make_other(SFTTrainer, folder)
    treeify(trainer)
    ids = torch.randint(3, 64, (2, 9))
    with pytest.raises(UserError, match="expected fused_lm_head = True in training on trees, got a call on"):
        trainer.model.train()(input_ids=ids, labels=ids)
    with torch.no_grad():
        assert trainer.model(input_ids=ids, labels=ids).logits.shape == (2, 9, 64)


def test_partitions_that_cannot_run_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="max_tokens: expected at least 2, got 1"):
        treeify(make_other(SFTTrainer, folder), 1)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="expected use_reentrant = False with max_tokens"):
        treeify(make_other(SFTTrainer, folder, **reentrant), 30)
