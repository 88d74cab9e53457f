"""What torch.compile keeps for the next start of a run."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from titan_tree.distributed.parallelize import keep_compiled
from titan_tree.distributed.titan import TreeSelectiveAC

FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def test_the_default_folder_of_torch_gives_way_to_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, default_cache_dir())  # as importing torch.compile does
    assert keep_compiled(tmp_path / "compiled") == tmp_path / "compiled"
    assert os.environ[FOLDER] == str(tmp_path / "compiled")


def test_a_folder_that_the_user_names_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    assert keep_compiled(tmp_path / "compiled") == tmp_path / "mine"


def test_a_selectively_checkpointed_block_is_not_traced_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    counters.clear()
    for _ in range(2):  # two starts of a run
        torch._dynamo.reset()
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(8, 8)])
        TreeSelectiveAC(TreeSelectiveAC.Config(preserve_rng_state=False)).apply(model)
        block = model.layers[0]
        block.compile(fullgraph=True, dynamic=True)
        block(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
