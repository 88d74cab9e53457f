"""Teachers: the models of [rl.teacher], whose likeliest tokens the loss "distill_topk" reads.

A snapshot scores the rollouts on the GPUs that train, each shared token once. A server of vLLM scores one
prompt per leaf of a tree, and reports the likeliest tokens in place of each token of the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.distributed.collectives import call_on_all_ranks
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.models.hf.snapshot_files import fingerprint
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.settings import RLRunConfig, is_address
from titan_tree.rl.truncation import Truncation
from titan_tree.run.model_setup import build_frozen_model, snapshot_model
from titan_tree.scoring.score_trees import set_teacher_topk
from titan_tree.tree.path_fields import TopK, teacher_topk_of
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

BYTES = 200  # of a token in an answer of vLLM, with its text; it is usually about 80


class Teachers:
    """Sets ``teacher_topk`` of rollouts. Each task names its teacher, if there are several.

    Args:
        config: the run's configuration.
        step: the training step, whose partitioner snapshots use.
        mesh: all ranks, which share a snapshot as they share the trained model.

    Attributes:
        identity: what determines each teacher, by name. A run must resume with the same identity.

    Raises:
        UserError: a snapshot cannot be loaded, or a server does not answer.
    """

    def __init__(self, config: RLRunConfig, step: TreeStep, mesh: DeviceMesh) -> None:
        self.step, self.max_tokens, self.top_k = step, config.data.max_tokens, config.rl.teacher.top_k
        self.identity: dict[str, str] = {}
        self.models: dict[str, TreeModel | _Server] = {}
        for name, where in config.rl.teacher.models.items():
            if is_address(where):
                self.identity[name] = where
                self.models[name] = call_on_all_ranks(partial(_Server, where, config))
            else:
                self.identity[name] = f"snapshot {fingerprint(Path(where))}"
                model = snapshot_model(config.model, where)
                self.models[name] = build_frozen_model(model, config.training, config.parallel, mesh)

    def name_paths(self, paths: Sequence[TokenPath], name: object) -> None:
        """Sets ``teacher`` of a task's paths to the name that the task has. None: to the only teacher."""
        if name is None and len(self.models) == 1:
            (name,) = self.models
        if not isinstance(name, str) or name not in self.models:
            raise UserError(
                f"rl.teacher.models: expected a task whose teacher is one of {', '.join(self.models)}, got "
                f"{shorten(name)}; set the attribute, or the field, teacher of each task"
            )
        for path in paths:
            path.teacher = name

    def set_teacher_topk(self, trees: Sequence[TokenTree]) -> None:
        """Sets ``teacher_topk`` of all paths of this rank's trees, each with one teacher. Collective."""
        for name, model in self.models.items():
            own = [tree for tree in trees if tree.paths[0].teacher == name]
            if isinstance(model, _Server):
                call_on_all_ranks(partial(model.score, own))
            else:
                partitioner = self.step.partitioner
                set_teacher_topk(model, own, self.top_k, max_tokens=self.max_tokens, partitioner=partitioner)


class _Server:
    """A server of vLLM that scores prompts with prompt_logprobs. Limits are those of [rl.server]."""

    def __init__(self, url: str, config: RLRunConfig) -> None:
        from titan_tree.rl.server.client import ServerClient  # imports httpx

        limits = dataclasses.replace(config.rl.server, api_key_env=config.rl.teacher.api_key_env)
        self.client = ServerClient(url, limits)
        self.top_k, self.concurrency = config.rl.teacher.top_k, limits.concurrency
        answer = self.client.find("/v1/models") or {}
        try:
            self.model = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{url}/v1/models: expected the name of a model, got {shorten(answer)}; check "
                "rl.teacher.models"
            ) from None

    def score(self, trees: Sequence[TokenTree]) -> None:
        """Sets ``teacher_topk`` of all paths."""
        leaves = [(tree, int((tree.path_node == leaf).argmax())) for tree in trees for leaf in tree.leaves]
        with ThreadPoolExecutor(self.concurrency) as pool:
            answers = list(pool.map(lambda leaf: self._ask(leaf[0].paths[leaf[1]]), leaves))
        topk: dict[int, list[TopK | None]] = {id(tree): [None] * len(tree) for tree in trees}
        for (tree, number), answer in zip(leaves, answers, strict=True):
            # Answers differ slightly where paths share tokens. One of them counts for all paths.
            for index, entry in zip(tree.indices_of(number).tolist(), answer, strict=True):
                topk[id(tree)][index] = topk[id(tree)][index] or entry
        for tree in trees:
            for number, path in enumerate(tree.paths):
                entries = [topk[id(tree)][index] for index in tree.indices_of(number).tolist()]
                with errors_at(self.client.url):
                    path.teacher_topk = teacher_topk_of(entries, path.tokens, path.loss_mask, None)

    def _ask(self, path: TokenPath) -> list[TopK | None]:
        """Returns the likeliest tokens in place of each token of a path, and each token itself."""
        if path.images:
            raise UserError(f"{self.client.url}: expected a snapshot as the teacher of rollouts with images")
        tokens = path.tokens.tolist()
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": self.top_k}
        largest = BYTES * (self.top_k + 2) * len(tokens) + 2**20
        answer = self.client.post("/v1/completions", body | {"temperature": 1.0}, largest)
        try:
            first, *others = entries = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(tokens[1:], others, strict=True)
            if first is None and all(str(token) in entry for token, entry in pairs):
                return list(entries)
        except (KeyError, IndexError, TypeError, ValueError):
            pass
        raise UserError(
            f"{self.client.url}: expected prompt_logprobs, with each of the {len(tokens)} tokens in an entry "
            f"of its own, got {shorten(answer)}; use vLLM, with --max-logprobs of at least {self.top_k}"
        )


def check_teachers(config: RLRunConfig, loss: TreeLoss) -> None:
    """Raises UserError if [rl.teacher] does not fit the loss, the sampling, or the files."""
    models = config.rl.teacher.models
    if bool(models) != loss.spec.reads_targets:
        expected = "none for the loss" if models else "the teachers of the loss"
        raise UserError(
            f"rl.teacher.models: expected {expected} {config.loss.name!r}, got {models or 'none'}; set it"
        )
    for where in models.values():
        if not is_address(where) and not Path(where).is_dir():
            raise UserError(
                f"rl.teacher.models: expected the folder of a snapshot, or the address of a server, got "
                f"{where!r}, which does not exist; correct it"
            )
        if is_address(where) and Truncation.of(config.rl).is_on:
            raise UserError(
                "rl.top_p, rl.top_k and rl.min_p: expected 1, 0 and 0 with a server as teacher, whose "
                "log-probs are those of the whole vocabulary; remove them, or use a snapshot"
            )
