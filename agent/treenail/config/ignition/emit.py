"""Write the model of an Ignition config in the version that a machine reads.

A field that the version does not have is an error, because Ignition ignores unknown fields: a
machine without its LUKS device would join the cluster. The versions of the fields are those of
`treenail.api.ignition.schema`.

Machines with an old boot image read version 2.2. There a file has one source of contents and
overwrites by default, and files name their filesystem.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from treenail import errors
from treenail.api import decode
from treenail.api.ignition import checks, model, parser, schema

VERSIONS_SERVED = (
    parser.VERSION2,
    schema.OLDEST,
    "3.1.0",
    "3.2.0",
    "3.3.0",
    "3.4.0",
    schema.NEWEST,
)
KERNEL_ARGUMENTS_SINCE = "3.3.0"
"""The first version with kernel arguments; see `detach_kernel_arguments`."""

_SPECIAL_BITS = 0o7000


class VersionTooOldError(errors.ConfigError):
    """A version of Ignition does not have a field of the config.

    ``field`` is its location in the config, as ``storage.luks[0]``, and ``first_version`` the
    first version that has it.
    """

    def __init__(self, field: str, first_version: str, *, requested: str) -> None:
        super().__init__(
            f"cannot write the config in Ignition {requested}: {field} needs Ignition "
            f"{first_version} or later",
            remedy="boot the machine from an image with a newer Ignition, or remove the field from "
            "the MachineConfigs of the pool",
        )
        self.field = field
        self.first_version = first_version


def emit_ignition(config: model.IgnitionConfig, version: str) -> decode.Json:
    """Return the config as a document of ``version``, one of `VERSIONS_SERVED`.

    The order of fields is always the same, and no field is null or empty. Fields that no version
    has are dropped. Raises `VersionTooOldError` for a field that the version does not have, and
    `IgnitionError` with its location for a value that Ignition rejects.
    """
    if version not in VERSIONS_SERVED:
        raise errors.IgnitionError(
            f"cannot write the config in Ignition {version:.40}: expected one of "
            f"{', '.join(VERSIONS_SERVED)}"
        )
    base = max(version, schema.OLDEST)
    values = {**config.to_json(), "ignition": {**config.ignition_section, "version": base}}
    document = _FieldSelector(base, version).select_fields(values, schema.CONFIG, "")
    checks.check_document(
        decode.Fields(document, "spec.config", errors.IgnitionError), replace(config, version=base)
    )
    if version != parser.VERSION2:
        return document
    if field := find_unsupported_field(document):
        raise VersionTooOldError(field, schema.OLDEST, requested=version)
    return convert_to_ignition2(document)


def detach_kernel_arguments(
    config: model.IgnitionConfig,
) -> tuple[model.IgnitionConfig, tuple[str, ...]]:
    """Return the config without kernel arguments, and the arguments, for versions below 3.3.

    The caller adds them to the MachineConfig that the config carries, so that the first boot of
    the node applies them, as with the MCO's server. Raises `VersionTooOldError` when the config
    removes an argument, because a MachineConfig cannot.
    """
    if config.absent_kernel_arguments:
        raise VersionTooOldError(
            "kernelArguments.shouldNotExist[0]",
            KERNEL_ARGUMENTS_SINCE,
            requested=f"older than {KERNEL_ARGUMENTS_SINCE}",
        )
    return replace(config, kernel_arguments=()), config.kernel_arguments


class _FieldSelector:
    """Copies the fields that a version has, and raises for fields that only newer ones have."""

    def __init__(self, version: str, requested: str) -> None:
        self._version = version
        self._requested = requested

    def select_fields(
        self, values: decode.Json, shape: schema.ObjectShape, place: str
    ) -> decode.Json:
        kept: decode.Json = {}
        for name, value in values.items():
            part = shape.nested.get(name)
            if not shape.has_field(name) or _is_empty(value, part):
                continue
            field = f"{place}.{name}" if place else name
            rule = _VALUE_RULES.get(name, _accept_value)
            since = max(shape.since.get(name, ""), rule(value))
            if since > self._version:
                field = f"{field}[0]" if isinstance(value, list) else field
                raise VersionTooOldError(field, since, requested=self._requested)
            selected = self._select_value(value, part, field)
            if not _is_empty(selected, part):
                kept[name] = selected
        return kept

    def _select_value(
        self, value: object, part: schema.ObjectShape | schema.ListShape | None, place: str
    ) -> object:
        """Return the value; one of a wrong type stays, and is found by the check of the result."""
        if isinstance(part, schema.ObjectShape) and isinstance(value, dict):
            return self.select_fields(value, part, place)
        if isinstance(part, schema.ListShape) and isinstance(value, list):
            return [
                self.select_fields(child, part.entry, f"{place}[{index}]")
                if part.entry is not None and isinstance(child, dict)
                else child
                for index, child in enumerate(value)
            ]
        return value


def _is_empty(value: object, part: schema.ObjectShape | schema.ListShape | None) -> bool:
    return value is None or (
        part is not None and value == ({} if isinstance(part, schema.ObjectShape) else [])
    )


def _accept_value(_value: object) -> str:
    return ""


def _check_mode(value: object) -> str:
    # Before 3.4 Ignition ignores the setuid, setgid and sticky bits.
    return "3.4.0" if isinstance(value, int) and value & _SPECIAL_BITS else ""


def _check_source(value: object) -> str:
    return checks.URL_SCHEMES.get(checks.read_scheme(value), "") if isinstance(value, str) else ""


def _check_hash(value: object) -> str:
    return "3.1.0" if isinstance(value, str) and value.startswith("sha256-") else ""


def _check_format(value: object) -> str:
    return "3.3.0" if value == "none" else ""


def _check_custom_pin(value: object) -> str:
    # In 3.2 a custom pin has both texts. 3.3 made them optional.
    is_complete = isinstance(value, dict) and value.get("pin") and value.get("config")
    return "" if is_complete else "3.3.0"


_VALUE_RULES: Mapping[str, Callable[[object], str]] = {
    "custom": _check_custom_pin,
    "format": _check_format,
    "hash": _check_hash,
    "mode": _check_mode,
    "source": _check_source,
}
"""Fields some values of which are newer than the field; each returns the first version."""


_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
"""Modes of version 3 where none is set. Ignition 0.35 then sets 0000."""


def find_unsupported_field(document: decode.Json) -> str:
    """Return the location of a field that 2.2 does not have, empty if there is none."""
    return next(_list_unsupported_fields(decode.Fields(document, "", errors.IgnitionError)), "")


def convert_to_ignition2(document: decode.Json) -> decode.Json:
    """Return a valid 3.0 document, without unsupported fields, as a document of 2.2."""
    fields = decode.Fields(document, "", errors.IgnitionError)
    older = {**document, "ignition": _convert_ignition(fields.get_object("ignition"))}
    if "storage" in document:
        storage = fields.get_object("storage")
        nodes = {
            "directories": storage.map_objects("directories", _convert_directory),
            "files": storage.map_objects("files", _convert_file),
            "links": storage.map_objects("links", _convert_node),
        }
        converted = {name: list(entries) for name, entries in nodes.items() if entries}
        older["storage"] = {
            name: converted.get(name, value) for name, value in storage.values.items()
        }
    return older


def _list_unsupported_fields(document: decode.Fields) -> Iterator[str]:
    storage = document.get_object("storage")
    config = document.get_object("ignition").get_object("config")
    for reference in config.iter_objects("merge"):
        if not reference.get_text("source"):
            yield reference.path_of("source")
    for disk in storage.iter_objects("disks"):
        # Version 2 counts sectors, and matches partitions by other rules.
        if disk.get_list("partitions"):
            yield f"{disk.path_of('partitions')}[0]"
    for filesystem in storage.iter_objects("filesystems"):
        yield filesystem.path
    for file in storage.iter_objects("files"):
        parts, contents = file.get_list("append"), file.get_object("contents")
        has_source = contents.get_optional_text("source") is not None
        # Without a source version 3 keeps the contents of a file that exists; version 2 cannot.
        if not parts and not has_source:
            yield contents.path_of("source")
        # Version 3 keeps the mode of a file that exists; a new file would get 0000 in version 2.
        has_mode = file.values.get("mode") is not None
        if parts and (has_source or len(parts) > 1 or not has_mode):
            yield f"{file.path_of('append')}[{1 if len(parts) > 1 and not has_source else 0}]"


def _convert_ignition(fields: decode.Fields) -> decode.Json:
    config = dict(fields.get_object("config").values)
    if "merge" in config:
        config["append"] = config.pop("merge")
    others = {**fields.values, "version": parser.VERSION2}
    return {**others, "config": config} if config else others


def _convert_file(fields: decode.Fields) -> decode.Json:
    node = {**_convert_node(fields), "mode": fields.values.get("mode", _FILE_MODE)}
    if parts := fields.get_list("append"):
        # Version 2 rejects an appended file that overwrites.
        node.pop("overwrite", None)
        return {**node, "append": True, "contents": parts[0]}
    return {**node, "overwrite": fields.get_bool("overwrite")}


def _convert_directory(fields: decode.Fields) -> decode.Json:
    return {**_convert_node(fields), "mode": fields.values.get("mode", _DIRECTORY_MODE)}


def _convert_node(fields: decode.Fields) -> decode.Json:
    return {"filesystem": parser.ROOT_FILESYSTEM, **fields.values}
