"""Removes what tests leave behind in titan_tree's registries."""

from titan_tree import registry

_REGISTRIES = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
_ENTRIES = [dict(each._entries) for each in _REGISTRIES]


def restore_registries() -> None:
    """Removes all entries that were registered since this module was imported."""
    for changed, entries in zip(_REGISTRIES, _ENTRIES, strict=True):
        changed._entries = dict(entries)
