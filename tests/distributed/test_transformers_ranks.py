"""Runs of a model of transformers: equal to those of titan_tree's own model, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_expert_parallel import square_of_mean
from tests.support.hf_families import hf_family
from tests.support.processes import as_rank, run_ranks
from tests.support.same_run import assert_same_run
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import register_loss
from titan_tree.models.pretrained import Implementation
from titan_tree.models.settings import ModelConfig
from titan_tree.run.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]

PARTITIONS = {"data__max_tokens": 12}
# The architecture, and options. Both models of Qwen3 start from the same snapshot.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"data__max_tokens": 70}),
    "partitions": ("qwen3", {**PARTITIONS, "training__activation_checkpoint": "full"}),
    "hybrid": ("qwen3_5_text", {"data__max_tokens": 30}),
    "hybrid with experts": ("qwen3_next", {"data__max_tokens": 30}),
    "experts with LoRA": (
        "gpt_oss",
        {
            **PARTITIONS,
            "training__activation_checkpoint": "full",
            "lora__rank": 4,
            "lora__targets": "[q_proj,experts.gate_up_proj,experts.down_proj]",
        },
    ),
    "whole paths": ("gpt_oss", {**PARTITIONS, "loss__name": "square_of_mean"}),
}


def config(
    folder: Path, name: str, implementation: Implementation = "transformers", steps: int = 2
) -> Config:
    """Returns a configuration of a run from a snapshot beside ``folder``."""
    register_loss("square_of_mean", whole_paths=True)(square_of_mean)
    architecture, options = CASES[name]
    snapshot = folder.parent / architecture
    if not snapshot.exists():
        # transformers does not train the embedding of a padding token.
        hf_family(architecture, pad_token_id=None).save_pretrained(snapshot)
    fixed = {
        "training__steps": steps,
        "optimizer__eps": 1e-3,  # otherwise AdamW turns rounding errors into steps of size lr
        "checkpoint__interval": steps,
        "checkpoint__export_hf": True,
    }
    made = tiny_config(folder / name.replace(" ", "_"), **fixed, **options)
    made.model = ModelConfig(hf_path=str(snapshot), implementation=implementation)
    return made


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("qwen3", 20),
        ("hybrid", 4),
        pytest.param("hybrid with experts", 20, marks=pytest.mark.exhaustive),
        pytest.param("partitions", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_both_implementations_train_alike(tmp_path: Path, name: str, steps: int) -> None:
    """Their exports have the same tensors."""
    both: list[Implementation] = ["native", "transformers"]
    runs = [train(config(tmp_path / each, name, each, steps)) for each in both]
    rows = [read_metrics(run.config) for run in runs]
    # Rounding errors in the gradients of a recurrent layer's decays are larger.
    bounds = {"grad_norm": 2e-4} if name.startswith("hybrid") else {}
    assert len(rows[0]) == steps
    for native, other in zip(*rows, strict=True):
        for column in other:  # the native model has further columns for its router
            assert float(other[column]) == pytest.approx(
                float(native[column]), rel=bounds.get(column, 1e-5)
            ), column
    exports = [load_file(run.folder.path / "hf" / "model.safetensors") for run in runs]
    assert exports[0].keys() - exports[1].keys() <= {"lm_head.weight"}
    for key, weight in exports[1].items():
        torch.testing.assert_close(weight, exports[0][key], rtol=1e-5, atol=1e-6, msg=key)


ON_TWO_RANKS = ["qwen3", "hybrid", "experts with LoRA", "whole paths"]  # they have the parts of the others


def train_cases(rank: int, ports: list[int], folder: Path) -> None:
    for name, port in zip(ON_TWO_RANKS, ports, strict=True):
        with as_rank(rank, 2, port):
            train(config(folder, name))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of all cases, trained by two processes."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    for name in ON_TWO_RANKS:
        config(folder, name)  # writes snapshots and data before two processes read them
    run_ranks(train_cases, 2, folder, num_groups=len(ON_TWO_RANKS))
    return folder


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_equal_one(two_ranks: Path, tmp_path: Path, name: str) -> None:
    """Also loads the checkpoint of two ranks on one."""
    assert_same_run(config(two_ranks, name), train(config(tmp_path / "one", name)))
