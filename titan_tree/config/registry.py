"""Registries: names that a configuration can use, and their implementations.

Each registry is declared beside the interface of its entries; docs/extending.md lists them. A configuration
can also name code of its own, as "module:attribute" (plugins.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, Generic, TypeVar

from titan_tree.config.plugins import calling, import_attribute, importing, is_import_string
from titan_tree.errors import UserError, shorten, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from names to implementations of one kind.

    An entry is the implementation itself or an import string: "package.module" or "package.module:attribute".
    The registry imports it on first use. Iterating over the names imports nothing, so reading a configuration
    does not import torch. Everywhere a name is accepted, "module:attribute" selects an implementation that
    nobody registered; it is imported when the name is checked.

    Args:
        kind: the word for an entry in error messages, such as "loss".
        entries: implementations or import strings by name. Error messages list the names in this order.
        interface: attributes by which an implementation that "module:attribute" selects is checked. "a|b"
            demands one of the two.
        key: the key of the configuration that selects an entry; None if every entry is used.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, T | str],
        interface: tuple[str, ...] = ("__call__",),
        key: str | None = None,
    ) -> None:
        self.kind, self.interface, self.key = kind, interface, key
        self._entries: dict[str, T | str] = dict(entries)
        self._owners: dict[str, str | None] = dict.fromkeys(entries, "titan_tree")
        self._selected: dict[str, T] = {}  # by "module:attribute"

    def register(self, name: str, entry: T | str, replace: bool = False) -> None:
        """Adds an entry. Code may register its own name again, as a cell of a notebook does.

        Raises:
            UserError: the name belongs to titan_tree or to another plugin, and ``replace`` is false.
        """
        owner = self._owners.setdefault(name, importing())
        if owner != importing() and not replace:
            raise UserError(
                f"{self.kind} {name!r} is registered by {owner or 'the script'} already; choose another "
                "name, or pass replace=True to register"
            )
        self._owners[name] = importing()
        self._entries[name] = entry

    @contextmanager
    def registered(self, name: str, entry: T | str) -> Iterator[None]:
        """Registers an entry within a ``with`` statement. After it, the registry is as before."""
        before = dict(self._entries), dict(self._owners)
        self.register(name, entry, replace=True)
        try:
            yield
        finally:
            self._entries, self._owners = before

    def calling(
        self, name: str, arguments: str = "", passed: tuple[type[Exception], ...] = ()
    ) -> AbstractContextManager[None]:
        """Returns the context for calls of an entry, which names it in errors of the user's code.

        Args:
            arguments: what it is called with, as in Python.
            passed: exceptions that the caller handles.
        """
        if self._owners.get(name) == "titan_tree":
            return nullcontext()
        key = f" ({self.key})" if self.key else ""
        return calling(f"{self.kind} {name!r}{key}{arguments and f', called with ({arguments})'}", passed)

    def __getitem__(self, name: str) -> T:
        """Returns the implementation with this name. Raises UserError for an unknown name."""
        if name not in self._selected and name not in self:
            raise unknown_name(self.kind, name, self._entries)
        if name in self._selected:
            return self._selected[name]
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            loaded: Any = import_module(module)
            entry = self._entries[name] = getattr(loaded, attribute) if attribute else loaded
        return entry

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names in the order of registration."""
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        """Returns whether a name exists. Imports and checks "module:attribute", or raises UserError."""
        if not isinstance(name, str):
            return False
        if is_import_string(name) and name not in self._entries:
            selected = import_attribute(name)
            if missing := [
                member
                for member in self.interface
                if not any(hasattr(selected, name) for name in member.split("|"))
            ]:
                raise UserError(
                    f"{name}: expected a value of the kind {self.kind}, got {shorten(selected)}, "
                    f"which has no {', '.join(missing).replace('|', ' or ')}"
                )
            self._selected[name] = selected
        return name in self._entries or name in self._selected

    def __len__(self) -> int:
        return len(self._entries)
