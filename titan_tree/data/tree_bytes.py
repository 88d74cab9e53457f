"""A token tree as bytes: what a token store holds, and what ranks send to each other.

    length of the JSON | JSON | array | array | ...

The JSON names the arrays and says how the fields of the paths are stored. A path's tokens follow from the
tree, and runs of equal numbers and equal images are stored once, so a tree takes much less room than its
paths.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.images import Image
from titan_tree.tree.path_fields import SamplingMask, TokenTargets
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import RoutedExperts
from titan_tree.tree.token_tree import TokenTree

TREE_ARRAYS = (
    "tokens",
    "node_offsets",
    "node_parent",
    "node_depth",
    "node_subtree_end",
    "node_paths",
    "path_node",
)
OWN_KINDS = ("tokens", "images")  # fields of a path that are not stored like the others
Ragged = type[SamplingMask] | type[TokenTargets]  # sizes [T], and arrays [S]
RAGGED: dict[str, Ragged] = {"sampling_mask": SamplingMask, "teacher_topk": TokenTargets}
PATH_FIELDS = tuple(f.name for f in dataclasses.fields(TokenPath) if f.name not in OWN_KINDS)
ALIGNMENT = 64  # every array, of trees, token stores and steps, begins at a multiple of so many bytes


def tree_to_bytes(tree: TokenTree) -> bytes:
    """Returns a tree with its paths as bytes.

    Raises:
        UserError: models of different sizes recorded the experts of its paths.
    """
    sizes = {path.routed_experts.shape[1:]: path for path in tree.paths if path.routed_experts is not None}
    if len(sizes) > 1:
        raise UserError(
            f"path {list(sizes.values())[1].id or '?'}: routed_experts: expected as many layers, and experts "
            f"per token, as in the other paths of its group, got {' and '.join(map(str, sizes))}"
        )
    arrays = {name: getattr(tree, name) for name in TREE_ARRAYS}
    fields = {
        name: _encode(name, [getattr(path, name) for path in tree.paths], arrays) for name in PATH_FIELDS
    }
    counts: list[int] = []
    if tree.routed_experts is not None:
        arrays["records"], *counts = tree.routed_experts
    images = {}
    if tree.image_row is not None:
        arrays["image_row"] = tree.image_row
        arrays |= {f"image.{number}": image.pixels for number, image in enumerate(tree.images)}
        number_of = {image.key: number for number, image in enumerate(tree.images)}
        images = {
            "patch": [image.patch for image in tree.images],
            "of_paths": [[(start, number_of[i.key]) for start, i in path.images] for path in tree.paths],
        }
    locations, offset = {}, 0
    for name, array in arrays.items():
        locations[name] = [array.dtype.str, array.shape, offset]
        offset += array.nbytes + len(padding(array.nbytes))
    description = {
        "fields": fields,
        "arrays": locations,
        "records": counts,
        "images": images,
        "is_rest": not tree.is_counted,
    }
    line = json.dumps(description).encode()
    out = bytearray(struct.pack("<Q", len(line)) + line)
    for array in arrays.values():
        out += padding(len(out)) + np.ascontiguousarray(array).tobytes()
    return bytes(out)


def tree_from_bytes(content: bytes | memoryview) -> TokenTree:
    """Returns the tree that ``tree_to_bytes`` has encoded. Its arrays are views of ``content``."""
    (length,) = struct.unpack_from("<Q", content)
    description = json.loads(bytes(content[8 : 8 + length]))
    values = memoryview(content)[8 + length + len(padding(8 + length)) :]
    arrays = {name: _array(values, location) for name, location in description["arrays"].items()}
    tree: dict[str, Any] = {name: arrays.pop(name) for name in TREE_ARRAYS}
    # Token stores before 2026-11-23 do not have "is_rest".
    tree["is_counted"] = not description.get("is_rest", False)
    if counts := description.get("records"):
        tree["routed_experts"] = RoutedExperts(arrays.pop("records"), *counts)
    images = description.get("images") or {"patch": [], "of_paths": [[]] * len(tree["path_node"])}
    if images["patch"]:
        pixels = [arrays.pop(f"image.{number}") for number in range(len(images["patch"]))]
        tree["images"] = tuple(map(Image, pixels, images["patch"]))
        tree["image_row"] = arrays.pop("image_row")
    path_index, path_offsets = _path_index(tree)
    flat = tree["tokens"][path_index]
    fields: dict[str, list[Any]] = {"tokens": np.split(flat, path_offsets[1:-1])}
    for name in PATH_FIELDS:
        stored = description["fields"].get(name, {"kind": "none"})  # older token stores lack newer fields
        fields[name] = _decode(name, stored, arrays, path_offsets)
    fields["images"] = [
        tuple((start, tree["images"][number]) for start, number in of_path) for of_path in images["of_paths"]
    ]
    paths = [_trusted_path(values) for values in zip(*fields.values(), strict=True)]
    return TokenTree(**tree, paths=tuple(paths), path_index=path_index, path_offsets=path_offsets)


# How the values of a field are stored, one value per path: "none" (all None), "values" (strings or numbers,
# in JSON), "dense" (arrays, one after another), "runs" (arrays with one number per token that repeats) or
# "ragged" (the types in RAGGED: their sizes as a field of its own, and each of their arrays).


def _encode(name: str, values: list[Any], arrays: dict[str, np.ndarray]) -> dict[str, object]:
    """Adds the arrays that a field needs, and returns its description for ``_decode``."""
    present = [value for value in values if value is not None]
    if not present:
        return {"kind": "none"}
    if name in RAGGED:
        sizes = [None if ragged is None else ragged.sizes for ragged in values]
        for part in RAGGED[name]._fields[1:]:
            arrays[f"{name}.{part}"] = np.concatenate([getattr(ragged, part) for ragged in present])
        return {"kind": "ragged", "sizes": _encode(f"{name}.sizes", sizes, arrays)}
    if not isinstance(present[0], np.ndarray):
        return {"kind": "values", "values": values}
    missing = [index for index, value in enumerate(values) if value is None]
    lengths = np.array([len(value) for value in present])
    flat = np.concatenate(present)
    runs = _run_starts(flat, lengths) if flat.ndim == 1 else None
    if runs is None or 2 * len(runs) > len(flat):
        arrays[f"{name}.dense"] = flat
        return {"kind": "dense", "missing": missing}
    arrays[f"{name}.runs"] = flat[runs]
    arrays[f"{name}.lengths"] = np.diff(runs, append=len(flat)).astype(np.int32)
    return {"kind": "runs", "missing": missing}


def _decode(
    name: str, description: dict[str, Any], arrays: dict[str, np.ndarray], path_offsets: np.ndarray
) -> list[Any]:
    num_paths = len(path_offsets) - 1
    if description["kind"] == "none":
        return [None] * num_paths
    if description["kind"] == "values":
        return description["values"]
    if description["kind"] == "ragged":
        sizes = _decode(f"{name}.sizes", description["sizes"], arrays, path_offsets)
        ends = np.cumsum([0 if of_path is None else of_path.sum() for of_path in sizes])
        make = RAGGED[name]
        parts = [np.split(arrays[f"{name}.{part}"], ends[:-1]) for part in make._fields[1:]]
        return [None if of_path[0] is None else make(*of_path) for of_path in zip(sizes, *parts, strict=True)]
    if description["kind"] == "dense":
        flat = arrays[f"{name}.dense"]
    else:
        flat = np.repeat(arrays[f"{name}.runs"], arrays[f"{name}.lengths"])
    if not (missing := set(description["missing"])):
        return np.split(flat, path_offsets[1:-1])
    lengths = np.diff(path_offsets)
    present = [index for index in range(num_paths) if index not in missing]
    values: list[np.ndarray | None] = [None] * num_paths
    for index, value in zip(present, np.split(flat, np.cumsum(lengths[present])[:-1]), strict=True):
        values[index] = value
    return values


def _run_starts(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns where runs of equal values start. Equal values have equal bits. No run spans two paths."""
    bits = flat.view(f"u{flat.itemsize}")
    starts = np.flatnonzero(np.diff(bits, prepend=bits[:1] + 1))
    return np.union1d(starts, np.cumsum(lengths)[:-1])


def _path_index(tree: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``path_index`` and ``path_offsets`` of a TokenTree from its nodes."""
    offsets, parents = tree["node_offsets"].tolist(), tree["node_parent"].tolist()
    from_root: list[np.ndarray] = []  # the tokens from the root to the end of each node
    for node, parent in enumerate(parents):
        tokens = np.arange(offsets[node], offsets[node + 1], dtype=np.int32)
        from_root.append(tokens if parent < 0 else np.concatenate([from_root[parent], tokens]))
    indices = [from_root[node] for node in tree["path_node"].tolist()]
    path_offsets = np.concatenate([[0], np.cumsum([len(index) for index in indices])])
    return np.concatenate(indices), path_offsets


def _trusted_path(values: tuple[object, ...]) -> TokenPath:
    """Returns a path of values that a TokenPath had before: they need no checks."""
    path = object.__new__(TokenPath)
    for name, value in zip(("tokens", *PATH_FIELDS, "images"), values, strict=True):
        setattr(path, name, value)
    return path


def _array(content: memoryview, location: tuple[str, list[int], int]) -> np.ndarray:
    dtype, shape, offset = location
    count = int(np.prod(shape))
    return np.frombuffer(content, dtype, count, offset).reshape(shape)


def padding(offset: int) -> bytes:
    """Returns the zeros between ``offset`` and the next multiple of ALIGNMENT."""
    return bytes(-offset % ALIGNMENT)
