"""TRL's trainers on trees and sharded by FSDP2, beside the stock trainers sharded alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.trl_runs import (
    ACCUMULATE,
    LORA,
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

from tests.support.processes import as_rank, run_ranks
from titan_tree.errors import UserError
from titan_tree.integrations.hugging_face import treeify

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.xdist_group("trl")]


def sharded(cls: type, folder: Path, is_tree: bool, **options: Any) -> Run:
    trainer = make_other(cls, folder, ddp_backend="gloo", max_steps=3, **options)
    shard(trainer)
    if is_tree:
        treeify(trainer)
    return run(trainer)


def train(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(rank, 2, ports[0]):
        for cls, options in (
            (SFTTrainer, {}),
            (DPOTrainer, {"adapter": LORA, "gradient_checkpointing": True}),
        ):
            stock, tree = (sharded(cls, folder, is_tree, **options) for is_tree in (False, True))
            assert type(tree.trainer.model_wrapped).__name__.startswith("FSDP"), tree.trainer.model_wrapped
            assert_equal(stock, tree)
        recorded: dict[str, Any] = {"loss_type": "dapo", "rollout": with_tool, "max_completion_length": 32}
        recorded |= {"ddp_backend": "gloo", "gradient_checkpointing": True, **ACCUMULATE}
        assert_equal(*(grpo(folder, tree, prepare=shard, **recorded) for tree in (None, {})))
        for change, message in (
            ({"fsdp_version": 1}, "SFTTrainer: fsdp_version: expected 2 on trees, got 1: train with Distr"),
            (
                {"cpu_offload": torch.distributed.fsdp.CPUOffloadPolicy()},
                "fsdp_offload_params: expected False",
            ),
        ):
            trainer = make_other(SFTTrainer, folder, ddp_backend="gloo")
            shard(trainer)
            for name, value in change.items():
                setattr(trainer.accelerator.state.fsdp_plugin, name, value)
            with pytest.raises(UserError, match=message):
                treeify(trainer)
        trainer = make_other(SFTTrainer, folder, ddp_backend="gloo")
        shard(trainer)
        with pytest.raises(UserError, match="max_tokens: expected None on trees, got 30: with FSDP2"):
            treeify(trainer, 30)
        with pytest.raises(UserError, match="model: expected whole weights on trees, got sharded ones"):
            treeify(stock.trainer)
        dist.destroy_process_group()


def test_two_ranks_train_as_the_sharded_stock_trainer_does(tmp_path: Path) -> None:
    """SFT, DPO with LoRA, and GRPO with recorded rollouts and accumulation."""
    run_ranks(train, 2, save_model(tmp_path))
