"""Saves a run's state, resumes it exactly, and exports its weights.

checkpoints.py  Checkpoints: saves and resumes
storage.py      the files of a checkpoint: tensors, index and checksums
background.py   writes checkpoints in a thread while training continues
changes.py      what may change in the configuration when a run resumes
export.py       the weights and adapters of a finished run
lock.py         keeps other runs out of a folder
"""

from titan_tree.run.checkpoint.checkpoints import Checkpoints, Progress
from titan_tree.run.checkpoint.export import export_results
from titan_tree.run.checkpoint.lock import FolderLock, set_aside

__all__ = ["Checkpoints", "FolderLock", "Progress", "export_results", "set_aside"]
