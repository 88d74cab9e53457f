"""The trainer computes the right gradients, trains alike on trees and flat paths, and stops when it must."""

import errno
import json
import logging
import math
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemWriter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.datasets import tree_dataset
from tests.support.tiny_run import SMALL, VOCAB, read_metrics, tiny_config, train, write_groups
from titan_tree import OneRank, Trainer, clip_and_step
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_loss.settings import LOSSES
from titan_tree.data.dataset import TreeDataset
from titan_tree.distributed.titan import FullAC, SelectiveAC, TreeSelectiveAC
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model, load_pretrained
from titan_tree.models.settings import ModelConfig
from titan_tree.run import build
from titan_tree.run.checkpoint.storage import CheckpointWriter, read_manifest
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.signals import SIGNALS
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("reduction", ["path_mean", "token_mean"])
def test_a_step_has_the_gradient_of_every_path_alone(tmp_path: Path, reduction: str) -> None:
    model = build_model("qwen3", "debug", vocab_size=VOCAB).double()
    data = tree_dataset(write_groups(tmp_path / "x.jsonl"), max_tokens=120, global_batch_groups=6)
    micro_batches = next(iter(data))
    paths = [path for trees in micro_batches for tree in trees for path in tree.paths]
    assert len(micro_batches) >= 2

    # The definition: one forward per path, and plain sums.
    total, counted = torch.zeros((), dtype=torch.float64), 0.0
    for path in paths:
        logprobs = model(TreeBatch.from_trees([TokenTree.from_paths([path])])).logprobs
        total = total - path.weight * (torch.from_numpy(path.loss_mask[1:]) * logprobs).sum()
        counted += path.weight * (1.0 if reduction == "path_mean" else float(path.loss_mask[1:].sum()))
    expected = total / counted
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    step = TreeStep(model, TreeLoss("sft", reduction))
    result = step.run(step.prepare(micro_batches))
    # The loss itself is kept in fp32; gradients never leave fp64.
    torch.testing.assert_close(result.loss, expected.float())
    tokens = sum(path.weight * float(path.loss_mask[1:].sum()) for path in paths)
    assert result.loss_metrics["nll"].item() == pytest.approx(total.item() / tokens, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-6, atol=1e-9, msg=name)
    assert result.counts.num_paths == len(paths)
    assert result.counts.logical_tokens == sum(len(path) for path in paths)
    assert result.counts.executed_tokens == sum(len(tree) for trees in micro_batches for tree in trees)


def test_a_trainer_takes_a_configuration() -> None:
    with pytest.raises(UserError, match=r"^Trainer: expected a Config, got str; pass what load_config"):
        Trainer("my.toml")  # type: ignore[arg-type]


def test_batches_are_pinned_only_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[TreeBatch] = []
    monkeypatch.setattr(TreeBatch, "pin_memory", lambda batch: pinned.append(batch) or f"pinned {len(batch)}")
    model = build_model("qwen3", "debug", vocab_size=VOCAB)
    micro_batches = next(iter(tree_dataset(write_groups(tmp_path / "x.jsonl"), max_tokens=160)))
    on_cpu = TreeStep(model, TreeLoss(), "cpu").prepare(micro_batches)
    assert not pinned
    on_gpu = TreeStep(model, TreeLoss(), "cuda").prepare(micro_batches)
    expected = [[f"pinned {len(batch)}" for batch in partitions] for partitions in on_cpu.micro_batches]
    assert on_gpu.micro_batches == expected
    assert on_gpu.counts == on_cpu.counts


def test_rewards_become_advantages(tmp_path: Path) -> None:
    """Path 5 7 has a higher reward than path 5 9: a step makes the first more likely, the second less."""
    data = tmp_path / "rewards.jsonl"
    rows = ((7, 1.0), (9, 0.0))
    data.write_text("".join(f'{{"group_id": 0, "tokens": [5, {last}], "reward": {r}}}\n' for last, r in rows))
    options: dict[str, Any] = {"data__files": data, "loss__name": "reinforce", "training__steps": 1}
    with pytest.raises(UserError, match="the paths have no advantage"):
        train(tiny_config(tmp_path / "a", **options))
    before, after = (
        train(tiny_config(tmp_path / f"lr{lr}", data__advantage="group", optimizer__lr=lr, **options))
        for lr in (0.0, 1e-3)
    )
    a, b = (torch.cat(tree_logprobs(trainer.model, [[5, 7], [5, 9]])) for trainer in (before, after))
    assert b[0] > a[0] + 1e-3
    assert b[1] < a[1] - 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3_5_moe"])  # which has the parts of the others
def test_tree_and_flat_training_have_the_same_loss_curve(tmp_path: Path, model: str) -> None:
    runs = {}
    for layout in ("tree", "leaf", "flat"):
        options: dict[str, Any] = SMALL[model] | {"data__layout": layout, "training__steps": 12}
        options["optimizer__lr"] = 4e-3
        if model == "qwen3":  # the weight of a shared token depends on the other paths of its tree
            options["loss__reduction"] = "distinct_token_mean"
        if model.endswith("_moe"):
            options |= {"router_loss__balance": 1e-2, "router_loss__z": 1e-3}
        config = tiny_config(tmp_path / layout, **options)
        train(config)
        runs[layout] = read_metrics(config)
    for tree, leaf, flat in zip(*runs.values(), strict=True):
        assert float(tree["loss"]) == pytest.approx(float(flat["loss"]), rel=1e-5), tree["step"]
        assert float(leaf["loss"]) == pytest.approx(float(flat["loss"]), rel=1e-5), tree["step"]
        assert float(leaf["executed_tokens"]) == float(tree["leaf_tokens"])
        assert (
            float(tree["executed_tokens"]) < float(flat["executed_tokens"]) == float(flat["logical_tokens"])
        )
        assert float(flat["por"]) == 0.0
    assert len(runs["tree"]) == 12
    first, last = (float(runs["tree"][i]["nll"]) for i in (0, -1))
    assert last < first - 0.3


@pytest.mark.parametrize("activation_checkpoint", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, activation_checkpoint: str) -> None:
    plain = tiny_config(tmp_path / "a")
    recomputed = tiny_config(tmp_path / "b", training__activation_checkpoint=activation_checkpoint)
    train(plain)
    train(recomputed)
    assert read_metrics(recomputed) == read_metrics(plain)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "attention_calls"), [(TreeSelectiveAC, 1), (FullAC, 2)])
def test_selective_checkpointing_does_not_recompute_attention(
    policy: type[SelectiveAC], attention_calls: int
) -> None:
    model = build_model("qwen3", "debug", attention="triton", num_hidden_layers=1)
    policy(policy.Config()).apply(model)
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2, 3]), TokenPath([1, 4])])])
    with CountCalls(torch.ops.titan_tree.tree_attention.default) as calls:
        model(batch).logprobs.sum().backward()
    assert calls.count == attention_calls


class CountCalls(TorchDispatchMode):
    """Counts the calls of one operator."""

    def __init__(self, operator: object) -> None:
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    options = {"checkpoint__interval": 1, "training__max_bad_steps": 1}
    config = tiny_config(tmp_path, optimizer__lr=1e30, **options)
    with pytest.raises(UserError, match=r"step 2: .* is nan.*step-1"):
        train(config)
    assert [row["step"] for row in read_metrics(config)] == ["1"]


@pytest.mark.parametrize(
    ("weight", "other"), [(0.0, ""), (1.0, ""), (1.0, '{"tokens": [1, 2], "weight": 0}')]
)
def test_a_batch_without_loss_tokens_stops_the_run(tmp_path: Path, weight: float, other: str) -> None:
    data = tmp_path / "masked.jsonl"
    data.write_text(f'{{"tokens": [1, 2, 3], "loss_mask": [0, 0, 0], "weight": {weight}}}\n{other}')
    with pytest.raises(UserError, match="counts no token"):
        train(tiny_config(tmp_path, data__files=data))


def test_a_full_disk_only_loses_the_checkpoint_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2, training__steps=6)
    write, calls = FileSystemWriter.write_data, []

    def refuse_the_second(self: FileSystemWriter, plan: object, planner: object) -> object:
        calls.append(self.path)
        if len(calls) == 2:
            (Path(self.path) / "__0_0.distcp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", refuse_the_second)
    with pytest.raises(UserError, match=r"step-4: .*No space left on device.*disk is full"):
        train(config)
    folder = Path(config.folder) / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-2"]
    assert train(config).progress.step == 6  # resumed from step-2


@pytest.mark.parametrize("bytes_written", [1000, 200_000])
def test_a_write_error_of_the_operating_system_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_written: int
) -> None:
    """Writing fails at the start of a file or within a tensor, for which torch has different messages."""
    write = CheckpointWriter.write_data
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited_write(*args: Any) -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_written, limit[1]))
        try:
            return write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr(CheckpointWriter, "write_data", limited_write)
    config = tiny_config(tmp_path, checkpoint__interval=2, model__overrides__hidden_size=256)
    with pytest.raises(UserError, match=r"step-2: writing the checkpoint failed"):
        train(config)
    assert not list((Path(config.folder) / "checkpoints").glob("step-*"))


def test_the_exported_snapshot_is_the_trained_model(tmp_path: Path) -> None:
    trained = train(tiny_config(tmp_path, checkpoint__export_hf=True))
    exported = load_pretrained(Path(trained.config.folder) / "hf", dtype=torch.float32).state_dict()
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, exported[name]), name


def test_a_run_starts_from_the_weights_of_a_snapshot(tmp_path: Path) -> None:
    first = train(tiny_config(tmp_path / "a", model__name="qwen3_moe", checkpoint__export_hf=True))
    weights = first.model.state_dict()
    config = tiny_config(
        tmp_path / "b", optimizer__lr=0.0, training__steps=1, training__seed=1, checkpoint__interval=1
    )
    config.model = ModelConfig(hf_path=f"{first.config.folder}/hf")  # without the name of the family
    for name, value in train(config).model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    saved = read_manifest(Path(config.folder) / "checkpoints" / "step-1")
    assert saved["architecture"]["name"] == "qwen3_moe"


def test_a_run_over_epochs_trains_on_every_group_that_often(tmp_path: Path) -> None:
    """9 groups, 2 epochs, 4 groups per step: 5 steps, the last with 2 groups."""
    options = {"data__global_batch_groups": 4, "training__steps": "null", "training__epochs": 2}
    trainer = train(tiny_config(tmp_path, **options))
    assert trainer.num_steps == 5
    assert trainer.optimizer_step.good_steps == 5
    assert trainer.counts.num_trees == 2 * 9
    assert [row["epoch"] for row in read_metrics(trainer.config)] == ["0", "0", "1", "1", "1"]
    sizes = trainer.data_sizes
    assert sizes is not None
    assert sizes.groups == 9
    assert 2 * sizes.samples == trainer.counts.num_paths


@pytest.mark.parametrize(("size", "steps"), [(9, 4), (2, 8), (4, 6)])
def test_a_resume_with_another_batch_size_trains_the_rest_of_the_epochs(
    tmp_path: Path, size: int, steps: int
) -> None:
    """9 groups, 2 epochs. The first has 3 steps of 3 groups, and the second has steps of another size."""
    options = {"training__steps": "null", "training__epochs": 2, "lr_scheduler__warmup_steps": 0}
    saves = {"checkpoint__interval": 3, "checkpoint__allow_changes": True}
    first = train(tiny_config(tmp_path, data__global_batch_groups=3, **options, **saves))
    shutil.rmtree(Path(first.config.folder) / "checkpoints" / "step-6")
    again = train(tiny_config(tmp_path, data__global_batch_groups=size, **options, **saves))
    assert again.num_steps == again.progress.step == again.optimizer_step.good_steps + 3 == steps
    assert again.counts.num_trees == 9
    rows = read_metrics(again.config)[3:]
    assert [(row["epoch"], int(row["step"])) for row in rows] == [("1", step) for step in range(4, steps + 1)]
    top = again.config.optimizer.lr
    expected = [top * (1 + math.cos(math.pi * (step - 1) / steps)) / 2 for step in range(4, steps + 1)]
    assert [float(row["lr"]) for row in rows] == pytest.approx(expected, rel=1e-6)


def test_data_that_end_before_the_last_step_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"training__steps": "null", "training__epochs": 1, "data__global_batch_groups": 3}
    monkeypatch.setattr(TreeDataset, "steps_left", lambda *_, **__: 5)
    with pytest.raises(UserError, match=r"^data\.files: they end before step 4 of 5"):
        train(tiny_config(tmp_path, **options))


def test_a_loop_of_your_own_equals_the_trainer(tmp_path: Path) -> None:
    """It has another optimizer object, and no process group. Its positions continue the stream of data."""
    config, mesh = tiny_config(tmp_path, data__max_tokens=24), OneRank()
    rows = read_metrics(train(config).config)
    model = build_parallel_model(config.model, config.training, config.parallel, mesh)
    step = build.build_tree_step(config, model, build.build_loss(config.loss), torch.device("cpu"))
    vectors, matrices = ([p for p in model.parameters() if (p.ndim == 1) == flag] for flag in (True, False))
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    reader = build.build_reader(config.data, None, model)
    position: dict[str, int] = {}
    for row in rows:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = float(row["lr"])
        dataset = build.build_dataset(reader, config, None, mesh)
        dataset.load_state_dict(dataset.state_dict() | position)
        ((inputs, position),) = build.build_step_loader(config, step, dataset, num_steps=1)
        result = step.run(inputs)
        norm = clip_and_step([optimizer], result.loss, config.optimizer.max_grad_norm)
        optimizer.zero_grad()
        assert float(result.loss) == pytest.approx(float(row["loss"]), rel=1e-5)
        assert float(norm) == pytest.approx(float(row["grad_norm"]), rel=1e-5)
    assert len(rows) == 4
    assert not torch.distributed.is_initialized()


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.steps: expected no value together with training\.epochs"):
        tiny_config(tmp_path, training__epochs=2)


def test_a_warm_up_longer_than_the_run_takes_all_of_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"training__steps": "null", "training__epochs": 1, "lr_scheduler__warmup_steps": 4}
    config = tiny_config(tmp_path, **options)
    caplog.set_level(logging.WARNING, "titan_tree")
    train(config)
    assert "lr_scheduler.warmup_steps: 4 is more than the 3 steps of the run; all of them" in caplog.text
    rates = [float(row["lr"]) / config.optimizer.lr for row in read_metrics(config)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1])


def test_mistakes_in_validation_files_are_found_before_training(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"tokens": [1, "x"]}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:1: tokens"):
        train(tiny_config(tmp_path / "run", validation__files=bad, validation__interval=100))
    assert not (tmp_path / "run" / "metrics.csv").exists()
    bad.write_text('{"tokens": [1, 2], "weight": 0}\n')
    with pytest.raises(UserError, match=r"validation\.files: expected tokens to score, but all loss masks"):
        train(tiny_config(tmp_path, validation__files=bad, validation__interval=100))


def test_validation_scores_held_out_files_as_each_path_alone(tmp_path: Path) -> None:
    """Loss and accuracy equal those of plain forward passes over every path; partitions change nothing."""
    held_out = write_groups(tmp_path / "held_out.jsonl", num_groups=3, seed=1)
    options = {"validation__files": held_out, "validation__interval": 3, "training__steps": 4}
    options["data__paths"] = "longest"  # only for training
    trainer = train(tiny_config(tmp_path / "whole", **options))
    rows = read_metrics(trainer.config)
    assert [row["step"] for row in rows if row["validation_loss"]] == ["3", "4"]

    hidden: list[torch.Tensor] = []
    trainer.model.norm.register_forward_hook(lambda module, inputs, output: hidden.append(output.detach()))
    loss = correct = weight = 0.0
    for record in map(json.loads, held_out.read_text().splitlines()):
        tokens = torch.tensor(record["tokens"])
        with torch.no_grad():
            trainer.model(TreeBatch.from_trees([TokenTree.from_paths([TokenPath(record["tokens"])])]))
            head = trainer.model.lm_head or trainer.model.embed_tokens
            logits = hidden.pop()[:-1] @ head.weight.T
        w = record["weight"] * torch.tensor(record["loss_mask"][1:])
        loss += float((w * F.cross_entropy(logits, tokens[1:], reduction="none")).sum())
        correct += float((w * (logits.argmax(1) == tokens[1:])).sum())
        weight += float(w.sum())
    assert float(rows[-1]["validation_loss"]) == pytest.approx(loss / weight, rel=1e-5)
    assert float(rows[-1]["validation_accuracy"]) == pytest.approx(correct / weight, abs=1e-6)

    cut = train(tiny_config(tmp_path / "cut", **options, data__max_tokens=12))
    for ours, theirs in zip(read_metrics(cut.config), rows, strict=True):
        if theirs["validation_loss"]:
            expected = pytest.approx(float(theirs["validation_loss"]), rel=1e-4)
            assert float(ours["validation_loss"]) == expected


@pytest.mark.slow
def test_a_script_without_a_guard_ends_with_one_message(tmp_path: Path) -> None:
    """Its worker would otherwise train too, and start workers of its own."""
    script = tmp_path / "script.py"
    config, folder = ROOT / "train_configs" / "demo.toml", tmp_path / "run"
    overrides = [f"folder={folder}", "training.steps=2", "lr_scheduler.warmup_steps=0", "data.workers=1"]
    script.write_text(
        "from titan_tree import Trainer, load_config\n"
        f"Trainer(load_config({str(config)!r}, {overrides!r})).train()\n"
    )
    result = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 1
    assert "AgreedError: data.workers: a worker process ended unexpectedly" in result.stderr
    assert 'put the training under if __name__ == "__main__":' in result.stderr


def test_a_process_makes_one_trainer_after_another(tmp_path: Path) -> None:
    def config(name: str, **options: Any) -> Config:
        return tiny_config(tmp_path / name, training__steps=1, checkpoint__interval=1, **options)

    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(UserError, match="no such file"):
        Trainer(config("bad", data__files="gone.jsonl"))
    with LOSSES.registered("mine", lambda: 0.0), pytest.raises(UserError, match=r"^loss 'mine' "):
        Trainer(config("run", loss__name="mine", training__deterministic=True)).train()
    assert torch.are_deterministic_algorithms_enabled()
    for _ in range(2):  # in the folder of the failed run, and again without a call of close
        trainer = Trainer(config("run"))
        trainer.train()
    assert not torch.are_deterministic_algorithms_enabled()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    another = Trainer(config("another"))
    trainer.close()  # releases nothing of the newer one
    another.train()
    another.close()
    another.close()
    assert not dist.is_initialized()
    assert [row["step"] for row in read_metrics(another.config)] == ["1"]
