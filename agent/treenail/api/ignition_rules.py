"""Validation rules for Ignition configs: single fields and the complete config."""

import posixpath
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from treenail.api.decode import DEPTH_LIMIT, Fields, Json
from treenail.api.ignition_model import (
    UNSET_OWNER,
    IgnitionConfig,
    IgnitionDirectory,
    IgnitionDropin,
    IgnitionFile,
    IgnitionLink,
    IgnitionOwner,
    IgnitionUnit,
    IgnitionUser,
)
from treenail.errors import IgnitionError

IgnitionNode = IgnitionFile | IgnitionDirectory | IgnitionLink

UNIT_TYPES = (
    "service", "socket", "device", "mount", "automount", "swap", "target", "path", "timer",
    "snapshot", "slice", "scope",
)  # fmt: skip
UNIT_ROOT = "/etc/systemd/system"

_CLEAN_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[^/\0]+)+")
_UNIT_NAME = re.compile(rf"[A-Za-z0-9:._\\@-]+\.({'|'.join(UNIT_TYPES)})")
_DROPIN_NAME = re.compile(r"[^/\0]+\.conf")
_MAX_MODE = 0o7777
# NAME_MAX and PATH_MAX of Linux; PATH_MAX includes the null character.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_ID_ALONE = frozenset({"id"})
_NO_ID = 2**32 - 1  # (uid_t) -1, which chown(2) reads as no change
_NOT_IN_HASHES = frozenset(":\n\0")


def parse_path(fields: Fields) -> str:
    """Read an absolute, clean path: without ``..`` and ``//``, and not the root."""
    found = fields.get_required_text("path")
    if not found.startswith("/"):
        raise _make_error(fields, "path", "an absolute path", found)
    if not _CLEAN_PATH.fullmatch(found):
        raise _make_error(
            fields, "path", "a path without '.', '..', '//' or a slash at its end", found
        )
    size = len(found.encode())
    if size > _MAX_PATH_BYTES:
        raise _make_error(fields, "path", f"a path of up to {_MAX_PATH_BYTES} bytes", found)
    if size > _MAX_NAME_BYTES and any(map(_is_name_too_long, found.split("/"))):
        raise _make_error(
            fields, "path", f"names of up to {_MAX_NAME_BYTES} bytes in the path", found
        )
    return found


def parse_mode(fields: Fields) -> int | None:
    """Read permission bits, None when absent."""
    found = fields.get_optional_integer("mode")
    if found is not None and not 0 <= found <= _MAX_MODE:
        raise fields.make_error("mode", "a mode from 0 to 4095 (07777)")
    return found


def parse_owner(fields: Fields, name: str) -> IgnitionOwner:
    """Read the user or group of a file; it has both an id and a name only in a merged config."""
    value = fields.values.get(name)
    if value is None:
        return UNSET_OWNER
    # Most owners are an ID alone, and a config may have thousands of files.
    if isinstance(value, dict) and value.keys() == _ID_ALONE:
        number = value["id"]
        if type(number) is int and 0 <= number < _NO_ID:
            return _make_owner(number)
    found = fields.get_object(name)
    number, text = found.get_optional_integer("id"), found.get_optional_text("name")
    if number is not None and not 0 <= number < _NO_ID:
        raise found.make_error("id", "the number of a user or group")
    return _make_owner(number, text)


_make_owner = lru_cache(maxsize=256)(IgnitionOwner)


def parse_unit_name(fields: Fields) -> str:
    """Read the name of a unit; a slash would lead to another directory."""
    found = fields.get_required_text("name")
    if not _UNIT_NAME.fullmatch(found):
        raise _make_error(
            fields, "name", "the name of a systemd unit, with its type at the end", found
        )
    # Drop-ins are in the directory NAME.d.
    has_dropins = bool(fields.get_list("dropins"))
    if _is_name_too_long(f"{found}.d" if has_dropins else found):
        raise _make_error(fields, "name", "a shorter name", found)
    return found


def parse_dropin(fields: Fields) -> IgnitionDropin:
    """Read a drop-in; a slash in its name would lead to another directory."""
    found = fields.get_required_text("name")
    if not _DROPIN_NAME.fullmatch(found):
        raise _make_error(fields, "name", "a file name that ends in .conf", found)
    if _is_name_too_long(found):
        raise _make_error(fields, "name", f"a name of up to {_MAX_NAME_BYTES} bytes", found)
    return IgnitionDropin(found, fields.get_optional_text("contents"))


def parse_user(fields: Fields) -> IgnitionUser:
    """Read a user of any version; errors omit the password hash."""
    password_hash = fields.get_optional_text("passwordHash")
    if _NOT_IN_HASHES & set(password_hash or ""):
        raise fields.error(
            f"{fields.path_of('passwordHash')}: expected a hash without colons, line ends and null "
            "characters"
        )
    return IgnitionUser(
        name=fields.get_required_text("name"),
        ssh_keys=fields.get_text_list("sshAuthorizedKeys"),
        password_hash=password_hash,
        others=prune_fields(fields, "name", "sshAuthorizedKeys", "passwordHash"),
    )


def prune_objects(fields: Fields, name: str) -> tuple[Json, ...]:
    """Copy the objects of a list without interpreting them."""
    return fields.map_objects(name, prune_fields)


def prune_fields(fields: Fields, *without: str) -> Json:
    """Copy the fields except ``without``, and drop null and empty values as Go does."""
    return _prune_object(fields.get_other_fields(*without), fields, DEPTH_LIMIT)


def validate_config(config: IgnitionConfig, fields: Fields) -> None:
    """Raise when entries of the config contradict each other."""
    nodes: list[IgnitionNode] = [*config.files, *config.directories, *config.links]
    _reject_duplicates((node.path, node.location, "path") for node in nodes)
    _reject_duplicates((unit.name, unit.location, "name") for unit in config.units)
    for unit in config.units:
        _reject_duplicates(
            (dropin.name, f"{unit.location}.dropins[{index}]", "name")
            for index, dropin in enumerate(unit.dropins)
        )
    passwd = fields.get_object("passwd")
    users = [(entry.get_required_text("name"), entry) for entry in passwd.iter_objects("users")]
    groups = [(entry.get_text("name"), entry) for entry in passwd.iter_objects("groups")]
    for entries in (users, groups):
        _reject_duplicates((name, entry.path, "name") for name, entry in entries)
    for index, found in enumerate(config.users):
        keys = enumerate(found.ssh_keys)
        place = f"{passwd.path}.users[{index}].sshAuthorizedKeys"
        _reject_duplicates((key, f"{place}[{number}]", "") for number, key in keys)
    _reject_links_in_parents(config, nodes)
    written = {written for unit in config.units for written in list_unit_paths(unit)}
    for node in nodes:
        if node.path in written:
            raise IgnitionError(f"{node.location}.path: a unit of this config has the same path")


def list_unit_paths(unit: IgnitionUnit) -> Iterator[str]:
    """Yield the paths of the unit file and its drop-ins."""
    if unit.contents:
        yield f"{UNIT_ROOT}/{unit.name}"
    for dropin in unit.dropins:
        if dropin.contents:
            yield f"{UNIT_ROOT}/{unit.name}.d/{dropin.name}"


def _reject_links_in_parents(config: IgnitionConfig, nodes: list[IgnitionNode]) -> None:
    links = {link.path for link in config.links}
    if not links:
        return
    for node in nodes:
        parent = posixpath.dirname(node.path)
        while parent != "/":
            if parent in links:
                raise IgnitionError(f"{node.location}.path: {parent} is a link of this config")
            parent = posixpath.dirname(parent)
    directories = {directory.path for directory in config.directories}
    for link in config.links:
        target = posixpath.normpath(posixpath.join(link.path, link.target))
        if link.hard and target in directories:
            raise IgnitionError(f"{link.location}.target: a hard link cannot point to a directory")


def _reject_duplicates(entries: Iterable[tuple[str, str, str]]) -> None:
    locations: dict[str, str] = {}
    for key, place, leaf in entries:
        if key in locations:
            where = f"{place}.{leaf}" if leaf else place
            raise IgnitionError(f"{where}: duplicate of {locations[key]}")
        locations[key] = place


def _prune_object(values: Json, fields: Fields, depth: int) -> Json:
    found = {key: _prune_value(value, fields, depth - 1) for key, value in values.items()}
    return {key: value for key, value in found.items() if value not in (None, {}, [])}


def _prune_value(value: object, fields: Fields, depth: int) -> object:
    if depth < 0:
        raise fields.error(f"{fields.path}: nested more than {DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        return _prune_object(value, fields, depth)
    if isinstance(value, list):
        return [_prune_value(inner, fields, depth - 1) for inner in value]
    return value


def _is_name_too_long(name: str) -> bool:
    return len(name.encode()) > _MAX_NAME_BYTES


def _make_error(fields: Fields, name: str, expected: str, found: str) -> IgnitionError:
    return IgnitionError(f"{fields.path_of(name)}: expected {expected}, found {found!r:.200}")
