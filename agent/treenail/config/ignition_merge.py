"""Merge of Ignition configs, by Ignition's rules.

A field of a later config overrides the earlier one, a missing field leaves it unchanged. List
entries with the same key are merged in place of the earlier one, new ones follow at the end.
Some lists share their keys, so that a link replaces the file at its path. Some only grow.
"""

from collections.abc import Iterator, Sequence

from treenail.api.decode import Fields, Json
from treenail.api.ignition_schema import CONFIG, HEADER, ListShape, ObjectShape
from treenail.errors import IgnitionError


class IgnitionMerger:
    """Accumulator of Ignition configs; fields unknown to Ignition 3.5 are dropped."""

    __slots__ = ("_tree",)

    def __init__(self) -> None:
        self._tree = _MergedObject(CONFIG)

    def add_config(self, config: Json, place: str) -> None:
        """Merge a config of version 3.5 into the accumulated one.

        Raises `IgnitionError` with the place of a value of the wrong type.
        """
        self._tree.add_fields(Fields(config, place, IgnitionError))

    def to_json(self) -> Json:
        """Return the merged config, without empty objects and lists."""
        return self._tree.to_json()


class _MergedObject:
    """Merged object; its lists are stored by key, in the order of the first occurrence."""

    __slots__ = ("_lists", "_objects", "_plain", "_shape")

    def __init__(self, shape: ObjectShape) -> None:
        self._shape = shape
        self._plain: dict[str, object] = {}
        self._objects: dict[str, _MergedObject] = {}
        self._lists: dict[str, dict[object, _MergedObject | str]] = {}

    def add_fields(self, fields: Fields) -> None:
        values = fields.values
        for name, kind in self._shape.plain.items():
            if name in values and values[name] is not None:
                self._plain[name] = _read_plain(fields, name, kind)
        for name, part in self._shape.nested.items():
            if name not in values or values[name] is None:
                continue
            if isinstance(part, ObjectShape):
                self._objects.setdefault(name, _MergedObject(part)).add_fields(
                    fields.get_object(name)
                )
            else:
                self._merge_list(fields, name, part)

    def to_json(self) -> Json:
        found: Json = {name: "" for name in self._shape.always if name not in self._plain}
        found.update(self._plain)
        for name in self._shape.unless_zero:
            if not found.get(name, True):
                del found[name]
        for name, inner in self._objects.items():
            found[name] = inner.to_json()
        for name, entries in self._lists.items():
            found[name] = [
                entry if isinstance(entry, str) else entry.to_json() for entry in entries.values()
            ]
        return {name: value for name, value in found.items() if value not in ({}, [])}

    def _merge_list(self, fields: Fields, name: str, part: ListShape) -> None:
        own = self._lists.setdefault(name, {})
        family = [self._lists.get(other, {}) for other in part.family if other != name]
        for key, entry in _read_keyed_entries(fields, name, part):
            for others in family:
                others.pop(key, None)
            present = own.get(key)
            if isinstance(entry, str) or part.entry is None:
                own[key] = str(entry)
            elif isinstance(present, _MergedObject) and _is_removal(entry, part.entry):
                del own[key]
            elif isinstance(present, _MergedObject):
                present.add_fields(entry)
            else:
                own[key] = tree = _MergedObject(part.entry)
                tree.add_fields(entry)


def _read_plain(fields: Fields, name: str, kind: type) -> str | int | bool | None:
    if kind is str:
        return fields.get_optional_text(name)
    return fields.get_optional_integer(name) if kind is int else fields.get_optional_bool(name)


def _read_keyed_entries(
    fields: Fields, name: str, part: ListShape
) -> Iterator[tuple[object, Fields | str]]:
    """Yield the entries of a list with their keys; appended entries have unique keys."""
    if part.entry is None:
        for text in fields.get_text_list(name):
            yield (object() if part.is_appended else text), text
        return
    for entry in fields.iter_objects(name):
        yield (object() if part.is_appended else _compute_key(entry, part.key, part.entry)), entry


def _compute_key(entry: Fields, names: Sequence[str], shape: ObjectShape) -> object:
    for name in names:
        if value := _read_plain(entry, name, shape.plain[name]):
            return name, value
    return None


def _is_removal(entry: Fields, shape: ObjectShape) -> bool:
    """Return whether the entry is a header without a value, which removes the earlier one."""
    return shape is HEADER and entry.values.get("value") is None
