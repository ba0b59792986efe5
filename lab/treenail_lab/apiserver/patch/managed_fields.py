"""Field ownership in ``metadata.managedFields``, and server-side apply.

It follows structured-merge-diff, in terms of leaves. A write takes the leaves that it changes from
their owners. An apply also gives up the leaves that its applier no longer mentions; those without
another owner are removed.

A set of fields has the format FieldsV1. A field is a path of steps: ``f:NAME`` for a key of a map,
``k:{…}`` for an item of a keyed list, ``v:…`` for a value of a set. An apply owns leaves only:
plain values, empty or atomic lists and maps, and for an item of a list the item itself. Another
write owns also the maps and lists that it creates.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.objects import Json, copy_json, is_equal
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
                    for place, member in find_members(item, topology.find_item(), (*path, step)):
                        if place != (*path, step):
                            yield place, member
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
    owned = {name: value for name, value in obj.items() if name not in out}
    return owned | ({"metadata": metadata} if metadata else {})


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


APPLY = "Apply"
UPDATE = "Update"


@dataclass(frozen=True, slots=True)
class FieldOwner:
    """An entry of ``metadata.managedFields``."""

    name: str
    operation: str
    api_version: str
    subresource: str
    time: str
    fields: frozenset[FieldPath]

    def is_same(self, other: "FieldOwner") -> bool:
        """Return whether both are one owner; an applier is the same in all API versions."""
        mine = (self.name, self.operation, self.subresource)
        same = mine == (other.name, other.operation, other.subresource)
        return same and (self.operation == APPLY or self.api_version == other.api_version)

    def __str__(self) -> str:
        via = f' with subresource "{self.subresource}"' if self.subresource else ""
        using = f" using {self.api_version}" if self.operation == UPDATE else ""
        return f'"{self.name}"{via}{using}'

    def to_json(self) -> Json:
        entry = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": encode_fields(self.fields),
        }
        return entry | ({"subresource": self.subresource} if self.subresource else {})


def read_owners(obj: Json) -> list[FieldOwner]:
    """Return the entries of an object's ``managedFields``."""
    return [
        FieldOwner(
            name=entry["manager"],
            operation=entry["operation"],
            api_version=entry["apiVersion"],
            subresource=entry.get("subresource", ""),
            time=entry.get("time", ""),
            fields=decode_fields(entry.get("fieldsV1") or {}),
        )
        for entry in obj["metadata"].get("managedFields") or []
    ]


def replace_owners(obj: Json, owners: Iterable[FieldOwner]) -> Json:
    """Return the object with these entries, without owners of nothing."""
    entries = [owner.to_json() for owner in owners if owner.fields]
    metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
    return obj | {"metadata": metadata | ({"managedFields": entries} if entries else {})}


def compute_update_owners(
    old: Json | None, new: Json, writer: FieldOwner, topology: MergeTopology
) -> list[FieldOwner]:
    """Return the owners of the new object after a write that is not an apply."""
    before, after = select_owned_fields(old) if old else {}, select_owned_fields(new)
    changed = _find_new(dict(find_members(before, topology)), find_members(after, topology))
    lost = changed | _find_new(dict(find_members(after, topology)), find_members(before, topology))
    owners = []
    mine = replace(writer, fields=frozenset(changed))
    for owner in read_owners(old) if old else []:
        if not owner.is_same(writer):
            owners.append(replace(owner, fields=owner.fields - lost))
        elif changed or owner.fields & lost:
            mine = replace(writer, fields=(owner.fields - lost) | changed)
        else:
            mine = owner
    return [*owners, mine]


def apply_intent(
    old: Json, intent: Json, writer: FieldOwner, topology: MergeTopology, *, force: bool
) -> tuple[Json, list[FieldOwner]]:
    """Return the object and its owners after an apply; raise 409 on a conflict of owners."""
    wanted = {path for path, _ in find_leaves(select_owned_fields(intent), topology)}
    merged = _merge_values(select_owned_fields(old), select_owned_fields(intent), topology)
    changed = _find_changes(select_owned_fields(old), merged, topology)
    owners = read_owners(old)
    mine = next((owner for owner in owners if owner.is_same(writer)), None)
    others = [owner for owner in owners if not owner.is_same(writer)]
    contested = [(owner, sorted(owner.fields & changed)) for owner in others]
    if not force and any(paths for _, paths in contested):
        raise _build_conflict([(owner, paths) for owner, paths in contested if paths])
    kept = [replace(owner, fields=owner.fields - changed) for owner in others]
    given_up = (mine.fields if mine else frozenset()) - wanted
    foreign = {path for owner in kept for path in owner.fields}
    left = _remove_fields(merged, given_up - foreign, foreign, topology)
    fields = frozenset(wanted)
    time = mine.time if mine and mine.fields == fields and not changed else writer.time
    return _replace_owned(old, left or {}), [*kept, replace(writer, fields=fields, time=time)]


def _find_changes(old: Json, new: Json, topology: MergeTopology) -> set[FieldPath]:
    """Return the leaves of the new document that are new or have another value."""
    return _find_new(dict(find_leaves(old, topology)), find_leaves(new, topology))


def _find_new(
    before: Mapping[FieldPath, Any], after: Iterable[tuple[FieldPath, Any]]
) -> set[FieldPath]:
    return {
        path for path, value in after if path not in before or not is_equal(before[path], value)
    }


def _replace_owned(old: Json, fields: Json) -> Json:
    """Return the object with its owned part replaced."""
    owned = select_owned_fields(old)
    metadata = {
        name: value
        for name, value in old["metadata"].items()
        if name not in owned.get("metadata", {})
    }
    rest = {name: value for name, value in old.items() if name not in owned}
    return rest | fields | {"metadata": metadata | (fields.get("metadata") or {})}


def _merge_values(old: Any, new: Any, topology: MergeTopology) -> Any:
    match old, new:
        case dict(), dict() if not topology.is_atomic:
            return old | {
                name: _merge_values(old.get(name), inner, topology.find_child(name))
                for name, inner in new.items()
            }
        case list(), list() if topology.list_keys is not None:
            items = dict(list_steps(old, topology))
            for step, item in list_steps(new, topology):
                items[step] = _merge_values(items.get(step), item, topology.find_item())
            return list(items.values())
        case _:
            return copy_json(new)


def _remove_fields(
    value: Any,
    removed: Set[FieldPath],
    foreign: Set[FieldPath],
    topology: MergeTopology,
    path: FieldPath = (),
) -> Any:
    """Return the document without the removed leaves, except what foreign leaves need.

    A map or list that loses all its leaves becomes null, which most schemas forbid:
    kube-apiserver refuses such an apply too.
    """
    below = {leaf for leaf in removed if leaf[: len(path)] == path}
    if not below:
        return value
    match value:
        case dict() if not topology.is_atomic:
            kept = {
                name: _remove_fields(
                    inner, below, foreign, topology.find_child(name), (*path, f"f:{name}")
                )
                for name, inner in value.items()
                if not _is_removed((*path, f"f:{name}"), below, foreign)
            }
            return kept if kept or path in foreign else None
        case list() if topology.list_keys is not None:
            items = [
                _remove_fields(
                    item, below - {(*path, step)}, foreign, topology.find_item(), (*path, step)
                )
                for step, item in list_steps(value, topology)
                if not _is_removed((*path, step), below, foreign)
            ]
            return items if items or path in foreign else None
        case _:
            return value


def _is_removed(path: FieldPath, removed: Set[FieldPath], foreign: Set[FieldPath]) -> bool:
    return path in removed and not any(other[: len(path)] == path for other in foreign)


def _build_conflict(contested: list[tuple[FieldOwner, list[FieldPath]]]) -> ApiError:
    causes: list[Json] = []
    texts = []
    for owner, paths in contested:
        causes += [
            {
                "reason": "FieldManagerConflict",
                "message": f"conflict with {owner}",
                "field": format_field(path),
            }
            for path in paths
        ]
        if len(paths) == 1:
            texts.append(f"conflict with {owner}: {format_field(paths[0])}")
        else:
            lines = "".join(f"\n- {format_field(path)}" for path in paths)
            texts.append(f"conflicts with {owner}:{lines}")
    count = "1 conflict" if len(causes) == 1 else f"{len(causes)} conflicts"
    message = f"Apply failed with {count}: " + "\n".join(texts)
    return ApiError(409, "Conflict", message, {"causes": causes})
