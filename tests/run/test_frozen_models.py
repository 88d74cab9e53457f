"""Frozen models, such as teachers and the base of adapters, never take the memory of fp32 weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.models.pretrained import build_model, load_pretrained, load_weights, save_pretrained
from titan_tree.models.settings import ModelConfig
from titan_tree.run import model_setup
from titan_tree.run.settings import TrainingConfig


def test_a_frozen_snapshot_is_read_in_the_dtype_of_the_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(build_model("qwen3", "debug"), tmp_path)
    dtypes = set()

    def load(built: torch.nn.Module, *rest: Any) -> None:
        dtypes.update(weight.dtype for weight in built.parameters())
        load_weights(built, *rest)

    monkeypatch.setattr(model_setup, "load_weights", load)
    model = ModelConfig(flavor=None, hf_path=str(tmp_path))
    training = TrainingConfig(dtype="bfloat16", compile=False)
    frozen = model_setup.build_frozen_model(model, training, ParallelConfig(), OneRank("cpu"))
    assert dtypes == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in frozen.parameters())
    read = frozen.state_dict()
    for name, weight in load_pretrained(tmp_path).state_dict().items():
        assert read[name].equal(weight.to(read[name].dtype)), name
