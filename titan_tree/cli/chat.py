"""Talks to the model of a run, a checkpoint or a snapshot.

titan-tree chat outputs/demo                       the newest checkpoint of a run
titan-tree chat outputs/demo/checkpoints/step-40   another one
titan-tree chat /models/Qwen3-1.7B --temperature 0.7 --system "Answer briefly."
titan-tree chat outputs/demo --task                what the run learned best, before and after training
echo "How many caps?" | titan-tree chat outputs/demo

Each line is a message. /image FILE shows an image before the next one, if the model reads images; /reset
forgets the conversation; /quit, Ctrl-D and Ctrl-C end it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from datetime import date
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

from titan_tree.cli.data_arguments import add_plugins_argument, count_to
from titan_tree.errors import UserError, printable

if TYPE_CHECKING:
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.models.tree_model import TreeModel
    from titan_tree.rl.environment import Message
    from titan_tree.run.saved_model import SavedModel
    from titan_tree.tree.context import Context

SHOWN_CHARACTERS = 600  # of a task's prompt; the end counts
SCORED_GROUPS = 8  # groups of the data whose samples --task scores
TRIES = 8  # best-learned samples that --task answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree chat``."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="the folder of a run, a checkpoint or a Hugging Face snapshot")
    add("--system", metavar="TEXT", help="a system message (default: none)")
    add("--max-tokens", type=count_to(10**9), default=512, metavar="N", help="of an answer")
    add(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0 chooses the likeliest token; 1 samples as the model does",
    )
    add("--seed", type=int, default=0, metavar="N", help="of sampling")
    add("--tokenizer", metavar="NAME", help="a folder, a file, or byte (default: the model's own)")
    add("--template", metavar="NAME", help="chatml, qwen3 or a file (default: the model's own)")
    add(
        "--task",
        action="store_true",
        help="show the prompt whose answer the run learned best, with answers before and after training",
    )
    add_plugins_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree chat``. Raises UserError if there is no such model."""
    import torch

    from titan_tree.data.images import load_image
    from titan_tree.run.saved_model import SavedModel
    from titan_tree.tree.images import NO_TOWER

    saved = SavedModel.at(args.model, args.plugins)
    tokenizer = saved.tokenizer(args.tokenizer, args.template)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.task:
        show_task(saved, tokenizer, device)
        return
    speaker = Speaker(saved.model(device), tokenizer, args.temperature)
    commands = ["/image FILE"] * (speaker.model.visual is not None) + ["/reset", "/quit"]
    print(f"{printable(str(saved.checkpoint or saved.snapshot))}; {', '.join(commands)}", file=sys.stderr)
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages: list[Message] = [*start]
    images: list[Message] = []  # parts of the next message
    for line in _lines():
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages, images = [*start], []
        elif line.startswith("/image "):
            source = os.path.expanduser(line.removeprefix("/image").strip())
            try:
                if speaker.model.visual is None:
                    raise UserError(NO_TOWER)
                images.append({"type": "image", "image": load_image(source, "")})
            except UserError as error:
                print(f"/image: {error}", file=sys.stderr)
        elif line.startswith("/"):
            expected = " or ".join(commands)
            print(f"unknown command {printable(line.split()[0])}; expected {expected}", file=sys.stderr)
        elif line:
            content = [*images, {"type": "text", "text": line}] if images else line
            messages.append({"role": "user", "content": content})
            images = []
            answer, is_finished = speaker.answer(messages, args.max_tokens, args.seed + len(messages))
            print(shown(answer), flush=True)
            if not answer.strip():
                print("(the answer has no visible text)", file=sys.stderr)
            if not is_finished:
                print(f"(cut off after --max-tokens {args.max_tokens})", file=sys.stderr)
            messages.append({"role": "assistant", "content": answer, "finish_reason": "stop"})


class Speaker:
    """Answers conversations with the weights of a model.

    Args:
        temperature: 0 chooses the likeliest token.
    """

    def __init__(self, model: TreeModel, tokenizer: TreeTokenizer, temperature: float = 0.0) -> None:
        from titan_tree.rl.generate_sampler import default_sampler
        from titan_tree.rl.rollouts import Chat
        from titan_tree.rl.truncation import ALL_IDS, Truncation

        self.model = model
        today = {"date": date.today().isoformat()} if "date" in tokenizer.template_variables else {}
        self.chat = Chat(tokenizer, today)
        truncation = ALL_IDS if temperature else Truncation(top_k=1)
        self.sampler = default_sampler(model, truncation, temperature or 1.0)

    def answer(self, messages: list[Message], max_tokens: int, seed: int) -> tuple[str, bool]:
        """Returns the answer to a conversation, and whether the model ended it.

        Raises:
            UserError: the conversation leaves no position of the model for an answer.
        """
        return self.continued(self.chat.prompt(SimpleNamespace(), messages), max_tokens, seed)

    def continued(self, context: Context, max_tokens: int, seed: int = 0) -> tuple[str, bool]:
        """Returns the text that follows token ids, and whether the model ended it. Raises as ``answer``."""
        import numpy as np

        self.model.image_limits.check(np.array(context), context.images)
        positions: int = self.model.config.max_position_embeddings
        room = positions - len(context)
        if room < 1:
            raise UserError(
                f"the conversation has {len(context):,} tokens, but the model has {positions:,} "
                "positions; start again, or use /reset earlier"
            )
        (turn,) = self.sampler.sample([context], [min(max_tokens, room)], self.chat.ends, [seed])
        return self.chat.text(turn.tokens), turn.tokens[-1] in self.chat.ends


def show_task(saved: SavedModel, tokenizer: TreeTokenizer, device: object) -> None:
    """Prints a prompt of a run's data with three answers: the data's, and before and after training.

    Of the first samples, the model has learned this one best: it says what the data say, or comes close.

    Raises:
        UserError: the run does not train on data files.
    """
    import numpy as np
    import torch

    from titan_tree.data.sample_reader import SampleReader
    from titan_tree.scoring.score_trees import score_paths
    from titan_tree.tree.context import Context

    assert isinstance(device, torch.device)
    if saved.config is None or not saved.config.data.files:
        raise UserError("--task: expected the folder of a run that trains on data files")
    reader = SampleReader(saved.config.data, tokenizer)
    groups = islice(reader.files.groups(), SCORED_GROUPS)
    paths = [path for group in groups for path in reader.paths(group) if path.loss_mask[1:].any()]
    if not paths:
        raise UserError("--task: the first samples of the run's data have no trained token")
    model = saved.model(device)
    least = [
        score.logprobs[1:][torch.from_numpy(path.loss_mask[1:] > 0)].min().item()
        for score, path in zip(score_paths(model, paths, saved.config.data.max_tokens), paths, strict=True)
    ]
    speaker = Speaker(model, tokenizer)
    tries: list[tuple[Context, list[int], str]] = []  # prompts, with answers of the data and of the model
    for index in sorted(range(len(paths)), key=least.__getitem__, reverse=True)[:TRIES]:
        path = paths[index]
        trained = np.flatnonzero(path.loss_mask[1:]) + 1  # nothing predicts the first token
        context = Context(path.tokens.tolist(), path.images).part(0, int(trained[0]))
        wanted = path.tokens[trained[0] : trained[-1] + 1].tolist()
        after, _ = speaker.continued(context, 2 * len(wanted))
        tries.append((context, wanted, after))
        if _without_thought(after) == _without_thought(speaker.chat.text(wanted)):
            break
    else:
        del tries[1:]
    context, wanted, after = tries[-1]
    before, _ = Speaker(saved.start_model(device), tokenizer).continued(context, len(wanted))
    print(f"task:\n{_indented(tokenizer.decode(context)[-SHOWN_CHARACTERS:])}")
    for name, text in (
        ("answer in the data", speaker.chat.text(wanted)),
        ("untrained model", before),
        (f"after training ({saved.checkpoint.name if saved.checkpoint else ''})", after),
    ):
        print(f"{name}:\n{_indented(text)}")


def _without_thought(answer: str) -> str:
    return answer.rpartition("</think>")[2].strip()


def shown(text: str) -> str:
    """Returns a text without control characters other than line breaks."""
    return "\n".join(map(printable, text.strip("\n").split("\n")))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in (shown(text) or "(nothing)").split("\n"))


def _lines() -> Iterator[str]:
    """Yields the lines of stdin without white space around them. A terminal shows a prompt."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text!r}")
    return number
