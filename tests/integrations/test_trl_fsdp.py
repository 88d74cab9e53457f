"""TRL's trainers on trees and sharded by FSDP2, beside the stock trainers sharded alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.trl_runs import (
    ACCUMULATE,
    LORA,
    ON_RANKS,
    Run,
    assert_equal,
    grpo,
    make_other,
    run,
    save_model,
    shard,
    with_tool,
)

pytest.importorskip("trl")

from trl import DPOTrainer, SFTTrainer
from trl.models.utils import prepare_fsdp

from tests.support.processes import as_rank, run_ranks
from titan_tree.errors import UserError
from titan_tree.integrations.hugging_face import treeify

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.xdist_group("trl")]


def sharded(cls: type, folder: Path, tree: dict[str, Any] | None, **options: Any) -> Run:
    trainer = make_other(cls, folder, **{"ddp_backend": "gloo", "max_steps": 10, **options})
    shard(trainer)
    if tree is not None:
        treeify(trainer, **tree)
    return run(trainer)


def with_sharded_reference(trainer: Any) -> None:
    """Shards the model, and the reference model as TRL does."""
    shard(trainer)
    if trainer.ref_model is not None:
        trainer.ref_model = prepare_fsdp(
            trainer.accelerator.unwrap_model(trainer.ref_model), trainer.accelerator
        )


def train_others(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(rank, 2, ports[0]):
        for cls, options in (
            (SFTTrainer, {}),
            (SFTTrainer, ACCUMULATE),
            (DPOTrainer, {"adapter": LORA, "gradient_checkpointing": True}),
        ):
            stock = sharded(cls, folder, None, **options)
            # The ranks may have different numbers of partitions. In the last case, one rank has only one.
            for max_tokens in (None, 30, (30, 10_000)[rank]):
                tree = sharded(cls, folder, {"max_tokens": max_tokens}, **options)
                assert type(tree.trainer.model_wrapped).__name__.startswith("FSDP")
                assert_equal(stock, tree)
        refuse(folder, stock.trainer)
        dist.destroy_process_group()


def train_grpo(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(rank, 2, ports[0]):
        recorded = {"rollout": with_tool, "max_completion_length": 32}
        for options in ON_RANKS:
            stock, *trees = (
                grpo(folder, tree, prepare=with_sharded_reference, **options | recorded)
                for tree in (None, {}, {"max_tokens": 30})
            )
            for tree in trees:
                assert_equal(stock, tree)
        dist.destroy_process_group()


def refuse(folder: Path, trained: Any) -> None:
    with pytest.raises(UserError, match="model: expected whole weights on trees, got sharded ones"):
        treeify(trained)
    for change, message in (
        ({"fsdp_version": 1}, "SFTTrainer: fsdp_version: expected 2 on trees, got 1: train with Distr"),
        ({"cpu_offload": torch.distributed.fsdp.CPUOffloadPolicy()}, "fsdp_offload_params: expected False"),
    ):
        trainer = make_other(SFTTrainer, folder, ddp_backend="gloo")
        shard(trainer)
        for name, value in change.items():
            setattr(trainer.accelerator.state.fsdp_plugin, name, value)
        with pytest.raises(UserError, match=message):
            treeify(trainer)


@pytest.mark.parametrize("train", [train_others, train_grpo])
def test_two_ranks_train_as_the_sharded_stock_trainer_does(tmp_path: Path, train: Any) -> None:
    """SFT, DPO with LoRA, and GRPO with recorded rollouts. In partitions, at most 30 tokens run at once."""
    run_ranks(train, 2, save_model(tmp_path))
