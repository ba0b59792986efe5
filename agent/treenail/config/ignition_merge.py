"""Ignition configs made into one, by Ignition's own rules.

What a later config sets wins, what it leaves out stays as it was. Entries of a list are the same
when their keys are: they are merged where the earlier one stands, new ones follow at the end.
Some lists share their keys, so that a link replaces the file of its path; some are only appended.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api.decode import Fields, Json
from treenail.errors import IgnitionError


@dataclass(frozen=True, slots=True)
class _List:
    """A list: what identifies an entry, and which lists it shares its keys with."""

    entry: "_Object | None" = None
    """None when the entries are texts, which identify themselves."""
    key: Sequence[str] = ()
    """Fields that identify an entry: the first one that is set."""
    appended: bool = False
    family: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Object:
    """An object: its plain fields with their types, and those that are lists or objects."""

    plain: Mapping[str, type]
    nested: Mapping[str, "_Object | _List"] = field(default_factory=dict)


class Merging:
    """A config that grows by every one that is added, without what Ignition 3.5 does not know."""

    __slots__ = ("_tree",)

    def __init__(self) -> None:
        self._tree = _Tree(_CONFIG)

    def add(self, config: Json, place: str) -> None:
        """Merge a config of version 3.5 into it.

        Raises `IgnitionError` that names the place of a value of the wrong type.
        """
        self._tree.add(Fields(config, place, IgnitionError))

    def to_json(self) -> Json:
        """The merged config, without what is empty."""
        return self._tree.to_json()


class _Tree:
    """An object whose lists are kept by key, in the order in which the keys came."""

    __slots__ = ("_lists", "_objects", "_plain", "_shape")

    def __init__(self, shape: _Object) -> None:
        self._shape = shape
        self._plain: dict[str, object] = {}
        self._objects: dict[str, _Tree] = {}
        self._lists: dict[str, dict[object, _Tree | str]] = {}

    def add(self, fields: Fields) -> None:
        for name, kind in self._shape.plain.items():
            if (value := _plain(fields, name, kind)) is not None:
                self._plain[name] = value
        for name, part in self._shape.nested.items():
            if fields.values.get(name) is None:
                continue
            if isinstance(part, _Object):
                self._objects.setdefault(name, _Tree(part)).add(fields.nested(name))
            else:
                self._add_list(fields, name, part)

    def to_json(self) -> Json:
        found: Json = dict(self._plain)
        for name, inner in self._objects.items():
            found[name] = inner.to_json()
        for name, entries in self._lists.items():
            found[name] = [
                entry if isinstance(entry, str) else entry.to_json() for entry in entries.values()
            ]
        return {name: value for name, value in found.items() if value not in ({}, [])}

    def _add_list(self, fields: Fields, name: str, part: _List) -> None:
        own = self._lists.setdefault(name, {})
        kin = [self._lists.get(other, {}) for other in part.family if other != name]
        for key, entry in _keyed(fields, name, part):
            for others in kin:
                others.pop(key, None)
            present = own.get(key)
            if isinstance(entry, str) or part.entry is None:
                own[key] = str(entry)
            elif isinstance(present, _Tree) and _takes_away(entry, part.entry):
                del own[key]
            elif isinstance(present, _Tree):
                present.add(entry)
            else:
                own[key] = tree = _Tree(part.entry)
                tree.add(entry)


def _plain(fields: Fields, name: str, kind: type) -> str | int | bool | None:
    if kind is str:
        return fields.optional_text(name)
    return fields.optional_integer(name) if kind is int else fields.optional_flag(name)


def _keyed(fields: Fields, name: str, part: _List) -> Iterator[tuple[object, Fields | str]]:
    """The entries of a list; those that are appended are like no other."""
    if part.entry is None:
        for text in fields.texts(name):
            yield (object() if part.appended else text), text
        return
    for entry in fields.objects(name):
        yield (object() if part.appended else _key(entry, part.key, part.entry)), entry


def _key(entry: Fields, names: Sequence[str], shape: _Object) -> object:
    found = ((name, _plain(entry, name, shape.plain[name])) for name in names)
    return next((key for key in found if key[1]), None)


def _takes_away(entry: Fields, shape: _Object) -> bool:
    """A header without a value takes the earlier one of its name away."""
    return shape is _HEADER and entry.values.get("value") is None


def _shape(
    texts: str = "", numbers: str = "", flags: str = "", **nested: _Object | _List
) -> _Object:
    kinds = ((texts, str), (numbers, int), (flags, bool))
    return _Object({name: kind for names, kind in kinds for name in names.split()}, nested)


# Ignition 3.5, as its specification lists it.

_TEXTS = _List()
_APPENDED = _List(appended=True)
_HEADER = _shape("name value")
_RESOURCE = _shape(
    "compression source",
    httpHeaders=_List(_HEADER, ("name",)),
    verification=_shape("hash"),
)
_RESOURCES = _List(_RESOURCE, ("source",))
_OWNER = _shape("name", "id")
_NODES = ("directories", "files", "links")
_ARGUMENTS = _List(family=("shouldExist", "shouldNotExist"))

_DIRECTORY = _shape("path", "mode", "overwrite", group=_OWNER, user=_OWNER)
_FILE = _shape(
    "path",
    "mode",
    "overwrite",
    append=_List(_RESOURCE, appended=True),
    contents=_RESOURCE,
    group=_OWNER,
    user=_OWNER,
)
_LINK = _shape("path target", "", "hard overwrite", group=_OWNER, user=_OWNER)
_PARTITION = _shape(
    "guid label typeGuid", "number sizeMiB startMiB", "resize shouldExist wipePartitionEntry"
)
_DISK = _shape("device", "", "wipeTable", partitions=_List(_PARTITION, ("number", "label")))
_FILESYSTEM = _shape(
    "device format label path uuid",
    "",
    "wipeFilesystem",
    mountOptions=_APPENDED,
    options=_APPENDED,
)
_LUKS = _shape(
    "device label name uuid",
    "",
    "discard wipeVolume",
    cex=_shape("", "", "enabled"),
    clevis=_shape(
        "",
        "threshold",
        "tpm2",
        custom=_shape("config pin", "", "needsNetwork"),
        tang=_List(_shape("advertisement thumbprint url"), ("url",)),
    ),
    keyFile=_RESOURCE,
    openOptions=_TEXTS,
    options=_APPENDED,
)
_RAID = _shape("level name", "spares", devices=_TEXTS, options=_APPENDED)
_GROUP = _shape("name passwordHash", "gid", "shouldExist system")
_USER = _shape(
    "gecos homeDir name passwordHash primaryGroup shell",
    "uid",
    "noCreateHome noLogInit noUserGroup shouldExist system",
    groups=_TEXTS,
    sshAuthorizedKeys=_TEXTS,
)
_UNIT = _shape(
    "contents name",
    "",
    "enabled mask",
    dropins=_List(_shape("contents name"), ("name",)),
)

_CONFIG = _shape(
    ignition=_shape(
        "version",
        config=_shape(merge=_RESOURCES, replace=_RESOURCE),
        proxy=_shape("httpProxy httpsProxy", noProxy=_TEXTS),
        security=_shape(tls=_shape(certificateAuthorities=_RESOURCES)),
        timeouts=_shape("", "httpResponseHeaders httpTotal"),
    ),
    kernelArguments=_shape(shouldExist=_ARGUMENTS, shouldNotExist=_ARGUMENTS),
    passwd=_shape(groups=_List(_GROUP, ("name",)), users=_List(_USER, ("name",))),
    storage=_shape(
        directories=_List(_DIRECTORY, ("path",), family=_NODES),
        disks=_List(_DISK, ("device",)),
        files=_List(_FILE, ("path",), family=_NODES),
        filesystems=_List(_FILESYSTEM, ("device",)),
        links=_List(_LINK, ("path",), family=_NODES),
        luks=_List(_LUKS, ("name",)),
        raid=_List(_RAID, ("name",)),
    ),
    systemd=_shape(units=_List(_UNIT, ("name",))),
)
