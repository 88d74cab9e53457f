"""CachedSampler: samples from the weights that are trained, without a copy of the model.

Shapes: B rows, S tokens per row, L layers, H heads, K key-value heads, D head dim, V vocabulary size,
d hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TypeGuard, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.tree_attention.block_lists import DecodingLists
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.errors import UserError
from titan_tree.models.block import Attention
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import MLP, Rope, at_least_fp32
from titan_tree.models.tree_model import TreeModel, with_images
from titan_tree.rl.sampler import at_temperature, check_logprobs, check_positions, draw, uniforms
from titan_tree.rl.tree_cache import Forest, TreeCache
from titan_tree.rl.truncation import ALL_IDS, KeptIds, Truncation
from titan_tree.tree.context import Completion, Ids
from titan_tree.tree.layout import TreeLayout

SHRINK = 0.8  # on a CPU, finished rows are dropped once at most this share of the batch is unfinished
COLUMNS = 256  # a step reads up to this many empty columns of a turn; a smaller number needs more CUDA graphs
READ = 32_768  # distinct tokens of contexts that one pass reads
CPU_READ = 1024  # fewer on a CPU, where attention has a dense mask
CACHE_SHARE = 0.4  # share of the GPU's memory that a cache may take
# Takes queries [n, H, D], and the cached keys and values of a layer [M, K, D]. Returns [n, H, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[
    [Tensor, Tensor], Tensor
]  # takes tokens [B] and their offset [1] in their turns, returns logits [B, V]


class CachedSampler:
    """Samples all contexts as one batch, a token at a time, with a cache of keys and values.

    On a GPU, several batches share its memory one after the other. The contexts of a batch are computed as
    token trees. A token that several contexts begin with has one key and value, which attention reads once
    for up to 16 rows, as in Hydragen (arXiv:2402.05099). If the model is compiled, so are the layers here.
    Log-probs are those of ``tree_logprobs`` up to rounding.

    Args:
        model: a dense decoder of titan_tree. The sampler uses its current weights, which must not be sharded
            while it samples (``unsharded``).
        truncation: which ids it keeps; completions record them.
        temperature: divides the logits before that. Reinforcement learning samples at 1.

    Raises:
        UserError: the model has experts, recurrent layers, or layers of transformers.
    """

    reads_images = True

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
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``. It is deterministic.

        Raises:
            UserError: a context and its turn may exceed the model's positions, or log-probs are NaN.
        """
        check_positions(contexts, max_tokens, self.model.config.max_position_embeddings)
        completions: list[Completion] = []
        with cast_weights(self.model):
            batch = self._rows(max(map(len, contexts)) + max(max_tokens))
            for start in range(0, len(contexts), batch):
                rows = slice(start, start + batch)
                completions += self._sample_batch(contexts[rows], max_tokens[rows], stops, seeds[rows])
        return completions

    def _sample_batch(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        completions = [Completion([], []) for _ in contexts]
        kept: list[tuple[list[int], KeptIds]] = []  # for each token: the contexts of its rows, and their ids
        cache, context_of_row, logits = self._read(contexts, max(1, *max_tokens) - 1)
        uniform = uniforms(seeds, max(max_tokens), self._device)[self._tensor(context_of_row)]
        offset = self._tensor([0])
        num_columns = 0  # number of columns of a turn that ``step`` reads
        for index in range(max(max_tokens)):
            logits = self.truncation.apply(at_temperature(logits, self.temperature))
            last_tokens, logprobs_of_rows = draw(logits, uniform[:, index])
            tokens, logprobs, sizes = on_host(last_tokens, logprobs_of_rows, self.truncation.sizes(logits))
            if self.truncation.is_on:
                kept.append((context_of_row, KeptIds.of(logits, sizes)))
            unfinished_rows = []
            for row, (i, token, logprob) in enumerate(zip(context_of_row, tokens, logprobs, strict=True)):
                turn, turn_logprobs, *_ = completions[i]
                if len(turn) == max_tokens[i] or (turn and turn[-1] in stops):
                    continue  # this row ended earlier
                turn.append(token)
                turn_logprobs.append(logprob)
                if token not in stops and len(turn) < max_tokens[i]:
                    unfinished_rows.append(row)
            if not unfinished_rows:
                break
            if self._device.type == "cpu" and len(unfinished_rows) <= SHRINK * len(context_of_row):
                rows = self._tensor(unfinished_rows)
                last_tokens, uniform, cache = last_tokens[rows], uniform[rows], cache.select(rows)
                context_of_row = [context_of_row[row] for row in unfinished_rows]
                num_columns = 0
            if index >= num_columns:
                num_columns = index + COLUMNS
                extend = partial(self._extend, cache=cache, lists=cache.block_lists(num_columns))
                step = self._graphs.capture(extend, last_tokens, offset)
            logits = step(last_tokens, offset)
            offset += 1
        if not self.truncation.is_on:
            return completions
        masks = [dict(zip(contexts_of_rows, ids.rows(), strict=True)) for contexts_of_rows, ids in kept]
        return [
            turn._replace(sampling_mask=[by_context[i] for by_context in masks[: len(turn.tokens)]])
            for i, turn in enumerate(completions)
        ]

    @property
    def _device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def _tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    def _rows(self, size: int) -> int:
        """Returns how many rows of ``size`` tokens are sampled at once."""
        if self._device.type != "cuda":
            return sys.maxsize
        config, weight = self.model.config, self.model.embed_tokens.weight
        row_elements = 2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        memory = torch.cuda.get_device_properties(self._device).total_memory
        return max(1, int(CACHE_SHARE * memory) // (row_elements * weight.itemsize))

    def _read(self, contexts: Sequence[Ids], size: int) -> tuple[TreeCache, list[int], Tensor]:
        """Computes keys and values of all contexts, each distinct token and image once.

        Returns:
            A cache with turns of this size, the context of each of its rows, and the logits [B, V] of these
            rows' next tokens.
        """
        config, weight = self.model.config, self.model.embed_tokens.weight
        forest = Forest.of(contexts, size)
        pixels = [torch.from_numpy(image.pixels) for image in forest.contexts.images]
        features = self.model.encode(pixels) if pixels else []
        shape = len(forest.end), config.num_key_value_heads, config.head_dim
        # Zeros, because attention multiplies values that a row does not see by 0, and 0 * nan is nan.
        cache = TreeCache.of(forest, size, weight.new_zeros(config.num_hidden_layers, 2, *shape))
        limit = CPU_READ if self._device.type == "cpu" else READ
        starts = range(0, len(forest.contexts), limit)
        hidden = torch.cat(
            [self._read_tokens(forest, start, start + limit, cache, features) for start in starts]
        )
        return cache, forest.row.tolist(), self._logits(hidden[self._tensor(forest.last)])

    def _read_tokens(
        self, forest: Forest, start: int, stop: int, cache: TreeCache, features: Sequence[Tensor]
    ) -> Tensor:
        """Computes tokens start .. stop - 1 of the contexts. The tokens before them must be in the cache.

        Args:
            features: the result of ``encode`` for the images of the contexts; () if there are none.

        Returns:
            Hidden states [n, d].
        """
        tree = forest.contexts
        tokens, positions = tree.tokens[start:stop], tree.positions[start:stop]
        n, end = len(tokens), tree.subtree_end
        seen = np.append(np.flatnonzero(end[:start] > start), np.arange(start, start + n))
        layout = self.model.prepare(
            TreeLayout(
                positions=self._tensor(positions),
                subtree_end=self._tensor(np.searchsorted(seen, end[seen]).astype(np.int32)),
                key_index=self._tensor(np.arange(len(seen) - n, len(seen), dtype=np.int32)),
            )
        )
        columns = self._tensor(forest.column[seen])

        def attend(q: Tensor, *keys_values: Tensor) -> Tensor:
            return self.model.attention(q, *(x[columns] for x in keys_values), layout)

        image_row = None if tree.image_row is None else self._tensor(tree.image_row[start:stop]).long()
        x = F.embedding(self._tensor(tokens), self.model.embed_tokens.weight)
        x, added = with_images(x, image_row, features)
        rope_positions = self._tensor(tree.rope_positions[..., start:stop])
        return self._run(x, added, rope_positions, columns[-n:], cache.keys_values, attend)

    def _extend(
        self, tokens: Tensor, offset: Tensor, cache: TreeCache, lists: DecodingLists | None
    ) -> Tensor:
        """Computes one token per row, at an offset in its turn.

        Args:
            tokens: [B].
            offset: [1].

        Returns:
            Logits [B, V] after the tokens.
        """
        position, column = cache.position + offset, cache.start + offset
        attend = partial(cache.attention, position=position, column=column.int(), lists=lists)
        x, rope_position = F.embedding(tokens, self.model.embed_tokens.weight), cache.rope_position + offset
        return self._logits(self._run(x, [], rope_position, column, cache.keys_values, attend))

    def _run(
        self,
        x: Tensor,
        added: Sequence[Tensor],
        position: Tensor,
        column: Tensor,
        keys_values: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Runs all layers on n tokens, and writes their keys and values to columns of a cache.

        Args:
            x, added: see ``with_images``.
            position: [n], or [3, n] with images: what rotary embeddings read.
            column: [n].
            keys_values: [L, 2, M, K, D].

        Returns:
            Hidden states [n, d].
        """
        model = self.model
        rope = model.make_rope(position)
        is_compiled = model.execution.is_compiled
        before, after = (_compiled_before, _compiled_after) if is_compiled else (_before, _after)
        rest = iter(added)
        for block, (keys, values) in zip(model.blocks, keys_values, strict=True):
            mixer = cast(Attention, block.mixer)
            q, k, v = before(block.input_layernorm, mixer, x, rope)
            keys.index_copy_(0, column, k)
            values.index_copy_(0, column, v)
            x = after(mixer, block.post_attention_layernorm, block.mlp, x, attend(q, keys, values))
            if (more := next(rest, None)) is not None:
                x = x + more
        return x

    def _logits(self, x: Tensor) -> Tensor:
        """Returns logits [n, V] from hidden states [n, d], on a GPU in fp32, as in training."""
        model = self.model
        head = model.embed_tokens.weight if model.output_weight is None else model.output_weight
        x = model.norm(x)
        wide = at_least_fp32(x)
        return torch.mm(x, head.T, out_dtype=wide) if x.is_cuda and x.dtype != wide else F.linear(x, head)


def _before(norm: nn.Module, mixer: Attention, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries [n, H, D], and keys and values [n, K, D], of a layer with input x [n, d]."""
    h = norm(x)
    projections = mixer.q_proj, mixer.k_proj, mixer.v_proj
    q, k, v = (projection(h).unflatten(-1, (-1, mixer.config.head_dim)) for projection in projections)
    return rope.rotate(mixer.q_norm(q)), rope.rotate(mixer.k_norm(k)), v


def _after(mixer: Attention, norm: nn.Module, mlp: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    """Returns the output [n, d] of a layer with input x [n, d], from what its heads return, [n, H, D]."""
    x = x + mixer.o_proj(attended.flatten(-2))
    return x + mlp(norm(x))


_compiled_before = torch.compile(_before, fullgraph=True, dynamic=True)
_compiled_after = torch.compile(_after, fullgraph=True, dynamic=True)


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
        self._stream: torch.cuda.Stream | None = None  # one for all graphs: each stream has memory of its own

    def capture(self, step: Step, tokens: Tensor, offset: Tensor) -> Step:
        """Returns ``step`` as a CUDA graph, because launching its many small kernels takes long.

        On a CPU, it returns ``step`` itself. A call of the graph overwrites the result of the previous call.
        A graph must not be called after a later capture.

        Args:
            step: a function that writes the same memory if it is called twice with the same inputs.
            tokens, offset: inputs of the first call.
        """
        if not tokens.is_cuda:
            return step
        inputs = tokens.clone(), offset.clone()
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

        def replay(tokens: Tensor, offset: Tensor) -> Tensor:
            inputs[0].copy_(tokens)
            inputs[1].copy_(offset)
            graph.replay()
            return result

        return replay


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
    check_logprobs(values)
    return list(map(int, ids)), values, [int(size) for size in chain(*numbers)]
