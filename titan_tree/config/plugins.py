"""Imports the user's code that a configuration names, as in ``plugins = ["my_package.parts"]``.

Every command and process looks for a module among the installed packages, and then in the current directory.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_tree.errors import UserError, shorten, unknown_name
from titan_tree.signals import Interrupted

PACKAGE = Path(__file__).parents[1]

_imported: list[str] = []
_importing: list[str] = []  # the plugins that are being imported, the innermost one last
_refusals = 0  # nested calls of ``imports_refused``


def imported_plugins() -> list[str]:
    """Returns the modules that this process imported, in their order. Its workers import them, too."""
    return list(_imported)


def importing() -> str | None:
    """Returns the plugin that is being imported, if one is."""
    return _importing[-1] if _importing else None


@contextmanager
def imports_refused() -> Iterator[None]:
    """Within a ``with`` statement, imports no further code: a stranger may have named it."""
    global _refusals
    _refusals += 1
    try:
        yield
    finally:
        _refusals -= 1


def import_plugins(modules: Iterable[str]) -> None:
    """Imports modules, which may register their parts. Raises UserError for one that cannot be imported."""
    for module in modules:
        import_plugin(module)


def import_plugin(module: str) -> ModuleType:
    """Imports a module by its dotted name.

    Raises:
        UserError: there is no such module, or its code raises; the message has the file and line of the code.
            Or imports are refused.
    """
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise UserError(
            f"expected the dotted name of a module, such as my_package.parts, got {shorten(module)}"
        )
    if _refusals and module not in _imported:
        raise UserError(
            f"names the code {module}, and that of a stored configuration runs only with --plugins; read the "
            "code first"
        )
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that it hides no installed package
    _importing.append(module)
    try:
        loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(_explain(module, error, directory)) from None
    finally:
        _importing.pop()
    if module not in _imported:
        _imported.append(module)
    return loaded


@contextmanager
def calling(where: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Calls code of the user within a ``with`` statement. Its exceptions become a UserError of one line.

    ``sys.exit`` does not end the run. The mode of autograd is restored after the statement.

    Args:
        where: the key that named the code, its name, and what it is called with.
        passed: exceptions that the caller handles.
    """
    torch: Any = sys.modules.get("torch")
    enabled = torch and torch.is_grad_enabled()
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, Interrupted):
        raise
    except BaseException as error:
        lacks_memory = isinstance(error, MemoryError) or (torch and isinstance(error, torch.OutOfMemoryError))
        if lacks_memory or isinstance(error, (UserError, *passed)):
            raise
        raise UserError(f"{where}: {_described(error)}") from error
    finally:
        if torch:
            torch.set_grad_enabled(enabled)


def is_import_string(name: object) -> bool:
    """Returns whether a name has the form "module:attribute"."""
    return isinstance(name, str) and re.fullmatch(r"[\w.]+:\w+", name) is not None


def import_attribute(name: str) -> Any:
    """Returns what "module:attribute" names. Raises UserError if there is no such module or attribute."""
    module, _, attribute = name.partition(":")
    loaded = import_plugin(module)
    try:
        return getattr(loaded, attribute)
    except AttributeError:
        public = [known for known in vars(loaded) if not known.startswith("_")]
        raise unknown_name(f"attribute of {loaded.__file__ or module}", attribute, public) from None
    except Exception as error:  # of a module that imports its parts when they are first used
        raise UserError(_explain(name, error, os.getcwd())) from None


def _explain(module: str, error: BaseException, directory: str) -> str:
    """Returns in one line why a module could not be imported, and where its code failed."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing!r} among the installed packages or in the current directory "
            f"{directory}; install it, or start the command in the folder that contains it"
        )
    return f"cannot import {module}: {_described(error)}"


def _described(error: BaseException) -> str:
    """Returns an error of the user's code in one line, with the file and line of this code that caused it."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {kind}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if "importlib" not in f.filename and not Path(f.filename).is_relative_to(PACKAGE)
    ]
    if own:  # the deepest line in the module's own folder, rather than one of a library that it calls
        first = next((frame for frame in own if "site-packages" not in frame.filename), own[0])
        folder = Path(first.filename).parent
        frame = [frame for frame in own if Path(frame.filename).is_relative_to(folder)][-1]
        return f"{frame.filename}:{frame.lineno}: {kind}: {message}"
    return f"{kind}: {message}"
