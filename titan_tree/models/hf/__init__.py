"""Hugging Face snapshots: local folders with a config.json and safetensors files.

snapshot_files  the files of a snapshot, opened and checked
names           how the tensors of a snapshot correspond to the parameters of a model
load            snapshot -> model
save            model -> snapshot
"""

from titan_tree.models.hf.load import (
    fill_shards,
    load_router_biases,
    model_from_config,
    read_weights,
)
from titan_tree.models.hf.save import save_pretrained, snapshot_prefix, snapshot_tensors

__all__ = [
    "fill_shards",
    "load_router_biases",
    "model_from_config",
    "read_weights",
    "save_pretrained",
    "snapshot_prefix",
    "snapshot_tensors",
]
