"""Two GPUs train as one GPU does, over NCCL: in fp32, the losses of all steps are equal within 1e-6.

To debug without GPUs, run the same code on gloo with TITAN_TREE_ON_CPU=1.
"""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from tests.rl import test_ranks as rl
from tests.run.test_stopping import act_after_step
from tests.support.gpu import ON_CPU, ON_RANKS, need_gpus, on_gpus
from tests.support.processes import as_rank, torchrun
from tests.support.rl_runs import DEMO, rows
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import SMALL, read_metrics, tiny_config, train
from titan_tree.config.toml import load_tables
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.config import Config

pytestmark = ON_RANKS
CUT: dict[str, Any] = {"data__max_tokens": 12}
SHARDED: dict[str, Any] = {**EXPERTS, "parallel__expert_parallel": 2}
SHARED: dict[str, Any] = {"parallel__sequence_parallel": 2}
RECOMPUTED = {"partition__activations": "recompute", "training__activation_checkpoint": "full"}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"data__max_tokens": 70},
    "partitions": CUT,
    "LoRA": {**CUT, "lora__rank": 4},
    "hybrid": {**CUT, **SMALL["qwen3_5"]},
    "experts": {"data__max_tokens": 70, **SHARDED},
    "experts, recomputed": {**CUT, **SHARDED, **RECOMPUTED},
    "experts, hybrid": {**CUT, **SHARDED, **SMALL["qwen3_5_moe"]},
    "shared tokens": {"data__max_tokens": 70, **SHARED},
    "shared tokens, partitions": {**CUT, **SHARED},
    "shared tokens, hybrid": {**CUT, **SMALL["qwen3_5"], **SHARED},
    "shared tokens, experts": {**CUT, **SHARDED, **SHARED},
    "four, experts": {**CUT, **SHARDED, **RECOMPUTED},  # two ranks hold the same experts
    "four, experts of each": {**CUT, **SHARDED, "parallel__expert_parallel": 4},
}
# What the run on one GPU has instead.
ALONE = {"parallel__sequence_parallel": 1, "parallel__expert_parallel": 1}
ONE_LAYER = {"model__overrides__num_hidden_layers": 1}
# Models in bf16, as small as the kernels for Hopper allow.
COMPILED: dict[str, dict[str, Any]] = {
    "experts": {**ONE_LAYER, **SHARDED, "training__activation_checkpoint": "selective"},
    "experts, recomputed": {**ONE_LAYER, **SHARDED, "training__activation_checkpoint": "full"},
    "shared tokens, hybrid": {
        **SMALL["qwen3_5"],
        **SHARED,
        **{f"model__overrides__{name}head_dim": 64 for name in ("", "linear_key_", "linear_value_")},
    },
}
DESK = (
    *("model.overrides.hidden_size=32", "model.overrides.head_dim=16", "data.global_batch_groups=8"),
    *("warm_start.steps=100", "warm_start.interval=100", "warm_start.reward=0"),
    *("training.steps=3", "checkpoint.interval=3", "lr_scheduler.warmup_steps=0", "optimizer.eps=1e-3"),
    "metrics.loggers=[csv]",
)
FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# What accelerate launch sets for FSDP2.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def config(folder: Path, options: dict[str, Any], **more: Any) -> Config:
    return tiny_config(folder, **{"checkpoint__interval": 4, "optimizer__eps": 1e-3} | options | more)


def train_on_ranks(rank: int, ports: list[int], num_ranks: int, made: Config) -> None:
    with as_rank(rank, num_ranks, ports[0]):
        train(made)


@pytest.mark.parametrize("name", CASES)
def test_supervised_training_equals_one_gpu(name: str, tmp_path: Path) -> None:
    """Gradient norms, and weights after four steps, are equal within 1e-5."""
    many, num_ranks = config(tmp_path / "many", CASES[name]), 4 if name.startswith("four") else 2
    on_gpus(train_on_ranks, num_ranks, num_ranks, many)
    assert_same_run(many, train(config(tmp_path / "one", CASES[name], **ALONE)))


# All at once, because compilation takes minutes.
@pytest.mark.parametrize("name", [pytest.param(c, marks=pytest.mark.xdist_group(c)) for c in COMPILED])
def test_bf16_compiled_equals_eager(name: str, tmp_path: Path) -> None:
    """Losses and gradient norms of four steps on partitioned trees agree within the rounding of bf16."""
    options = {"training__dtype": "bfloat16", "data__max_tokens": 40, **COMPILED[name]}
    both = [config(tmp_path / f"{c}", options, training__compile=c) for c in (False, True)]
    for made in both:
        on_gpus(train_on_ranks, 2, 2, made)
    for eager, compiled in zip(*map(read_metrics, both), strict=True):
        for column in ("loss", "grad_norm"):
            assert float(compiled[column]) == pytest.approx(float(eager[column]), rel=2e-2), column


def train_until_killed(rank: int, ports: list[int], made: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        act_after_step(patch, 3, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
        train_on_ranks(rank, ports, 2, made)


def test_a_killed_run_resumes_on_two_gpus_and_on_one(tmp_path: Path) -> None:
    """The ranks share the experts. Both resumed runs equal one that was not killed, on one GPU."""
    options = {**CASES["experts"], "checkpoint__interval": 2}
    two = config(tmp_path / "two", options)
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_gpus(train_until_killed, 2, two, fresh=True)
    one = config(tmp_path / "one", options, data__files=two.data.files[0], **ALONE)
    shutil.copytree(two.folder, one.folder)
    on_gpus(train_on_ranks, 2, 2, two)
    assert train(one).optimizer_step.good_steps == 2
    whole = train(config(tmp_path / "whole", options, **ALONE))
    for made in (two, one):
        assert_same_run(made, whole)


@pytest.mark.parametrize("name", ["scored partitions", "LoRA", "shared tokens", "replicas"])
def test_reinforcement_learning_equals_one_gpu(tmp_path: Path, name: str) -> None:
    """With scored partitions, LoRA, sequence parallelism, and a replica of the weights on each rank."""
    on_gpus(rl.train_ranks, 2, 2, tmp_path / "two", name, *rl.OF_TWO.get(name, ()))
    one = rl.train(rl.config(tmp_path / "one", name))
    rl.assert_same_run(rl.config(tmp_path / "two", name), one, tolerance=1e-4)


@pytest.mark.xdist_group("commands")
def test_the_command_of_supervised_training_equals_one_gpu(tmp_path: Path) -> None:
    need_gpus(2)
    two, one = (config(tmp_path / name, CASES["dense"]) for name in ("two", "one"))
    options = ("data.max_tokens=70", "checkpoint.interval=4", "optimizer.eps=1e-3")
    torchrun("-m", "titan_tree", "train", tmp_path / "two" / "config.toml", *options, **FP32)
    assert_same_run(two, train(one))


@pytest.mark.xdist_group("commands")
def test_the_command_of_reinforcement_learning_equals_one_gpu(tmp_path: Path) -> None:
    """The demo with a short warm start, from which both runs start. The ranks shard weights by FSDP2."""
    need_gpus(2)

    def desk(folder: Path) -> RLRunConfig:
        return load_tables(RLRunConfig, DEMO, [*DESK, f"folder={folder}"])

    one = RLTrainer(after_warm_start(desk(tmp_path / "one")))
    one.train()
    one.close()
    shutil.copytree(tmp_path / "one" / "warm_start", tmp_path / "two" / "warm_start")
    torchrun("-m", "titan_tree", "rl", DEMO, *DESK, f"folder={tmp_path / 'two'}", **FP32)
    assert any(float(row["reward"]) for row in rows(tmp_path / "one"))
    rl.assert_same_run(after_warm_start(desk(tmp_path / "two")), one, tolerance=1e-4)


def train_with_trl(rank: int, ports: list[int], folder: Path, wrapper: str) -> None:
    from trl import SFTTrainer

    from tests.support.trl_runs import ACCUMULATE, assert_equal, grpo, make_other, run, shard, with_tool
    from titan_tree.integrations.hugging_face import treeify

    is_sharded = wrapper == "FSDP"
    device: dict[str, Any] = {"ddp_backend": "gloo"} if ON_CPU else {"use_cpu": False}

    def prepare(trainer: Any) -> None:
        if ON_CPU and is_sharded:  # accelerate leaves FSDP2 out
            shard(trainer)

    def sft(prepare: Any, is_tree: bool, batch: int = 8) -> Any:
        trainer = make_other(SFTTrainer, folder, max_steps=3, per_device_train_batch_size=batch, **device)
        prepare(trainer)
        if is_tree:
            treeify(trainer)
        return run(trainer)

    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        for name, value in FSDP2.items() if is_sharded and not ON_CPU else ():
            patch.setenv(name, value)
        stock, tree = sft(prepare, False), sft(prepare, True)
        assert type(tree.trainer.model_wrapped).__name__.startswith(wrapper), tree.trainer.model_wrapped
        assert tree.trainer.accelerator.num_processes == 2
        assert_equal(stock, tree)
        options: dict[str, Any] = {"loss_type": "dapo", "max_completion_length": 32, **device, **ACCUMULATE}
        options |= {"rollout": with_tool} if is_sharded else {"beta": 0.1}
        assert_equal(*(grpo(folder, on_trees, prepare=prepare, **options) for on_trees in (None, {})))
        torch.distributed.destroy_process_group()
    if rank == 0:
        with as_rank(0, 1, ports[1]):
            alone = sft(id, True, batch=16)
        two, one = ([row["loss"] for row in r.trainer.state.log_history[:3]] for r in (tree, alone))
        assert two == pytest.approx(one, rel=1e-6)


@pytest.mark.xdist_group("trl")
@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "FSDP"])
def test_trl_on_trees_equals_one_gpu_and_the_stock_trainers(tmp_path: Path, wrapper: str) -> None:
    """SFT, whose losses equal those of one GPU, and GRPO.

    GRPO has generated rollouts and a reference model, or is sharded with recorded rollouts. It draws other
    rollouts on one GPU.
    """
    from tests.support.trl_runs import save_model

    on_gpus(train_with_trl, 2, save_model(tmp_path), wrapper, num_groups=2)


def train_with_lightning(rank: int, ports: list[int], made: Config, folder: Path) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from tests.support.lightning_run import fit, lightning_trainer

    strategy = ModelParallelStrategy(process_group_backend="gloo" if ON_CPU else "cpu:gloo,cuda:nccl")
    with as_rank(rank, 2, ports[0]):
        fit(made, lightning_trainer(folder, accelerator="auto", devices=2, strategy=strategy))


@pytest.mark.xdist_group("lightning")
def test_lightning_equals_the_trainer_on_one_gpu(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from tests.support.lightning_run import expected, logged

    made, folder = config(tmp_path / "two", CUT), tmp_path / "lightning"
    on_gpus(train_with_lightning, 2, made, folder, fresh=True)  # crashed in ranks that TRL had used
    want, got = expected(train(config(tmp_path / "one", CUT)).config), logged(tmp_path / "lightning")
    assert list(got) == list(want) == [1, 2, 3, 4]
    for step, values in want.items():
        assert got[step]["loss"] == pytest.approx(values["loss"], rel=1e-6), step
        assert got[step]["grad_norm"] == pytest.approx(values["grad_norm"], rel=1e-5), step
