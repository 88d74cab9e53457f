"""Rollouts: trajectories as token ids, exactly as the model read and wrote them.

Text that was decoded is never encoded again: another tokenization of the same text is another path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.hf_files import template_ends
from titan_tree.data.advantages import advantages
from titan_tree.data.images import with_loaded_images
from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.rl.environment import Episode, Message, Reply
from titan_tree.rl.sampler import Sampler
from titan_tree.tree.context import Completion, Context, Ids, context_images
from titan_tree.tree.paths import TokenPath

# Placeholders for any question, and for any turn of the model, whose text occurs nowhere else.
SAID = "answer-zq"
QUESTION: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": SAID}


@dataclass(kw_only=True)
class Rollout:
    """One trajectory of T tokens on a task. It has one context, or several if the environment compacts them.

    Attributes:
        tokens: [T] token ids and images of all contexts, one after another. A turn sees only its own context.
        mask: [T] 1 for a sampled token, else 0.
        logprobs: [T] log-probs of sampled tokens in nats, as the sampler reported them, else 0.
        starts: index of the first token of each turn of the model.
        turns: texts of finished turns.
        inherited: number of turns that another rollout has sampled, see ``fork``.
        reward: None until the rollout has ended.
        is_cut_off: whether a limit of tokens ended the rollout. Its reward is then 0.
        contexts: index of the first token of each context.
        experts: one array [t, L, k] per context with the experts of its first t tokens, see ``TokenPath``.
            Empty if the sampler did not record experts.
        kept: [T] the ids that sampling kept for each token, see ``TokenPath.sampling_mask``; empty: all ids.
        versions: [T] the version of the policy that sampled each token; -1: not sampled, or not known.
    """

    episode: Episode | None = None  # None: a program has played the rollout, see agents.py
    tokens: Context = field(default_factory=Context)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    inherited: int = 0
    reward: float | None = None
    is_cut_off: bool = False
    contexts: list[int] = field(default_factory=lambda: [0])
    experts: list[np.ndarray] = field(default_factory=list)
    kept: list[Sequence[int] | np.ndarray] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def context(self) -> Context:
        """The newest context."""
        return self.tokens.part(self.contexts[-1], len(self.tokens))

    def read(self, tokens: Ids, new_context: bool = False) -> None:
        """Appends tokens that the model reads, to the newest context or as a new one."""
        if new_context:
            self.contexts.append(len(self.tokens))
        self.tokens.images += tuple((len(self.tokens) + at, image) for at, image in context_images(tokens))
        self._append(tokens, [0.0] * len(tokens), 0, [()] * len(tokens), -1)

    def write(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        experts: np.ndarray | None = None,
        sampling_mask: Sequence[Sequence[int] | np.ndarray] | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Appends a turn of the model, see ``Completion``."""
        self.starts.append(len(self.tokens))
        kept = [()] * len(tokens) if sampling_mask is None else sampling_mask
        self._append(tokens, logprobs, 1, kept, -1 if policy_version is None else policy_version)
        if experts is not None:
            self._record(experts)

    def fork(self, turn: int) -> Rollout:
        """Returns an unfinished rollout that shares all tokens before ``turn`` with this one."""
        end = self.starts[turn]
        contexts = [start for start in self.contexts if start < end]
        return Rollout(
            episode=self.episode,
            tokens=self.tokens.part(0, end),
            mask=self.mask[:end],
            logprobs=self.logprobs[:end],
            kept=self.kept[:end],
            versions=self.versions[:end],
            starts=self.starts[:turn],
            turns=self.turns[:turn],
            inherited=turn,
            contexts=contexts,
            experts=[rows[: end - start] for start, rows in zip(contexts, self.experts, strict=False)],
        )

    def paths(self, advantage: np.ndarray, name: str) -> list[TokenPath]:
        """Returns the training samples of the rollout: one for each context.

        They are joined as one rollout for the reduction "rollout_token_mean".

        Args:
            advantage: [T], one value per token.
            name: the rollout's name, with which the ids of its paths begin.
        """
        ends = [*self.contexts[1:], len(self.tokens)]
        has_versions = max(self.versions, default=-1) >= 0
        paths = [
            TokenPath(
                (part := self.tokens.part(start, end)),
                self.mask[start:end],
                advantage=advantage[start:end],
                old_logprobs=self.logprobs[start:end],
                routed_experts=self.experts[i] if self.experts else None,
                sampling_mask=self.kept[start:end],
                policy_version=self.versions[start:end] if has_versions else None,
                images=part.images,
                id=name if len(ends) == 1 else f"{name}/{i}",
            )
            for i, (start, end) in enumerate(zip(self.contexts, ends, strict=True))
        ]
        TokenPath.join_rollout(paths, name)
        return paths

    def end(self, reward: float, is_cut_off: bool = False) -> None:
        """Ends the rollout. Raises UserError if the reward is not a finite number."""
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(
                f"environment: reward: expected a finite number, got {shorten(reward)} after the turns "
                f"{shorten(self.turns)}; correct the environment's method reply"
            )
        self.reward, self.is_cut_off = float(reward), is_cut_off

    def _record(self, experts: np.ndarray) -> None:
        """Adds the experts of the newest context. Experts that an earlier turn recorded stay unchanged."""
        if len(self.experts) == len(self.contexts):
            earlier = self.experts.pop()
            is_known = (earlier >= 0).all((1, 2))
            experts = experts.copy()
            experts[: len(earlier)][is_known] = earlier[is_known]
        self.experts.append(experts)

    def _append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        mask: int,
        kept: Sequence[Sequence[int] | np.ndarray],
        version: int,
    ) -> None:
        self.tokens += tokens
        self.versions += [version] * len(tokens)
        self.kept += kept
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)


class Chat:
    """Turns messages into tokens with the chat template, and turns of the model into text.

    Args:
        variables: variables of the template, as in [data.sample].

    Attributes:
        ends: the ids that end a turn: where the template ends answers, and calls.

    Raises:
        UserError: the template does not end an answer with a special token.
    """

    def __init__(self, tokenizer: TreeTokenizer, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.tokenizer, self.variables = tokenizer, variables
        tokens, _, size = self._answered([QUESTION])
        self.ends = template_ends(tokenizer, variables)
        if tokens[size - 1] not in self.ends:
            raise UserError(
                "data.template: expected a chat template that ends turns with a special token, but they end "
                f"with {tokenizer.decode(tokens[size - 1 : size])!r}; choose another template"
            )

    def start(self, episode: Episode, number: int) -> list[Rollout]:
        """Returns ``number`` rollouts that have only the prompt."""
        tokens = self.prompt(episode, episode.prompt)
        rollouts = [Rollout(episode=episode) for _ in range(number)]
        for rollout in rollouts:
            rollout.read(tokens)
        return rollouts

    def prompt(self, episode: Episode, messages: Sequence[Message]) -> Context:
        """Returns what the model reads before its first turn of a context that begins with ``messages``."""
        tokens, size, _ = self._answered(messages, getattr(episode, "tools", None))
        return tokens.part(0, size)

    def text(self, turn: Sequence[int]) -> str:
        """Returns the text of a turn without the id that ends it."""
        return self.tokenizer.decode(turn[:-1] if turn and turn[-1] in self.ends else turn)

    def observation(self, messages: Sequence[Message], end: int) -> Context:
        """Returns what the template writes between a turn that ended with the id ``end`` and the next one.

        ``end`` takes the place of the token that ends the turn there, which may be another one, as in
        gpt-oss's template. If that is also an end, such as the mark of the next role in GLM, it stays.
        """
        try:
            tokens, size, _ = self._answered([QUESTION, ANSWER, *messages])
        except UserError:
            results = [m for m in messages if isinstance(m, dict) and m.get("role") == "tool"]
            if not results:
                raise
            said = {"arguments": {"a": SAID}}  # some templates show results only of calls
            calls = [said | {"name": m.get("name") or "tool", "id": m.get("tool_call_id")} for m in results]
            turn = ANSWER | {"content": "", "tool_calls": calls}
            tokens, size, _ = self._answered([QUESTION, turn, *messages])
        decode = self.tokenizer.decode
        start = next(i for i in range(size + 1) if SAID in decode(tokens[max(i - len(SAID), 0) : i]))
        for ids in (self.ends, self.tokenizer.special_tokens.values()):
            for i in range(start, size):
                if (token := tokens[i]) in ids:
                    return tokens.part(i + (token == end or token not in self.ends), size)
        return tokens.part(start, size)

    def _answered(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[Context, int, int]:
        """Returns (tokens of ``messages`` and an answer, start of the answer, end of the answer)."""
        messages = with_loaded_images([*messages, ANSWER], "", {})
        (path,) = self.tokenizer.samples(messages, tools, turns="last", **self.variables)
        answer = np.flatnonzero(path.loss_mask)
        return Context(path.tokens.tolist(), path.images), int(answer[0]), int(answer[-1]) + 1


def branches(rollouts: Sequence[Rollout], number: int, draw: random.Random) -> list[Rollout]:
    """Returns ``number`` unfinished rollouts. Each forks a random one of ``rollouts`` at a random later turn.

    If no rollout has a second turn, it returns none. The choice ignores rewards: otherwise it would bias the
    values of contexts.
    """
    longer = [rollout for rollout in rollouts if len(rollout.starts) > 1]
    if not longer:
        return []
    sources = draw.choices(longer, k=number)
    return [source.fork(draw.randrange(1, len(source.starts))) for source in sources]


def play(
    rollouts: Sequence[Rollout],
    sampler: Sampler,
    chat: Chat,
    seeds: Sequence[str],
    *,
    max_turn_tokens: int,
    max_rollout_tokens: int,
) -> None:
    """Samples all rollouts to their end. Each round samples the next turn of all unfinished rollouts.

    A rollout that reaches a limit is cut off, or that writes a placeholder of images in a context with some.

    Args:
        seeds: one per rollout. Equal seeds give equal rollouts if the weights and all other rollouts are
            equal, and the sampler is deterministic. Other rollouts change the rounding, see ``sampler``.
        max_turn_tokens: maximum number of tokens of one turn.
        max_rollout_tokens: maximum number of tokens of each context, prompt included.

    Raises:
        UserError: a prompt is empty, or leaves no room for a turn. Errors of the sampler also pass through.
    """
    for rollout in rollouts:
        if not rollout.context:
            raise UserError("a task: expected a prompt of at least one token, got none; give it a message")
        if len(rollout.context) >= max_rollout_tokens:
            raise UserError(
                f"rl.max_rollout_tokens: expected more than the {len(rollout.context):,} tokens of a prompt, "
                f"got {max_rollout_tokens:,}; raise it"
            )
    unfinished, turn = list(zip(rollouts, seeds, strict=True)), 0
    while unfinished:
        contexts = [rollout.context for rollout, _ in unfinished]
        max_tokens = [min(max_turn_tokens, max_rollout_tokens - len(context)) for context in contexts]
        turn_seeds = [random.Random(f"{seed}/{turn}").getrandbits(62) for _, seed in unfinished]
        if any(context.images for context in contexts) and not getattr(sampler, "reads_images", False):
            raise UserError(
                "the sampler: expected one that reads images, because the environment shows some; choose "
                "another one, or set its attribute reads_images"
            )
        completions = sampler.sample(contexts, max_tokens, chat.ends, turn_seeds)
        for (rollout, _), context, completion in zip(unfinished, contexts, completions, strict=True):
            rollout.write(*cut_at_placeholder(completion, context))
            _answer(rollout, chat, max_rollout_tokens)
        unfinished = [(rollout, seed) for rollout, seed in unfinished if rollout.reward is None]
        turn += 1


def cut_at_placeholder(turn: Completion, context: Context) -> Completion:
    """Returns a turn up to the first token, if any, that stands for images in its context."""
    placeholders = {context[at] for at, _ in context.images}
    size = next((i for i, token in enumerate(turn.tokens, 1) if token in placeholders), None)
    if size is None:
        return turn
    experts = None if turn.experts is None else turn.experts[: len(context) + size]
    mask = None if turn.sampling_mask is None else turn.sampling_mask[:size]
    return Completion(turn.tokens[:size], turn.logprobs[:size], experts, mask, turn.policy_version)


def _answer(rollout: Rollout, chat: Chat, max_rollout_tokens: int) -> None:
    """Lets the environment answer the newest turn."""
    with errors_at("a sampled turn"):
        rollout.turns.append(chat.text(rollout.tokens[rollout.starts[-1] :]))
    if rollout.tokens[-1] not in chat.ends:
        rollout.end(0.0, is_cut_off=True)
        return
    assert rollout.episode is not None
    reply: Reply = rollout.episode.reply(rollout.turns)
    if reply.messages is None:
        rollout.end(reply.reward)
        return
    if reply.new_context:
        num_seen, tokens = 0, chat.prompt(rollout.episode, reply.messages)
    else:
        num_seen, tokens = len(rollout.context), chat.observation(reply.messages, rollout.tokens[-1])
    if num_seen + len(tokens) >= max_rollout_tokens:
        rollout.end(0.0, is_cut_off=True)
        return
    rollout.read(tokens, reply.new_context)


def token_paths(
    rollouts: Sequence[Rollout], name: str, advantage: str, options: Mapping[str, Any]
) -> list[TokenPath]:
    """Returns the finished rollouts of one task as training samples, one for each context.

    For advantages, the contexts of an episode are one history, because they follow one another. Those of a
    program do not: the state of a turn is its own context, as in the rows of ``titan-tree serve``.

    Args:
        name: the task's name, with which the ids of paths begin.
        advantage: the estimator, a name in ``ADVANTAGES``.
        options: keyword arguments for the estimator.
    """
    is_program = all(rollout.episode is None for rollout in rollouts)
    histories, owners = [], []
    for owner, rollout in enumerate(rollouts):
        for start, end in pairwise([*(rollout.contexts if is_program else [0]), len(rollout.tokens)]):
            part = rollout.tokens.part(start, end)
            histories.append(TokenPath(part, rollout.mask[start:end], images=part.images))
            owners.append(owner)
    inherited = None if is_program else [rollout.inherited for rollout in rollouts]
    values = iter(advantages(advantage, histories, rewards([rollouts]), owners, inherited, **options))
    paths = []
    for i, rollout in enumerate(rollouts):
        value = np.concatenate([next(values) for _ in range(owners.count(i))])
        paths += rollout.paths(value, f"{name}/{i}")
    return paths


def rewards(groups: Sequence[Sequence[Rollout]]) -> list[float]:
    """Returns the rewards of finished rollouts."""
    return [r.reward for r in chain.from_iterable(groups) if r.reward is not None]
