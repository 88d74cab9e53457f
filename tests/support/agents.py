"""Sessions without a server: a sampler that writes what a test says, and requests that follow one another."""

import asyncio
import random
import threading

from titan_tree.serve.request import Request
from titan_tree.tree.context import Completion

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
USER = {"role": "user", "content": "user says hello"}
WORDS = ("user says hello", "the four", "two and two is", " assistant", "日本語", "x = 1\n", "café")


class ScriptedSampler:
    """Writes turns, whose tokens are not those that the tokenizer would choose.

    Args:
        texts: the texts of the first turns. The turns after them are random.

    Attributes:
        read: all contexts, in the order in which they were read, with their turns.
    """

    def __init__(self, chat, texts=()):
        self.tokenizer, self.ends, self.texts, self.read = chat.tokenizer, chat.ends, list(texts), []

    def sample(self, contexts, max_tokens, stops, seeds):
        assert stops == self.ends
        turns = []
        for context, limit, seed in zip(contexts, max_tokens, seeds, strict=True):
            draw = random.Random(seed)
            text = self.texts.pop(0) if self.texts else random_turn(draw)
            tokens = []
            for token in self.tokenizer.encode(text):
                pieces = self.tokenizer.decode([token])
                split = [i for c in pieces for i in self.tokenizer.encode(c)]
                tokens += split if "<" not in pieces and draw.random() < 0.5 else [token]
            tokens = [*tokens, stops[0]][:limit]
            turn = Completion(tokens, [-draw.random() for _ in tokens])
            self.read.append((list(context), turn))
            turns.append(turn)
        return turns


def random_turn(draw):
    text = "".join(draw.choices(WORDS, k=draw.randint(1, 4)))
    if draw.random() < 0.5:
        text = f"<think>\n{draw.choice(WORDS).strip()}\n</think>\n\n{text.strip()}"
    if draw.random() < 0.4:
        space = draw.choice((" ", ""))
        arguments = f'{{"at":{space}"{draw.random()}"}}'
        text += f'\n<tool_call>\n{{"name": "look",{space}"arguments": {arguments}}}\n</tool_call>'
    return text


def asked(recorder, sampler, *requests, session="a"):
    """Returns the answers to requests of one session, one after another."""
    until = threading.Event()

    async def ask():
        try:
            return [
                await recorder.turn(session, request, digest=str(i), is_retry=False)
                for i, request in enumerate(requests)
            ]
        finally:
            until.set()

    with_loop = threading.Thread(target=recorder.run, args=(sampler, until))
    with_loop.start()
    try:
        return asyncio.run(ask())
    finally:
        with_loop.join()


def follow(request, answer, *messages):
    """Returns the request of a client that appends messages to what it got."""
    return Request(messages=[*request.messages, answer.message, *messages], tools=request.tools)


def printed(chat, request):
    """Returns what the chat template prints for a request."""
    return chat.tokenizer.render(request.messages, request.tools, True, **chat.variables)
