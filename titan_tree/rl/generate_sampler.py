"""GenerateSampler: samples from the weights that are trained with ``generate`` of transformers.

Shapes: B contexts, U distinct ones, S tokens in the longest one, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.errors import UserError
from titan_tree.models.pretrained import import_transformers
from titan_tree.models.tree_model import TreeModel, with_images
from titan_tree.rl.cached_sampler import CachedSampler, is_dense_decoder
from titan_tree.rl.sampler import (
    Sampler,
    at_temperature,
    check_logprobs,
    check_positions,
    distinct_contexts,
    draw,
    uniforms,
)
from titan_tree.rl.truncation import ALL_IDS, KeptIds, Truncation
from titan_tree.tree.context import Completion, Ids
from titan_tree.tree.token_tree import TokenTree


class GenerateSampler:
    """Samples all contexts as one batch, with the loop and the caches of transformers.

    It computes with the modules of the model, so it needs no copy of the weights. Equal contexts are read
    once. Log-probs are those of ``tree_logprobs`` up to rounding.

    Args:
        model: any model. The sampler uses its current weights, in the dtype of training. They must not be
            sharded while it samples (``unsharded``).
        truncation: which ids it keeps; completions record them.
        temperature: divides the logits before that. Reinforcement learning samples at 1.

    Raises:
        UserError: transformers does not implement the model, or is not installed.
    """

    reads_images = True

    def __init__(self, model: TreeModel, truncation: Truncation = ALL_IDS, temperature: float = 1.0) -> None:
        self.model, self.truncation, self.temperature = model, truncation, temperature
        import_transformers()  # raises UserError if the library is missing
        from titan_tree.models.transformers.blocks import CACHE
        from titan_tree.models.transformers.generation import generating

        self._generating: Any = generating(model)
        self._cache = CACHE

    @torch.no_grad()
    def sample(
        self, contexts: Sequence[Ids], max_tokens: Sequence[int], stops: Ids, seeds: Sequence[int]
    ) -> list[Completion]:
        """See ``Sampler``. It is deterministic.

        Raises:
            UserError: a context and its turn may exceed the model's positions, log-probs are NaN, or the
                model is Qwen3-VL and contexts have images.
        """
        check_positions(contexts, max_tokens, self.model.config.max_position_embeddings)
        paths, numbers = distinct_contexts(contexts)
        tree, rows = TokenTree.from_paths(paths), self._tensor(numbers)
        index = self._left_padded([tree.indices_of(path) for path in range(len(paths))])
        tokens, mask = self._tensor(tree.tokens)[index], (index >= 0).long()
        positions = self._tensor(tree.rope_positions)[..., index]
        uniform = uniforms(seeds, max(max_tokens), self._device)
        ends = self._tensor(max_tokens), self._tensor(stops)
        record = _Record(*ends, uniform, self.truncation, self.temperature)
        with cast_weights(self.model):
            cache = self._read(tree, index, mask, positions)
            if cache is not None:
                cache.reorder_cache(rows)
            out = self._generating.generate(
                tokens[rows],
                attention_mask=mask[rows],
                # All axes of the position of text are equal, and contexts end with text.
                position_ids=positions.view(-1, *tokens.shape)[0, rows],
                **{self._cache: cache},
                do_sample=False,  # ``record`` draws the tokens
                max_new_tokens=max(max_tokens),
                logits_processor=[record.draw],
                stopping_criteria=[record.is_done],
            )
        sampled = out[:, tokens.shape[1] :].tolist()
        logprobs = torch.stack(record.logprobs, 1).tolist()
        kept = [ids.rows() for ids in record.kept]
        completions = []
        for row, (tokens, limit) in enumerate(zip(sampled, max_tokens, strict=True)):
            # ``generate`` continues a turn that has ended, until all have.
            size = next((i for i, token in enumerate(tokens[:limit], 1) if token in stops), limit)
            check_logprobs(logprobs[row][:size])
            masks = [of_rows[row] for of_rows in kept[:size]] if self.truncation.is_on else None
            completions.append(Completion(tokens[:size], logprobs[row][:size], None, masks))
        return completions

    @property
    def _device(self) -> torch.device:
        return self.model.embedding_weight.device

    def _tensor(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long, device=self._device)

    def _left_padded(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Returns rows of indices as [U, S]. Padding is -1, and on the left, for ``generate``."""
        size = max(map(len, rows))
        return self._tensor(np.stack([np.pad(row, (size - len(row), 0), constant_values=-1) for row in rows]))

    def _read(self, tree: TokenTree, index: Tensor, mask: Tensor, positions: Tensor) -> Any:
        """Returns transformers' cache of all but the last token of each context; None for 1 or 2 columns.

        ``generate`` reads so few itself. A pass over one column would put padding into recurrent states,
        because transformers takes it for a decoding step, which has no padding.
        """
        if index.shape[1] <= 2:
            return None
        tokens, inputs = self._tensor(tree.tokens), {}
        if tree.image_row is None:
            inputs["input_ids"] = tokens[index[:, :-1]]
        elif not hasattr(self._generating.base_model.rotary_emb, "mrope_section"):
            raise UserError(
                f"GenerateSampler: expected Qwen3.5 for contexts with images, got {self.model.family}; let "
                "CachedSampler or a server sample (rl.server.url)"
            )
        else:
            features = self.model.encode([torch.from_numpy(image.pixels) for image in tree.images])
            x = self.model.embedding_weight[tokens]
            x, _ = with_images(x, self._tensor(tree.image_row), features)
            inputs["inputs_embeds"] = x[index[:, :-1]]
        out = self._generating.base_model(
            **inputs, attention_mask=mask[:, :-1], position_ids=positions[..., :-1], use_cache=True
        )
        return out[self._cache]


class _Record:
    """Draws tokens, records their log-probs, and ends rows.

    Args:
        limits: [B], the maximal number of tokens of each row.
        stops: the ids that end a row.
        uniform: [B, T] fp64, the random numbers of each row's tokens.
        truncation, temperature: see ``GenerateSampler``.
    Attributes:
        logprobs: one tensor [B] fp32 per sampled token, in nats.
        kept: one entry per sampled token; empty without truncation.
    """

    def __init__(
        self, limits: Tensor, stops: Tensor, uniform: Tensor, truncation: Truncation, temperature: float
    ) -> None:
        self.limits, self.stops, self.uniform = limits, stops, uniform
        self.truncation, self.temperature = truncation, temperature
        self.logprobs: list[Tensor] = []
        self.kept: list[KeptIds] = []

    def draw(self, _: Tensor, logits: Tensor) -> Tensor:
        """Draws the next token of each row. Returns scores [B, V] whose largest one is the token's."""
        logits = self.truncation.apply(at_temperature(logits, self.temperature))
        tokens, logprobs = draw(logits, self.uniform[:, len(self.logprobs)])
        self.logprobs.append(logprobs)
        if (sizes := self.truncation.sizes(logits)) is not None:
            self.kept.append(KeptIds.of(logits, sizes.tolist()))
        return torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)

    def is_done(self, tokens: Tensor, _: object, **__: object) -> Tensor:
        """Returns whether each row ends with this token, [B]. ``generate`` remembers which ones have."""
        return (len(self.logprobs) >= self.limits) | torch.isin(tokens[:, -1], self.stops)


def default_sampler(model: TreeModel, truncation: Truncation = ALL_IDS, temperature: float = 1.0) -> Sampler:
    """Returns a sampler of the weights of ``model``: ``CachedSampler`` for dense decoders of titan_tree.

    Raises:
        UserError: no sampler can sample from the model.
    """
    sampler = CachedSampler if is_dense_decoder(model) else GenerateSampler
    return sampler(model, truncation, temperature)
