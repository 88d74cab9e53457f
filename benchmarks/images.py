"""Times whole steps on trees with images beside the same samples on one row per leaf path.

python -m benchmarks images                                            # 16 answers to one image
python -m benchmarks images --data agentnet_screens.zip                # also screenshots of real desktops
python -m benchmarks images --model Qwen3-VL-2B --vision train --data agentnet_screens.zip --enlarge 2

Weights are random. A step has forward and backward passes, clipping and AdamW with a learning rate of 0, so
all steps see the same weights. "difference" is that of the losses of both layouts.

- *tree*: one tree per task. The tower encodes each distinct image of a micro-batch once.
- *rows*: one path per leaf, packed without padding, as a good trainer without trees has them. Each row has
  images of its own, with equal pixels but another key, so the tower encodes them for each row again.
  (titan_tree itself would share equal images between the trees of a micro-batch, too.)

Each step encodes its images as if it saw them first: later steps of a run with a frozen tower find them.

The samples are 16 answers to a question about a random image, and computer use, if ``--data`` has it: a
folder or a ZIP file with rollouts_last1.jsonl, rollouts_last3.jsonl, rollouts_last5.jsonl (contexts show the
last screenshots) or rollouts.jsonl (all). Lines have ``group_id`` and OpenAI's ``messages``; with ``"turns":
"last"``, only the last answer is trained. Four characters of text are one token. 1,500 tokens of
instructions come first. ``--enlarge`` repeats pixels, because published screenshots are smaller than screens.

"encodings" are images that the tower encodes in a step. "tower ms" is the time of the tower alone, with its
backward pass if it is trained, and "share" its share of the step. On the host, "merge ms" merges the paths
of a step into trees and prepares its batches, and "image ms" reads, resizes and hashes one file.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import steps
from benchmarks.timers import Contender, add_rounds, peak_memory, reset_peak_memory, run_rounds, wall_s
from titan_tree.cli.bench.record import Row
from titan_tree.data.images import load_image
from titan_tree.data.packing import leaf_trees, pack
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.engine.feature_cache import forget_features
from titan_tree.engine.step_io import StepInput
from titan_tree.errors import UserError
from titan_tree.models.decoder_config import ConfigJson
from titan_tree.models.settings import ModelConfig
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# vision_config of Qwen3-VL-2B, without its defaults. That of Qwen3.5-2B is assumed to have the same sizes.
TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
}
WITH_DEEPSTACK = TOWER | {"deepstack_visual_indexes": [5, 11, 17]}
MODELS: dict[str, tuple[str, str, ConfigJson | None]] = {  # family, flavor, and config.json of the tower
    "Qwen3-VL-2B": ("qwen3", "1.7B", {"model_type": "qwen3_vl", "vision_config": WITH_DEEPSTACK}),
    "Qwen3.5-2B": ("qwen3_5", "2B", {"model_type": "qwen3_5", "vision_config": TOWER}),
    "debug": ("qwen3", "debug", None),
}
FILES = {f"last {number}": f"rollouts_last{number}.jsonl" for number in (1, 3, 5)} | {"all": "rollouts.jsonl"}
URL = re.compile(r'"url": *"(.+?)"')
PAD, TEXT_IDS = 0, 500  # the placeholder of images; ids 1 to 500 are text, in the vocabulary of each model
INSTRUCTIONS, QUESTION = 1500, 100  # tokens
KEYS = ("model", "vision", "enlarge", "max_tokens", "activation_checkpoint", "case", "layout")
RATIOS = ("speed-up",)
QUICK = (
    "--model", "debug", "--size", "256", "256", "--answer", "8", "--max-tokens", "1024", "--rounds", "1",
    "--no-compile",
)  # fmt: skip
PACKAGES = ("transformers",)
COLUMNS = (
    "model", "vision", "case", "layout", "tokens", "images", "encodings", "ms", "tower ms", "share", "GiB",
    "tokens/s", "speed-up", "difference", "merge ms", "image ms",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RowImage(Image):
    """An image that no other row has, although pixels may be equal."""

    owner: str = ""

    @cached_property
    def key(self) -> str:
        return self.owner


@dataclass(frozen=True)
class Case:
    """The samples of each task, and the milliseconds to load one of their images."""

    name: str
    groups: Sequence[Sequence[TokenPath]]
    image_ms: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    names, ways = list(MODELS), ["frozen", "train"]
    add("--model", nargs="+", choices=names, default=names[:2], help="sizes (default: both of 2B)")
    add("--vision", nargs="+", choices=ways, default=ways, help="what to do with the tower (default: both)")
    add("--data", type=Path, metavar="FOLDER_OR_ZIP", help="samples with screenshots, see above")
    add("--enlarge", type=int, default=1, help="factor for both sides of screenshots (default: 1)")
    add("--size", type=int, nargs=2, default=[1920, 1088], metavar=("W", "H"), help="(default: 1920 1088)")
    add("--answer", type=int, default=300, help="tokens of each of the 16 answers (default: %(default)s)")
    help = "of a micro-batch; larger trees run in one pass, too (default: %(default)s)"
    add("--max-tokens", type=int, default=16_384, help=help)
    modes = ("none", "selective", "full")
    add("--activation-checkpoint", choices=modes, default="none", help="of the text model (default: none)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the layers")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per model, way to use the tower, case and layout."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [answers(args.answer, *args.size)]
        cases += recorded(args.data, args.enlarge, folder) if args.data else []
    with steps.process_group() as (mesh, device):
        for name, vision in itertools.product(args.model, args.vision):
            family, flavor, tower = MODELS[name]
            config = ModelConfig(name=family, flavor=flavor, vision=vision)
            model = steps.model_with_tower(config, steps.training_config(args), mesh, tower)
            update = steps.optimizer_update(model, OptimizerConfig(lr=0.0))
            steps.training_step(model, device).warm_up(args.max_tokens)
            setting = {"model": name, "vision": vision} | {key: getattr(args, key) for key in KEYS[2:-2]}
            for case in cases:
                yield from (setting | row for row in measure(case, model, update, args, device))
            del model, update
            gc.collect()
            torch.compiler.reset()  # the graphs of a model count against the limit of recompilations
            if device.type == "cuda":
                torch.cuda.empty_cache()


def answers(length: int, width: int, height: int) -> Case:
    """Returns 16 answers of ``length`` tokens to a question about one image."""
    draw = np.random.default_rng(0)
    image = Image(draw.integers(0, 256, (height, width, 3), np.uint8))
    prompt = [TEXT_IDS, *[PAD] * len(image), *draw.integers(1, TEXT_IDS, QUESTION)]
    mask = np.repeat([0, 1], [len(prompt), length])
    answers = draw.integers(1, TEXT_IDS, (16, length))
    paths = [TokenPath([*prompt, *answer], mask, images=[(1, image)]) for answer in answers]
    return Case(f"16 x {length}, {width} x {height}", [paths])


def recorded(data: Path, enlarge: int, folder: str) -> Iterator[Case]:
    """Yields a case for each file of ``data``, a folder, or a ZIP file that is extracted to ``folder``."""
    if data.is_file():
        zipfile.ZipFile(data).extractall(folder)
    else:
        folder = str(data)
    files = {name: Path(folder, file) for name, file in FILES.items() if Path(folder, file).exists()}
    if not files:
        raise UserError(f"--data {data}: expected one of {', '.join(FILES.values())}, found none")
    for name, file in files.items():
        text = file.read_text()
        started = time.perf_counter()
        loaded = {source: load_image(source, folder) for source in set(URL.findall(text))}
        image_ms = 1e3 * (time.perf_counter() - started) / len(loaded)
        larger = {
            source: Image(image.pixels.repeat(enlarge, axis=0).repeat(enlarge, axis=1))
            for source, image in loaded.items()
        }
        groups: dict[str, list[TokenPath]] = {}
        for record in map(json.loads, text.splitlines()):
            groups.setdefault(record["group_id"], []).append(token_path(record, larger))
        yield Case(name, list(groups.values()), round(image_ms, 1))


def token_path(record: Mapping[str, Any], shown: Mapping[str, Image]) -> TokenPath:
    """Returns the path of a conversation. Equal texts become equal tokens."""
    tokens, mask, images = [TEXT_IDS] * INSTRUCTIONS, [0] * INSTRUCTIONS, []
    for number, message in enumerate(record["messages"], 1):
        is_last = number == len(record["messages"])
        is_trained = message["role"] == "assistant" and (is_last or record.get("turns") != "last")
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        for index, part in enumerate([{"text": f"<|im_start|>{message['role']}"}, *parts]):
            if "text" in part:
                text = part["text"].encode()
                tokens += (1 + np.frombuffer(text + b" " * (-len(text) % 4), np.uint32) % TEXT_IDS).tolist()
            else:
                images.append((len(tokens), shown[part["image_url"]["url"]]))
                tokens += [PAD] * len(images[-1][1])
            mask += [int(is_trained and index > 0)] * (len(tokens) - len(mask))
    return TokenPath(tokens, mask, images=images)


def rows(case: Case) -> Iterator[list[TokenPath]]:
    """Yields the paths of each leaf, with images of their own."""
    leaves = [tree.paths for paths in case.groups for tree in leaf_trees(paths)]
    for row, paths in enumerate(leaves):

        def own(image: Image, row: int = row) -> Image:
            return RowImage(image.pixels, image.patch, owner=f"{row} {image.key}")

        yield [replace(p, images=tuple((at, own(image)) for at, image in p.images)) for p in paths]


def measure(
    case: Case, model: TreeModel, update: steps.Update, args: argparse.Namespace, device: torch.device
) -> Iterator[Row]:
    """Yields a table row per layout of a case."""
    step = steps.training_step(model, device)
    groups = {"rows": list(rows(case)), "tree": case.groups}
    prepared: dict[str, StepInput] = {}
    losses: dict[str, float] = {}

    def prepare(layout: str) -> None:
        prepared[layout] = step.prepare(
            pack(list(map(TokenTree.from_paths, groups[layout])), args.max_tokens)
        )

    def timed(layout: str) -> Iterator[dict[str, float]]:
        sample = {"merge": 1e3 * wall_s(partial(prepare, layout))}
        forget_features()
        reset_peak_memory(device)
        started = time.perf_counter()
        losses[layout], _, _ = update(step, prepared[layout])  # waits for the device
        sample["ms"] = 1e3 * (time.perf_counter() - started)
        sample["GiB"] = peak_memory(device) / 2**30
        yield sample | {"tower": 1e3 * steps.encode_images(model, prepared[layout])}

    contenders = [Contender(layout, partial(timed, layout)) for layout in groups]
    for layout in groups:
        list(timed(layout))  # reserves memory and tunes kernels
    run_rounds(contenders, args.rounds)
    for contender in contenders:
        of_step, ms, tower_ms = prepared[contender.name], contender.median("ms"), contender.median("tower")
        yield {
            "case": case.name,
            "layout": contender.name,
            "tokens": of_step.counts.executed_tokens,
            "images": sum(len(path.images) for paths in case.groups for path in paths),
            "encodings": sum(len(first.pixels) for first, *_ in of_step.micro_batches),
            "ms": round(ms, 1),
            "tower ms": round(tower_ms, 1),
            "share": f"{tower_ms / ms:.1%}",
            "GiB": round(max(contender.samples["GiB"]), 1),
            "tokens/s": round(1e3 * of_step.counts.executed_tokens / ms),
            "speed-up": round(contenders[0].median("ms") / ms, 2),
            "difference": f"{abs(losses['tree'] / losses['rows'] - 1):.1e}",
            "merge ms": round(contender.median("merge"), 1),
            "image ms": case.image_ms,
        }
