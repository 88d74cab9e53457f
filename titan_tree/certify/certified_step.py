"""What is certified: the model and the first trees of a configuration, as training would run them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch.distributed as dist

from titan_tree.components.moe.routing import RouterLoss
from titan_tree.components.tree_loss.spec import COUNT_ONCE
from titan_tree.data.packing import MicroBatches, pack
from titan_tree.distributed.collectives import rank, world_size
from titan_tree.distributed.mesh import OneRank, init_distributed
from titan_tree.distributed.parallelize import weight_shards
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.weights import draw_weights
from titan_tree.rl.settings import RLRunConfig, WarmStartConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.build import build_dataset, build_loss, build_reader, build_tokenizer, build_tree_step
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model, snapshot_model
from titan_tree.run.settings import MetricsConfig
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree, common_prefix, merge_keys

STD_B = 0.02  # of the factors B of a new LoRA


@dataclass
class CertifiedStep:
    """The model, its step, and the trees of the first step.

    Attributes:
        config: the configuration, without router losses and replayed experts.
        micro_batches: those of the trees that fit, the same on all ranks.
        source: where their paths come from.
    """

    config: Config
    tree_step: TreeStep
    micro_batches: MicroBatches
    source: str

    @property
    def trees(self) -> list[TokenTree]:
        return list(chain.from_iterable(self.micro_batches))

    @property
    def paths(self) -> list[TokenPath]:
        return [path for tree in self.trees for path in tree.paths]

    def own_micro_batches(self) -> MicroBatches:
        """Returns this rank's part of the step."""
        if world_size() == 1:
            return self.micro_batches
        shared = self.config.parallel.sequence_parallel  # ranks with the same trees
        own = self.trees[rank() // shared :: world_size() // shared]
        return pack(own, self.config.data.max_tokens)


@contextmanager
def opened(config: Config, max_tokens: int) -> Iterator[CertifiedStep]:
    """Yields what is certified of a configuration of training or of reinforcement learning. Collective.

    Args:
        max_tokens: maximum sum of the lengths of all paths. Two that do not fit are cut around their branch.

    Raises:
        UserError: the configuration cannot be trained, or not be compared.
    """
    # Transformers computes neither of them.
    data = dataclasses.replace(config.data, replay="off")
    config = dataclasses.replace(config, data=data, router_loss=RouterLoss())
    make = _of_rollouts(config) if isinstance(config, RLRunConfig) else _of_files(config)
    with make as certified:
        _draw_updates(certified)
        loss = certified.tree_step.loss
        trees = _first(certified.trees, max_tokens, whole=loss.spec.compares_paths)
        certified.micro_batches = pack(trees, config.data.max_tokens)
        if not any(path.weight and (path.loss_mask[1:] > 0).any() for path in certified.paths):
            raise UserError(
                f"titan-tree certify: the loss counts none of the {sum(map(len, certified.paths)):,} tokens "
                "that are compared, because loss masks or weights are 0; raise --tokens, or check the data"
            )
        _draw_advantages(certified)
        if loss.reduction in COUNT_ONCE:
            for tree in certified.trees:
                tree.weigh_edges()
        yield certified


@contextmanager
def _of_files(config: Config) -> Iterator[CertifiedStep]:
    mesh, device = init_distributed(config.parallel.timeout_s)
    try:
        loss = build_loss(config.loss)
        model = build_parallel_model(config.model, config.training, config.parallel, mesh, config.lora)
        tokenizer = build_tokenizer(config.data, config.model.hf_path)
        reader = build_reader(config.data, tokenizer, model, config.loss)
        # Each rank reads all groups.
        (micro_batches,) = build_dataset(reader, config, 1, OneRank(), is_balanced=True).steps(1)
        source = ", ".join(map(str, config.data.files))
        yield CertifiedStep(config, build_tree_step(config, model, loss, device), micro_batches, source)
    finally:
        dist.destroy_process_group()


@contextmanager
def _of_rollouts(config: RLRunConfig) -> Iterator[CertifiedStep]:
    """Samples the rollouts of one task. A warm start that is complete gives the weights."""
    warm = Path(config.folder) / "warm_start" / "hf"
    with TemporaryDirectory() as folder:
        config = dataclasses.replace(
            config,
            folder=folder,
            model=snapshot_model(config.model, str(warm)) if warm.exists() else config.model,
            warm_start=WarmStartConfig(),
            data=dataclasses.replace(config.data, global_batch_groups=1),
            metrics=MetricsConfig(loggers=[]),
        )
        trainer = RLTrainer(config)
        try:
            if dist.get_world_size() > 1:
                raise UserError("titan-tree certify: expected one process for rl; start it without --nproc")
            trees = [TokenTree.from_paths(paths) for paths in trainer.paths(1)]
            trainer.add_logprobs(trees)
            source = f"rollouts of {config.rl.environment}, sampled by {trainer.sampler_name}"
            yield CertifiedStep(config, trainer.tree_step, [trees], source)
        finally:
            trainer.close()


def _draw_updates(certified: CertifiedStep) -> None:
    """Draws the factors B of a new LoRA, which are 0: the updates would otherwise not be tested."""
    factors = {n: s for n, s in weight_shards(certified.tree_step.model).items() if n.endswith("_lora_B")}
    if certified.config.lora.adapter is None:
        for name, shard in factors.items():
            draw_weights(shard, name, certified.config.training.seed, lambda _, draws: draws.normal(STD_B))


def _draw_advantages(certified: CertifiedStep) -> None:
    """Draws the advantages if all are 0, as those of equal rewards are: all gradients would be 0."""
    given = [path.advantage for path in certified.paths if path.advantage is not None]
    if given and not any(values.any() for values in given):
        certified.source += ", with random advantages because all are 0"
        draw = np.random.default_rng(0)
        for values in given:
            values[:] = draw.normal()


def _first(trees: Sequence[TokenTree], max_tokens: int, whole: bool) -> list[TokenTree]:
    """Returns the first trees, and of the last one the first paths, that fit.

    Args:
        whole: a tree keeps all of its paths, and the first one is taken in any case.
    """
    chosen: list[TokenTree] = []
    left = max_tokens
    for tree in trees:
        sizes = np.cumsum([len(path) for path in tree.paths])
        number = int((sizes <= left).sum())
        if whole and number < len(sizes):
            number = 0 if chosen else len(sizes)
        if not chosen and number < min(len(sizes), 2):
            return [TokenTree.from_paths(_around_branch(tree.paths, max_tokens // 2))]
        if not number:
            break
        chosen.append(tree if number == len(sizes) else TokenTree.from_paths(tree.paths[:number]))
        left -= sizes[number - 1]
    return chosen


def _around_branch(paths: Sequence[TokenPath], size: int) -> list[TokenPath]:
    """Returns ``size`` tokens of two paths, around the token where they diverge, or of the first path."""
    first, *others = paths
    key, *other_keys = merge_keys(paths)[0]
    shared = [common_prefix(key, other) for other in other_keys]
    for number, other in zip(shared, others, strict=True):
        if number < min(len(first), len(other)):
            start = max(0, number - size // 2)
            return [_part(path, start, start + size) for path in (first, other)]
    return [_part(first, 0, size)]


def _part(path: TokenPath, start: int, stop: int) -> TokenPath:
    """Returns the tokens ``start``, .., ``stop`` - 1 of a path, and the whole of images that they cut."""
    for begin, image in path.images:
        end = begin + len(image)
        start = begin if begin < start < end else start
        stop = end if begin < stop < end else stop
    part = copy.copy(path)
    part.images = tuple((begin - start, image) for begin, image in path.images if start <= begin < stop)
    for name in ("tokens", "loss_mask", "policy_version", *PER_TOKEN):
        if (values := getattr(path, name)) is not None:
            setattr(part, name, values[start:stop].copy())
    for name in ("sampling_mask", "teacher_topk"):
        if (values := getattr(path, name)) is not None:
            setattr(part, name, values.of_tokens(np.arange(start, min(stop, len(path)))))
    part.routed_experts, part.id = None, f"{path.id}[{start}:{stop}]"
    return part
