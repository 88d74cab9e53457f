"""Tenants: models that clients train side by side, each an adapter over one frozen base or a whole model.

    data -> DataForest -> TreeStep -> log-probs of every target, gradients of one tenant

Tenants are modules of their own. They share the tensors of the base and nothing else, so a request for one
of them never reads or changes weights, gradients or optimizer states of another.

N targets of all data together.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker import types

from titan_tree.components.lora import LoRA
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.integrations.rows import RowLoss
from titan_tree.models.hf.save import all_or_nothing
from titan_tree.models.hf.snapshot_files import write_json
from titan_tree.models.lora.adapters import adaptable
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.rollouts import Chat
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.tinker.forest import DataForest
from titan_tree.rl.tinker.losses import Evaluation, loss_of
from titan_tree.rl.tinker.tenant import Tenant
from titan_tree.rl.truncation import Truncation
from titan_tree.run.model_setup import build_parallel_model, share_base
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.serve.tinker.api import META, Weights
from titan_tree.serve.tinker.wire import Pass, PassResult, Sample, Sequences

ALPHA = 32.0  # of adapters of any rank, as in Tinker (thinkingmachines.ai/blog/lora)
KEPT = 64  # sampled adapters that stay in memory; of models with weights of their own, only one does


class Tenants:
    """The engine of ``TinkerAPI``: the models of all clients, on one device.

    Args:
        config: [model] is the base of all of them; [training], [data] and [partition] say how passes run.
        chat: has the tokenizer, and the tokens that end answers.
        base: the result of ``build_base``.
        lock: held while something computes.
    """

    def __init__(self, config: RLRunConfig, chat: Chat, base: TreeModel, lock: threading.Lock) -> None:
        self.config, self.chat, self.base, self.lock = config, chat, base, lock
        self.device = base.embedding_weight.device
        self._tenants: dict[str, Tenant] = {}
        self._sampled: OrderedDict[str, Tenant] = OrderedDict()  # the last used one is last

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a sequence."""
        return self.base.config.max_position_embeddings

    def create(self, model: str, adapter: types.LoraConfig | None) -> None:
        """Creates a tenant. Raises UserError if it would train nothing."""
        with self.lock:
            self._tenants[model] = self._new(adapter, is_trained=True)

    def drop(self, models: Sequence[str]) -> None:
        """Forgets tenants, snapshots, and weights that were loaded from folders to sample from."""
        with self.lock:
            for model in models:
                self._tenants.pop(model, None)
                self._sampled.pop(model, None)

    def check(self, call: Pass) -> None:
        """Raises UserError if a pass cannot run: for its loss, or for one of its data."""
        loss, _ = loss_of(call.loss, call.options)
        if not call.data:
            raise UserError("data: expected at least one datum, got none")
        loss.check(call.data)
        vocab_size = self.base.config.vocab_size
        for index, datum in enumerate(call.data):
            targets = datum.inputs["target_tokens"]
            if call.loss != "cross_entropy" and targets.ndim > 1:
                raise UserError(f"data[{index}].target_tokens: expected one per token for {call.loss}")
            if len(datum.tokens) >= self.max_length:  # the last target is one more
                raise UserError(
                    f"data[{index}].model_input: expected fewer than {self.max_length:,} tokens, the model's "
                    f"positions, got {len(datum.tokens):,}"
                )
            for name, ids in (("model_input", datum.tokens), ("target_tokens", targets)):
                if (bad := (ids < 0) | (ids >= vocab_size)).any():
                    raise UserError(
                        f"data[{index}].{name}: expected ids below the model's vocabulary size "
                        f"{vocab_size:,}, got {ids[bad][0]}"
                    )

    def run(self, calls: Sequence[Pass]) -> list[PassResult]:
        """Runs passes of one kind as one forest. Gradients add to those of the tenant."""
        tenant, loss_name = self._tenant(calls[0].model), calls[0].loss
        loss, options = loss_of(loss_name, calls[0].options)
        data = [datum for call in calls for datum in call.data]
        forest = DataForest.of(data, self.config.serve.merge)
        sizes = [datum.inputs["target_tokens"].size for datum in data]
        evaluate = Evaluation(loss, options, data, self.device)
        partition = self.config.partition
        with self.lock:
            step = TreeStep(
                tenant.model,
                RowLoss(forest, evaluate),
                self.device,
                TreePartitioner(partition.strategy, self.config.data.max_tokens, partition.max_chain_tokens),
            )
            prepared = step.prepare([[forest.tree]])
            if calls[0].forward_only:
                ((batch, scores),) = step.score(prepared)
                evaluate(forest.by_token(scores["logprobs"], batch))
            else:
                try:
                    step.run(prepared)
                except BaseException:
                    tenant.optimizer.zero_grad()
                    tenant.has_lost = True
                    raise
        logprobs = iter(evaluate.logprobs.cpu().split(sizes))
        losses = iter(evaluate.losses.cpu().split(sizes))
        results = []
        for call in calls:
            shaped = [next(logprobs).numpy().reshape(d.inputs["target_tokens"].shape) for d in call.data]
            total = sum(float(next(losses).double().sum()) for _ in call.data)
            results.append(PassResult(shaped, {"loss:sum": total}))
            results[-1].metrics["tokens:sum"] = float(sum(len(datum.tokens) for datum in call.data))
            # All passes together have one forest; their metrics are summed.
            computed = 0.0 if len(results) > 1 else float(len(forest.tree))
            results[-1].metrics["distinct_tokens:sum"] = computed
        return results

    def step(self, model: str, params: types.AdamParams) -> dict[str, float]:
        """Steps a tenant's optimizer, see ``Tenant.step``. Returns metrics."""
        tenant = self._tenant(model)
        with self.lock:
            return {"grad_norm:mean": tenant.step(params)}

    def save(self, model: str, folder: Path, meta: dict[str, Any]) -> None:
        """Writes a tenant into a new folder, see ``Tenant.save``, with ``meta``."""
        tenant = self._tenant(model)
        with self.lock, all_or_nothing(folder) as temporary:
            tenant.save(temporary, self.config.model.hf_path)
            write_json(temporary / META, meta)

    def load(self, model: str, folder: Path, adapter: types.LoraConfig | None, with_optimizer: bool) -> None:
        """Gives a tenant, which is created if it does not exist, the weights that ``save`` wrote.

        Raises:
            UserError: it is no adapter of the same kind, or a file is damaged.
        """
        with self.lock:
            tenant = self._tenants.get(model) or self._new(adapter, is_trained=True)
            if _covered(tenant.adapter) != _covered(adapter):
                raise UserError(f"load_weights: expected weights of {tenant.adapter}, got {adapter}")
            tenant.load(folder, with_optimizer)
            self._tenants[model] = tenant

    def snapshot(self, model: str, name: str) -> None:
        """Keeps a copy of a tenant's weights in memory, to sample from, under a name."""
        tenant = self._tenant(model)
        with self.lock:
            copied = self._new(tenant.adapter, is_trained=False)
            own = dict(copied.model.named_parameters())
            for weight_name, weight in tenant.weights.items():
                own[weight_name].data.copy_(weight.detach())
            self._keep(name, copied)

    def sample(self, weights: Weights, samples: Sequence[Sample]) -> list[Sequences]:
        """Draws samples of one kind at once, each distinct prompt computed once.

        Args:
            weights: a name given to ``snapshot``, "" for the base, or a folder that ``save`` wrote.
        Raises:
            UserError: a prompt is empty or too long, or the snapshot is gone.
        """
        first = samples[0]
        rows = [(index, sample) for index, sample in enumerate(samples) for _ in range(sample.number)]
        stops, texts = self._stops(first.stop)
        with self.lock:
            sampled = self._weights_to_sample(weights)
            sampler = sampled.sampler(Truncation(first.top_p, first.top_k), first.temperature)
            limits = [self._limit(sample) for sample in samples]
            seeds = [seed for sample in samples for seed in _seeds(sample)]
            turns = sampler.sample(
                [sample.prompt for _, sample in rows], [limits[index] for index, _ in rows], stops, seeds
            )
            results = [Sequences() for _ in samples]
            for (index, _), turn in zip(rows, turns, strict=True):
                tokens, is_stopped = self._until(turn.tokens, stops, texts)
                results[index].turns.append((tokens, turn.logprobs[: len(tokens)], is_stopped))
            scored = [index for index, sample in enumerate(samples) if sample.prompt_logprobs]
            if scored:
                with torch.no_grad():
                    values = tree_logprobs(
                        sampled.model, [samples[i].prompt for i in scored], self.config.data.max_tokens
                    )
                for index, logprobs in zip(scored, values, strict=True):
                    padded = np.append(np.nan, logprobs.float().cpu().numpy()).astype(np.float32)
                    results[index] = dataclasses.replace(results[index], prompt_logprobs=padded)
        return results

    def check_sample(self, sample: Sample) -> None:
        """Raises UserError for a prompt or a limit that no sampler can take."""
        if not sample.prompt:
            raise UserError("prompt: expected at least one token, got none")
        if bad := [t for t in sample.prompt if not 0 <= t < self.base.config.vocab_size]:
            raise UserError(f"prompt: expected ids below {self.base.config.vocab_size:,}, got {bad[0]}")
        if sample.stop and "" in sample.stop:
            raise UserError("stop: expected texts or token ids, got an empty text")
        if not 0 < sample.number <= 4096:
            raise UserError(f"num_samples: expected 1 to 4,096, got {sample.number}")
        if not (0 < sample.top_p <= 1 and 0 <= sample.temperature < float("inf")):
            raise UserError("top_p, temperature: expected 0 < top_p <= 1 and temperature >= 0")
        if self._limit(sample) < 1 or len(sample.prompt) + self._limit(sample) > self.max_length:
            raise UserError(
                f"max_tokens: expected 1 to {self.max_length - len(sample.prompt):,}, since the model has "
                f"{self.max_length:,} positions and the prompt {len(sample.prompt):,} tokens, got "
                f"{sample.max_tokens}"
            )

    def _tenant(self, model: str) -> Tenant:
        if model not in self._tenants:
            raise UserError(
                f"model {model}: expected a model that was created, but that failed; create another"
            )
        return self._tenants[model]

    def _weights_to_sample(self, weights: Weights) -> Tenant:
        """Returns the model with these weights, from memory or from a folder."""
        name = weights if isinstance(weights, str) else str(weights[0])
        if name not in self._sampled:
            if name == "":
                self._keep(name, Tenant(share_base(self.base, self.config.training), None))
            elif isinstance(weights, str):
                raise UserError("sampling_session_id: these weights are gone; save them with a name")
            else:
                tenant = self._new(weights[1], is_trained=False)
                tenant.load_weights(weights[0])
                self._keep(name, tenant)
        self._sampled.move_to_end(name)
        return self._sampled[name]

    def _keep(self, name: str, tenant: Tenant) -> None:
        """Keeps a model to sample from, and forgets the one that was not used for longest."""
        self._sampled[name] = tenant
        shares = tenant.adapter is not None
        alike = [n for n, other in self._sampled.items() if n and (other.adapter is not None) == shares]
        for old in alike[: -KEPT if shares else -1]:
            del self._sampled[old]

    def _limit(self, sample: Sample) -> int:
        room = self.max_length - len(sample.prompt)
        return min(room, self.config.rl.max_turn_tokens) if sample.max_tokens is None else sample.max_tokens

    def _stops(self, stop: tuple[int, ...] | tuple[str, ...] | None) -> tuple[list[int], list[str]]:
        """Returns the ids and the texts that end a turn. Texts end it beside the ids that end answers."""
        if stop is None:
            return list(self.chat.ends), []
        texts = [text for text in stop if isinstance(text, str)]
        return (list(self.chat.ends), texts) if texts else ([int(token) for token in stop], [])

    def _until(self, tokens: list[int], stops: list[int], texts: list[str]) -> tuple[list[int], bool]:
        """Cuts a turn behind the token that completes a text. Returns it, and whether a stop ended it."""

        def has_text(number: int) -> bool:
            decoded = self.chat.tokenizer.decode(tokens[:number])
            return any(text in decoded for text in texts)

        if texts and has_text(len(tokens)):
            return tokens[: bisect_left(range(len(tokens)), True, key=has_text)], True
        return tokens, bool(tokens) and tokens[-1] in stops

    def _new(self, adapter: types.LoraConfig | None, is_trained: bool) -> Tenant:
        """Returns a model with the weights of the base, in fp32 if all of them are trained."""
        config = self.config
        if adapter is not None:
            lora = LoRA(rank=adapter.rank, alpha=ALPHA, targets=_targets(self.base, adapter))
            seed = random.getrandbits(32) if adapter.seed is None else adapter.seed
            return Tenant(share_base(self.base, config.training, lora, seed), adapter)
        if is_trained:
            mesh = OneRank(self.device.type)
            return Tenant(build_parallel_model(config.model, config.training, config.parallel, mesh), None)
        return Tenant(share_base(copy.deepcopy(self.base), config.training), None)


def _targets(model: TreeModel, adapter: types.LoraConfig) -> tuple[str, ...]:
    """Returns the weights that an adapter covers: linears of the layers, and routed experts."""
    names = [
        name for name in adaptable(model) if (adapter.train_mlp if ".mlp." in name else adapter.train_attn)
    ]
    if not names:
        raise UserError(
            "lora_config: expected train_mlp or train_attn, got neither; adapters of the unembedding do not "
            "exist here"
        )
    if adapter.rank < 1:
        raise UserError(f"lora_config.rank: expected at least 1, got {adapter.rank}")
    return tuple(names)


def _covered(adapter: types.LoraConfig | None) -> types.LoraConfig | None:
    """Returns what decides the names and shapes of the weights."""
    return None if adapter is None else adapter.model_copy(update={"seed": None})


def _seeds(sample: Sample) -> list[int]:
    """Returns a number for each of the turns of a sample, the same ones for the same seed."""
    source = random.Random(sample.seed)
    return [source.getrandbits(62) for _ in range(sample.number)]
