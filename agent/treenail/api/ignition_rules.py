"""What every Ignition config must keep to, field by field and as a whole."""

import posixpath
import re
from collections.abc import Iterable, Iterator

from treenail.api.decode import DEPTH_LIMIT, Fields, Json
from treenail.api.ignition_model import (
    NOBODY_NAMED,
    Directory,
    Dropin,
    File,
    Ignition,
    Link,
    Owner,
    Unit,
    User,
)
from treenail.errors import IgnitionError

Node = File | Directory | Link

UNIT_TYPES = (
    "service", "socket", "device", "mount", "automount", "swap", "target", "path", "timer",
    "snapshot", "slice", "scope",
)  # fmt: skip
UNIT_ROOT = "/etc/systemd/system"

_TIDY_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[^/\0]+)+")
_UNIT_NAME = re.compile(rf"[A-Za-z0-9:._\\@-]+\.({'|'.join(UNIT_TYPES)})")
_DROPIN_NAME = re.compile(r"[^/\0]+\.conf")
_MAX_MODE = 0o7777
# What Linux allows; the whole path has a null character at its end.
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_NOT_IN_HASHES = frozenset(":\n\0")


def path(fields: Fields) -> str:
    """An absolute path that says where it leads: no ``..``, nothing twice, not the root itself."""
    found = fields.required_text("path")
    if not found.startswith("/"):
        raise _wrong(fields, "path", "an absolute path", found)
    if not _TIDY_PATH.fullmatch(found):
        raise _wrong(fields, "path", "a path without '.', '..', '//' or a slash at its end", found)
    if len(found.encode()) > _MAX_PATH_BYTES:
        raise _wrong(fields, "path", f"a path of up to {_MAX_PATH_BYTES} bytes", found)
    if any(_too_long(name) for name in found.split("/")):
        raise _wrong(fields, "path", f"names of up to {_MAX_NAME_BYTES} bytes in the path", found)
    return found


def mode(fields: Fields) -> int | None:
    """Permission bits, None when absent."""
    found = fields.optional_integer("mode")
    if found is not None and not 0 <= found <= _MAX_MODE:
        raise fields.refuse("mode", "a mode from 0 to 4095 (07777)")
    return found


def owner(fields: Fields, name: str) -> Owner:
    """A file's user or group."""
    if fields.values.get(name) is None:
        return NOBODY_NAMED
    found = fields.nested(name)
    number, text = found.optional_integer("id"), found.optional_text("name")
    if number is not None and text:
        raise fields.error(f"{found.path}: expected an id or a name, found both")
    if number is not None and not 0 <= number < 2**32 - 1:
        raise found.refuse("id", "the number of a user or group")
    return Owner(number, text)


def unit_name(fields: Fields) -> str:
    """The name of a unit; one with a slash would be written elsewhere."""
    found = fields.required_text("name")
    if not _UNIT_NAME.fullmatch(found):
        raise _wrong(fields, "name", "the name of a systemd unit, with its type at the end", found)
    # Its drop-ins are in a directory of its name and two characters more.
    has_dropins = bool(fields.list_of("dropins"))
    if _too_long(f"{found}.d" if has_dropins else found):
        raise _wrong(fields, "name", "a shorter name", found)
    return found


def dropin(fields: Fields) -> Dropin:
    """A drop-in; one with a slash in its name would be written elsewhere."""
    found = fields.required_text("name")
    if not _DROPIN_NAME.fullmatch(found):
        raise _wrong(fields, "name", "a file name that ends in .conf", found)
    if _too_long(found):
        raise _wrong(fields, "name", f"a name of up to {_MAX_NAME_BYTES} bytes", found)
    return Dropin(found, fields.optional_text("contents"))


def user(fields: Fields) -> User:
    """A user, of any version; a hash that would break its line in /etc/shadow is not told."""
    password_hash = fields.optional_text("passwordHash")
    if _NOT_IN_HASHES & set(password_hash or ""):
        raise fields.error(
            f"{fields.at('passwordHash')}: expected a hash without colons, line ends and null "
            "characters"
        )
    return User(
        name=fields.required_text("name"),
        ssh_keys=fields.texts("sshAuthorizedKeys"),
        password_hash=password_hash,
        others=prune(fields, "name", "sshAuthorizedKeys", "passwordHash"),
    )


def kept(fields: Fields, name: str) -> tuple[Json, ...]:
    """The objects of a list that is not read further."""
    return fields.each(name, prune)


def prune(fields: Fields, *without: str) -> Json:
    """The fields but those, less what is null, an empty object or an empty list, as Go does it."""
    return _pruned_object(fields.others(*without), fields, DEPTH_LIMIT)


def check(config: Ignition, fields: Fields) -> None:
    """Raise when one entry of the config contradicts another."""
    nodes: list[Node] = [*config.files, *config.directories, *config.links]
    _refuse_twice((node.path, node.place, "path") for node in nodes)
    _refuse_twice((unit.name, unit.place, "name") for unit in config.units)
    for unit in config.units:
        _refuse_twice(
            (dropin.name, f"{unit.place}.dropins[{index}]", "name")
            for index, dropin in enumerate(unit.dropins)
        )
    passwd = fields.nested("passwd")
    for name in ("users", "groups"):
        entries = list(passwd.objects(name))
        _refuse_twice((entry.required_text("name"), entry.path, "name") for entry in entries)
    for index, found in enumerate(config.users):
        keys = enumerate(found.ssh_keys)
        place = f"{passwd.path}.users[{index}].sshAuthorizedKeys"
        _refuse_twice((key, f"{place}[{number}]", "") for number, key in keys)
    _refuse_links_on_the_way(config, nodes)
    written = {written for unit in config.units for written in unit_paths(unit)}
    for node in nodes:
        if node.path in written:
            raise IgnitionError(f"{node.place}.path: a unit of this config is written there too")


def unit_paths(unit: Unit) -> Iterator[str]:
    """Where the contents of a unit are written."""
    if unit.contents:
        yield f"{UNIT_ROOT}/{unit.name}"
    for dropin in unit.dropins:
        if dropin.contents:
            yield f"{UNIT_ROOT}/{unit.name}.d/{dropin.name}"


def _refuse_links_on_the_way(config: Ignition, nodes: list[Node]) -> None:
    links = {link.path for link in config.links}
    if not links:
        return
    for node in nodes:
        parent = posixpath.dirname(node.path)
        while parent != "/":
            if parent in links:
                raise IgnitionError(f"{node.place}.path: {parent} is a link of this config")
            parent = posixpath.dirname(parent)
    directories = {directory.path for directory in config.directories}
    for link in config.links:
        target = posixpath.normpath(posixpath.join(link.path, link.target))
        if link.hard and target in directories:
            raise IgnitionError(f"{link.place}.target: a hard link can't lead to a directory")


def _refuse_twice(entries: Iterable[tuple[str, str, str]]) -> None:
    seen: dict[str, str] = {}
    for key, place, leaf in entries:
        if key in seen:
            where = f"{place}.{leaf}" if leaf else place
            raise IgnitionError(f"{where}: the same as {seen[key]}")
        seen[key] = place


def _pruned_object(values: Json, fields: Fields, depth: int) -> Json:
    found = {key: _pruned(value, fields, depth - 1) for key, value in values.items()}
    return {key: value for key, value in found.items() if value not in (None, {}, [])}


def _pruned(value: object, fields: Fields, depth: int) -> object:
    if depth < 0:
        raise fields.error(f"{fields.path}: nested more than {DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        return _pruned_object(value, fields, depth)
    if isinstance(value, list):
        return [_pruned(inner, fields, depth - 1) for inner in value]
    return value


def _too_long(name: str) -> bool:
    return len(name.encode()) > _MAX_NAME_BYTES


def _wrong(fields: Fields, name: str, expected: str, found: str) -> IgnitionError:
    return IgnitionError(f"{fields.at(name)}: expected {expected}, found {found!r:.200}")
