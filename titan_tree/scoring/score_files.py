"""score_files: writes the log-probs of data files as records that training reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.data_files import Group
from titan_tree.data.readers import OpenFile, open_binary
from titan_tree.data.sample_reader import SampleReader
from titan_tree.distributed.collectives import call_on_all_ranks, call_on_rank_0, rank, world_size
from titan_tree.distributed.faults import failures_named
from titan_tree.distributed.mesh import OneRank, all_ranks, init_distributed
from titan_tree.errors import UserError
from titan_tree.models.hf.snapshot_files import fingerprint
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.build import build_reader, build_tokenizer
from titan_tree.run.checkpoint import FolderLock
from titan_tree.run.config import Config, paths_read
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.rank_facts import check_ranks
from titan_tree.scoring.resumable_file import ResumableFile
from titan_tree.scoring.score_trees import PathScores, score_trees
from titan_tree.scoring.scored_records import PlacedPath, named_groups, path_record, placed_paths
from titan_tree.tree.paths import LOGPROBS, TokenPath
from titan_tree.tree.token_tree import TokenTree

FIELDS = tuple(name for name in LOGPROBS if name != "rollout_logprobs")  # the ones to write
LARGE = 0.1  # nats: differences above are counted


@dataclass(frozen=True, kw_only=True)
class ScoreTotals:
    """What was scored, and how the rollout_logprobs of the sampling engine differ from the scores.

    Differences are over tokens that the loss mask counts and that have rollout_logprobs, in nats.
    """

    groups: int = 0
    paths: int = 0
    tokens: int = 0  # sum of the path lengths
    distinct: int = 0  # tokens of the trees
    compared: int = 0  # tokens with rollout_logprobs
    abs_sum: float = 0.0  # sum of |difference|
    k3_sum: float = (
        0.0  # sum of r - 1 - log r, with r = p / p_rollout: the k3 estimate of KL(rollout || scored)
    )
    large: int = 0  # tokens whose |difference| is above 0.1
    largest: float = 0.0

    def __add__(self, other: ScoreTotals) -> ScoreTotals:
        values = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)}
        return ScoreTotals(**values | {"largest": max(self.largest, other.largest)})


def score_files(
    config: Config,
    out: str | Path,
    field: str = "old_logprobs",
    *,
    entropies: bool = False,
    routed_experts: bool = False,
    top_k: int = 0,
    open_file: OpenFile = open_binary,
    inputs: Sequence[str] = (),
    force: bool = False,
) -> ScoreTotals:
    """Scores all paths of ``config.data.files`` and writes them to ``out``, one record of token ids each.

    Records keep the order of the files, the groups, and all fields of the samples. Rewards stay rewards:
    advantages are computed when training reads the file. With several ranks, each scores every world_size-th
    group, and rank 0 writes. All ranks return the same totals. If an earlier call was interrupted, this one
    continues it.

    Args:
        config: a configuration of training. The tables [model], [lora], [data], [partition], [parallel] and
            [training] (dtype, seed) are read. ``data.global_batch_groups`` groups are scored at a time.
        out: a JSON Lines file to write.
        field: "old_logprobs" or "ref_logprobs": the field of the log-probs.
        entropies: also write ``entropies``, which training ignores.
        routed_experts: also write ``routed_experts``, of a model with experts.
        top_k: also write so many of the likeliest tokens, for distillation: ``teacher_topk``.
        open_file: opens the data files; a progress bar wraps them here.
        inputs: what is read besides what ``config`` names, see ``check_output``.
        force: replace ``out`` if it exists.

    Raises:
        UserError: ``out`` exists, data are malformed or have the field already, or an interrupted call had
            other settings or data.
    """
    if field not in FIELDS:
        raise UserError(f"--field: expected one of {', '.join(FIELDS)}, got {field!r}")
    if top_k < 0:
        raise UserError(f"--top-k: expected a number of at least 1, got {top_k}")
    is_member = dist.is_initialized()
    if not is_member:
        init_distributed(config.parallel.timeout_s)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with failures_named(lambda: "scoring", lambda: "run the same command again to continue"):
            check_ranks(config)
            output = call_on_all_ranks(
                lambda: ResumableFile(Path(out), [*inputs, *paths_read(config)], force)
            )
            mesh = all_ranks(device)
            return _ScoreRun(config, output, field, entropies, routed_experts, top_k, mesh, open_file)()
    finally:
        if not is_member:
            dist.destroy_process_group()


class _ScoreRun:
    """One call of ``score_files``."""

    def __init__(
        self,
        config: Config,
        output: ResumableFile,
        field: str,
        entropies: bool,
        routed_experts: bool,
        top_k: int,
        mesh: DeviceMesh | OneRank,
        open_file: OpenFile,
    ) -> None:
        # Rewards stay rewards, and every group is scored once.
        data = dataclasses.replace(config.data, advantage="given", advantage_options={}, weights=None)
        self.config, self.field = config, field
        self.sharing = config.parallel.sequence_parallel  # ranks that score the same trees
        self.entropies, self.routed_experts, self.top_k = entropies, routed_experts, top_k
        self.open_file, self.output = open_file, output
        self.lock = FolderLock(self.output.folder)
        self.model: TreeModel = build_parallel_model(
            config.model, config.training, config.parallel, mesh, config.lora
        )
        self._check_experts()
        self.reader: SampleReader = build_reader(
            data, build_tokenizer(data, config.model.hf_path), self.model
        )
        self.partitioner = None
        if config.partition.strategy != "none":
            self.partitioner = TreePartitioner(config.partition.strategy, data.max_tokens)

    def __call__(self) -> ScoreTotals:
        progress = call_on_rank_0(lambda: self.output.open(self._description()))
        done = ScoreTotals(**progress or {})
        groups = islice(named_groups(self.reader.files.groups(self.open_file)), done.groups, None)
        worker, num_workers = rank() // self.sharing, world_size() // self.sharing
        size = self.config.data.global_batch_groups
        while batch := call_on_all_ranks(lambda: list(islice(groups, size))):
            parts = self._gather(self._score(batch[worker::num_workers]))
            done = call_on_rank_0(partial(self._write, parts, len(batch), done))
        call_on_rank_0(self._finish)
        return done

    def _write(
        self, parts: Sequence[Sequence[tuple[str, ScoreTotals]]], num_groups: int, done: ScoreTotals
    ) -> ScoreTotals:
        """Writes the results of each worker in the order of the groups, and returns the totals so far."""
        results = [parts[i % len(parts)][i // len(parts)] for i in range(num_groups)]
        done = sum((totals for _, totals in results), done)
        self.output.append([text for text, _ in results], dataclasses.asdict(done))
        return done

    def _finish(self) -> None:
        self.output.finish()
        self.lock.release()

    def _score(self, named: Sequence[tuple[Group, str]]) -> list[tuple[str, ScoreTotals]]:
        """Returns the records and the totals of each group. Collective."""
        placed = call_on_all_ranks(lambda: [placed_paths(self.reader, group) for group, _ in named])
        trees = call_on_all_ranks(lambda: [self._tree(paths) for paths in placed])
        with torch.no_grad():
            scores = score_trees(
                self.model,
                trees,
                self.config.data.max_tokens,
                self.partitioner,
                entropies=self.entropies,
                routed_experts=self.routed_experts,
                top_k=self.top_k,
            )
        return [
            self._group_result(group, name, paths, tree, path_scores)
            for (group, name), paths, tree, path_scores in zip(named, placed, trees, scores, strict=True)
        ]

    def _tree(self, placed: Sequence[PlacedPath]) -> TokenTree:
        """Returns the tree of a group's paths, with the fields that scoring needs. All paths are scored."""
        replay = self.config.data.replay
        paths = []
        for path, _ in placed:
            if getattr(path, self.field) is not None:
                raise UserError(
                    f"path {path.id}: {self.field}: expected none, because they are computed; remove the "
                    "field from the data, or choose another --field"
                )
            for name, is_asked in (("routed_experts", self.routed_experts), ("teacher_topk", self.top_k)):
                if is_asked and getattr(path, name) is not None:
                    raise UserError(
                        f"path {path.id}: {name}: expected none, because they are computed; remove the "
                        "field, or do not ask for them"
                    )
            experts = None if replay == "off" else path.routed_experts
            paths.append(
                TokenPath(
                    path.tokens,
                    path.loss_mask,
                    id=path.id,
                    temperature=path.temperature,
                    sampling_mask=path.sampling_mask,
                    routed_experts=experts,
                    images=path.images,
                )
            )
        return TokenTree.from_paths(paths, replay)

    def _group_result(
        self,
        group: Group,
        name: str,
        placed: Sequence[PlacedPath],
        tree: TokenTree,
        scores: Sequence[PathScores],
    ) -> tuple[str, ScoreTotals]:
        lines = []
        totals = ScoreTotals(groups=1, paths=len(placed), tokens=len(tree.path_index), distinct=len(tree))
        for (path, fields), path_scores in zip(placed, scores, strict=True):
            values = {
                self.field: path_scores.logprobs,
                "entropies": path_scores.entropies,
                "routed_experts": path_scores.routed_experts,
            }
            present = {key: value.cpu().numpy() for key, value in values.items() if value is not None}
            lines.append(path_record(group, name, path, fields, present, path_scores.likeliest) + "\n")
            totals += _difference(path, present[self.field])
        return "".join(lines), totals

    def _gather(self, results: list[tuple[str, ScoreTotals]]) -> list[list[tuple[str, ScoreTotals]]]:
        """Returns the results of all workers on rank 0, and [] on other ranks."""
        if world_size() == 1:
            return [results]
        by_rank = [results] * world_size() if rank() == 0 else None
        dist.gather_object(results, by_rank)
        return by_rank[:: self.sharing] if by_rank else []

    def _check_experts(self) -> None:
        if not self.routed_experts:
            return
        if self.model.experts is None:
            raise UserError("--experts: expected a model with experts, but this model has none; remove it")
        if self.sharing > 1:
            raise UserError(
                f"--experts: expected parallel.sequence_parallel = 1, got {self.sharing}; set it to 1"
            )

    def _description(self) -> dict[str, object]:
        """Returns what decides the records: a run continues one with the same description."""
        config = dataclasses.asdict(self.config)
        tables = {name: config[name] for name in ("model", "lora", "data")}
        for name in ("advantage", "advantage_options", "weights", "workers", "shuffle_buffer", "seed"):
            del tables["data"][name]
        hf_path = self.config.model.hf_path
        return tables | {
            "snapshot": fingerprint(Path(hf_path)) if hf_path else self.config.training.seed,
            "dtype": self.config.training.dtype,
            "files": self.reader.files.checksums,
            "field": self.field,
            "entropies": self.entropies,
            "experts": self.routed_experts,
            "top_k": self.top_k,
        }


def _difference(path: TokenPath, logprobs: np.ndarray) -> ScoreTotals:
    """Compares a path's rollout_logprobs, if there are any, with ``logprobs`` [T]."""
    if path.rollout_logprobs is None:
        return ScoreTotals()
    log_ratio = logprobs.astype(np.float64) - path.rollout_logprobs
    log_ratio = log_ratio[np.isfinite(log_ratio)]
    size = np.abs(log_ratio)
    return ScoreTotals(
        compared=len(log_ratio),
        abs_sum=float(size.sum()),
        k3_sum=float((np.expm1(np.minimum(log_ratio, 80)) - log_ratio).sum()),
        large=int((size > LARGE).sum()),
        largest=float(size.max(initial=0)),
    )
