"""Fields of Ignition configs: their types, their lists, and the version that introduced each.

`treenail.config.merge` merges configs by this table. Conversion drops the fields that the
version of a config does not have, as Ignition does, and ``render`` warns about them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Union

from treenail.api import decode

OLDEST = "3.0.0"
NEWEST = "3.5.0"
FETCH_SECTIONS = ("proxy", "security", "timeouts")
"""Parts of ``ignition`` for what Ignition fetches; a MachineConfig contains everything."""
FETCH_REMEDY = "remove it, and write the settings of programs into their files"


@dataclass(frozen=True, slots=True)
class ListShape:
    """Shape of a list: the key of an entry, and the lists that share the keys."""

    entry: "ObjectShape | None" = None
    """None for a list of strings, which are their own keys."""
    key: Sequence[str] = ()
    """Fields that identify an entry: the first one that has a value."""
    is_appended: bool = False
    family: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Shape of an object: its plain fields with their types, and its lists and objects."""

    plain: Mapping[str, type]
    nested: Mapping[str, Union["ObjectShape", ListShape]]
    since: Mapping[str, str] = field(default_factory=dict)
    """Versions that introduced a field, unless it is as old as the format."""
    always: Sequence[str] = ()
    """Texts that Go writes although they are empty."""
    unless_zero: Sequence[str] = ()
    """Fields that Go omits when they are empty or 0, although the document sets them."""

    def has_field(self, name: str) -> bool:
        """Return whether any version has the field."""
        return name in self.plain or name in self.nested


@dataclass(frozen=True, slots=True)
class IgnoredField:
    """A field that has no effect; ``since`` is the first version that has it, if any has."""

    location: str
    since: str = ""
    suggestion: str = ""
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.location}: ignored: {self.reason}"
        if self.since:
            return (
                f"{self.location}: ignored: this field needs Ignition {self.since} or later; set "
                "ignition.version to it"
            )
        hint = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.location}: ignored: unknown field{hint}"


def has_values(value: object) -> bool:
    """Return whether there is a value; an object with only empty values has none."""
    if isinstance(value, dict):
        return any(map(has_values, value.values()))
    return value not in (None, "", [])


def drop_newer_fields(config: decode.Json, version: str) -> decode.Json:
    """Return the config without the fields that its version does not have."""
    if version == NEWEST:
        return config  # merging drops unknown fields
    return _drop_from_object(config, CONFIG2 if version < OLDEST else CONFIG, version)


def find_ignored_fields(config: decode.Fields, version: str) -> Iterator[IgnoredField]:
    """Yield the fields that a version of Ignition does not have, or that no node uses."""
    yield from find_unknown_fields(config, CONFIG2 if version < OLDEST else CONFIG, version)
    section = config.get_object("ignition")
    for name in FETCH_SECTIONS:
        if has_values(section.values.get(name)):
            reason = f"nodes fetch nothing with Ignition; {FETCH_REMEDY}"
            yield IgnoredField(section.path_of(name), reason=reason)


def find_unknown_fields(
    fields: decode.Fields, shape: ObjectShape, version: str = NEWEST
) -> Sequence[IgnoredField]:
    """Return the fields of a valid document that ``shape`` or ``version`` does not have."""
    unknown_fields: list[IgnoredField] = []
    _add_unknown_fields(fields, shape, version, unknown_fields)
    return unknown_fields


def _add_unknown_fields(
    fields: decode.Fields, shape: ObjectShape, version: str, unknown_fields: list[IgnoredField]
) -> None:
    for name, value in fields.values.items():
        if value is None:
            continue
        if shape.since.get(name, "") > version:
            unknown_fields.append(IgnoredField(fields.path_of(name), shape.since[name]))
        elif name in shape.plain:
            continue
        elif (part := shape.nested.get(name)) is None:
            suggestion = _suggest_name(name, shape)
            unknown_fields.append(IgnoredField(fields.path_of(name), suggestion=suggestion))
        elif isinstance(part, ObjectShape):
            _add_unknown_fields(fields.get_object(name), part, version, unknown_fields)
        elif part.entry is not None:
            for entry in fields.iter_objects(name):
                _add_unknown_fields(entry, part.entry, version, unknown_fields)


def _drop_from_object(values: decode.Json, shape: ObjectShape, version: str) -> decode.Json:
    kept: decode.Json = {}
    for name, value in values.items():
        if not shape.has_field(name) or shape.since.get(name, "") > version:
            continue
        part = shape.nested.get(name)
        entry = part.entry if isinstance(part, ListShape) else None
        if isinstance(part, ObjectShape) and isinstance(value, dict):
            kept[name] = _drop_from_object(value, part, version)
        elif entry is not None and isinstance(value, list):
            kept[name] = [
                _drop_from_object(inner, entry, version) if isinstance(inner, dict) else inner
                for inner in value
            ]
        else:
            kept[name] = value
    return kept


def _suggest_name(name: str, shape: ObjectShape) -> str:
    import difflib  # noqa: PLC0415  # only warnings need it

    known = {field.casefold(): field for field in (*shape.plain, *shape.nested)}
    close = difflib.get_close_matches(name.casefold(), known, n=1)
    parts = (
        f"{outer}.{name}"
        for outer, part in shape.nested.items()
        if isinstance(part, ObjectShape) and part.has_field(name)
    )
    return known[close[0]] if close else next(parts, "")


def make_shape(
    texts: str = "",
    numbers: str = "",
    flags: str = "",
    *,
    since: Mapping[str, str] | None = None,
    always: str = "",
    unless_zero: str = "",
    **nested: ObjectShape | ListShape,
) -> ObjectShape:
    """Build a shape from the names of plain fields, and nested shapes by name."""
    kinds = ((texts, str), (numbers, int), (flags, bool))
    return ObjectShape(
        {name: kind for names, kind in kinds for name in names.split()},
        nested,
        since or {},
        always.split(),
        unless_zero.split(),
    )


TEXTS = ListShape()
APPENDED = ListShape(is_appended=True)
HEADER = make_shape("name value", always="name")
_HASH = make_shape("hash")
_HEADERS = ListShape(HEADER, ("name",))
_RESOURCE = make_shape(
    "compression source", httpHeaders=_HEADERS, verification=_HASH, since={"httpHeaders": "3.1.0"}
)
_REFERENCE = make_shape(
    "compression source",
    httpHeaders=_HEADERS,
    verification=_HASH,
    since={"compression": "3.1.0", "httpHeaders": "3.1.0"},
)
_REFERENCES = ListShape(_REFERENCE, ("source",))
_OWNER = make_shape("name", "id")
_NODES = ("directories", "files", "links")
_ARGUMENTS = ListShape(family=("shouldExist", "shouldNotExist"))

_DIRECTORY = make_shape("path", "mode", "overwrite", group=_OWNER, user=_OWNER)
_FILE = make_shape(
    "path",
    "mode",
    "overwrite",
    append=ListShape(_RESOURCE, is_appended=True),
    contents=_RESOURCE,
    group=_OWNER,
    user=_OWNER,
)
_LINK = make_shape("path target", "", "hard overwrite", group=_OWNER, user=_OWNER)
_PARTITION = make_shape(
    "guid label typeGuid",
    "number sizeMiB startMiB",
    "resize shouldExist wipePartitionEntry",
    since={"resize": "3.2.0"},
    unless_zero="number",
)
_DISK = make_shape("device", "", "wipeTable", partitions=ListShape(_PARTITION, ("number", "label")))
_FILESYSTEM = make_shape(
    "device format label path uuid",
    "",
    "wipeFilesystem",
    mountOptions=APPENDED,
    options=APPENDED,
    since={"mountOptions": "3.1.0"},
)
_TANG = make_shape(
    "advertisement thumbprint url",
    # Version 3.4 has the advertisement, but Ignition's conversion to 3.5 loses it.
    since={"advertisement": "3.5.0"},
    unless_zero="url",
)
_LUKS = make_shape(
    "device label name uuid",
    "",
    "discard wipeVolume",
    cex=make_shape("", "", "enabled"),
    clevis=make_shape(
        "",
        "threshold",
        "tpm2",
        custom=make_shape("config pin", "", "needsNetwork"),
        tang=ListShape(_TANG, ("url",)),
    ),
    keyFile=_RESOURCE,
    openOptions=TEXTS,
    options=APPENDED,
    since={"cex": "3.5.0", "discard": "3.4.0", "openOptions": "3.4.0"},
    always="name",
)
_RAID = make_shape("level name", "spares", devices=TEXTS, options=APPENDED, always="name")
_GROUP = make_shape(
    "name passwordHash", "gid", "shouldExist system", since={"shouldExist": "3.2.0"}, always="name"
)
_USER = make_shape(
    "gecos homeDir name passwordHash primaryGroup shell",
    "uid",
    "noCreateHome noLogInit noUserGroup shouldExist system",
    groups=TEXTS,
    sshAuthorizedKeys=TEXTS,
    since={"shouldExist": "3.2.0"},
    always="name",
)
_DROPINS = ListShape(make_shape("contents name"), ("name",))
_UNIT = make_shape("contents name", "", "enabled mask", dropins=_DROPINS)
_TIMEOUTS = make_shape("", "httpResponseHeaders httpTotal")

CONFIG = make_shape(
    ignition=make_shape(
        "version",
        config=make_shape(merge=_REFERENCES, replace=_REFERENCE),
        proxy=make_shape("httpProxy httpsProxy", noProxy=TEXTS),
        security=make_shape(tls=make_shape(certificateAuthorities=_REFERENCES)),
        timeouts=_TIMEOUTS,
        since={"proxy": "3.1.0"},
    ),
    kernelArguments=make_shape(shouldExist=_ARGUMENTS, shouldNotExist=_ARGUMENTS),
    passwd=make_shape(groups=ListShape(_GROUP, ("name",)), users=ListShape(_USER, ("name",))),
    storage=make_shape(
        directories=ListShape(_DIRECTORY, ("path",), family=_NODES),
        disks=ListShape(_DISK, ("device",)),
        files=ListShape(_FILE, ("path",), family=_NODES),
        filesystems=ListShape(_FILESYSTEM, ("device",)),
        links=ListShape(_LINK, ("path",), family=_NODES),
        luks=ListShape(_LUKS, ("name",)),
        raid=ListShape(_RAID, ("name",)),
        since={"luks": "3.2.0"},
    ),
    systemd=make_shape(units=ListShape(_UNIT, ("name",))),
    since={"kernelArguments": "3.3.0"},
)
"""Ignition 3.5, with the versions that introduced its fields."""

_CONTENTS2 = make_shape("compression source", verification=_HASH)
_REFERENCE2 = make_shape("source", verification=_HASH)
_UNITS2 = ListShape(make_shape("contents name", "", "enable enabled mask", dropins=_DROPINS))

CONFIG2 = make_shape(
    ignition=make_shape(
        "version",
        config=make_shape(append=ListShape(_REFERENCE2), replace=_REFERENCE2),
        security=make_shape(tls=make_shape(certificateAuthorities=ListShape(_REFERENCE2))),
        timeouts=_TIMEOUTS,
    ),
    networkd=make_shape(units=ListShape(make_shape("contents name", dropins=_DROPINS))),
    passwd=make_shape(
        groups=ListShape(make_shape("name passwordHash", "gid", "system")),
        users=ListShape(
            make_shape(
                "gecos homeDir name passwordHash primaryGroup shell",
                "uid",
                "noCreateHome noLogInit noUserGroup system",
                create=make_shape(
                    "gecos homeDir primaryGroup shell",
                    "uid",
                    "noCreateHome noLogInit noUserGroup system",
                    groups=TEXTS,
                ),
                groups=TEXTS,
                sshAuthorizedKeys=TEXTS,
            )
        ),
    ),
    storage=make_shape(
        directories=ListShape(
            make_shape("filesystem path", "mode", "overwrite", group=_OWNER, user=_OWNER)
        ),
        disks=ListShape(
            make_shape(
                "device",
                "",
                "wipeTable",
                partitions=ListShape(make_shape("guid label typeGuid", "number size start")),
            )
        ),
        files=ListShape(
            make_shape(
                "filesystem path",
                "mode",
                "append overwrite",
                contents=_CONTENTS2,
                group=_OWNER,
                user=_OWNER,
            )
        ),
        filesystems=ListShape(
            make_shape(
                "name path",
                mount=make_shape(
                    "device format label uuid",
                    "",
                    "wipeFilesystem",
                    create=make_shape("", "", "force", options=TEXTS),
                    options=TEXTS,
                ),
            )
        ),
        links=ListShape(
            make_shape("filesystem path target", "", "hard overwrite", group=_OWNER, user=_OWNER)
        ),
        raid=ListShape(make_shape("level name", "spares", devices=TEXTS, options=TEXTS)),
    ),
    systemd=make_shape(units=_UNITS2),
)
"""Ignition 2.2."""
