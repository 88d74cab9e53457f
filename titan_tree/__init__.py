"""Train language models on token trees: every shared token computed once, loss and gradients exact."""

from titan_tree.components.tree_attention import TreeAttention
from titan_tree.components.tree_loss import TreeLoss, register_loss
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.batch import PathPairs, TreeBatch
from titan_tree.data.layout import TreeLayout
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree, TreeStats
from titan_tree.errors import UserError
from titan_tree.models.hf import load_pretrained, save_pretrained
from titan_tree.models.registry import build_model
from titan_tree.scoring import tree_logprobs

__all__ = [
    "PathPairs",
    "TokenPath",
    "TokenTree",
    "TreeAttention",
    "TreeBatch",
    "TreeLayout",
    "TreeLoss",
    "TreeStats",
    "TreeTokenizer",
    "UserError",
    "build_model",
    "load_pretrained",
    "register_loss",
    "save_pretrained",
    "tree_logprobs",
]
