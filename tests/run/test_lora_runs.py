"""Runs with LoRA: several ranks equal one, checkpoints hold adapters only, and exports compute the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_families import hf_family
from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import EXPERTS, assert_same_run
from tests.support.tiny_run import SMALL, VOCAB, read_metrics, tiny_config, train, write_groups
from titan_tree import load_adapter, load_pretrained
from titan_tree.errors import UserError
from titan_tree.run.config import Config, load_config
from titan_tree.scoring.score_trees import tree_logprobs

LORA: dict[str, Any] = {"lora__rank": 4, "optimizer__lr": 0.01, "optimizer__eps": 1e-3}
CUT: dict[str, Any] = {"data__max_tokens": 12}
EXPERT_TARGETS = {"lora__targets": "[q_proj,experts.gate_up_proj,experts.down_proj]"}
CASES: dict[str, dict[str, Any]] = {
    "sharded experts": {
        **CUT,
        **EXPERTS,
        **EXPERT_TARGETS,
        "router_bias__rate": 1e-2,
        "parallel__sequence_parallel": 2,
        "parallel__expert_parallel": 2,
        "training__activation_checkpoint": "selective",
    },
    "quantized base": {
        **CUT,
        "lora__quantize": "nf4",  # of the MLPs' weights, which have 16,384 numbers
        "model__overrides__intermediate_size": 512,
    },
    "bfloat16": {"training__dtype": "bfloat16"},
}
PATHS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 3, 4], [5, 6, 20, 21]]


def config(folder: Path, name: str, **options: Any) -> Config:
    fixed = {"training__steps": 2, "checkpoint__interval": 2}
    return tiny_config(folder / re.sub(r"\W", "_", name), **LORA | fixed | CASES[name] | options)


def train_case(rank: int, ports: list[int], folder: Path, name: str) -> None:
    with as_rank(rank, 2, ports[0]):
        train(config(folder, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    alone = {"parallel__sequence_parallel": 1, "parallel__expert_parallel": 1}
    many = config(tmp_path / "two", name)  # writes the data before two processes read it
    run_ranks(train_case, 2, tmp_path / "two", name)
    one = train(config(tmp_path / "one", name, **alone))
    if name == "bfloat16":  # gradients are rounded on each rank, before they are summed
        losses = [[float(row["loss"]) for row in read_metrics(each)] for each in (many, one.config)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        return
    assert_same_run(many, one)


def assert_same_logprobs(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        for a, b in zip(tree_logprobs(got, PATHS), tree_logprobs(want, PATHS), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_checkpoints_hold_adapters_only_and_resume_exactly(tmp_path: Path) -> None:
    options = {"training__steps": 6, "checkpoint__interval": 3, "lr_scheduler__min_lr_factor": 1.0}
    options |= {"model__name": "qwen3_moe", "router_bias__rate": 1e-2, **EXPERT_TARGETS}
    # Names of checkpointed layers must not hide what is frozen.
    options |= {"training__activation_checkpoint": "full"}
    whole = train(tiny_config(tmp_path / "whole", **LORA | options))
    assert len({row["loss"] for row in read_metrics(whole.config)}) == 6
    for name, parameter in whole.model.named_parameters():
        assert parameter.requires_grad == ("_lora_" in name)
    assert sum(len(optimizer.state) for optimizer in whole.optimizers) == 2 * (2 * 3)

    tensors = json.loads((Path(whole.config.folder) / "checkpoints" / "step-3" / "tensors.json").read_text())
    assert all("_lora_" in name or name.endswith("e_score_correction_bias") for name in tensors)
    assert sum(name.startswith("model.") for name in tensors) == 2 * (2 * 3 + 1)

    first = tiny_config(tmp_path / "two", **LORA | options | {"training__steps": 3})
    train(first)
    resumed = train(tiny_config(tmp_path / "two", **LORA | options))
    assert resumed.optimizer_step.good_steps == 3
    assert read_metrics(resumed.config) == read_metrics(whole.config)
    for (name, got), want in zip(
        resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(got, want), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"training__seed": 1},
            "base = random weights, training.seed 0 (now random weights, training.seed 1)",
        ),
        ({"lora__rank": 8}, "'rank': 4"),
        ({"lora__rank": 0}, "(now None)"),
    ],
)
def test_a_resume_needs_the_same_base_and_updates(tmp_path: Path, change: Any, message: str) -> None:
    options = LORA | {"training__steps": 1, "checkpoint__interval": 1}
    train(tiny_config(tmp_path, **options))
    with pytest.raises(UserError, match=re.escape(message)):
        train(tiny_config(tmp_path, **options | {"training__steps": 2} | change))


def test_snapshots_of_transformers_train_and_a_resume_notices_another_one(tmp_path: Path) -> None:
    """Models of transformers do not know the weights of LoRA either."""
    base = tmp_path / "base"
    hf_family("llama", vocab_size=VOCAB).save_pretrained(base)
    write_groups(tmp_path / "data.jsonl")
    toml = tmp_path / "llama.toml"
    toml.write_text(
        f'folder = "{tmp_path}/run"\n[model]\nhf_path = "{base}"\n[data]\nfiles = "{tmp_path}/data.jsonl"\n'
        'max_tokens = 40\n[lora]\nrank = 4\n[training]\nsteps = 2\ndtype = "float32"\n[checkpoint]\n'
        "interval = 1\nexport_hf = true\n[optimizer]\nlr = 0.01\n"
    )
    run = train(load_config(toml))
    tensors = json.loads((tmp_path / "run" / "checkpoints" / "step-2" / "tensors.json").read_text())
    assert all("_lora_" in name for name in tensors)
    merged = load_pretrained(tmp_path / "run" / "hf", torch.float32)
    adapted = load_pretrained(base, torch.float32)
    load_adapter(adapted, tmp_path / "run" / "adapter")
    assert_same_logprobs(merged, adapted)
    assert_same_logprobs(run.model, adapted)
    from_adapter = ["lora.rank=0", f"lora.adapter={tmp_path}/run/adapter", f"folder={tmp_path}/next"]
    again = train(load_config(toml, [*from_adapter, "optimizer.lr=0.0"]))
    assert_same_logprobs(again.model, adapted)

    changed = hf_family("llama", vocab_size=VOCAB)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(1.5)
    changed.save_pretrained(base)
    with pytest.raises(UserError, match=r"base = snapshot \w+ \(now snapshot \w+\)"):
        train(load_config(toml, ["training.steps=3"]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exports_compute_the_same(tmp_path: Path, dtype: str) -> None:
    """The adapter on the base, the merged snapshot, and a new run that starts from the adapter."""
    options = (
        LORA | SMALL["qwen3_5"] | {"checkpoint__export_hf": True, "training__activation_checkpoint": "full"}
    )
    run = train(tiny_config(tmp_path / "run", **options, training__dtype=dtype))
    folder = Path(run.config.folder)
    merged = load_pretrained(folder / "hf", torch.float32)
    base = train(tiny_config(tmp_path / "base", **options | {"optimizer__lr": 0.0}, training__steps=1))
    plain = load_pretrained(Path(base.config.folder) / "hf", torch.float32)
    adapted = load_pretrained(Path(base.config.folder) / "hf", torch.float32)
    load_adapter(adapted, folder / "adapter")
    assert_same_logprobs(merged, adapted, 1e-5 if dtype == "float32" else 2e-2)
    with torch.no_grad():
        difference = torch.cat(tree_logprobs(merged, PATHS)) - torch.cat(tree_logprobs(plain, PATHS))
    assert difference.abs().max() > 0.1
    for name, factor in run.model.named_parameters():
        if "_lora_" in name:
            assert torch.equal(factor, adapted.get_parameter(name.replace("_checkpoint_wrapped_module.", "")))
