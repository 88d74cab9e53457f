"""The Trainer of transformers on trees beside the stock trainer: equal losses and weights."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import PrinterCallback, Trainer, TrainingArguments

from tests.support.hf_families import VOCAB, hf_family
from titan_tree.errors import UserError
from titan_tree.integrations.hugging_face import treeify

pytestmark = pytest.mark.slow  # importing transformers' Trainer takes seconds


def rows() -> list[dict[str, list[int]]]:
    """Rows of 14 to 21 tokens in groups of four with common prefixes of 12, of which no label is trained."""
    draw = torch.Generator().manual_seed(0)

    def tokens(size: int) -> list[int]:
        return torch.randint(3, VOCAB, (size,), generator=draw).tolist()

    prefixes = [tokens(12) for _ in range(4)]
    ends = [tokens(2 + i % 8) for i in range(16)]
    return [{"input_ids": prefixes[i // 4] + end, "labels": [-100] * 12 + end} for i, end in enumerate(ends)]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in batch)
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    whole = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in batch]
    return {
        name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in whole])
        for name, fill in fills.items()
    }


def make(path: Path, cls: type[Trainer] = Trainer, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("compute_metrics",) if name in options}
    arguments = {
        "output_dir": str(path),
        "report_to": [],
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_steps": 10,
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 8,
        "seed": 7,
    }
    trainer = cls(
        model=hf_family("qwen3"),
        args=TrainingArguments(**arguments | options),  # type: ignore[arg-type]
        train_dataset=rows(),  # type: ignore[arg-type]
        eval_dataset=rows()[:4],  # type: ignore[arg-type]
        data_collator=collate,
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


ACCUMULATE = {
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "gradient_checkpointing": True,
}


@pytest.mark.parametrize(
    ("options", "max_tokens"),
    [({}, None), pytest.param(ACCUMULATE, 20, marks=pytest.mark.exhaustive)],
)
def test_ten_steps_equal_those_of_trainer(
    tmp_path: Path, options: dict[str, Any], max_tokens: int | None
) -> None:
    stock, tree = (make(tmp_path, **options) for _ in range(2))
    treeify(tree, max_tokens)
    start = {name: p.clone() for name, p in stock.model.state_dict().items()}
    for trainer in (stock, tree):
        trainer.train()
    one, other = ([log for log in trainer.state.log_history if "loss" in log] for trainer in (stock, tree))
    assert len(one) == 10
    assert [log["loss"] for log in other] == pytest.approx([log["loss"] for log in one], rel=1e-5)
    assert all(log["tree/distinct_tokens"] < log["tree/row_tokens"] for log in other)
    tokens = sum(len(row["input_ids"]) for row in rows()) / options.get("gradient_accumulation_steps", 1)
    logged = [log["tree/row_tokens"] for log in other]  # means over the forward passes of a step
    assert [one + two for one, two in zip(logged[::2], logged[1::2], strict=True)] == [tokens] * 5  # epochs
    weights = tree.model.state_dict()
    moved = max(float((p - start[name]).norm()) for name, p in stock.model.state_dict().items())
    for name, p in stock.model.state_dict().items():
        assert float((p - weights[name]).norm()) <= 1e-5 * moved, name
    assert tree.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)


def test_metrics_get_the_logits_of_rows(tmp_path: Path) -> None:
    stock, tree = (
        make(tmp_path, compute_metrics=lambda x: {"sum": float(x.predictions.sum())}) for _ in range(2)
    )
    treeify(tree)
    want, found = (trainer.evaluate()["eval_sum"] for trainer in (stock, tree))
    assert found == pytest.approx(want, rel=1e-5)


class WithLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_other_losses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^treeify: WithLoss: expected a trainer of transformers, or of T"):
        treeify(make(tmp_path, WithLoss))
    trainer = make(tmp_path)
    trainer.model.loss_function = print
    with pytest.raises(
        UserError, match=r"^treeify: loss_function: expected ForCausalLMLoss of transf.*print; use a c"
    ):
        treeify(trainer)
    trainer = make(tmp_path)
    treeify(trainer)
    with pytest.raises(UserError, match=r"^treeify: Trainer: expected a model that treeify has not changed"):
        treeify(trainer)
