"""Train language models on token trees: every shared token computed once, loss and gradients exact.

The names below are imported when they are first used (PEP 562): reading data or ``titan-tree inspect`` never
waits for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_tree.components.tree_attention import TreeAttention
    from titan_tree.components.tree_loss import TreeLoss, register_loss
    from titan_tree.components.tree_partitioner import TreePartitioner
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.engine.scoring import tree_logprobs
    from titan_tree.errors import UserError
    from titan_tree.models.hf import load_pretrained, save_pretrained
    from titan_tree.models.registry import build_model
    from titan_tree.tree.batch import PathPairs, TreeBatch
    from titan_tree.tree.layout import TreeLayout
    from titan_tree.tree.paths import TokenPath
    from titan_tree.tree.token_tree import TokenTree, TreeStats

__all__ = [
    "PathPairs",
    "TokenPath",
    "TokenTree",
    "TreeAttention",
    "TreeBatch",
    "TreeLayout",
    "TreeLoss",
    "TreePartitioner",
    "TreeStats",
    "TreeTokenizer",
    "UserError",
    "build_model",
    "load_pretrained",
    "register_loss",
    "save_pretrained",
    "tree_logprobs",
]

_HOME = {
    "PathPairs": "tree.batch",
    "TokenPath": "tree.paths",
    "TokenTree": "tree.token_tree",
    "TreeAttention": "components.tree_attention",
    "TreeBatch": "tree.batch",
    "TreeLayout": "tree.layout",
    "TreeLoss": "components.tree_loss",
    "TreePartitioner": "components.tree_partitioner",
    "TreeStats": "tree.token_tree",
    "TreeTokenizer": "components.tree_tokenizer",
    "UserError": "errors",
    "build_model": "models.registry",
    "load_pretrained": "models.hf",
    "register_loss": "components.tree_loss",
    "save_pretrained": "models.hf",
    "tree_logprobs": "engine.scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
