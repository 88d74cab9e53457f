"""Saves a run's state, resumes it exactly, and exports its weights."""

from titan_tree.checkpoint.checkpoints import Checkpoints, Progress
from titan_tree.checkpoint.export import export_adapter, export_hf
from titan_tree.checkpoint.lock import FolderLock, set_aside

__all__ = ["Checkpoints", "FolderLock", "Progress", "export_adapter", "export_hf", "set_aside"]
