"""The same steps in Lightning, and other frameworks' trainers on trees."""

import sys
from importlib import import_module
from types import ModuleType

_FRAMEWORKS = "titan_tree.integrations.frameworks"
# The modules of version 0.1, and the class in frameworks.py that has their functions now.
_MOVED = {"areal": "AReaL", "prime_rl": "PrimeRL", "skyrl": "SkyRL", "slime": "Slime", "samples": ""}


class _MovedModule(ModuleType):
    """A module of version 0.1 whose functions moved to frameworks.py."""

    def __getattr__(self, name: str) -> object:
        frameworks = import_module(_FRAMEWORKS)
        owner = _MOVED[self.__name__.rpartition(".")[2]]
        return getattr(getattr(frameworks, owner) if owner else frameworks, name)


for _name in _MOVED:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _MovedModule(f"{__name__}.{_name}")
