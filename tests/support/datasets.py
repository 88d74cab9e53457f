"""Datasets and sample readers for tests, built in one call."""

from pathlib import Path
from typing import Any

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.sample_reader import NO_LIMITS, SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.tree.paths import ModelLimits

# Real rollouts beside the repository. Tests that need them are skipped if the folder is missing.
REAL_DATA = Path(__file__).parents[3] / "shared" / "data"

Files = str | Path | list[str]


def sample_reader(
    files: Files,
    tokenizer: TreeTokenizer | None = None,
    limits: ModelLimits = NO_LIMITS,
    **settings: Any,
) -> SampleReader:
    """Returns a reader; ``settings`` are keys of the table [data]."""
    return SampleReader(_config(files, settings), tokenizer, limits)


def tree_dataset(
    files: Files,
    tokenizer: TreeTokenizer | None = None,
    limits: ModelLimits = NO_LIMITS,
    *,
    allow_larger: bool = False,
    epochs: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    weighs_edges: bool = False,
    **settings: Any,
) -> TreeDataset:
    """Returns a dataset; ``settings`` are keys of the table [data]."""
    config = _config(files, settings)
    reader = SampleReader(config, tokenizer, limits)
    return TreeDataset(
        config,
        reader,
        allow_larger=allow_larger,
        epochs=epochs,
        rank=rank,
        world_size=world_size,
        weighs_edges=weighs_edges,
    )


def _config(files: Files, settings: dict[str, Any]) -> DataConfig:
    return DataConfig(files=files if isinstance(files, list) else str(files), **settings)
