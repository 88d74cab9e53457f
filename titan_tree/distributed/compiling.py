"""torch.compile: its settings for modules that run on trees, and where it keeps its graphs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from titan_tree.models.tree_model import TreeModel


def compile_modules(model: TreeModel, modules: Iterable[nn.Module], fullgraph: bool = True) -> None:
    """Compiles modules of a model, in place, for tensors of all sizes.

    Args:
        fullgraph: whether a graph break is an error.
    """
    # The compiler makes separate graphs for the sizes 0 and 1 of each tensor. This limit is above the number
    # of their combinations.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # Numbers such as the eps of a norm are constants. Otherwise they would be tensors on the CPU, so that the
    # graphs of a GPU would have C++ kernels too.
    torch._dynamo.config.specialize_float = True
    # RMSNorm's reductions over rows and columns are otherwise fused in large batches only, in another graph.
    torch._inductor.config.triton.mix_order_reduction_non_strict_mode = True
    if "states" in model.cache_streams:
        # The many small tables of a layout may have equal sizes by chance. A graph must not rely on that.
        torch.fx.experimental._config.use_duck_shape = False
    if model.communicates:
        # This pass orders operators by their sizes, which differ by rank. All ranks must exchange in one
        # order.
        torch._inductor.config.reorder_for_peak_memory = False
        # The graph would check that no number of rows is negative. If a block is checkpointed selectively,
        # the Inductor of torch 2.11 cannot pass that check to the backward graph.
        torch._dynamo.config.do_not_emit_runtime_asserts = True
    for module in modules:
        module.compile(fullgraph=fullgraph, dynamic=True)


def keep_compiled(folder: Path) -> Path:
    """Makes torch.compile keep its graphs and kernels in ``folder``, and returns the folder that it will use.

    That is another one if the environment variable TORCHINDUCTOR_CACHE_DIR names one. PyTorch sets this
    variable to a default when it is imported, so the default counts as unset. Triton keeps its kernels in
    the folder "triton" there, unless TRITON_CACHE_DIR names another one.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name, default_cache_dir()) == default_cache_dir():
        os.environ[name] = str(folder.absolute())
    cache = Path(os.environ[name])
    # Inductor sets this when it compiles, but not when it finds its graphs in the cache. The next start
    # would look for the kernels that are called directly, such as TreeAttention's, in another folder.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    return cache
