"""Rollouts: trajectories as token ids, exactly as the model read and wrote them.

Text that was decoded is never encoded again: another tokenization of the same text is another path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import UserError, shorten
from titan_tree.rl.environment import Episode, Message, Reply
from titan_tree.rl.sampler import Sampler
from titan_tree.tree.paths import TokenPath

# Stand for any question, and for any turn of the model.
QUESTION: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": "answer"}


@dataclass
class Rollout:
    """One trajectory of T tokens on a task. It has one context, or several if the environment compacts them.

    Attributes:
        tokens: [T] token ids of all contexts, one after another. A turn sees those of its own context.
        mask: [T] 1 for a sampled token, else 0.
        logprobs: [T] log-probs of sampled tokens in nats, as the sampler reported them, else 0.
        starts: index of the first token of each turn of the model.
        turns: texts of finished turns.
        inherited: number of turns that another rollout has sampled, see ``fork``.
        reward: None until the rollout has ended.
        is_cut_off: whether a limit of tokens ended it; its reward is 0.
        contexts: index of the first token of each context.
        experts: [t, L, k] for each context: the experts of its first t tokens, see ``TokenPath``. Empty if
            they were not recorded.
    """

    episode: Episode
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    starts: list[int] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    inherited: int = 0
    reward: float | None = None
    is_cut_off: bool = False
    contexts: list[int] = field(default_factory=lambda: [0])
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """The tokens of the newest context."""
        return self.tokens[self.contexts[-1] :]

    def read(self, tokens: Sequence[int], new_context: bool = False) -> None:
        """Appends tokens that the model reads, to the newest context or as a new one."""
        if new_context:
            self.contexts.append(len(self.tokens))
        self._append(tokens, [0.0] * len(tokens), 0)

    def write(
        self, tokens: Sequence[int], logprobs: Sequence[float], experts: np.ndarray | None = None
    ) -> None:
        """Appends a turn of the model, see ``Completion``."""
        self.starts.append(len(self.tokens))
        self._append(tokens, logprobs, 1)
        if experts is not None:
            self._record(experts)

    def fork(self, turn: int) -> Rollout:
        """Returns an unfinished rollout that shares all tokens before ``turn`` with this one."""
        at = self.starts[turn]
        tokens, mask, logprobs = self.tokens[:at], self.mask[:at], self.logprobs[:at]
        fork = Rollout(self.episode, tokens, mask, logprobs, self.starts[:turn], self.turns[:turn], turn)
        fork.contexts = [start for start in self.contexts if start < at]
        fork.experts = [rows[: at - start] for start, rows in zip(fork.contexts, self.experts, strict=False)]
        return fork

    def paths(self, advantage: np.ndarray, name: str) -> list[TokenPath]:
        """Returns the training samples of the rollout: one for each context.

        They are joined as one rollout for the reduction "rollout_token_mean".

        Args:
            advantage: [T].
            name: of the rollout; the ids of its paths begin with it.
        """
        ends = [*self.contexts[1:], len(self.tokens)]
        paths = [
            TokenPath(
                self.tokens[start:end],
                self.mask[start:end],
                advantage=advantage[start:end],
                old_logprobs=self.logprobs[start:end],
                routed_experts=self.experts[i] if self.experts else None,
                id=name if len(ends) == 1 else f"{name}/{i}",
            )
            for i, (start, end) in enumerate(zip(self.contexts, ends, strict=True))
        ]
        TokenPath.join_rollout(paths)
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
        """Adds the experts of the newest context. Those that an earlier turn recorded stay."""
        if len(self.experts) == len(self.contexts):
            earlier = self.experts.pop()
            is_known = (earlier >= 0).all((1, 2))
            experts = experts.copy()
            experts[: len(earlier)][is_known] = earlier[is_known]
        self.experts.append(experts)

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)


class Chat:
    """Turns messages into tokens with the chat template, and turns of the model into text.

    Attributes:
        end: the id that ends a turn.

    Raises:
        UserError: the template does not end a turn with a special token.
    """

    def __init__(self, tokenizer: TreeTokenizer) -> None:
        self.tokenizer = tokenizer
        tokens, _, size = self._answered([QUESTION])
        self.end = tokens[size - 1]
        self._num_ends = tokens[:size].count(self.end)  # up to the end of the answer
        if self.end not in tokenizer.special_tokens.values():
            raise UserError(
                "data.template: expected a chat template that ends turns with a special token, but they end "
                f"with {tokenizer.decode([self.end])!r}; choose another template"
            )

    def start(self, episode: Episode, number: int) -> list[Rollout]:
        """Returns ``number`` rollouts that have only the prompt."""
        tokens = self.prompt(episode, episode.prompt)
        size = len(tokens)
        return [Rollout(episode, [*tokens], [0] * size, [0.0] * size) for _ in range(number)]

    def prompt(self, episode: Episode, messages: Sequence[Message]) -> list[int]:
        """Returns what the model reads before its first turn of a context that begins with ``messages``."""
        tokens, size, _ = self._answered(messages, getattr(episode, "tools", None))
        return tokens[:size]

    def text(self, turn: Sequence[int]) -> str:
        """Returns the text of a turn without the id that ends it."""
        return self.tokenizer.decode(turn[:-1] if turn and turn[-1] == self.end else turn)

    def observation(self, messages: Sequence[Message]) -> list[int]:
        """Returns what the template writes between the end of a turn and the beginning of the next one."""
        tokens, size, _ = self._answered([QUESTION, ANSWER, *messages])
        ends = [i for i, token in enumerate(tokens) if token == self.end]
        return tokens[ends[self._num_ends - 1] + 1 : size]

    def _answered(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], int, int]:
        """Returns the tokens of ``messages`` and an answer, and where the answer starts and ends."""
        (path,) = self.tokenizer.samples([*messages, ANSWER], tools, turns="last")
        answer = np.flatnonzero(path.loss_mask)
        return path.tokens.tolist(), int(answer[0]), int(answer[-1]) + 1


@dataclass(frozen=True)
class Limits:
    """Limits of tokens: of one turn, and of each context of a rollout with its prompt."""

    turn: int
    rollout: int


def play(rollouts: Sequence[Rollout], sampler: Sampler, chat: Chat, limits: Limits, seed: str) -> None:
    """Samples all rollouts to their end, one turn of all that go on at a time.

    A rollout that reaches a limit is cut off.

    Args:
        seed: with the same weights, the same seed gives the same rollouts if the sampler is deterministic.

    Raises:
        UserError: a prompt leaves no room for a turn, or what the sampler raises.
    """
    live = list(rollouts)
    for rollout in live:
        if len(rollout.context) >= limits.rollout:
            raise UserError(
                f"rl.max_rollout_tokens: expected more than the {len(rollout.context):,} tokens of a prompt, "
                f"got {limits.rollout:,}; raise it"
            )
    turn = 0
    while live:
        contexts = [rollout.context for rollout in live]
        room = [min(limits.turn, limits.rollout - len(context)) for context in contexts]
        draw = random.Random(f"{seed}/{turn}").getrandbits(62)
        turns = sampler.sample(contexts, room, chat.end, draw)
        for rollout, completion in zip(live, turns, strict=True):
            rollout.write(*completion)
            _answer(rollout, chat, limits)
        live = [rollout for rollout in live if rollout.reward is None]
        turn += 1


def _answer(rollout: Rollout, chat: Chat, limits: Limits) -> None:
    """Lets the environment answer the newest turn."""
    rollout.turns.append(chat.text(rollout.tokens[rollout.starts[-1] :]))
    if rollout.tokens[-1] != chat.end:
        rollout.end(0.0, is_cut_off=True)
        return
    reply: Reply = rollout.episode.reply(rollout.turns)
    if reply.messages is None:
        rollout.end(reply.reward)
        return
    if reply.new_context:
        before, read = 0, chat.prompt(rollout.episode, reply.messages)
    else:
        before, read = len(rollout.context), chat.observation(reply.messages)
    if before + len(read) >= limits.rollout:
        rollout.end(0.0, is_cut_off=True)
        return
    rollout.read(read, reply.new_context)
