"""What torch.compile makes of blocks, and what it keeps for the next start of a run."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.utils import run_and_get_code

from titan_tree.distributed.compiling import keep_compiled
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.titan import TreeSelectiveAC
from titan_tree.models.pretrained import build_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

FOLDER, KERNELS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def test_the_default_folder_of_torch_gives_way_to_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, default_cache_dir())  # as importing torch.compile does
    monkeypatch.setenv(KERNELS, "")  # restores the variable after the test
    monkeypatch.delenv(KERNELS)
    assert keep_compiled(tmp_path / "compiled") == tmp_path / "compiled"
    assert os.environ[FOLDER] == str(tmp_path / "compiled")
    assert os.environ[KERNELS] == str(tmp_path / "compiled" / "triton")


def test_folders_that_the_user_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    monkeypatch.setenv(KERNELS, str(tmp_path / "kernels"))
    assert keep_compiled(tmp_path / "compiled") == tmp_path / "mine"
    assert os.environ[KERNELS] == str(tmp_path / "kernels")


@pytest.mark.slow
def test_a_selectively_checkpointed_block_is_not_traced_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    counters.clear()
    for _ in range(2):  # two starts of a run
        torch._dynamo.reset()
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(8, 8, bias=False)])  # no C++ kernels
        TreeSelectiveAC(TreeSelectiveAC.Config(preserve_rng_state=False)).apply(model)
        block = model.layers[0]
        block.compile(fullgraph=True, dynamic=True)
        block(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.exhaustive
def test_the_eps_of_a_norm_is_a_constant_of_its_graph() -> None:
    """As an input it would be a tensor on the CPU, even if the model is on a GPU."""
    torch._dynamo.reset()
    model = build_model("qwen3", "debug")
    parallelize(model, OneRank(), dtype=torch.float32, compile=True)
    _, (code, *_) = run_and_get_code(model.norm, torch.ones(4, model.config.hidden_size))
    assert "float*" in code
    assert "double" not in code


def test_blocks_get_no_tables_that_they_do_not_read() -> None:
    """With torch 2.11, a compiled graph depends on the sizes of all of its inputs."""
    layout = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2, 3])])]).layout
    assert layout.chains is not None
    dense, hybrid = (build_model(name, "debug").prepare(layout) for name in ("qwen3", "qwen3_5"))
    assert dense.chains is dense.chunks is dense.predecessor is dense.state_exports is None
    assert hybrid.chains is not None
