"""CachedSampler: samples from the weights that are trained, without a copy of the model.

B rows, T new tokens of each, S tokens that the cache has room for, L layers, K key-value heads, D head dim,
V vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from titan_tree.rl.sampler import Completion

SHRINK = 0.8  # rows that have ended leave the batch once at most this share of it is live


class Cache(NamedTuple):
    """Keys and values, [L, B, S, K, D] each."""

    keys: Tensor
    values: Tensor

    def select(self, rows: Tensor) -> Cache:
        """Returns a copy of some rows."""
        return Cache(self.keys[:, rows], self.values[:, rows])


class CachedSampler:
    """Samples all contexts as one batch, a token at a time, with a cache of keys and values.

    Equal contexts are read once. Log-probs are those of ``tree_logprobs`` up to rounding.

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
        size = max(len(context) + limit for context, limit in zip(contexts, max_tokens, strict=True))
        if size > (most := self.model.config.max_position_embeddings):
            raise UserError(
                f"rl.max_rollout_tokens: expected at most the model's {most:,} positions, got {size:,} for a "
                "context and its turn; lower it"
            )
        generator = torch.Generator(self._device).manual_seed(seed)
        completions = [Completion([], []) for _ in contexts]
        with cast_weights(self.model):
            cache = self._read(contexts, size)
            last = self._tensor([context[-1] for context in contexts])
            position = self._tensor([len(context) - 1 for context in contexts])
            live = list(range(len(contexts)))  # the context of each row
            while live:
                logprobs = self._extend(last[:, None], position, cache).float().log_softmax(-1)
                last = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
                position = (position + 1).clamp_max(size - 1)  # rows that have ended run on
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
                if len(going) <= SHRINK * len(live):
                    rows = self._tensor(going)
                    last, position, cache = last[rows], position[rows], cache.select(rows)
                    live = [live[row] for row in going]
        return completions

    @property
    def _device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def _tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _read(self, contexts: Sequence[Sequence[int]], size: int) -> Cache:
        """Returns a cache with all but the last token of each context.

        Different contexts are padded on the right. Decoding replaces the keys of the padding before it sees
        them.
        """
        config, weight = self.model.config, self.model.embed_tokens.weight
        different = {tuple(context): row for row, context in enumerate(dict.fromkeys(map(tuple, contexts)))}
        shape = (config.num_hidden_layers, len(different), size, config.num_key_value_heads, config.head_dim)
        cache = Cache(*torch.zeros(2, *shape, dtype=weight.dtype, device=weight.device))
        longest = max(map(len, different)) - 1
        if longest:
            padded = self._tensor(
                [[*context[:-1], *[0] * (longest + 1 - len(context))] for context in different]
            )
            self._extend(padded, self._tensor([0] * len(different)), cache)
        return cache.select(self._tensor([different[tuple(context)] for context in contexts]))

    def _extend(self, tokens: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Reads tokens [B, T], whose first one has position start [B] in its row, and writes the cache.

        Returns:
            Logits [B, V] after the last token.
        """
        model, (rows, length) = self.model, tokens.shape
        position = start[:, None] + torch.arange(length, device=start.device)
        size = int(position.max()) + 1
        rope = model.make_rope(position.flatten())
        mask = (torch.arange(size, device=start.device) <= position[..., None])[:, None]  # [B, 1, T, size]
        row = torch.arange(rows, device=start.device)[:, None]
        x = F.embedding(tokens, model.embed_tokens.weight)  # [B, T, d]
        for i, block in enumerate(model.blocks):
            mixer, h = block.mixer, block.input_layernorm(x).flatten(0, 1)
            assert isinstance(mixer, Attention)
            assert isinstance(block.mlp, MLP)
            D = model.config.head_dim
            q, k, v = (p(h).unflatten(-1, (-1, D)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
            q, k = rope.rotate(mixer.q_norm(q)), rope.rotate(mixer.k_norm(k))
            cache.keys[i][row, position] = k.unflatten(0, (rows, length))
            cache.values[i][row, position] = v.unflatten(0, (rows, length))
            out = F.scaled_dot_product_attention(
                q.unflatten(0, (rows, length)).transpose(1, 2),
                cache.keys[i][:, :size].transpose(1, 2),
                cache.values[i][:, :size].transpose(1, 2),
                attn_mask=mask,
                enable_gqa=True,
            )
            x = x + mixer.o_proj(out.transpose(1, 2).flatten(-2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        head = model.embed_tokens.weight if model.output_weight is None else model.output_weight
        return F.linear(model.norm(x[:, -1]), head)
