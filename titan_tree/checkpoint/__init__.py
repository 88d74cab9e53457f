"""Saves a run's state, resumes it exactly, and exports its weights."""

from titan_tree.checkpoint.checkpoints import Checkpoints, Progress
from titan_tree.checkpoint.export import export_results
from titan_tree.checkpoint.lock import FolderLock, set_aside

__all__ = ["Checkpoints", "FolderLock", "Progress", "export_results", "set_aside"]
