"""Merge of Ignition configs, by Ignition's rules.

A field of a later config overrides the earlier one, a missing field leaves it unchanged. List
entries with the same key are merged in place of the earlier one, new ones follow at the end.
Some lists share their keys, so that a link replaces the file at its path. Some only grow.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api.decode import Fields, Json
from treenail.errors import IgnitionError


@dataclass(frozen=True, slots=True)
class _ListShape:
    """Shape of a list: the key of an entry, and the lists that share the keys."""

    entry: "_ObjectShape | None" = None
    """None for a list of strings, which are their own keys."""
    key: Sequence[str] = ()
    """Fields that identify an entry: the first one that has a value."""
    is_appended: bool = False
    family: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _ObjectShape:
    """Shape of an object: its plain fields with their types, and its lists and objects."""

    plain: Mapping[str, type]
    nested: Mapping[str, "_ObjectShape | _ListShape"] = field(default_factory=dict)


class IgnitionMerger:
    """Accumulator of Ignition configs; fields unknown to Ignition 3.5 are dropped."""

    __slots__ = ("_tree",)

    def __init__(self) -> None:
        self._tree = _MergedObject(_CONFIG)

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

    def __init__(self, shape: _ObjectShape) -> None:
        self._shape = shape
        self._plain: dict[str, object] = {}
        self._objects: dict[str, _MergedObject] = {}
        self._lists: dict[str, dict[object, _MergedObject | str]] = {}

    def add_fields(self, fields: Fields) -> None:
        for name, kind in self._shape.plain.items():
            if (value := _read_plain(fields, name, kind)) is not None:
                self._plain[name] = value
        for name, part in self._shape.nested.items():
            if fields.values.get(name) is None:
                continue
            if isinstance(part, _ObjectShape):
                self._objects.setdefault(name, _MergedObject(part)).add_fields(
                    fields.get_object(name)
                )
            else:
                self._merge_list(fields, name, part)

    def to_json(self) -> Json:
        found: Json = dict(self._plain)
        for name, inner in self._objects.items():
            found[name] = inner.to_json()
        for name, entries in self._lists.items():
            found[name] = [
                entry if isinstance(entry, str) else entry.to_json() for entry in entries.values()
            ]
        return {name: value for name, value in found.items() if value not in ({}, [])}

    def _merge_list(self, fields: Fields, name: str, part: _ListShape) -> None:
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
    fields: Fields, name: str, part: _ListShape
) -> Iterator[tuple[object, Fields | str]]:
    """Yield the entries of a list with their keys; appended entries have unique keys."""
    if part.entry is None:
        for text in fields.get_text_list(name):
            yield (object() if part.is_appended else text), text
        return
    for entry in fields.iter_objects(name):
        yield (object() if part.is_appended else _compute_key(entry, part.key, part.entry)), entry


def _compute_key(entry: Fields, names: Sequence[str], shape: _ObjectShape) -> object:
    found = ((name, _read_plain(entry, name, shape.plain[name])) for name in names)
    return next((key for key in found if key[1]), None)


def _is_removal(entry: Fields, shape: _ObjectShape) -> bool:
    """Return whether the entry is a header without a value, which removes the earlier one."""
    return shape is _HEADER and entry.values.get("value") is None


def _make_shape(
    texts: str = "", numbers: str = "", flags: str = "", **nested: _ObjectShape | _ListShape
) -> _ObjectShape:
    kinds = ((texts, str), (numbers, int), (flags, bool))
    return _ObjectShape({name: kind for names, kind in kinds for name in names.split()}, nested)


# Ignition 3.5, as its specification lists it.

_TEXTS = _ListShape()
_APPENDED = _ListShape(is_appended=True)
_HEADER = _make_shape("name value")
_RESOURCE = _make_shape(
    "compression source",
    httpHeaders=_ListShape(_HEADER, ("name",)),
    verification=_make_shape("hash"),
)
_RESOURCES = _ListShape(_RESOURCE, ("source",))
_OWNER = _make_shape("name", "id")
_NODES = ("directories", "files", "links")
_ARGUMENTS = _ListShape(family=("shouldExist", "shouldNotExist"))

_DIRECTORY = _make_shape("path", "mode", "overwrite", group=_OWNER, user=_OWNER)
_FILE = _make_shape(
    "path",
    "mode",
    "overwrite",
    append=_ListShape(_RESOURCE, is_appended=True),
    contents=_RESOURCE,
    group=_OWNER,
    user=_OWNER,
)
_LINK = _make_shape("path target", "", "hard overwrite", group=_OWNER, user=_OWNER)
_PARTITION = _make_shape(
    "guid label typeGuid", "number sizeMiB startMiB", "resize shouldExist wipePartitionEntry"
)
_DISK = _make_shape(
    "device", "", "wipeTable", partitions=_ListShape(_PARTITION, ("number", "label"))
)
_FILESYSTEM = _make_shape(
    "device format label path uuid",
    "",
    "wipeFilesystem",
    mountOptions=_APPENDED,
    options=_APPENDED,
)
_LUKS = _make_shape(
    "device label name uuid",
    "",
    "discard wipeVolume",
    cex=_make_shape("", "", "enabled"),
    clevis=_make_shape(
        "",
        "threshold",
        "tpm2",
        custom=_make_shape("config pin", "", "needsNetwork"),
        tang=_ListShape(_make_shape("advertisement thumbprint url"), ("url",)),
    ),
    keyFile=_RESOURCE,
    openOptions=_TEXTS,
    options=_APPENDED,
)
_RAID = _make_shape("level name", "spares", devices=_TEXTS, options=_APPENDED)
_GROUP = _make_shape("name passwordHash", "gid", "shouldExist system")
_USER = _make_shape(
    "gecos homeDir name passwordHash primaryGroup shell",
    "uid",
    "noCreateHome noLogInit noUserGroup shouldExist system",
    groups=_TEXTS,
    sshAuthorizedKeys=_TEXTS,
)
_UNIT = _make_shape(
    "contents name",
    "",
    "enabled mask",
    dropins=_ListShape(_make_shape("contents name"), ("name",)),
)

_CONFIG = _make_shape(
    ignition=_make_shape(
        "version",
        config=_make_shape(merge=_RESOURCES, replace=_RESOURCE),
        proxy=_make_shape("httpProxy httpsProxy", noProxy=_TEXTS),
        security=_make_shape(tls=_make_shape(certificateAuthorities=_RESOURCES)),
        timeouts=_make_shape("", "httpResponseHeaders httpTotal"),
    ),
    kernelArguments=_make_shape(shouldExist=_ARGUMENTS, shouldNotExist=_ARGUMENTS),
    passwd=_make_shape(groups=_ListShape(_GROUP, ("name",)), users=_ListShape(_USER, ("name",))),
    storage=_make_shape(
        directories=_ListShape(_DIRECTORY, ("path",), family=_NODES),
        disks=_ListShape(_DISK, ("device",)),
        files=_ListShape(_FILE, ("path",), family=_NODES),
        filesystems=_ListShape(_FILESYSTEM, ("device",)),
        links=_ListShape(_LINK, ("path",), family=_NODES),
        luks=_ListShape(_LUKS, ("name",)),
        raid=_ListShape(_RAID, ("name",)),
    ),
    systemd=_make_shape(units=_ListShape(_UNIT, ("name",))),
)
