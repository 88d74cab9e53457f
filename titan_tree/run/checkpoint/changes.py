"""Compares the configuration of a run with that in its checkpoint, and refuses misleading changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

from titan_tree.errors import UserError, shorten
from titan_tree.run.config import Config

logger = logging.getLogger(__name__)

# If one of these keys changes, the loss or the data differ before and after the checkpoint, so that one curve
# shows two experiments. A trailing dot stands for a whole table.
DECISIVE = (
    "data.advantage",
    "data.files",
    "data.global_batch_groups",
    "data.layout",
    "data.merge",
    "data.paths",
    "data.replay",
    "data.sample.",
    "data.seed",
    "data.shuffle_buffer",
    "data.template",
    "data.tokenizer",
    "data.weights",
    "loss.",
    "rl.",
    "router_loss.",
    "validation.files",
    "warm_start.",
)
# These keys change neither training nor logged values. ``TreeDataset`` compares ``data.files`` by content.
IRRELEVANT = (
    *("folder", "data.workers", "checkpoint.", "metrics.", "profiler.", "lightning.", "rl.server."),
    "rl.agent.concurrency",
)


def check_architecture(folder: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises UserError if the checkpoints of ``folder`` belong to another model or optimizer."""
    wrong = [
        f"{key} = {before.get(key)} (now {now.get(key)})"
        for key in sorted({**before, **now})
        if before.get(key) != now.get(key)
    ]
    if wrong:
        raise UserError(
            f"{folder}: contains checkpoints of another model or optimizer: {', '.join(wrong)}; restore "
            "these settings, or choose another folder"
        )


def check_config(folder: Path, before: Mapping[str, object], now: Config, allow_changes: bool) -> None:
    """Logs what has changed. Raises UserError if one curve would show two experiments."""
    decisive, other = config_changes(before, now)
    if decisive and not allow_changes:
        raise UserError(
            f"{folder}: its checkpoints belong to another experiment: {', '.join(decisive)}; restore these "
            "settings, choose another folder, or set checkpoint.allow_changes = true"
        )
    for change in decisive + other:
        logger.info("changed since the checkpoint: %s", change)


def config_changes(
    before: Mapping[str, object], now: Config, names: tuple[str, ...] = DECISIVE
) -> tuple[list[str], list[str]]:
    """Compares two configurations.

    Args:
        before: the earlier one as nested dictionaries. Keys that its version lacked had their defaults.
        names: keys whose changes make a curve misleading, written as in ``DECISIVE``.

    Returns:
        The changes that make a curve misleading, and all others, each as "key: before -> now".
    """
    made = {field.name: field.default_factory() for field in fields(now) if callable(field.default_factory)}
    defaults = {name: asdict(table) for name, table in made.items() if is_dataclass(type(table))}
    old, new = dict(flat(defaults)) | dict(flat(before)), dict(flat(asdict(now)))
    decisive: list[str] = []
    other: list[str] = []
    for key in sorted(old | new):
        if old.get(key) == new.get(key) or key == "data.files" or matches(key, IRRELEVANT):
            continue
        change = f"{key}: {shorten(old.get(key))} -> {shorten(new.get(key))}"
        (decisive if matches(key, names) else other).append(change)
    return decisive, other


def flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the keys of nested tables, joined by dots, with their values."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def matches(key: str, names: tuple[str, ...]) -> bool:
    """Returns whether ``names`` contain a key, as in ``DECISIVE``."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)
