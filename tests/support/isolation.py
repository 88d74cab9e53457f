"""Removes what tests leave behind in titan_tree's registries and in its list of plugins."""

from titan_tree.components.backends import ATTENTION_BACKENDS, RECURRENCE_BACKENDS
from titan_tree.components.tree_loss.settings import LOSSES
from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
from titan_tree.config import plugins
from titan_tree.config.registry import Registry
from titan_tree.data.readers import READERS
from titan_tree.data.settings import ADVANTAGES
from titan_tree.distributed.settings import OPTIMIZERS
from titan_tree.models.settings import MODELS
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.run.metrics.loggers import LOGGERS
from titan_tree.run.metrics.step_metrics import METRICS

REGISTRIES: list[Registry] = [
    MODELS,
    ATTENTION_BACKENDS,
    RECURRENCE_BACKENDS,
    PARTITION_STRATEGIES,
    LOSSES,
    ADVANTAGES,
    READERS,
    ENVIRONMENTS,
    OPTIMIZERS,
    LOGGERS,
    METRICS,
]
_ENTRIES = [dict(each._entries) for each in REGISTRIES]


def restore_registries() -> None:
    """Removes all entries that were registered since this module was imported, and forgets plugins.

    Processes that read data import the plugins that this process has imported.
    """
    plugins._imported.clear()
    for changed, entries in zip(REGISTRIES, _ENTRIES, strict=True):
        changed._entries = dict(entries)
