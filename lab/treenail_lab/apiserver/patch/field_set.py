"""Sets of fields in the format of ``metadata.managedFields`` (FieldsV1).

A field is a path of steps: ``f:NAME`` for a key of a map, ``k:{…}`` for an item of a keyed list,
``v:…`` for a value of a set. An apply owns leaves only: plain values, empty or atomic lists and
maps, and for an item of a list the item itself. Another write owns also the maps and lists that it
creates.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.patch.merge_topology import MergeTopology, build_item_key

FieldPath = tuple[str, ...]
# The value of a list item as a leaf: its presence, independent of its fields.
PRESENT = object()


def find_leaves(
    value: Any, topology: MergeTopology, path: FieldPath = ()
) -> Iterator[tuple[FieldPath, Any]]:
    """Yield every leaf of a document with its value."""
    match value:
        case dict() if value and not topology.is_atomic:
            for name, inner in value.items():
                yield from find_leaves(inner, topology.find_child(name), (*path, f"f:{name}"))
        case list() if value and topology.list_keys is not None:
            for step, item in list_steps(value, topology):
                yield (*path, step), PRESENT
                if topology.list_keys:
                    yield from find_leaves(item, topology.find_item(), (*path, step))
        case _:
            yield path, value


def find_members(
    value: Any, topology: MergeTopology, path: FieldPath = ()
) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the leaves of a document, and each of its maps and lists as present."""
    match value:
        case dict() if not topology.is_atomic:
            if topology.is_optional:
                yield path, PRESENT
            for name, inner in value.items():
                yield from find_members(inner, topology.find_child(name), (*path, f"f:{name}"))
        case list() if topology.list_keys is not None:
            if topology.is_optional:
                yield path, PRESENT
            for step, item in list_steps(value, topology):
                yield (*path, step), PRESENT
                if topology.list_keys:
                    for place, found in find_members(item, topology.find_item(), (*path, step)):
                        if place != (*path, step):
                            yield place, found
        case _:
            yield path, value


def list_steps(items: list[Any], topology: MergeTopology) -> Iterator[tuple[str, Any]]:
    """Yield the items of a keyed list or a set, each with its step."""
    for item in items:
        if topology.list_keys and isinstance(item, dict):
            identity = build_item_key(item, topology.list_keys, topology.key_defaults)
            yield f"k:{_dump_json(identity)}", item
        else:
            yield f"v:{_dump_json(item)}", item


def select_owned_fields(obj: Json) -> Json:
    """Return the part of an object whose fields have owners."""
    kept = ("annotations", "labels", "finalizers", "ownerReferences")
    # Empty ones are not stored, so they have no owner.
    metadata = {name: obj["metadata"][name] for name in kept if obj["metadata"].get(name)}
    out = {"apiVersion", "kind", "metadata"}
    found = {name: value for name, value in obj.items() if name not in out}
    return found | ({"metadata": metadata} if metadata else {})


def encode_fields(paths: Iterable[FieldPath]) -> Json:
    """Encode the set as FieldsV1."""
    root: Json = {}
    members: list[Json] = []
    for path in sorted(paths):
        here = root
        for step in path:
            here = here.setdefault(step, {})
        members.append(here)
    for member in members:
        if member:
            member["."] = {}
    return root


def decode_fields(document: Mapping[str, Any]) -> frozenset[FieldPath]:
    """Decode a FieldsV1 document."""
    return frozenset(_decode_paths(document, ()))


def _decode_paths(document: Mapping[str, Any], path: FieldPath) -> Iterator[FieldPath]:
    for step, inner in document.items():
        if step == ".":
            yield path
        elif not inner:
            yield (*path, step)
        else:
            yield from _decode_paths(inner, (*path, step))


def format_field(path: FieldPath) -> str:
    """Format a field as conflicts name it: ``.spec.containers[name="a"].image``."""
    text = ""
    for step in path:
        kind, _, rest = step.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            pairs = json.loads(rest).items()
            text += "[" + ",".join(f"{name}={_dump_json(value)}" for name, value in pairs) + "]"
        else:
            text += f"[={rest}]"
    return text


def _dump_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
