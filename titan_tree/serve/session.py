"""Session: the calls of one rollout, as a tree of the token ids that the model read and wrote.

Clients send text. The chat template prints all of it again in each request, and encoding it would not give
the ids that were sampled. So the prompt of a call has two parts: the ids of the longest earlier call whose
text, images included, begins the new text, as the model read and wrote them; and the ids of the rest. A call
that continues no earlier one is a fork. On a tree, it costs its own tokens alone, so nothing is masked, and
no prompt is changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from titan_tree.components.tree_tokenizer.tool_calls import parse_object
from titan_tree.serve.request import Answer, Message, Request
from titan_tree.tree.context import Completion, Context, Ids

Mode = Literal["faithful", "append"]
# Why a call is a fork.
AGAIN = "the same messages again"
BESIDE = "another continuation of a turn"
TOOLS = "other tools"
SYSTEM = "another system message"
NEW = "a new conversation"
REWRITTEN = "an earlier turn was rewritten"
CHANGED = "an earlier message was changed"
PRINTED = "the template prints an earlier turn in another way"
CUT = "the history was cut"


@dataclass(eq=False, kw_only=True)
class Call:
    """A request with the turn that the model sampled.

    Attributes:
        number: a number, which grows from call to call.
        prompt: the ids that the model read.
        parent: the call whose ids, with its turn, begin the prompt; None: there is none.
        fork: why it continues no call, or not alone; "": it is no fork.
        turn: what the model wrote; None until it has.
        answer: what the client got.
    """

    number: int
    prompt: Context
    parent: Call | None
    fork: str
    roles: list[str]  # of the messages, and of the answer
    keys: list[bytes]  # digests of the tools, of each message, and of the answer
    turn: Completion | None = None
    answer: Answer | None = None

    @property
    def tokens(self) -> Context:
        """The prompt and the turn."""
        assert self.turn is not None
        return self.prompt.extended(self.turn.tokens)

    @property
    def last_token(self) -> int:
        """The last id of the turn."""
        assert self.turn is not None
        return self.turn.tokens[-1]


@dataclass(frozen=True, kw_only=True)
class SessionPath:
    """A path from the root of a session to a leaf, of T tokens.

    A sampled token that several paths share is trained in the first one, and is context in the others.

    Attributes:
        tokens: [T] token ids and images.
        mask: [T] 1 for a token that this path trains, else 0.
        logprobs: [T] log-probs of those tokens in nats, as they were sampled, else 0.
        starts: indices of the first token of each turn that this path trains.
        experts: [t, L, k], see ``Completion``.
        kept: [T] the ids that sampling kept for each token that this path trains; else, and if all were, ().
        is_cut_off: whether a limit of tokens ended its last turn.
    """

    tokens: Context
    mask: list[int]
    logprobs: list[float]
    starts: list[int]
    experts: np.ndarray | None
    kept: list[Sequence[int] | np.ndarray]
    is_cut_off: bool


class Session:
    """The calls of a rollout.

    Args:
        decode: returns the text of token ids.
        ends: the ids that end a turn.
        mode: "faithful": prompts have the text that the template prints. "append": a request whose messages
            extend those of an earlier call continues its ids, even if the template prints them in another
            way, for example without thoughts.
    """

    def __init__(self, decode: Callable[[Ids], str], ends: Collection[int], mode: Mode = "faithful") -> None:
        self.calls: list[Call] = []
        self._decode, self._ends, self._mode = decode, ends, mode
        self._by_text: dict[bytes, Call] = {}
        self._by_messages: dict[bytes, Call] = {}
        self._written: dict[str, str] = {}  # arguments by the ids of calls

    def as_written(self, request: Request) -> Request:
        """Returns a request in which arguments of calls are spelled as the model wrote them.

        Clients parse them, so that white space and forms of characters and numbers get lost. Anthropic's API
        has only objects. Arguments with another value stay as they are.
        """
        messages = [self._spelled(message) for message in request.messages]
        return replace(request, messages=messages)

    def begin(
        self, request: Request, printed: Context, observe: Callable[[Sequence[Message], int], Context]
    ) -> Call:
        """Returns a call with its prompt, and adds it.

        Args:
            printed: what the chat template prints for the request, as token ids.
            observe: returns what the template prints between a turn, given its last id, and the next one.
        """
        prompt, parent, fork, keys = self._placed(request, printed, observe)
        roles = [message["role"] for message in request.messages]
        number = 1 + max((call.number for call in self.calls), default=-1)
        call = Call(number=number, prompt=prompt, parent=parent, fork=fork, roles=roles, keys=keys)
        self.calls.append(call)
        return call

    def size(
        self, request: Request, printed: Context, observe: Callable[[Sequence[Message], int], Context]
    ) -> int:
        """Returns the number of tokens of the prompt that ``begin`` would make."""
        return len(self._placed(request, printed, observe)[0])

    def finish(self, call: Call, turn: Completion, answer: Answer) -> None:
        """Adds the turn of a call. Other calls may continue it after ``index``."""
        call.roles.append("assistant")
        call.keys.append(_key(answer.message))
        call.turn, call.answer = turn, answer

    def index(self, call: Call) -> None:
        """Lets later calls continue a call that has its turn."""
        assert call.answer is not None
        *_, (_, text) = self._boundaries(call.tokens)
        self._by_text.setdefault(text, call)
        self._by_messages.setdefault(_joined(call.keys), call)
        for each in call.answer.message.get("tool_calls", ()):
            self._written[each["id"]] = each["function"]["arguments"]

    def drop(self, call: Call) -> None:
        """Forgets a call that has not been indexed."""
        self.calls.remove(call)

    def forks(self) -> Counter[str]:
        """Returns the number of forks by their cause."""
        return Counter(call.fork for call in self.calls if call.fork)

    def paths(self) -> list[SessionPath]:
        """Returns the path of each leaf, in the order of the calls' numbers."""
        done = [call for call in self.calls if call.turn is not None]
        inner = {call.parent for call in done}
        trained: set[Call] = set()
        leaves = [_calls_to(call) for call in done if call not in inner]
        # Restored calls have the order in which their turns ended. Rows must not depend on a restart.
        leaves.sort(key=lambda calls: [call.number for call in calls])
        return [_path(calls, trained) for calls in leaves]

    def _spelled(self, message: Message) -> Message:
        if not any(call.get("id") in self._written for call in message.get("tool_calls", ())):
            return message
        calls = []
        for call in message["tool_calls"]:
            written, function = self._written.get(call.get("id"), ""), call["function"]
            value = parse_object(written)
            if value is not None and _is_equal(value, _arguments(function["arguments"])):
                is_usual = json.dumps(value, ensure_ascii=False) == written  # as in ``normalize_messages``
                spelled = value if is_usual else written
                call = {**call, "function": {**function, "arguments": spelled}}
            calls.append(call)
        return {**message, "tool_calls": calls}

    def _placed(
        self, request: Request, printed: Context, observe: Callable[[Sequence[Message], int], Context]
    ) -> tuple[Context, Call | None, str, list[bytes]]:
        keys = [_digest(request.tools), *map(_key, request.messages)]
        parent, start = None, 0  # the call that is continued, and where its text ends
        for at, text in self._boundaries(printed):
            if (call := self._by_text.get(text)) is not None:
                parent, start = call, at
        rest = printed.part(start, len(printed))
        if self._mode == "append" and (found := self._extended(keys, request)) is not None:
            number, extended = found
            # Else, the text has led to a later turn, which was cut off.
            if parent is None or len(parent.keys) <= len(extended.keys):
                parent, rest = extended, observe(request.messages[number:], extended.last_token)
        prompt = rest if parent is None else parent.tokens.extended(rest)
        return prompt, parent, self._fork(keys, parent, request), keys

    def _extended(self, keys: list[bytes], request: Request) -> tuple[int, Call] | None:
        """Returns the call with the most of the request's first messages, and their number."""
        for number in range(len(request.messages) - 1, 0, -1):
            if request.messages[number - 1]["role"] == "assistant":
                call = self._by_messages.get(_joined(keys[: number + 1]))
                if call is not None and call.last_token in self._ends:
                    return number, call
        return None

    def _fork(self, keys: list[bytes], parent: Call | None, request: Request) -> str:
        """Returns why a request continues no call, or not alone, or ""."""

        def common(call: Call) -> int:
            pairs = enumerate(zip(call.keys, keys, strict=False))
            return next((i for i, (a, b) in pairs if a != b), min(len(call.keys), len(keys)))

        if not self.calls:
            return ""
        nearest = max(self.calls, key=lambda call: (common(call), call.number))
        number = common(nearest)  # of the tools and the messages that were seen before
        if parent is not None and number <= common(parent):
            return BESIDE if any(call.parent is parent for call in self.calls) else ""
        if number == len(keys):
            return AGAIN
        if number == 0:
            return TOOLS
        if number == len(nearest.keys):
            return PRINTED
        message, seen = request.messages[number - 1], request.messages[: number - 1]
        if not seen and message["role"] == "system":
            return SYSTEM
        if [message["role"]] != nearest.roles[number - 1 : number]:
            return CUT
        if message["role"] == "assistant":
            return REWRITTEN
        return CHANGED if any(each["role"] == "assistant" for each in seen) else NEW

    def _boundaries(self, tokens: Context) -> Iterator[tuple[int, bytes]]:
        """Yields where turns may end, each with a digest of the text and the images before it."""
        images = list(tokens.images)
        digest, start = blake2b(digest_size=16), 0
        for at, token in enumerate(tokens):
            if token not in self._ends:
                continue
            for stop in (at, at + 1):
                digest.update(self._decode(tokens[start:stop]).encode())
                while images and images[0][0] < stop:
                    digest.update(images.pop(0)[1].key.encode())
                start = stop
                yield stop, digest.digest()
        digest.update(self._decode(tokens[start:]).encode())
        for _, image in images:
            digest.update(image.key.encode())
        yield len(tokens), digest.digest()


def _calls_to(leaf: Call) -> list[Call]:
    """Returns the calls from the root to a leaf."""
    calls = [leaf]
    while (parent := calls[-1].parent) is not None:
        calls.append(parent)
    return calls[::-1]


def _path(calls: Sequence[Call], trained: set[Call]) -> SessionPath:
    leaf = calls[-1]
    tokens = leaf.tokens
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    kept: list[Sequence[int] | np.ndarray] = [()] * len(tokens)
    starts: list[int] = []
    experts: np.ndarray | None = None
    for call in calls:
        assert call.turn is not None
        start = len(call.prompt)
        stop = start + len(call.turn.tokens)
        if (rows := call.turn.experts) is not None:
            if experts is not None:  # what an earlier call recorded stays
                rows = rows.copy()
                is_known = (experts >= 0).all((1, 2))
                rows[: len(experts)][is_known] = experts[is_known]
            experts = rows
        if call in trained:
            continue
        trained.add(call)
        starts.append(start)
        mask[start:stop] = [1] * (stop - start)
        logprobs[start:stop] = call.turn.logprobs
        if call.turn.sampling_mask is not None:
            kept[start:stop] = call.turn.sampling_mask
    return SessionPath(
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        starts=starts,
        experts=experts,
        kept=kept,
        is_cut_off=leaf.answer is not None and leaf.answer.finish == "length",
    )


def _key(message: Message) -> bytes:
    """Returns a digest of a message as clients spell it: ids, thoughts and outer white space do not count."""
    content = message.get("content") or ""
    if isinstance(content, str):
        content = content.strip()
    else:
        content = [[part["type"], part.get("text", part.get("image"))] for part in content]
    calls = [
        (call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return _digest([message["role"], content, calls])


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _is_equal(a: Any, b: Any) -> bool:
    """Returns whether JSON values are equal. For Python, true is also 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _joined(keys: Sequence[bytes]) -> bytes:
    """Returns one digest of several, in their order."""
    return blake2b(b"".join(keys), digest_size=16).digest()
