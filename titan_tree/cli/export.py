"""Writes the weights of a run or a checkpoint as a Hugging Face snapshot, with its tokenizer.

titan-tree export outputs/demo exported                      the newest checkpoint of a run
titan-tree export outputs/demo/checkpoints/step-40 exported  another one
titan-tree export outputs/lora adapter --adapter             LoRA alone, as PEFT reads it

Without --adapter, updates of LoRA are added to the weights. The weights get the dtype of training.
With --force, a folder OUT that exists is renamed to OUT.earlier.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from titan_tree.cli.data_arguments import add_plugins_argument
from titan_tree.config.files import check_folder
from titan_tree.errors import UserError, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree export``."""
    add = parser.add_argument
    add("model", metavar="RUN_OR_CHECKPOINT", help="the folder of a run, or a checkpoint inside of one")
    add("out", metavar="OUT", help="the folder to write, a new one")
    add("--adapter", action="store_true", help="write only LoRA, as an adapter of PEFT")
    add("--force", action="store_true", help="write OUT although it exists; it is renamed to OUT.earlier")
    add_plugins_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree export``. Raises UserError if there is no such model, or if OUT exists."""
    import torch

    from titan_tree.run.build import build_tokenizer
    from titan_tree.run.checkpoint.export import export_adapter, export_hf
    from titan_tree.run.saved_model import SavedModel

    saved = SavedModel.at(args.model, args.plugins)
    if saved.config is None:
        raise UserError(f"{args.model}: {saved.snapshot} is a snapshot already; use it as it is, or copy it")
    source, training = saved.config.model.hf_path, saved.config.training
    read = Path(args.model, "config.toml"), saved.checkpoint, source, saved.config.data.tokenizer
    out = check_folder(Path(args.out).expanduser(), [path for path in read if path], args.force)
    tokenizer = build_tokenizer(saved.config.data, source)
    model = saved.model(torch.device("cpu"))
    if args.adapter and model.lora is None:
        raise UserError(f"--adapter: {args.model} was trained without LoRA; remove --adapter")
    export = secrets.token_hex(4)
    if args.adapter:
        export_adapter(model, out, export, source)
    else:
        dtype, variables = getattr(torch, training.dtype), saved.config.data.sample
        export_hf(model, out, export, dtype, source, tokenizer, variables)
    kind = "an adapter of PEFT" if args.adapter else f"a Hugging Face snapshot in {training.dtype}"
    auto = "AutoModelForCausalLM" if model.visual is None else "AutoModelForImageTextToText"
    loads = (
        f'peft.PeftModel.from_pretrained(model, "{args.out}")'
        if args.adapter
        else f'transformers.{auto}.from_pretrained("{args.out}") or titan-tree chat {args.out}'
    )
    print(printable(f"wrote {args.out}: {kind}, from {saved.checkpoint}"))
    print(printable(f"load it: {loads}"))
