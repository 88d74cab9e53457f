"""Train language models on token trees: every shared token is computed once, with exact loss and gradients.

``_MODULES`` lists the public names. A module is imported when one of its names is first used (PEP 562), so
reading data and ``titan-tree inspect`` do not import torch. Type checkers read the imports under
``TYPE_CHECKING`` instead; a test compares both lists.
"""

import _signal  # built in; the module signal takes milliseconds to import, in which Ctrl-C would arrive
import sys

# Until a command handles signals itself, Ctrl-C ends it as SIGTERM does: at once, without a traceback. While
# Python looks for the module of ``python -m titan_tree``, sys.argv[0] is "-m".
_NAMED = any(word.removeprefix("-m").split(".")[0] == "titan_tree" for word in sys.orig_argv)
_IS_COMMAND = (sys.argv[:1] == ["-m"] and _NAMED) or "".join(sys.argv[:1]).endswith("/titan-tree")
if _IS_COMMAND and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from titan_tree.components.recurrence import TreeGDN as TreeGDN
    from titan_tree.components.recurrence import TreeKDA as TreeKDA
    from titan_tree.components.recurrence import TreeSSD as TreeSSD
    from titan_tree.components.tree_attention import TreeAttention as TreeAttention
    from titan_tree.components.tree_loss.corrections import KLPenalty as KLPenalty
    from titan_tree.components.tree_loss.corrections import RolloutCorrection as RolloutCorrection
    from titan_tree.components.tree_loss.loss import TreeLoss as TreeLoss
    from titan_tree.components.tree_loss.loss import register_loss as register_loss
    from titan_tree.components.tree_partitioner.partitioner import TreePartitioner as TreePartitioner
    from titan_tree.components.tree_tokenizer import TreeTokenizer as TreeTokenizer
    from titan_tree.data.dataset import TreeDataset as TreeDataset
    from titan_tree.distributed.mesh import OneRank as OneRank
    from titan_tree.distributed.optimizers import clip_and_step as clip_and_step
    from titan_tree.engine.tree_step import TreeStep as TreeStep
    from titan_tree.errors import UserError as UserError
    from titan_tree.models.lora.adapters import adapters_off as adapters_off
    from titan_tree.models.lora.peft import load_adapter as load_adapter
    from titan_tree.models.lora.peft import save_adapter as save_adapter
    from titan_tree.models.plain import PlainModel as PlainModel
    from titan_tree.models.pretrained import build_model as build_model
    from titan_tree.models.pretrained import load_pretrained as load_pretrained
    from titan_tree.models.pretrained import save_pretrained as save_pretrained
    from titan_tree.run.config import load_config as load_config
    from titan_tree.run.trainer import Trainer as Trainer
    from titan_tree.scoring.score_trees import tree_logprobs as tree_logprobs
    from titan_tree.tree.batch import PathPairs as PathPairs
    from titan_tree.tree.batch import TreeBatch as TreeBatch
    from titan_tree.tree.layout import TreeLayout as TreeLayout
    from titan_tree.tree.paths import TokenPath as TokenPath
    from titan_tree.tree.token_tree import TokenTree as TokenTree
    from titan_tree.tree.token_tree import TreeStats as TreeStats

__version__ = "0.2.0"

_MODULES = {  # public name -> the module that defines it
    "TreeAttention": "titan_tree.components.tree_attention",
    "TreeGDN": "titan_tree.components.recurrence",
    "TreeKDA": "titan_tree.components.recurrence",
    "TreeSSD": "titan_tree.components.recurrence",
    "KLPenalty": "titan_tree.components.tree_loss.corrections",
    "RolloutCorrection": "titan_tree.components.tree_loss.corrections",
    "TreeLoss": "titan_tree.components.tree_loss.loss",
    "register_loss": "titan_tree.components.tree_loss.loss",
    "TreePartitioner": "titan_tree.components.tree_partitioner.partitioner",
    "TreeTokenizer": "titan_tree.components.tree_tokenizer",
    "load_config": "titan_tree.run.config",
    "TreeDataset": "titan_tree.data.dataset",
    "OneRank": "titan_tree.distributed.mesh",
    "clip_and_step": "titan_tree.distributed.optimizers",
    "TreeStep": "titan_tree.engine.tree_step",
    "UserError": "titan_tree.errors",
    "build_model": "titan_tree.models.pretrained",
    "adapters_off": "titan_tree.models.lora.adapters",
    "load_adapter": "titan_tree.models.lora.peft",
    "save_adapter": "titan_tree.models.lora.peft",
    "PlainModel": "titan_tree.models.plain",
    "load_pretrained": "titan_tree.models.pretrained",
    "save_pretrained": "titan_tree.models.pretrained",
    "Trainer": "titan_tree.run.trainer",
    "tree_logprobs": "titan_tree.scoring.score_trees",
    "PathPairs": "titan_tree.tree.batch",
    "TreeBatch": "titan_tree.tree.batch",
    "TreeLayout": "titan_tree.tree.layout",
    "TokenPath": "titan_tree.tree.paths",
    "TokenTree": "titan_tree.tree.token_tree",
    "TreeStats": "titan_tree.tree.token_tree",
}
__all__ = sorted([*_MODULES, "__version__"])

_MOVED = {  # modules of earlier versions -> their successors
    "balance": "run.balance",
    "build": "run.build",
    "certify.subject": "certify.certified_step",
    "checkpoint": "run.checkpoint",
    "components.moe.router": "components.moe.kernels",
    "components.recurrence.rounds": "components.recurrence.launch",
    "components.tree_attention.backend": "components.tree_attention.operator",
    "components.tree_attention.hopper.pieces": "components.tree_attention.hopper.key_groups",
    "components.tree_attention.plan": "components.tree_attention.block_lists",
    "components.tree_gdn": "components.recurrence",
    "config.data": "data.settings",
    "config.lightning": "integrations.lightning_settings",
    "config.losses": "components.tree_loss.settings",
    "config.model": "models.settings",
    "config.outputs": "run.settings",
    "config.reference": "cli.reference",
    "config.rl": "rl.settings",
    "config.rl_tables": "rl.settings",
    "config.run_tables": "run.settings",
    "config.tables": "run.config",
    "config.training": "run.settings",
    "data.readers.agent_lightning": "data.readers.harnesses.rollouts",
    "data.readers.benchmarks": "data.readers.harnesses.benchmarks",
    "data.readers.claude_code": "data.readers.harnesses.claude_code",
    "data.readers.codex": "data.readers.harnesses.codex",
    "data.readers.nemo_gym": "data.readers.harnesses.rollouts",
    "data.readers.openhands": "data.readers.harnesses.openhands",
    "data.readers.pi": "data.readers.harnesses.pi",
    "data.readers.rows": "data.readers.row_reader",
    "data.readers.sessions": "data.readers.harnesses.sessions",
    "data.readers.trace_reader": "data.readers.harnesses.rollouts",
    "data.readers.verifiers": "data.readers.harnesses.verifiers",
    "engine.exchange_timer": "engine.device_clock",
    "engine.gateway_cache": "engine.partitions",
    "engine.router_loss": "engine.losses",
    "engine.scoring": "scoring.score_trees",
    "engine.step_run": "engine.tree_step",
    "folder": "run.folder",
    "integrations.trl": "integrations.hugging_face",
    "leaving": "run.stopping",
    "metrics": "run.metrics",
    "model_setup": "run.model_setup",
    "models.attention": "models.block",
    "models.peft": "models.lora.peft",
    "models.registry": "models.decoder",
    "plugins": "config.plugins",
    "registry": "config.registry",
    "rl.server.protocols": "rl.server.vllm",
    "rl.server_sampler": "rl.server.server_sampler",
    "run.memory_check": "run.model_setup",
    "score": "scoring.score_files",
    "trainer": "run.trainer",
    "tree.chains": "tree.chunks",
    "tree.sampling_masks": "tree.path_fields",
    "tree.token_shards": "tree.batch",
}
_ROWS = "make TokenPaths of the rows, as docs/frameworks.md shows"
_REMOVED = {  # modules without a successor -> what to do instead
    "cli.__main__": "run `python -m titan_tree COMMAND`",
    "lightning": (
        "run `python -m titan_tree train CONFIG.toml --trainer lightning`, or import "
        "titan_tree.integrations.lightning"
    ),
    "rl.__main__": "run `python -m titan_tree rl CONFIG.toml`",
    "train": "run `python -m titan_tree train CONFIG.toml`",
    "bench": "import benchmarks in a clone of the repository; titan_tree.cli.bench has titan-tree bench real",
    "integrations.areal": _ROWS,
    "integrations.fields": _ROWS,
    "integrations.frameworks": _ROWS,
    "integrations.prime_rl": _ROWS,
    "integrations.samples": _ROWS,
    "integrations.skyrl": _ROWS,
    "integrations.slime": _ROWS,
    "models.kimi_linear": 'load_pretrained(folder, implementation="transformers") runs Kimi-Linear',
    "rl.server.broadcast": 'servers of vLLM read a folder, with rl.server.weights = "folder" or "adapter"',
}


class _MovedModules:
    """Says what to use instead of a module that has moved or was removed, when an import looks for it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        name = fullname.removeprefix("titan_tree.")
        if successor := _MOVED.get(name):
            raise ModuleNotFoundError(f"{fullname} has moved; import titan_tree.{successor} instead")
        if instead := _REMOVED.get(name):
            raise ModuleNotFoundError(f"{fullname} was removed; {instead}")


sys.meta_path.append(_MovedModules())  # Python asks it only for modules that do not exist


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
