"""DataForest: the sequences of Tinker's data as one tree, and its log-probs in the order of their targets.

A target that is not the token that follows is a branch of one token. So any target, and any number of them
per token, costs no more than one token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.serve.tinker.wire import Datum
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

MAX_BRANCHED = (
    2**27
)  # tokens on the paths of all branches, which take about 40 bytes each while a tree is built


class DataForest(NamedTuple):
    """The tree of all data.

    Attributes:
        pair: [N] int64, the (edge, path) pair that predicts each of the N targets of all data.
    """

    tree: TokenTree
    pair: Tensor

    @staticmethod
    def of(data: Sequence[Datum], merge: bool = True) -> DataForest:
        """Returns the tree of data, which all have target_tokens.

        Args:
            merge: merge equal prefixes of different data. False computes each datum alone, for comparison.

        Raises:
            UserError: the paths to the branches of targets would not fit into the host's memory.
        """
        trees, pairs, first = [], [], 0
        for part in [data] if merge else [[datum] for datum in data]:
            tree, pair, number = _tree(part)
            trees.append(tree)
            pairs.append(pair + first)
            first += number
        return DataForest(TokenTree.forest(trees), torch.from_numpy(np.concatenate(pairs)))

    def by_token(self, values: Tensor, batch: TreeBatch) -> Tensor:
        """Returns the values of edges [E] in the order of the targets, [N]. See ``Rows.by_token``."""
        return values[batch.pairs.edge][self.pair.to(values.device)]


def _tree(data: Sequence[Datum]) -> tuple[TokenTree, np.ndarray, int]:
    """Returns the tree of data, the pair of each of their N targets, and the number of pairs."""
    targets = [datum.inputs["target_tokens"].reshape(len(datum.tokens), -1) for datum in data]
    tokens = [np.append(datum.tokens, wanted[-1, 0]) for datum, wanted in zip(data, targets, strict=True)]
    follows = [wanted == ids[1:, None] for ids, wanted in zip(tokens, targets, strict=True)]
    paths = [
        TokenPath(ids, loss_mask=np.append(False, same.any(1)), id=f"data[{index}]")
        for index, (ids, same) in enumerate(zip(tokens, follows, strict=True))
    ]
    pair = np.full(sum(map(np.size, targets)), -1)
    number, start, others = 0, 0, []
    tree = TokenTree.from_paths(paths)
    for index, (wanted, same) in enumerate(zip(targets, follows, strict=True)):
        own = pair[start : start + wanted.size].reshape(wanted.shape)  # a view
        is_scored = same.any(1)
        own[same] = np.broadcast_to((number + np.cumsum(is_scored) - 1)[:, None], same.shape)[same]
        token, column = (~same).nonzero()
        place = start + token * wanted.shape[1] + column
        node = tree.path_index[tree.path_offsets[index] + token]
        others.append(np.stack([node, wanted[token, column], np.full_like(token, index), token, place]))
        number, start = number + int(is_scored.sum()), start + wanted.size
    nodes, ids, index, token, place = np.concatenate(others, 1)
    if len(nodes):
        # One branch for each distinct (token of the tree, target).
        _, chosen, branch = np.unique(np.stack([nodes, ids]), axis=1, return_index=True, return_inverse=True)
        if (size := int((token[chosen] + 2).sum())) > MAX_BRANCHED:
            raise UserError(
                "target_tokens: expected fewer or shorter data with targets that do not follow their tokens; "
                f"the paths to {len(chosen):,} of them have {size:,} tokens, more than {MAX_BRANCHED:,}; "
                "send fewer data in a call"
            )
        pair[place] = number + branch.ravel()
        for i in chosen:
            branched = np.append(tokens[index[i]][: token[i] + 1], ids[i])
            mask = np.arange(len(branched)) == len(branched) - 1
            paths.append(TokenPath(branched, loss_mask=mask, id=f"data[{index[i]}]"))
        tree, number = TokenTree.from_paths(paths), number + len(chosen)
    return tree, pair, number
