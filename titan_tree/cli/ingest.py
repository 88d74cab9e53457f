"""Renders and tokenizes data files once, and writes a token store that training streams.

titan-tree ingest rollouts.jsonl.gz rollouts.store --tokenizer /models/Qwen3-1.7B
titan-tree ingest rollouts.jsonl rollouts.store data.tokenizer=byte data.advantage=group
titan-tree inspect rollouts.store
titan-tree train CONFIG.toml data.files=rollouts.store

Training on a store sees the same trees in the same order as training on the files.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from titan_tree.cli.data_arguments import (
    add_data_arguments,
    add_force_argument,
    add_overrides,
    data_config,
    progress_bar,
)
from titan_tree.errors import UserError, count, printable

if TYPE_CHECKING:  # functions import what --help does not need
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.data.sample_reader import SampleReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree ingest``."""
    add_data_arguments(parser)
    parser.add_argument("out", type=os.path.expanduser, metavar="OUT", help="the store to write, a new file")
    add_force_argument(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree ingest``. Raises UserError for malformed input or an existing store."""
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.data.sample_reader import SampleReader
    from titan_tree.data.token_store import write_store
    from titan_tree.tree.token_tree import TreeStats

    config = data_config(args)
    tokenizer = TreeTokenizer.load(config.tokenizer, config.template) if config.tokenizer else None
    reader = SampleReader(config, tokenizer)
    _check(reader, tokenizer)
    with progress_bar() as open_file:
        groups = ((group.id, reader.paths(group)) for group in reader.files.groups(open_file))
        read = [*reader.files.paths, *filter(None, (args.tokenizer, args.template))]
        stats = write_store(args.out, groups, _header(reader, tokenizer), read, args.force)
    total = TreeStats.total(stats)
    print(
        f"{printable(args.out)}: {count(len(stats), 'group')} with {count(total.n_paths, 'sample')}; "
        f"tokens: {total.n_flat:,} of all paths, {total.n_leaf:,} of leaf paths, {total.n_tree:,} distinct; "
        f"{Path(args.out).stat().st_size / 1e6:,.1f} MB"
    )


def _check(reader: SampleReader, tokenizer: TreeTokenizer | None) -> None:
    """Raises UserError if the samples would not be those of training on the files."""
    from titan_tree.data.data_files import holds_conversations
    from titan_tree.data.token_store import is_store

    for file in reader.files.paths:
        if Path(file).is_file() and is_store(Path(file)):
            raise UserError(f"{file}: this is a token store already; train on it as it is")
    if tokenizer is None and holds_conversations(next(reader.files.groups())):
        raise UserError("--tokenizer: conversations need the tokenizer of the model; give its folder")


def _header(reader: SampleReader, tokenizer: TreeTokenizer | None) -> dict[str, object]:
    """Returns what the store is made of."""
    config = reader.config
    checksums = zip(reader.files.paths, reader.files.checksums, strict=True)
    return {
        "sources": [{"file": file, "bytes": size, "crc32": crc} for file, (size, crc) in checksums],
        "tokenizer": tokenizer.fingerprint() if tokenizer else None,
        "tokenizer_name": " with template ".join(filter(None, (config.tokenizer, config.template))),
        "sample": config.sample,
        "advantage": config.advantage,
        "advantage_options": config.advantage_options,
    }
