"""Under chatml, ids equal those of the whole rendered text, which an engine computes."""

import base64
import gzip
import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer, normalizers

from tests.components.tree_tokenizer.test_tokenizer import SPECIAL, WORDS, hf_tokenizer
from tests.support.conversations import random_conversation
from tests.support.datasets import REAL_DATA
from tests.support.plain_samples import PlainTokenizer, assert_same_samples
from tests.support.tokenizer_files import save
from titan_tree.components import tree_tokenizer
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.vocabulary import QWEN_PATTERN

RANKS = REAL_DATA / "qwen.tiktoken.gz"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IDS = dict(zip(CONTROL, range(151_643, 151_646), strict=True)) | {
    "<tool_call>": 151_657,
    "</tool_call>": 151_658,
    "<tool_response>": 151_665,
    "</tool_response>": 151_666,
    "<think>": 151_667,
    "</think>": 151_668,
}
CHATML = Path(tree_tokenizer.__file__).with_name("chatml.jinja").read_text()


class Library:
    """A tokenizer of the library ``tokenizers``, which PlainTokenizer uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = {
            token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.tokenizer.encode_special_tokens = not special
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def test_random_conversations_have_the_ids_of_the_library(tmp_path):
    """Messages hold control tokens, think tags, line feeds and combining marks."""
    theirs = hf_tokenizer(QWEN_PATTERN, normalizers.NFC())
    save(theirs, tmp_path)
    ours = TreeTokenizer.from_hf(tmp_path, "chatml")
    plain = PlainTokenizer(Library(theirs), CHATML, SPECIAL)
    rng = random.Random(0)
    n_samples = n_control = n_words = 0
    for _ in range(20):
        messages, tools = random_conversation(rng)
        n_samples += assert_same_samples(ours, plain, messages, tools) or 0
        n_control += sum(token in message["content"] for message in messages for token in SPECIAL)
        n_words += sum(token in message["content"] for message in messages for token in WORDS)
    assert (n_samples, n_control, n_words) == (102, 44, 62)


@cache
def engine() -> tiktoken.Encoding:
    lines = (line.split() for line in gzip.decompress(RANKS.read_bytes()).splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("engine", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens=IDS)


def whole(text: str) -> list[int]:
    return engine().encode(unicodedata.normalize("NFC", text), allowed_special="all")


def turns_of(name: str, last: bool, max_tasks: int | None = None) -> tuple[int, int, int]:
    """Asserts equal ids. Returns the numbers of turns, of those that are equal if encoded without a cut
    before the completion, and of conversations with control tokens in messages, which are left out."""
    tokenizer = TreeTokenizer.from_tiktoken(RANKS)
    n_turns = n_uncut = n_control = 0
    lines = gzip.decompress((REAL_DATA / f"{name}.jsonl.gz").read_bytes()).splitlines()
    for line in lines[:max_tasks]:
        task = json.loads(line)
        tools = task.get("tools")
        for trajectory in task["trajectories"]:
            messages = trajectory["messages"]
            if any(token in json.dumps(messages, ensure_ascii=False) for token in CONTROL):
                n_control += 1
                continue
            indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            paths = tokenizer.samples(messages, tools, turns="last" if last else "each")
            for index, path in zip(indices[-len(paths) :], paths, strict=True):
                prompt = tokenizer.render(messages[:index], tools, add_generation_prompt=True)
                text = tokenizer.render(messages[: index + 1], tools)
                completion = text[len(prompt) :].rstrip()
                before, trained = whole(prompt), whole(completion)
                assert path.tokens.tolist() == before + trained + whole("\n")
                assert path.loss_mask.sum() == len(trained)
                n_turns += 1
                n_uncut += path.tokens.tolist() == whole(text)
    return n_turns, n_uncut, n_control


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
@pytest.mark.parametrize(
    ("name", "last", "max_tasks", "n_turns"),
    [
        pytest.param("toolbench_dfsdt", False, None, 748, marks=pytest.mark.exhaustive),
        ("webdancer_think", False, None, 210),
        ("tau_airline", True, 10, 69),
    ],
)
def test_real_turns_have_the_ids_of_the_whole_text(name, last, max_tasks, n_turns):
    """No message holds a control token. ``last``: only the last turn of each conversation, to save time."""
    assert turns_of(name, last, max_tasks) == (n_turns, n_turns, 0)
