"""Registries: lazy entries, errors for unknown names, and entries that all exist."""

import sys

import pytest

from tests.support.cases import for_each
from tests.support.isolation import REGISTRIES
from titan_tree.config.registry import Registry
from titan_tree.errors import UserError

BY_KIND = {registry.kind: registry for registry in REGISTRIES}


def test_an_import_string_is_imported_on_first_use() -> None:
    sys.modules.pop("this", None)
    colours: Registry[object] = Registry("colour", {"zen": "this", "join": "os.path:join"})
    assert list(colours) == ["zen", "join"]
    assert "zen" in colours
    assert len(colours) == 2
    assert "this" not in sys.modules
    assert colours["zen"] is sys.modules["this"]
    from os.path import join

    assert colours["join"] is join


def test_register_adds_an_entry_and_replaces_those_of_others_only_on_request() -> None:
    numbers: Registry[int] = Registry("number", {"one": 1})
    numbers.register("two", 2)
    numbers.register("two", 22)
    with pytest.raises(UserError) as error:
        numbers.register("one", 11)
    assert str(error.value) == (
        "number 'one' is registered by titan_tree already; choose another name, "
        "or pass replace=True to register"
    )
    assert numbers["one"] == 1
    numbers.register("one", 11, replace=True)
    assert {name: numbers[name] for name in numbers} == {"one": 11, "two": 22}


def test_module_and_attribute_select_code_that_nobody_registered() -> None:
    colours: Registry[object] = Registry("colour", {"zen": "this"})
    from os.path import join

    assert "os.path:join" in colours
    assert colours["os.path:join"] is join
    assert list(colours) == ["zen"]
    assert colours["titan_tree.config.registry:Registry"] is Registry


def test_an_unknown_name_is_an_error_that_suggests_the_closest_one() -> None:
    numbers: Registry[int] = Registry("number", {"one": 1, "three": 3})
    with pytest.raises(UserError) as error:
        numbers["tree"]
    assert str(error.value) == "unknown number 'tree'; did you mean 'three'? (known: one, three)"
    with pytest.raises(UserError, match=r"^unknown number '1' \(known: one, three\)$"):
        numbers["1"]


@for_each(("kind", "name"), [(kind, name) for kind, entries in BY_KIND.items() for name in entries])
def test_every_entry_can_be_imported(kind: str, name: str) -> None:
    assert BY_KIND[kind][name] is not None
