"""TreeEngine in verl, beside verl's own engine. Skipped without verl; docs/verl.md says how to run it."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "cpu"
pytest.importorskip("verl")

from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import ActorConfig, TrainingWorkerConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss
from verl.workers.utils.padding import no_padding_2_padding

from tests.support.processes import as_rank, process_group, run_ranks
from tests.support.verl_cpu import (
    ROWS,
    StockEngine,
    TreeEngine,
    configs,
    difference,
    gradients,
    make_engine,
    prepared,
    snapshot,
)
from titan_tree.errors import UserError

pytestmark = pytest.mark.slow

PARTITIONS = 20  # tokens of a forward pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path_factory.mktemp("verl")
    dist.destroy_process_group()


def budget(max_tokens: int | None) -> dict[str, Any]:
    """Returns options of a batch."""
    return {"use_dynamic_bsz": max_tokens is not None, "max_token_len_per_gpu": max_tokens}


def actor(loss: str = "vanilla", mode: str = "token-mean") -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        loss_agg_mode=mode,
        entropy_coeff=0.01,
        policy_loss=PolicyLossConfig(loss_mode=loss, dro_beta=0.1 if loss == "dro" else None),
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )


def check_scores(stock: Any, tree: Any, max_tokens: int | None, **options: Any) -> None:
    data = prepared(**options)
    with stock.eval_mode(), tree.eval_mode():
        want = stock.infer_batch(prepared(**options))["model_output"]
        got = tree.infer_batch(prepared(**options, **budget(max_tokens)))["model_output"]
    assert got.keys() == want.keys() == {"log_probs", "entropy"}
    for name, value in want.items():
        assert torch.equal(got[name].offsets(), value.offsets())
        padded = (no_padding_2_padding(each, data) for each in (got[name], value))
        torch.testing.assert_close(*padded, rtol=0, atol=2e-5)


def check_losses(stock: Any, tree: Any, max_tokens: int | None, losses: list[tuple[str, str]]) -> None:
    for name, mode in losses:
        results = []
        for engine, options in ((stock, {}), (tree, budget(max_tokens))):
            if name in ("clip_cov", "kl_cov", "geo_mean") and engine is stock:
                # These depend on how verl cuts rows into micro-batches.
                options = {"micro_batch_size_per_gpu": ROWS}
            torch.manual_seed(0)  # clip_cov draws tokens
            loss = partial(ppo_loss, actor(name, mode))  # which keeps sizes of the batch in its config
            with engine.train_mode():
                engine.optimizer_zero_grad()
                out = engine.forward_backward_batch(prepared(**options), loss)
                results.append((sum(out["loss"]), gradients(engine), out["metrics"]))
        (want_loss, want, metrics), (got_loss, got, got_metrics) = results
        assert got_loss == pytest.approx(want_loss, rel=1e-5, abs=1e-6), name
        assert difference(got, want) < 1e-5, name
        assert got_metrics.keys() == metrics.keys(), name


LOSSES = [(name, "token-mean") for name in POLICY_LOSS_REGISTRY]
LOSSES += [("vanilla", "seq-mean-token-mean"), ("gspo", "seq-mean-token-mean")]


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])  # a head of its own, a tied one, windows
def test_one_rank(folder: Path, name: str, max_tokens: int | None) -> None:
    path = snapshot(folder, name)
    stock, tree = make_engine(StockEngine, path), make_engine(TreeEngine, path)
    for temperature in (1.0, 0.7, torch.tensor([1.0, 0.7] * (ROWS // 2))):
        check_scores(stock, tree, max_tokens, temperature=temperature)
    check_losses(stock, tree, max_tokens, LOSSES if name == "llama" else LOSSES[:2])


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_bf16(folder: Path, max_tokens: int | None) -> None:
    """verl's default precision. Errors of gradients relative to fp32 are those of verl's own engine."""
    path, found = snapshot(folder), []
    bf16 = {"engine": {"mixed_precision": None}, "enable_gradient_checkpointing": True}
    for kind, changes in ((StockEngine, {}), (StockEngine, bf16), (TreeEngine, bf16)):
        engine = make_engine(kind, path, **copy.deepcopy(changes))
        with engine.train_mode():
            options = budget(max_tokens) if kind is TreeEngine else {}
            engine.forward_backward_batch(prepared(**options), partial(ppo_loss, actor()))
            found.append(torch.cat([g.float().flatten() for g in gradients(engine).values()]))
    exact, stock, tree = found
    assert (tree - exact).norm() < 1.2 * (stock - exact).norm()


def check_steps(stock: Any, tree: Any, max_tokens: int | None) -> None:
    norms = []
    for engine, options in ((stock, {}), (tree, budget(max_tokens))):
        norms.append([])
        for step in range(5):
            with engine.train_mode():
                out = engine.train_batch(prepared(step, **options), partial(ppo_loss, actor()))
            norms[-1].append(out["metrics"]["grad_norm"])
            assert out["model_output"] == {}
    torch.testing.assert_close(*map(torch.tensor, norms), rtol=1e-5, atol=0)
    weights = [dict(engine.get_per_tensor_param()[0]) for engine in (stock, tree)]
    # AdamW turns the rounding errors of small gradients into steps of up to lr = 1e-3.
    assert difference(*weights) < 1e-4


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_five_steps(folder: Path, max_tokens: int | None) -> None:
    path = snapshot(folder)
    stock = make_engine(StockEngine, path, enable_gradient_checkpointing=True)
    tree = make_engine(TreeEngine, path, enable_gradient_checkpointing=True)
    check_steps(stock, tree, max_tokens)


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_adapters(folder: Path, max_tokens: int | None) -> None:
    path, lora = snapshot(folder), {"lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    stock, tree = (make_engine(kind, path, **lora) for kind in (StockEngine, TreeEngine))
    check_steps(stock, tree, max_tokens)
    check_scores(stock, tree, max_tokens)
    with stock.disable_adapter(), tree.disable_adapter():
        check_scores(stock, tree, max_tokens)


def test_checkpoints_are_those_of_verl(folder: Path, tmp_path: Path) -> None:
    """verl's own engine goes on from a checkpoint of the engine on trees."""
    path = snapshot(folder)
    stock, tree = (make_engine(kind, path) for kind in (StockEngine, TreeEngine))
    with tree.train_mode():
        tree.train_batch(prepared(), partial(ppo_loss, actor()))
    tree.save_checkpoint(str(tmp_path))
    stock.load_checkpoint(str(tmp_path), del_local_after_load=False)
    norms = []
    for engine in (stock, tree):
        with engine.train_mode():
            norms.append(engine.train_batch(prepared(1), partial(ppo_loss, actor()))["metrics"]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert difference(*(dict(engine.get_per_tensor_param()[0]) for engine in (stock, tree))) < 1e-4


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_supervised_fine_tuning(folder: Path, max_tokens: int | None) -> None:
    path, results = snapshot(folder), []
    for kind, options in ((StockEngine, {}), (TreeEngine, budget(max_tokens))):
        engine, data = make_engine(kind, path), prepared(calculate_entropy=False, **options)
        masks = [
            torch.arange(len(ids)) >= len(ids) - length
            for ids, length in zip(
                data["input_ids"].unbind(), data["response_mask"].sum(1).tolist(), strict=True
            )
        ]
        data["loss_mask"] = torch.nested.as_nested_tensor(
            [mask.float() for mask in masks], layout=torch.jagged
        )
        for name in ("prompts", "responses"):
            data.pop(name)
        with engine.train_mode():
            out = engine.forward_backward_batch(data, partial(sft_loss, None))
            results.append((sum(out["loss"]), gradients(engine)))
    (want_loss, want), (got_loss, got) = results
    assert got_loss == pytest.approx(want_loss, rel=1e-5)
    assert difference(got, want) < 1e-5


@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_the_worker_takes_the_engine_from_the_registry(folder: Path, max_tokens: int | None) -> None:
    settings = configs(snapshot(folder), max_tokens)
    with as_rank(0, 1, port=0):
        worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **settings))
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, actor()))
    assert type(worker.engine) is TreeEngine
    options = {"global_token_num": [20] * ROWS}
    data = prepared(**options)
    for name in ("use_dynamic_bsz", "micro_batch_size_per_gpu"):
        data.pop(name)
    trained = worker.train_batch(copy.deepcopy(data))
    scored = worker.infer_batch(copy.deepcopy(data))
    assert trained["metrics"]["grad_norm"] > 0
    assert {"entropy", "log_probs"} <= set(scored.keys())


def run_on_rank(rank: int, ports: list[int], folder: Path, max_tokens: int | None, task: str) -> None:
    with process_group(rank, 2, ports[0]):
        stock, tree = (make_engine(kind, str(folder)) for kind in (StockEngine, TreeEngine))
        if task == "losses":
            check_scores(stock, tree, max_tokens)
            check_losses(stock, tree, max_tokens, LOSSES)
        else:
            check_steps(stock, tree, max_tokens)


@pytest.mark.parametrize("task", ["losses", "steps"])
@pytest.mark.parametrize("max_tokens", [None, PARTITIONS])
def test_two_ranks(tmp_path: Path, max_tokens: int | None, task: str) -> None:
    run_ranks(run_on_rank, 2, snapshot(tmp_path), max_tokens, task)


def test_fewer_tokens_are_computed(folder: Path) -> None:
    path = snapshot(folder)
    stock, tree = (make_engine(kind, path) for kind in (StockEngine, TreeEngine))
    seen = []
    tree.tree_model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for engine in (stock, tree):
        with engine.eval_mode():
            engine.infer_batch(prepared())
    assert (stock.computed, sum(seen)) == (156, 63)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"strategy": "fsdp"}}, "strategy: expected 'fsdp2' on token trees, got 'fsdp'"),
        ({"use_liger": True}, "use_liger: expected False on token trees, got True"),
        (
            {"engine": {"ulysses_sequence_parallel_size": 2}},
            "ulysses_sequence_parallel_size: expected 1 on token trees, got 2",
        ),
        ({"engine": {"mixed_precision": {"param_dtype": "fp16"}}}, "param_dtype: expected 'bf16'"),
    ],
)
def test_settings_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TreeEngine(**configs(snapshot(folder), None, **changes))


@pytest.mark.parametrize("options", [{"use_fused_kernels": True}, {"distillation_use_topk": True}])
def test_options_of_a_batch_are_refused(folder: Path, options: dict[str, Any]) -> None:
    tree = make_engine(TreeEngine, snapshot(folder))
    with pytest.raises(UserError, match=f"verl: {next(iter(options))}: expected false"), tree.eval_mode():
        tree.infer_batch(prepared(**options))


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="has not been tested on trees"):
        make_engine(TreeEngine, snapshot(folder, "starcoder2"))


def test_stock_verl_loads_the_engine(folder: Path) -> None:
    """As a user starts it: one environment variable, and no import of titan_tree."""
    code = (
        "import json, verl, sys\n"
        "from verl.workers.engine_workers import TrainingWorker\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "kinds = ('language_model', 'value_model')\n"
        "print(json.dumps([EngineRegistry.get_engine_cls(kind, 'fsdp2').__module__ for kind in kinds]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment |= {
        "VERL_USE_EXTERNAL_MODULES": "titan_tree.integrations.verl",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
    }
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [
        "titan_tree.integrations.verl",
        "verl.workers.engine.fsdp.transformer_impl",
    ]
