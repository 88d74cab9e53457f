"""TRL's SFT, DPO, KTO and RLOO on trees beside the stock trainers, and what they leave unchanged."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.trl_runs import (
    ACCUMULATE,
    LORA,
    PACKED,
    Run,
    assert_equal,
    cases,
    make_other,
    run,
    save_model,
)

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PrinterCallback
from trl import DPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer

from titan_tree.integrations.hugging_face import treeify

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trl")]  # importing trl takes ten seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SFT": (SFTTrainer, {}),
    "SFT, dft": (SFTTrainer, {"loss_type": "dft", **ACCUMULATE}),
    "SFT, padding-free": (SFTTrainer, {"padding_free": True, "max_length": None}),
    "SFT, packed": (SFTTrainer, PACKED),
    "SFT, wrapped": (SFTTrainer, {**PACKED, "packing_strategy": "wrapped"}),
    "DPO": (DPOTrainer, {}),
    "DPO, weighting": (DPOTrainer, {"use_weighting": True}),
    "DPO, LoRA": (DPOTrainer, {"adapter": LORA}),
    "DPO, reference ahead": (DPOTrainer, {"precompute_ref_log_probs": True}),
    "KTO": (KTOTrainer, {}),
    "RLOO": (RLOOTrainer, {"num_generations": 4, "max_completion_length": 12, "beta": 0.05}),
    "RLOO, two iterations, accumulation": (
        RLOOTrainer,
        {"num_generations": 4, "max_completion_length": 12, "beta": 0.05, "num_iterations": 2, **ACCUMULATE},
    ),
}


LONG_TAIL = ("SFT, wrapped", "DPO, reference ahead", "RLOO, two iterations, accumulation")


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[[str, int], Any]:
    """Returns a function that makes the trainer of a case, for a number of steps."""
    return lambda name, steps: make_other(OTHERS[name][0], folder, **OTHERS[name][1], max_steps=steps)


@pytest.fixture(scope="module")
def stock(make: Callable[[str, int], Any]) -> Callable[[str, int], Run]:
    """Returns the run of the stock trainer for a case and a number of steps. Each is trained once."""
    return functools.cache(lambda name, steps: run(make(name, steps)))


@pytest.mark.parametrize(
    ("name", "max_tokens", "steps"), cases(OTHERS, LONG_TAIL, ("SFT, padding-free", "DPO, weighting"))
)
def test_other_trainers(
    make: Callable[[str, int], Any],
    stock: Callable[[str, int], Run],
    name: str,
    max_tokens: int | None,
    steps: int,
) -> None:
    trainer = make(name, steps)
    treeify(trainer, max_tokens)
    tree = run(trainer)
    assert_equal(stock(name, steps), tree)
    assert tree.logs[0]["tree/distinct_tokens"] <= tree.logs[0]["tree/row_tokens"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("max_tokens", [None, 30])
def test_qlora(folder: Path, max_tokens: int | None) -> None:
    """4 bits of bitsandbytes. TRL's adapters are bf16 then; in fp32, rounding cannot hide an error."""
    pytest.importorskip("bitsandbytes")

    def make() -> Any:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        options = {"max_steps": 10, "gradient_checkpointing": True}
        trainer = make_other(SFTTrainer, folder, LORA, quantization, **options)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return trainer

    tree = make()
    treeify(tree, max_tokens)
    assert_equal(run(make()), run(tree))


def test_the_model_generates_and_saves_as_before(folder: Path, tmp_path: Path) -> None:
    trainer = make_other(SFTTrainer, folder, max_steps=1)
    model, ids = trainer.model, torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding

    def outputs(model: Any) -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits
        return logits, model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    before, names = outputs(model), list(model.state_dict())
    treeify(trainer, 30)
    assert all(map(torch.equal, before, outputs(model)))
    assert list(model.state_dict()) == names
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(map(torch.equal, outputs(loaded), outputs(model)))
    assert not torch.equal(outputs(model)[0], before[0])
