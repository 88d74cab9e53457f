"""Two GPUs train as one GPU does, over NCCL, and TRL's trainers on trees as the stock ones on two GPUs.

To debug without GPUs, run the same code on gloo with TITAN_TREE_ON_CPU=1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.test_ranks import OF_TWO, assert_same_run, config, train, train_ranks
from tests.support import same_run, tiny_run
from tests.support.processes import as_rank, run_ranks
from tests.support.rl_runs import DEMO, rows
from titan_tree.config.toml import load_tables
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.config import Config, load_config

ON_CPU = os.environ.get("TITAN_TREE_ON_CPU") == "1"
pytestmark = (
    pytest.mark.exhaustive
    if ON_CPU
    else [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]
)
ROOT = DEMO.parents[1]
DESK = (
    *("model.overrides.hidden_size=32", "model.overrides.head_dim=16", "data.global_batch_groups=8"),
    *("warm_start.steps=100", "warm_start.interval=100", "warm_start.reward=0"),
    *("training.steps=3", "checkpoint.interval=3", "lr_scheduler.warmup_steps=0", "optimizer.eps=1e-3"),
    "metrics.loggers=[csv]",
)
SUPERVISED = (
    *("training.steps=5", "checkpoint.interval=5", "optimizer.eps=1e-3", "metrics.loggers=[csv]"),
    "data.global_batch_groups=4",
)
# What accelerate launch sets for FSDP2.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def torchrun(*arguments: str) -> None:
    """Runs titan-tree on two ranks, as the command torchrun does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ended = subprocess.run(
        [*command, "-m", "titan_tree", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NVIDIA_TF32_OVERRIDE": "0"},
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def desk(folder: Path) -> RLRunConfig:
    return load_tables(RLRunConfig, DEMO, [*DESK, f"folder={folder}"])


def test_the_command_of_reinforcement_learning_equals_one_gpu(tmp_path: Path) -> None:
    """The demo with a short warm start, from which both runs start. The ranks shard weights by FSDP2."""
    one = RLTrainer(after_warm_start(desk(tmp_path / "one")))
    one.train()
    one.close()
    shutil.copytree(tmp_path / "one" / "warm_start", tmp_path / "two" / "warm_start")
    torchrun("rl", str(DEMO), *DESK, f"folder={tmp_path / 'two'}")
    assert any(float(row["reward"]) for row in rows(tmp_path / "one"))
    assert_same_run(after_warm_start(desk(tmp_path / "two")), one, tolerance=1e-4)


def train_on_gpus(rank: int, ports: list[int], folder: Path, name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    train_ranks(rank, ports, 2, folder, name, *OF_TWO.get(name, ()))


@pytest.mark.parametrize("name", ["scored partitions", "LoRA", "shared tokens", "replicas"])
def test_reinforcement_learning_equals_one_gpu(tmp_path: Path, name: str) -> None:
    """With scored partitions, LoRA, sequence parallelism, and a replica of the weights on each rank."""
    run_ranks(train_on_gpus, 2, tmp_path / "two", name, start="spawn")
    assert_same_run(config(tmp_path / "two", name), train(config(tmp_path / "one", name)), tolerance=1e-4)


@pytest.mark.parametrize("more", [(), ("model.name=qwen3_moe", "parallel.expert_parallel=2")])
def test_the_command_of_supervised_training_equals_one_gpu(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Five steps of the demo with FSDP2, dense and with the experts of a layer sharded over both ranks."""

    def demo(folder: Path) -> Config:
        alone = (*more, "parallel.expert_parallel=1")
        return load_config(ROOT / "train_configs" / "demo.toml", [*SUPERVISED, *alone, f"folder={folder}"])

    torchrun("train", "train_configs/demo.toml", *SUPERVISED, *more, f"folder={tmp_path / 'two'}")
    same_run.assert_same_run(demo(tmp_path / "two"), tiny_run.train(demo(tmp_path / "one")))


def train_with_trl(rank: int, ports: list[int], folder: Path, wrapper: str) -> None:
    from trl import SFTTrainer

    from tests.support.trl_runs import ACCUMULATE, assert_equal, grpo, make_other, run, shard, with_tool
    from titan_tree.integrations.hugging_face import treeify

    torch.backends.cuda.matmul.allow_tf32 = False
    is_sharded = wrapper == "FSDP"
    device: dict[str, Any] = {"ddp_backend": "gloo"} if ON_CPU else {"use_cpu": False}

    def prepare(trainer: Any) -> None:
        if ON_CPU and is_sharded:  # accelerate leaves FSDP2 out
            shard(trainer)

    def sft(is_tree: bool) -> Any:
        trainer = make_other(SFTTrainer, folder, max_steps=3, **device)
        prepare(trainer)
        if is_tree:
            treeify(trainer)
        return run(trainer)

    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        for name, value in FSDP2.items() if is_sharded and not ON_CPU else ():
            patch.setenv(name, value)
        stock, tree = sft(False), sft(True)
        assert type(tree.trainer.model_wrapped).__name__.startswith(wrapper), tree.trainer.model_wrapped
        assert tree.trainer.accelerator.num_processes == 2
        assert_equal(stock, tree)
        options: dict[str, Any] = {"loss_type": "dapo", "max_completion_length": 32, **device, **ACCUMULATE}
        options |= {"rollout": with_tool} if is_sharded else {"beta": 0.1}
        assert_equal(*(grpo(folder, on_trees, prepare=prepare, **options) for on_trees in (None, {})))
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FSDP"])
def test_trl_on_trees_equals_the_stock_trainers(tmp_path: Path, wrapper: str) -> None:
    """SFT, and GRPO: with generated rollouts and a reference model, or sharded with recorded rollouts."""
    from tests.support.trl_runs import save_model

    run_ranks(train_with_trl, 2, save_model(tmp_path), wrapper, start="spawn")
