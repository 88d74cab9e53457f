"""CachedSampler: samples from the weights that are trained, without a copy of the model.

B rows, T new tokens of each, S tokens that the cache has room for, L layers, H heads, K key-value heads, D
head dim, V vocabulary, d hidden size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.errors import UserError
from titan_tree.models.attention import Attention
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import MLP
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.sampler import Completion, longest_row

# Rows that have ended leave the batch once at most this share of it is live. A GPU then needs a new graph.
SHRINK = {"cpu": 0.8, "cuda": 0.4}
LENGTHS = 256  # a step of decoding reads a multiple of this many keys
CACHE_SHARE = 0.3  # of the GPU's memory that a cache may take; a copy of some rows is made beside it
# Takes a layer's index, queries [B, T, H, D], and keys and values [B, T, K, D]. Returns [B, T, H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Cache(NamedTuple):
    """Keys and values, [L, B, S, K, D] each."""

    keys: Tensor
    values: Tensor

    def select(self, rows: Tensor) -> Cache:
        """Returns a copy of some rows."""
        return Cache(self.keys[:, rows], self.values[:, rows])


class CachedSampler:
    """Samples all contexts as one batch, a token at a time, with a cache of keys and values.

    On a GPU, several batches share its memory one after the other. Equal contexts of a batch are read once.
    Log-probs are those of ``tree_logprobs`` up to rounding.

    Args:
        model: a dense decoder of titan_tree on one device. The sampler uses its current weights.

    Raises:
        UserError: the model has experts, recurrent layers, or layers of transformers.
    """

    def __init__(self, model: TreeModel) -> None:
        if not isinstance(model, Decoder) or not all(
            isinstance(block.mixer, Attention) and not block.mixer.output_gate and isinstance(block.mlp, MLP)
            for block in model.blocks
        ):
            raise UserError(
                "CachedSampler: expected a dense decoder of titan_tree with softmax attention, such as qwen3 "
                "or llama; choose such a model, or pass RLTrainer another sampler"
            )
        self.model = model

    @torch.no_grad()
    def sample(
        self, contexts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: int, seed: int
    ) -> list[Completion]:
        """See ``Sampler``. It is deterministic.

        Raises:
            UserError: a context and its turn may exceed the model's positions.
        """
        size = longest_row(contexts, max_tokens, self.model.config.max_position_embeddings)
        generator = torch.Generator(self._device).manual_seed(seed)
        completions: list[Completion] = []
        with cast_weights(self.model):
            batch = self._rows(size)
            for start in range(0, len(contexts), batch):
                rows = slice(start, start + batch)
                completions += self._sample_batch(contexts[rows], max_tokens[rows], stop, generator)
        return completions

    def _sample_batch(
        self,
        contexts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        stop: int,
        generator: torch.Generator,
    ) -> list[Completion]:
        completions = [Completion([], []) for _ in contexts]
        size = max(len(context) + limit for context, limit in zip(contexts, max_tokens, strict=True))
        cache = self._read(contexts, size)
        last = self._tensor([context[-1] for context in contexts])
        position = self._tensor([len(context) - 1 for context in contexts])
        longest = max(map(len, contexts))  # tokens of the longest row
        length = 0  # keys that ``step`` reads of each row
        live = list(range(len(contexts)))  # the context of each row
        while live:
            if longest > length:
                length = min(math.ceil(longest / LENGTHS) * LENGTHS, size)
                step = graphed(partial(self._extend, cache=cache, length=length), last, position)
            logprobs = step(last, position).float().log_softmax(-1)
            last = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
            position = (position + 1).clamp_max(size - 1)  # rows that have ended run on
            longest = min(longest + 1, size)
            chosen = logprobs.gather(1, last[:, None])[:, 0].tolist()
            going = []
            for row, (i, token) in enumerate(zip(live, last.tolist(), strict=True)):
                tokens, values, _ = completions[i]
                if len(tokens) == max_tokens[i] or (tokens and tokens[-1] == stop):
                    continue  # this row ended earlier
                tokens.append(token)
                values.append(chosen[row])
                if token != stop and len(tokens) < max_tokens[i]:
                    going.append(row)
            if len(going) <= SHRINK[self._device.type] * len(live):
                rows = self._tensor(going)
                last, position, cache = last[rows], position[rows], cache.select(rows)
                live, length = [live[row] for row in going], 0
        return completions

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
        row = 2 * size * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        memory = torch.cuda.get_device_properties(self._device).total_memory
        return max(1, int(CACHE_SHARE * memory) // (row * weight.itemsize))

    def _read(self, contexts: Sequence[Sequence[int]], size: int) -> Cache:
        """Returns a cache with all but the last token of each context.

        Different contexts are padded on the right. Decoding replaces the keys of the padding before it sees
        them.
        """
        config, weight = self.model.config, self.model.embed_tokens.weight
        different = {tuple(context): row for row, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        shape = (config.num_hidden_layers, len(different), size, config.num_key_value_heads, config.head_dim)
        cache = Cache(*torch.zeros(2, *shape, dtype=weight.dtype, device=weight.device))
        length = max(map(len, different)) - 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer][:, :length], cache.values[layer][:, :length] = k, v
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        if length:
            padding = [0] * length
            tokens = self._tensor([[*context[:-1], *padding][:length] for context in different])
            self._run(tokens, torch.arange(length, device=tokens.device).expand_as(tokens), attend)
        return cache.select(self._tensor([different[tuple(context)] for context in contexts]))

    def _extend(self, tokens: Tensor, position: Tensor, cache: Cache, length: int) -> Tensor:
        """Reads a token [B] at position [B] of each row, and writes the cache.

        Args:
            length: keys to read of each row; more than every position.

        Returns:
            Logits [B, V] after the tokens.
        """
        row = torch.arange(len(tokens), device=tokens.device)
        visible = (torch.arange(length, device=tokens.device) <= position[:, None])[:, None, None]
        num_heads = self.model.config.num_key_value_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[row, position], values[row, position] = k[:, 0], v[:, 0]
            out = F.scaled_dot_product_attention(
                q[:, 0].unflatten(1, (num_heads, -1)),  # the heads that share a key are rows of one query
                keys[:, :length].transpose(1, 2),
                values[:, :length].transpose(1, 2),
                attn_mask=visible,
            )
            return out.flatten(1, 2)[:, None]

        x = self._run(tokens[:, None], position[:, None], attend)[:, 0]
        model = self.model
        head = model.embed_tokens.weight if model.output_weight is None else model.output_weight
        return F.linear(model.norm(x), head)

    def _run(self, tokens: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Runs all layers on tokens [B, T] at position [B, T]. Returns hidden states [B, T, d]."""
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
            out = attend(i, *(part.unflatten(0, tokens.shape) for part in (q, k, v)))
            x = x + mixer.o_proj(out.flatten(-2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return x


def graphed(
    step: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, position: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns ``step``; on a GPU as a CUDA graph, because launching its many small kernels takes long.

    What the graph returns is overwritten by the next call.

    Args:
        step: writes the same memory if it is called twice with the same inputs.
        tokens, position: inputs of the first call.
    """
    if not tokens.is_cuda:
        return step
    inputs = tokens.clone(), position.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*inputs)  # libraries allocate their workspaces before the capture
        graph.capture_begin(capture_error_mode="thread_local")
        result = step(*inputs)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(tokens: Tensor, position: Tensor) -> Tensor:
        for own, new in zip(inputs, (tokens, position), strict=True):
            own.copy_(new)
        graph.replay()
        return result

    return replay
