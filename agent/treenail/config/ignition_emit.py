"""Writes the model of an Ignition config in the version that a machine reads.

A field that the version does not have is an error, because Ignition ignores unknown fields: a
machine without its LUKS device would join the cluster. The versions of the fields are those of
`treenail.api.ignition_schema`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from treenail.api.decode import Fields, Json
from treenail.api.ignition_checks import URL_SCHEMES, check_document, read_scheme
from treenail.api.ignition_model import IgnitionConfig
from treenail.api.ignition_schema import CONFIG, NEWEST, OLDEST, ListShape, ObjectShape
from treenail.config.ignition_emit2 import VERSION2, convert_to_ignition2, find_unsupported_field
from treenail.errors import ConfigError, IgnitionError

VERSIONS_SERVED = (VERSION2, OLDEST, "3.1.0", "3.2.0", "3.3.0", "3.4.0", NEWEST)
KERNEL_ARGUMENTS_SINCE = "3.3.0"
"""The first version with kernel arguments; see `split_kernel_arguments`."""

_SPECIAL_BITS = 0o7000


class VersionTooOldError(ConfigError):
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


def emit_ignition(config: IgnitionConfig, version: str) -> Json:
    """Return the config as a document of ``version``, one of `VERSIONS_SERVED`.

    The order of fields is always the same, and no field is null or empty. Fields that no version
    has are dropped. Raises `VersionTooOldError` for a field that the version does not have, and
    `IgnitionError` with its location for a value that Ignition rejects.
    """
    if version not in VERSIONS_SERVED:
        raise IgnitionError(
            f"cannot write the config in Ignition {version:.40}: expected one of "
            f"{', '.join(VERSIONS_SERVED)}"
        )
    base = max(version, OLDEST)
    values = {**config.to_json(), "ignition": {**config.ignition_section, "version": base}}
    document = _FieldSelector(base, version).select_fields(values, CONFIG, "")
    check_document(Fields(document, "spec.config", IgnitionError), replace(config, version=base))
    if version != VERSION2:
        return document
    if field := find_unsupported_field(document):
        raise VersionTooOldError(field, OLDEST, requested=version)
    return convert_to_ignition2(document)


def split_kernel_arguments(config: IgnitionConfig) -> tuple[IgnitionConfig, tuple[str, ...]]:
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

    def select_fields(self, values: Json, shape: ObjectShape, place: str) -> Json:
        found: Json = {}
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
                found[name] = selected
        return found

    def _select_value(
        self, value: object, part: ObjectShape | ListShape | None, place: str
    ) -> object:
        """Return the value; one of a wrong type stays, and is found by the check of the result."""
        if isinstance(part, ObjectShape) and isinstance(value, dict):
            return self.select_fields(value, part, place)
        if isinstance(part, ListShape) and isinstance(value, list):
            return [
                self.select_fields(each, part.entry, f"{place}[{index}]")
                if part.entry is not None and isinstance(each, dict)
                else each
                for index, each in enumerate(value)
            ]
        return value


def _is_empty(value: object, part: ObjectShape | ListShape | None) -> bool:
    return value is None or (
        part is not None and value == ({} if isinstance(part, ObjectShape) else [])
    )


def _accept_value(_value: object) -> str:
    return ""


def _check_mode(value: object) -> str:
    # Before 3.4 Ignition ignores the setuid, setgid and sticky bits.
    return "3.4.0" if isinstance(value, int) and value & _SPECIAL_BITS else ""


def _check_source(value: object) -> str:
    return URL_SCHEMES.get(read_scheme(value), "") if isinstance(value, str) else ""


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
