"""Parse Ignition configs of all supported versions into one model.

Old clusters still contain configs of version 2.2, in which the last entry of a name wins, and files
are overwritten by default. Features without an equivalent in version 3 are rejected.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from treenail import errors
from treenail.api import decode
from treenail.api.ignition import model, schema
from treenail.units import unit_install

VERSION2 = "2.2.0"


VERSIONS = (VERSION2, "3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", model.VERSION)


def parse_ignition(document: object, *, location: str = "spec.config") -> model.IgnitionConfig:
    """Parse the document; raise `IgnitionError` with the location of the error.

    None is an empty config. Like Ignition this ignores fields that the version of the document does
    not have. A merged config may be valid here although Ignition would reject it as a document:
    `treenail.api.ignition.checks` has the checks for documents. Contents stay encoded.
    """
    if document is None:
        return model.IgnitionConfig()
    fields = decode.Fields.from_json(document, location, errors.IgnitionError)
    version = fields.get_object("ignition").get_text("version")
    if version not in VERSIONS:
        raise errors.IgnitionError(
            f"{fields.get_object('ignition').path_of('version')}: expected one of "
            f"{', '.join(VERSIONS)}, found {version!r:.40}",
            remedy=f"write the config in version {model.VERSION} of Ignition's format",
        )
    values = schema.drop_newer_fields(fields.values, version)
    fields = decode.Fields(values, location, errors.IgnitionError)
    return parse_ignition2(fields) if version == VERSION2 else _parse_ignition3(fields, version)


def _parse_ignition3(fields: decode.Fields, version: str) -> model.IgnitionConfig:
    storage, passwd = fields.get_object("storage"), fields.get_object("passwd")
    arguments = fields.get_object("kernelArguments")
    config = model.IgnitionConfig(
        version=version,
        files=storage.map_objects("files", _parse_file),
        directories=storage.map_objects("directories", _parse_directory),
        links=storage.map_objects("links", _parse_link),
        units=fields.get_object("systemd").map_objects("units", _parse_unit),
        users=passwd.map_objects("users", parse_user),
        groups=prune_objects(passwd, "groups"),
        disks=prune_objects(storage, "disks"),
        filesystems=prune_objects(storage, "filesystems"),
        raid=prune_objects(storage, "raid"),
        luks=storage.map_objects("luks", lambda entry: _parse_luks(entry, version)),
        kernel_arguments=arguments.get_text_list("shouldExist"),
        absent_kernel_arguments=arguments.get_text_list("shouldNotExist"),
        ignition_section=prune_fields(fields.get_object("ignition"), "version"),
    )
    validate_config(config, fields)
    return config


def _parse_file(fields: decode.Fields) -> model.IgnitionFile:
    return model.IgnitionFile(
        path=parse_path(fields),
        contents=model.Contents.from_fields(fields.get_object("contents")),
        append=fields.map_objects("append", model.Contents.from_fields),
        mode=parse_mode(fields),
        user=parse_owner(fields, "user"),
        group=parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_luks(fields: decode.Fields, version: str) -> decode.Json:
    luks = prune_fields(fields)
    clevis = fields.get_object("clevis")
    if version == "3.2.0" and clevis.values.get("custom") is not None:
        # Both texts are required in version 3.2 and optional in 3.3, so that empty ones stay.
        custom = {"config": "", "pin": "", **prune_fields(clevis.get_object("custom"))}
        luks["clevis"] = {**prune_fields(clevis), "custom": custom}
    return luks


def _parse_directory(fields: decode.Fields) -> model.IgnitionDirectory:
    return model.IgnitionDirectory(
        path=parse_path(fields),
        mode=parse_mode(fields),
        user=parse_owner(fields, "user"),
        group=parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_link(fields: decode.Fields) -> model.IgnitionLink:
    return model.IgnitionLink(
        path=parse_path(fields),
        target=fields.get_required_text("target"),
        hard=fields.get_optional_bool("hard"),
        user=parse_owner(fields, "user"),
        group=parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_unit(fields: decode.Fields) -> model.IgnitionUnit:
    return model.IgnitionUnit(
        name=parse_unit_name(fields),
        contents=fields.get_optional_text("contents"),
        enabled=fields.get_optional_bool("enabled"),
        mask=fields.get_optional_bool("mask"),
        dropins=fields.map_objects("dropins", parse_dropin),
        location=fields.path,
    )


IgnitionNode = model.IgnitionFile | model.IgnitionDirectory | model.IgnitionLink

UNIT_TYPES = (
    "service", "socket", "device", "mount", "automount", "swap", "target", "path", "timer",
    "snapshot", "slice", "scope",
)  # fmt: skip

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


def parse_path(fields: decode.Fields) -> str:
    """Read an absolute, clean path: without ``..`` and ``//``, and not the root."""
    path = fields.get_required_text("path")
    if not path.startswith("/"):
        raise _make_error(fields, "path", "an absolute path", path)
    if not _CLEAN_PATH.fullmatch(path):
        raise _make_error(
            fields, "path", "a path without '.', '..', '//' or a slash at its end", path
        )
    size = len(path.encode())
    if size > _MAX_PATH_BYTES:
        raise _make_error(fields, "path", f"a path of up to {_MAX_PATH_BYTES} bytes", path)
    if size > _MAX_NAME_BYTES and any(map(_is_name_too_long, path.split("/"))):
        raise _make_error(
            fields, "path", f"names of up to {_MAX_NAME_BYTES} bytes in the path", path
        )
    return path


def parse_mode(fields: decode.Fields) -> int | None:
    """Read permission bits, None when absent."""
    mode = fields.get_optional_integer("mode")
    if mode is not None and not 0 <= mode <= _MAX_MODE:
        raise fields.make_error("mode", "a mode from 0 to 4095 (07777)")
    return mode


def parse_owner(fields: decode.Fields, name: str) -> model.IgnitionOwner:
    """Read the user or group of a file; it has both an id and a name only in a merged config."""
    value = fields.values.get(name)
    if value is None:
        return model.UNSET_OWNER
    # Most owners are an ID alone, and a config may have thousands of files.
    if isinstance(value, dict) and value.keys() == _ID_ALONE:
        number = value["id"]
        if type(number) is int and 0 <= number < _NO_ID:
            return _make_owner(number)
    owner = fields.get_object(name)
    number, text = owner.get_optional_integer("id"), owner.get_optional_text("name")
    if number is not None and not 0 <= number < _NO_ID:
        raise owner.make_error("id", "the number of a user or group")
    return _make_owner(number, text)


_make_owner = lru_cache(maxsize=256)(model.IgnitionOwner)


def parse_unit_name(fields: decode.Fields) -> str:
    """Read the name of a unit; a slash would lead to another directory."""
    name = fields.get_required_text("name")
    if not _UNIT_NAME.fullmatch(name):
        raise _make_error(
            fields, "name", "the name of a systemd unit, with its type at the end", name
        )
    # Drop-ins are in the directory NAME.d.
    has_dropins = bool(fields.get_list("dropins"))
    if _is_name_too_long(f"{name}.d" if has_dropins else name):
        raise _make_error(fields, "name", "a shorter name", name)
    return name


def parse_dropin(fields: decode.Fields) -> model.IgnitionDropin:
    """Read a drop-in; a slash in its name would lead to another directory."""
    name = fields.get_required_text("name")
    if not _DROPIN_NAME.fullmatch(name):
        raise _make_error(fields, "name", "a file name that ends in .conf", name)
    if _is_name_too_long(name):
        raise _make_error(fields, "name", f"a name of up to {_MAX_NAME_BYTES} bytes", name)
    return model.IgnitionDropin(name, fields.get_optional_text("contents"))


def parse_user(fields: decode.Fields) -> model.IgnitionUser:
    """Read a user of any version; errors omit the password hash."""
    password_hash = fields.get_optional_text("passwordHash")
    if _NOT_IN_HASHES & set(password_hash or ""):
        raise fields.error(
            f"{fields.path_of('passwordHash')}: expected a hash without colons, line ends and null "
            "characters"
        )
    return model.IgnitionUser(
        name=fields.get_required_text("name"),
        ssh_keys=fields.get_text_list("sshAuthorizedKeys"),
        password_hash=password_hash,
        others=prune_fields(fields, "name", "sshAuthorizedKeys", "passwordHash"),
    )


def prune_objects(fields: decode.Fields, name: str) -> tuple[decode.Json, ...]:
    """Copy the objects of a list without interpreting them."""
    return fields.map_objects(name, prune_fields)


def prune_fields(fields: decode.Fields, *without: str) -> decode.Json:
    """Copy the fields except ``without``, and drop null and empty values as Go does."""
    return _prune_object(fields.get_other_fields(*without), fields, decode.DEPTH_LIMIT)


def validate_config(config: model.IgnitionConfig, fields: decode.Fields) -> None:
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
    for index, user in enumerate(config.users):
        keys = enumerate(user.ssh_keys)
        place = f"{passwd.path}.users[{index}].sshAuthorizedKeys"
        _reject_duplicates((key, f"{place}[{number}]", "") for number, key in keys)
    _reject_links_in_parents(config, nodes)
    written = {written for unit in config.units for written in list_unit_paths(unit)}
    for node in nodes:
        if node.path in written:
            raise errors.IgnitionError(
                f"{node.location}.path: a unit of this config has the same path"
            )


def list_unit_paths(unit: model.IgnitionUnit) -> Iterator[str]:
    """Yield the paths of the unit file and its drop-ins."""
    if unit.contents:
        yield f"{unit_install.UNIT_DIRECTORY}/{unit.name}"
    for dropin in unit.dropins:
        if dropin.contents:
            yield f"{unit_install.UNIT_DIRECTORY}/{unit.name}.d/{dropin.name}"


def _reject_links_in_parents(config: model.IgnitionConfig, nodes: list[IgnitionNode]) -> None:
    links = {link.path for link in config.links}
    if not links:
        return
    for node in nodes:
        parent = posixpath.dirname(node.path)
        while parent != "/":
            if parent in links:
                raise errors.IgnitionError(
                    f"{node.location}.path: {parent} is a link of this config"
                )
            parent = posixpath.dirname(parent)
    directories = {directory.path for directory in config.directories}
    for link in config.links:
        target = posixpath.normpath(posixpath.join(link.path, link.target))
        if link.hard and target in directories:
            raise errors.IgnitionError(
                f"{link.location}.target: a hard link cannot point to a directory"
            )


def _reject_duplicates(entries: Iterable[tuple[str, str, str]]) -> None:
    locations: dict[str, str] = {}
    for key, place, leaf in entries:
        if key in locations:
            where = f"{place}.{leaf}" if leaf else place
            raise errors.IgnitionError(f"{where}: duplicate of {locations[key]}")
        locations[key] = place


def _prune_object(values: decode.Json, fields: decode.Fields, depth: int) -> decode.Json:
    pruned = {key: _prune_value(value, fields, depth - 1) for key, value in values.items()}
    return {key: value for key, value in pruned.items() if value not in (None, {}, [])}


def _prune_value(value: object, fields: decode.Fields, depth: int) -> object:
    if depth < 0:
        raise fields.error(f"{fields.path}: nested more than {decode.DEPTH_LIMIT} deep")
    if isinstance(value, dict):
        return _prune_object(value, fields, depth)
    if isinstance(value, list):
        return [_prune_value(inner, fields, depth - 1) for inner in value]
    return value


def _is_name_too_long(name: str) -> bool:
    return len(name.encode()) > _MAX_NAME_BYTES


def _make_error(
    fields: decode.Fields, name: str, expected: str, actual: str
) -> errors.IgnitionError:
    return errors.IgnitionError(
        f"{fields.path_of(name)}: expected {expected}, found {actual!r:.200}"
    )


ROOT_FILESYSTEM = "root"
SUPPORTED_USER = "core"


def parse_ignition2(fields: decode.Fields) -> model.IgnitionConfig:
    """Parse the config. As in the MCO's conversion, files and units come last to first."""
    storage, passwd = fields.get_object("storage"), fields.get_object("passwd")
    networkd = fields.get_object("networkd")
    if networkd.get_list("units"):
        raise _make_unsupported_error(networkd.path_of("units"))
    for filesystem in storage.iter_objects("filesystems"):
        if filesystem.get_text("name") != ROOT_FILESYSTEM:
            raise _make_unsupported_error(filesystem.path)
    for disk in storage.iter_objects("disks"):
        if disk.get_list("partitions"):
            raise _make_unsupported_error(disk.path_of("partitions"))
    config = model.IgnitionConfig(
        version=VERSION2,
        files=_keep_last_files(storage.map_objects("files", _parse_file2)),
        directories=storage.map_objects("directories", _parse_directory2),
        links=storage.map_objects("links", _parse_link2),
        units=_merge_units(fields.get_object("systemd").map_objects("units", _parse_unit2)),
        users=_merge_users(passwd),
        groups=passwd.map_objects("groups", _prune_zeros),
        disks=storage.map_objects("disks", _prune_zeros),
        raid=storage.map_objects("raid", _prune_zeros),
        ignition_section=_convert_ignition(fields.get_object("ignition")),
    )
    validate_config(config, decode.Fields({}, fields.path, fields.error))
    _reject_link_prefixes(config)
    return config


def _parse_file2(fields: decode.Fields) -> model.IgnitionFile:
    source = model.Contents.from_fields(fields.get_object("contents"))
    contents = replace(source, source=source.source or "", compression=source.compression or None)
    is_appended = fields.get_bool("append")
    overwrite = False if is_appended else fields.get_optional_bool("overwrite")
    return model.IgnitionFile(
        path=_parse_path(fields),
        contents=model.Contents() if is_appended else contents,
        append=(contents,) if is_appended else (),
        mode=parse_mode(fields),
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=True if overwrite is None else overwrite,
        location=fields.path,
    )


def _parse_directory2(fields: decode.Fields) -> model.IgnitionDirectory:
    return model.IgnitionDirectory(
        path=_parse_path(fields),
        mode=parse_mode(fields),
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_link2(fields: decode.Fields) -> model.IgnitionLink:
    return model.IgnitionLink(
        path=_parse_path(fields),
        target=fields.get_required_text("target"),
        hard=fields.get_bool("hard") or None,
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_unit2(fields: decode.Fields) -> model.IgnitionUnit:
    enabled = fields.get_optional_bool("enabled")
    dropins = fields.map_objects("dropins", parse_dropin)
    return model.IgnitionUnit(
        name=parse_unit_name(fields),
        contents=fields.get_text("contents") or None,
        # "enabled" replaced "enable" and wins over it.
        enabled=fields.get_bool("enable") or None if enabled is None else enabled,
        mask=fields.get_bool("mask") or None,
        dropins=tuple(
            model.IgnitionDropin(dropin.name, dropin.contents or None) for dropin in dropins
        ),
        location=fields.path,
    )


def _parse_path(fields: decode.Fields) -> str:
    filesystem = fields.get_text("filesystem")
    if filesystem != ROOT_FILESYSTEM:
        raise fields.error(
            f"{fields.path_of('filesystem')}: expected {ROOT_FILESYSTEM}, found {filesystem!r:.40}"
        )
    path = fields.get_text("path")
    # Version 2 accepts unclean paths, version 3 does not.
    tidy = posixpath.normpath(f"/{path.lstrip('/')}") if path.startswith("/") else path
    return parse_path(decode.Fields({"path": tidy}, fields.path, fields.error))


def _parse_owner(fields: decode.Fields, name: str) -> model.IgnitionOwner:
    owner = parse_owner(fields, name)
    return replace(owner, name=owner.name or None)


def _keep_last_files(files: tuple[model.IgnitionFile, ...]) -> tuple[model.IgnitionFile, ...]:
    last_files: dict[str, model.IgnitionFile] = {}
    for file in reversed(files):
        last_files.setdefault(file.path, file)
    return tuple(last_files.values())


def _merge_units(units: tuple[model.IgnitionUnit, ...]) -> tuple[model.IgnitionUnit, ...]:
    """Return the last unit of each name, with the drop-ins of earlier ones appended."""
    last_units: dict[str, model.IgnitionUnit] = {}
    for unit in reversed(units):
        merged = last_units.setdefault(unit.name, unit)
        present = {dropin.name for dropin in merged.dropins}
        more = tuple(dropin for dropin in unit.dropins if dropin.name not in present)
        last_units[unit.name] = replace(merged, dropins=merged.dropins + more)
    return tuple(last_units.values())


def _merge_users(passwd: decode.Fields) -> tuple[model.IgnitionUser, ...]:
    """Merge all entries of the user core: the last entry with the SSH keys of all."""
    core: model.IgnitionUser | None = None
    for fields in reversed(list(passwd.iter_objects("users"))):
        user = parse_user(fields)
        if user.name != SUPPORTED_USER:
            raise fields.error(
                f"{fields.path_of('name')}: expected {SUPPORTED_USER}, found {user.name!r:.40}"
            )
        merged = core or replace(user, others=_prune_zeros(decode.Fields(user.others, fields.path)))
        core = replace(merged, ssh_keys=tuple(dict.fromkeys(merged.ssh_keys + user.ssh_keys)))
    return () if core is None else (core,)


def _convert_ignition(fields: decode.Fields) -> decode.Json:
    config = fields.get_object("config")
    converted: decode.Json = {}
    if config.values.get("replace") is not None:
        converted["replace"] = _convert_reference(config.get_object("replace"))
    if merge := config.map_objects("append", _convert_reference):
        converted["merge"] = list(merge)
    others = prune_fields(fields, "version", "config")
    return {**others, "config": converted} if converted else others


def _convert_reference(fields: decode.Fields) -> decode.Json:
    return {"source": "", **prune_fields(fields)}


def _prune_zeros(fields: decode.Fields) -> decode.Json:
    """Return the fields without zero values, which version 2 does not distinguish from absent ones.

    The numbers of users and groups may be 0.
    """
    return {
        name: value
        for name, value in prune_fields(fields).items()
        if value or name in ("uid", "gid")
    }


def _reject_link_prefixes(config: model.IgnitionConfig) -> None:
    """Raise when a path begins with that of a link, as the MCO's conversion does."""
    nodes: list[IgnitionNode] = [*config.files, *config.directories, *config.links]
    for link in config.links:
        for node in nodes:
            if node.path != link.path and node.path.startswith(link.path):
                raise errors.IgnitionError(
                    f"{node.location}.path: begins with the path of a link, {link.path}",
                    remedy="write the config in Ignition 3.5",
                )


def _make_unsupported_error(what: str) -> errors.IgnitionError:
    return errors.IgnitionError(
        f"{what}: has no equivalent in Ignition 3",
        remedy="write the config in Ignition 3.5",
    )
