"""CachedSampler: samples from the weights that are trained, without a copy of the model.

Shapes: B rows, S tokens per row, L layers, H heads, K key-value heads, D head dim, V vocabulary size,
d hidden size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.errors import UserError
from titan_tree.models.block import Attention
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import MLP
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.context_cache import Bundles, ContextCache
from titan_tree.rl.sampler import Completion, at_temperature, draw, longest_row, uniforms
from titan_tree.rl.truncation import ALL_IDS, KeptIds, Truncation
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, common_prefix, lexicographic_order

SHRINK = 0.8  # on a CPU, finished rows are dropped once at most this share of the batch is unfinished
SLOTS = 256  # a step reads up to this many empty slots of a turn; a smaller number needs more CUDA graphs
READ = 32_768  # distinct tokens of contexts that one pass reads
CPU_READ = 1024  # fewer on a CPU, where attention has a dense mask
CACHE_SHARE = 0.4  # share of the GPU's memory that a cache may take
# Takes a layer's index, queries [B, S, H, D], and keys and values [B, S, K, D]. Returns [B, S, H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]  # takes tokens [B] and a slot [1], returns logits [B, V]


class CachedSampler:
    """Samples all contexts as one batch, a token at a time, with a cache of keys and values.

    On a GPU, several batches share its memory one after the other. The contexts of a batch are computed as
    token trees. Keys and values of equal contexts are stored, and read for each new token, once for up to 16
    rows, as in Hydragen (arXiv:2402.05099). Log-probs are those of ``tree_logprobs`` up to rounding.

    Args:
        model: a dense decoder of titan_tree. The sampler uses its current weights, which must not be sharded
            while it samples (``unsharded``).
        truncation: which ids it keeps; completions record them.
        temperature: divides the logits before that. Reinforcement learning samples at 1.

    Raises:
        UserError: the model has experts, recurrent layers, or layers of transformers.
    """

    def __init__(self, model: TreeModel, truncation: Truncation = ALL_IDS, temperature: float = 1.0) -> None:
        if not is_dense_decoder(model):
            raise UserError(
                "CachedSampler: expected a dense decoder of titan_tree with softmax attention, such as qwen3 "
                "or llama; choose such a model, or pass RLTrainer another sampler"
            )
        self.model, self.truncation, self.temperature = model, truncation, temperature
        self._graphs = Graphs()

    @torch.no_grad()
    def sample(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``. It is deterministic.

        Raises:
            UserError: a context and its turn may exceed the model's positions, or log-probs are NaN.
        """
        longest_row(contexts, max_tokens, self.model.config.max_position_embeddings)
        completions: list[Completion] = []
        with cast_weights(self.model):
            batch = self._rows(max(map(len, contexts)) + max(max_tokens))
            for start in range(0, len(contexts), batch):
                rows = slice(start, start + batch)
                completions += self._sample_batch(contexts[rows], max_tokens[rows], stop, seeds[rows])
        return completions

    def _sample_batch(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seeds: Sequence[int]
    ) -> list[Completion]:
        completions = [Completion([], []) for _ in contexts]
        kept: list[tuple[list[int], KeptIds]] = []  # for each token: the contexts of its rows, and their ids
        cache = self._read(contexts, max(max_tokens))
        last_tokens = self._tensor([context[-1] for context in contexts])
        slot = self._tensor([0])
        uniform = torch.tensor(uniforms(seeds, max(max_tokens)), dtype=torch.float64, device=self._device)
        context_of_row = list(range(len(contexts)))
        unfinished_rows = list(context_of_row)
        num_slots = 0  # number of slots of a turn that ``step`` reads
        for position in range(max(max_tokens)):
            if not unfinished_rows:
                break
            if self._device.type == "cpu" and len(unfinished_rows) <= SHRINK * len(context_of_row):
                rows = self._tensor(unfinished_rows)
                last_tokens, uniform, cache = last_tokens[rows], uniform[rows], cache.select(rows)
                context_of_row = [context_of_row[row] for row in unfinished_rows]
                num_slots = 0
            if position >= num_slots:
                num_slots = position + SLOTS
                extend = partial(self._extend, cache=cache.first_slots(num_slots))
                step = self._graphs.capture(extend, last_tokens, slot)
            logits = self.truncation.apply(at_temperature(step(last_tokens, slot), self.temperature))
            last_tokens, logprobs_of_rows = draw(logits, uniform[:, position])
            tokens, logprobs, sizes = on_host(last_tokens, logprobs_of_rows, self.truncation.sizes(logits))
            if self.truncation.is_on:
                kept.append((context_of_row, KeptIds.of(logits, sizes)))
            slot += 1
            unfinished_rows = []
            for row, (i, token, logprob) in enumerate(zip(context_of_row, tokens, logprobs, strict=True)):
                turn, turn_logprobs, *_ = completions[i]
                if len(turn) == max_tokens[i] or (turn and turn[-1] == stop):
                    continue  # this row ended earlier
                turn.append(token)
                turn_logprobs.append(logprob)
                if token != stop and len(turn) < max_tokens[i]:
                    unfinished_rows.append(row)
        if not self.truncation.is_on:
            return completions
        masks: list[list[np.ndarray]] = [[] for _ in contexts]
        for owners, ids in kept:
            for i, mask in zip(owners, ids.rows(), strict=True):
                masks[i].append(mask)
        return [
            turn._replace(sampling_mask=mask[: len(turn.tokens)])
            for turn, mask in zip(completions, masks, strict=True)
        ]

    @property
    def _device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def _tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _rows(self, size: int) -> int:
        """Returns how many rows of ``size`` tokens are sampled at once."""
        if self._device.type != "cuda":
            return sys.maxsize
        config, weight = self.model.config, self.model.embed_tokens.weight
        row_elements = 2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        memory = torch.cuda.get_device_properties(self._device).total_memory
        return max(1, int(CACHE_SHARE * memory) // (row_elements * weight.itemsize))

    def _read(self, contexts: Sequence[Sequence[int]], turn: int) -> ContextCache:
        """Returns a cache with all but the last token of each context, and room for ``turn`` tokens.

        Contexts are read as token trees, so tokens that they share are computed once. The cache also has the
        last token of a context, and padding, which decoding does not see there.
        """
        config, weight = self.model.config, self.model.embed_tokens.weight
        distinct: dict[tuple[int, ...], int] = {}
        index = [distinct.setdefault(tuple(context), len(distinct)) for context in contexts]
        bundles, _ = Bundles.of(index, weight.device)
        paths = [TokenPath(contexts[row]) for row in bundles.rows[:, 0].tolist()]

        def empty(rows: int, size: int) -> Tensor:
            sizes = rows, config.num_key_value_heads, aligned(size), config.head_dim
            return weight.new_zeros(config.num_hidden_layers, 2, *sizes)

        shared, turns = empty(len(paths), max(map(len, contexts))), empty(len(contexts), turn)
        for numbers in in_trees(paths, CPU_READ if self._device.type == "cpu" else READ):
            self._read_tree(TokenTree.from_paths([paths[i] for i in numbers]), numbers, shared)
        length = self._tensor([len(context) - 1 for context in contexts])
        return ContextCache(shared, turns, length, bundles)

    def _read_tree(self, tree: TokenTree, numbers: Sequence[int], shared: Tensor) -> None:
        """Reads a tree once, and writes the keys and values of path i to row ``numbers[i]`` of ``shared``.

        Args:
            shared: [L, 2, U, K, P, D], see ``ContextCache.context``.
        """
        of_bundle = np.repeat(numbers, np.diff(tree.path_offsets))
        arrays = tree.tokens, tree.positions, tree.subtree_end, tree.path_index, of_bundle
        tokens, positions, subtree_end, source, bundle = (
            torch.from_numpy(array).to(shared.device) for array in arrays
        )
        index = torch.arange(len(tree), dtype=torch.int32, device=shared.device)
        layout = self.model.prepare(TreeLayout(positions=positions, subtree_end=subtree_end, key_index=index))
        position = positions[source]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shared[layer, 0, bundle, :, position] = k[0, source]
            shared[layer, 1, bundle, :, position] = v[0, source]
            return self.model.attention(q[0], k[0], v[0], layout)[None]

        self._run(tokens[None], positions[None], attend)

    def _extend(self, tokens: Tensor, slot: Tensor, cache: ContextCache) -> Tensor:
        """Reads one token per row, and writes its keys and values to a slot of the turn.

        Args:
            tokens: [B].
            slot: [1].

        Returns:
            Logits [B, V] after the tokens.
        """
        mask = cache.mask(slot)

        def attend(layer: int, *qkv: Tensor) -> Tensor:
            return cache.attend(layer, slot, mask, *(x[:, 0] for x in qkv))[:, None]

        x = self._run(tokens[:, None], (cache.length + slot)[:, None], attend)[:, 0]
        model = self.model
        head = model.embed_tokens.weight if model.output_weight is None else model.output_weight
        return F.linear(model.norm(x), head)

    def _run(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Runs all layers on tokens [B, S] at position [B, S]. Returns hidden states [B, S, d]."""
        model = self.model
        rope = model.make_rope(position.flatten())
        x = F.embedding(tokens, model.embed_tokens.weight)
        for i, block in enumerate(model.blocks):
            mixer, h = block.mixer, block.input_layernorm(x)
            assert isinstance(mixer, Attention)
            assert isinstance(block.mlp, MLP)
            projections = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
            q, k, v = (p(h).unflatten(-1, (-1, model.config.head_dim)).flatten(0, 1) for p in projections)
            q, k = rope.rotate(mixer.q_norm(q)), rope.rotate(mixer.k_norm(k))
            out = attend(i, *(y.unflatten(0, tokens.shape) for y in (q, k, v)))
            x = x + mixer.o_proj(out.flatten(-2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return x


def is_dense_decoder(model: TreeModel) -> TypeGuard[Decoder]:
    """Returns whether ``CachedSampler`` can sample from the model."""
    return isinstance(model, Decoder) and all(
        isinstance(block.mixer, Attention) and not block.mixer.output_gate and isinstance(block.mlp, MLP)
        for block in model.blocks
    )


class Graphs:
    """CUDA graphs that share memory, because only the newest one is used.

    Without sharing, the allocator would keep the memory of deleted graphs until no other memory is left, and
    the driver may fail before that.
    """

    def __init__(self) -> None:
        self._newest: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None  # all graphs use one, because each has its own memory

    def capture(self, step: Step, tokens: Tensor, slot: Tensor) -> Step:
        """Returns ``step`` as a CUDA graph, because launching its many small kernels takes long.

        On a CPU, it returns ``step`` itself. A call of the graph overwrites the result of the previous call.
        A graph must not be called after a later capture.

        Args:
            step: a function that writes the same memory if it is called twice with the same inputs.
            tokens, slot: inputs of the first call.
        """
        if not tokens.is_cuda:
            return step
        inputs = tokens.clone(), slot.clone()
        stream = self._stream = self._stream or torch.cuda.Stream()
        graph, pool = torch.cuda.CUDAGraph(), self._newest.pool() if self._newest else None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(*inputs)  # libraries allocate their workspaces before the capture
            graph.capture_begin(pool, capture_error_mode="thread_local")
            result = step(*inputs)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._newest = graph

        def replay(tokens: Tensor, slot: Tensor) -> Tensor:
            inputs[0].copy_(tokens)
            inputs[1].copy_(slot)
            graph.replay()
            return result

        return replay


def in_trees(paths: Sequence[TokenPath], limit: int) -> list[list[int]]:
    """Returns groups of numbers of paths. The tree of a group has at most ``limit`` tokens, or one path.

    Paths that begin alike come to the same group, as far as the limit allows.
    """
    groups: list[list[int]] = []
    tokens, size, previous = [path.tokens for path in paths], limit, np.empty(0, np.int32)
    for i in lexicographic_order(tokens):
        new = len(tokens[i]) - common_prefix(previous, tokens[i])
        if new and size + new > limit:
            groups.append([])
            size, new = 0, len(tokens[i])
        groups[-1].append(i)
        size, previous = size + new, tokens[i]
    return groups


def aligned(size: int) -> int:
    """Returns ``size``, rounded up so that each row of a bf16 matrix starts at a multiple of 16 bytes."""
    return math.ceil(size / 8) * 8


def on_host(
    tokens: Tensor, logprobs: Tensor, sizes: Tensor | None
) -> tuple[list[int], list[float], list[int]]:
    """Returns sampled tokens, their log-probs and sizes, [B] each, as lists. It waits for a GPU once.

    Raises:
        UserError: log-probs are NaN.
    """
    # One copy to the host. fp64 holds ids and log-probs exactly.
    columns = [tokens, logprobs] if sizes is None else [tokens, logprobs, sizes]
    ids, values, *numbers = torch.stack([column.double() for column in columns]).tolist()
    if any(map(math.isnan, values)):
        raise UserError(
            "CachedSampler: the model's log-probs: expected numbers, got nan; check that its weights are "
            "finite, or set training.dtype to float32"
        )
    return list(map(int, ids)), values, [int(size) for size in chain(*numbers)]
