"""Validation of MachineConfigs before the merge, and of the size of rendered ones."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from treenail import errors
from treenail.api import decode, machineconfig
from treenail.api.ignition import checks, parser, schema

SIZE_LIMIT = 1_572_864
"""Maximum size of an object as JSON, in bytes: the request limit of etcd."""

_MACHINE_CONFIG = schema.make_shape("apiVersion kind metadata spec")
_SPEC = schema.make_shape(
    "baseOSExtensionsContainerImage config extensions fips kernelArguments kernelType osImageURL"
)
# Permissions without the leading 0 that makes them octal in YAML 1.1.
_OCTAL_DIGITS = re.compile(r"[0-7]{3}")
_MAX_MODE = 0o777
_CONTROL = re.compile("[\x7f-\x84\x86-\x9f\ufffe\uffff]")


class ValidConfig(NamedTuple):
    """A valid MachineConfig: its parsed Ignition config and its unknown fields."""

    ignored: tuple[schema.IgnoredField, ...]
    """The fields that have no effect, as `find_ignored_fields` yields them."""
    ignition: decode.Json | None
    """Its Ignition config in version 3.5, as the merge needs it."""


def validate_config(config: machineconfig.MachineConfig) -> ValidConfig:
    """Raise `ConfigError` with the MachineConfig and the place when the config is invalid."""
    try:
        return _validate_spec(config)
    except errors.ConfigError as error:
        raise errors.ConfigError(
            f"MachineConfig {config.name}: {error}", remedy=error.remedy
        ) from error


def find_ignored_fields(config: machineconfig.MachineConfig) -> Iterator[schema.IgnoredField]:
    """Yield the fields of a valid MachineConfig that have no effect, such as misspelt ones."""
    yield from schema.find_unknown_fields(decode.Fields(config.others, ""), _MACHINE_CONFIG)
    yield from schema.find_unknown_fields(decode.Fields(config.spec_others, "spec"), _SPEC)
    if config.config is not None:
        ignition_config = decode.Fields(config.config, "spec.config")
        version = ignition_config.get_object("ignition").get_text("version")
        yield from schema.find_ignored_fields(ignition_config, version)


def check_rendered_size(spec: decode.Json, name: str) -> None:
    """Raise `ConfigError` when a rendered config is too large for the API server."""
    text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
    size = len(text) if text.isascii() else len(text.encode())
    if size > SIZE_LIMIT:
        raise errors.ConfigError(
            f"cannot store {name}: it has {size} bytes, and the limit is {SIZE_LIMIT}",
            remedy="shrink the files of its MachineConfigs, or move them into the OS image",
        )


def _reject_other_case(ignored: Iterable[schema.IgnoredField]) -> None:
    """Raise for ``Storage``: Go reads it as ``storage``, so that ignoring it changes the name."""
    for field in ignored:
        name = re.split(r"[.\]]", field.location)[-1]
        if name != field.suggestion and name.lower() == field.suggestion.lower():
            raise errors.ConfigError(
                f"{field.location}: unknown field",
                remedy=f"write {field.suggestion}: upper and lower case matter",
            )


def find_control_character(value: object, place: str = "spec") -> str:
    """Return the place of the first text in ``value`` that YAML rejects; empty without any.

    Go's JSON does not escape these characters, and the YAML parser that reads it rejects them.
    """
    # Python's JSON does not escape them either. One search takes a tenth of the walk's time, and
    # most configs are ASCII, where it is a search for one character.
    text = json.dumps(value, ensure_ascii=False)
    if "\x7f" not in text if text.isascii() else not _CONTROL.search(text):
        return ""
    return _locate_control_character(value, place)


def _locate_control_character(value: object, place: str) -> str:
    if isinstance(value, str):
        return place if _CONTROL.search(value) else ""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        parts = ((f"{place}.{name}", inner) for name, inner in value.items())
    elif isinstance(value, list):
        parts = ((f"{place}[{index}]", inner) for index, inner in enumerate(value))
    return next(filter(None, (_locate_control_character(inner, at) for at, inner in parts)), "")


def check_kernel(config: machineconfig.MachineConfig) -> None:
    """Raise `ConfigError` for an unknown kernel type or extension."""
    if config.kernel_type not in ("", *machineconfig.KERNEL_TYPES):
        raise errors.ConfigError(
            f"spec.kernelType: expected one of {', '.join(machineconfig.KERNEL_TYPES)}, "
            f"found {config.kernel_type!r:.40}"
        )
    for index, name in enumerate(config.extensions):
        if name not in machineconfig.EXTENSIONS:
            raise errors.ConfigError(
                f"spec.extensions[{index}]: expected one of {', '.join(machineconfig.EXTENSIONS)}, "
                f"found {name!r:.40}"
            )


def _validate_spec(config: machineconfig.MachineConfig) -> ValidConfig:
    check_kernel(config)
    if config.config is None:
        return ValidConfig(tuple(find_ignored_fields(config)), None)
    document = decode.Fields(config.config, "spec.config", errors.IgnitionError)
    parsed = parser.parse_ignition(config.config)
    checks.check_document(document, parsed)
    ignored = tuple(find_ignored_fields(config))
    _reject_other_case(ignored)
    # Also files that a later one of version 2 replaces.
    for file in document.get_object("storage").iter_objects("files"):
        mode = file.get_optional_integer("mode") or 0
        if mode > _MAX_MODE:
            raise errors.ConfigError(
                f"{file.path_of('mode')}: expected at most 511 (0777), found {mode} ({mode:#o})",
                remedy=f"the number is decimal: write 0{mode} in YAML, or {int(str(mode), 8)}"
                if _OCTAL_DIGITS.fullmatch(str(mode))
                else "remove the setuid, setgid and sticky bits: a MachineConfig cannot set them",
            )
    return ValidConfig(ignored, parsed.to_json())
