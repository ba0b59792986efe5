"""Converts Ignition 2.2, which old clusters still contain, to version 3.

In version 2 the last entry of a name wins, and files are overwritten by default. Features without
an equivalent in version 3 are rejected.
"""

import posixpath
from dataclasses import replace

from treenail.api import ignition_rules as rules
from treenail.api.contents import Contents
from treenail.api.decode import Fields, Json
from treenail.api.ignition_model import (
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

VERSION = "2.2.0"
ROOT_FILESYSTEM = "root"
SUPPORTED_USER = "core"


def parse_ignition2(fields: Fields) -> IgnitionConfig:
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
    config = IgnitionConfig(
        version=VERSION,
        files=_keep_last_files(storage.map_objects("files", _parse_file)),
        directories=storage.map_objects("directories", _parse_directory),
        links=storage.map_objects("links", _parse_link),
        units=_merge_units(fields.get_object("systemd").map_objects("units", _parse_unit)),
        users=_merge_users(passwd),
        groups=passwd.map_objects("groups", _prune_zeros),
        disks=storage.map_objects("disks", _prune_zeros),
        raid=storage.map_objects("raid", _prune_zeros),
        ignition_section=_convert_ignition(fields.get_object("ignition")),
    )
    rules.validate_config(config, Fields({}, fields.path, fields.error))
    _reject_link_prefixes(config)
    return config


def _parse_file(fields: Fields) -> IgnitionFile:
    found = Contents.from_fields(fields.get_object("contents"))
    contents = replace(found, source=found.source or "", compression=found.compression or None)
    is_appended = fields.get_bool("append")
    overwrite = False if is_appended else fields.get_optional_bool("overwrite")
    return IgnitionFile(
        path=_parse_path(fields),
        contents=Contents() if is_appended else contents,
        append=(contents,) if is_appended else (),
        mode=rules.parse_mode(fields),
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=True if overwrite is None else overwrite,
        location=fields.path,
    )


def _parse_directory(fields: Fields) -> IgnitionDirectory:
    return IgnitionDirectory(
        path=_parse_path(fields),
        mode=rules.parse_mode(fields),
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_link(fields: Fields) -> IgnitionLink:
    return IgnitionLink(
        path=_parse_path(fields),
        target=fields.get_required_text("target"),
        hard=fields.get_bool("hard") or None,
        user=_parse_owner(fields, "user"),
        group=_parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_unit(fields: Fields) -> IgnitionUnit:
    enabled = fields.get_optional_bool("enabled")
    dropins = fields.map_objects("dropins", rules.parse_dropin)
    return IgnitionUnit(
        name=rules.parse_unit_name(fields),
        contents=fields.get_text("contents") or None,
        # "enabled" replaced "enable" and wins over it.
        enabled=fields.get_bool("enable") or None if enabled is None else enabled,
        mask=fields.get_bool("mask") or None,
        dropins=tuple(IgnitionDropin(dropin.name, dropin.contents or None) for dropin in dropins),
        location=fields.path,
    )


def _parse_path(fields: Fields) -> str:
    filesystem = fields.get_text("filesystem")
    if filesystem != ROOT_FILESYSTEM:
        raise fields.error(
            f"{fields.path_of('filesystem')}: expected {ROOT_FILESYSTEM}, found {filesystem!r:.40}"
        )
    found = fields.get_text("path")
    # Version 2 accepts unclean paths, version 3 does not.
    tidy = posixpath.normpath(f"/{found.lstrip('/')}") if found.startswith("/") else found
    return rules.parse_path(Fields({"path": tidy}, fields.path, fields.error))


def _parse_owner(fields: Fields, name: str) -> IgnitionOwner:
    found = rules.parse_owner(fields, name)
    return replace(found, name=found.name or None)


def _keep_last_files(files: tuple[IgnitionFile, ...]) -> tuple[IgnitionFile, ...]:
    found: dict[str, IgnitionFile] = {}
    for file in reversed(files):
        found.setdefault(file.path, file)
    return tuple(found.values())


def _merge_units(units: tuple[IgnitionUnit, ...]) -> tuple[IgnitionUnit, ...]:
    """Return the last unit of each name, with the drop-ins of earlier ones appended."""
    found: dict[str, IgnitionUnit] = {}
    for unit in reversed(units):
        merged = found.setdefault(unit.name, unit)
        present = {dropin.name for dropin in merged.dropins}
        more = tuple(dropin for dropin in unit.dropins if dropin.name not in present)
        found[unit.name] = replace(merged, dropins=merged.dropins + more)
    return tuple(found.values())


def _merge_users(passwd: Fields) -> tuple[IgnitionUser, ...]:
    """Merge all entries of the user core: the last entry with the SSH keys of all."""
    found: IgnitionUser | None = None
    for fields in reversed(list(passwd.iter_objects("users"))):
        user = rules.parse_user(fields)
        if user.name != SUPPORTED_USER:
            raise fields.error(
                f"{fields.path_of('name')}: expected {SUPPORTED_USER}, found {user.name!r:.40}"
            )
        merged = found or replace(user, others=_prune_zeros(Fields(user.others, fields.path)))
        found = replace(merged, ssh_keys=tuple(dict.fromkeys(merged.ssh_keys + user.ssh_keys)))
    return () if found is None else (found,)


def _convert_ignition(fields: Fields) -> Json:
    config = fields.get_object("config")
    found: Json = {}
    if config.values.get("replace") is not None:
        found["replace"] = _convert_reference(config.get_object("replace"))
    if merge := config.map_objects("append", _convert_reference):
        found["merge"] = list(merge)
    others = rules.prune_fields(fields, "version", "config")
    return {**others, "config": found} if found else others


def _convert_reference(fields: Fields) -> Json:
    return {"source": "", **rules.prune_fields(fields)}


def _prune_zeros(fields: Fields) -> Json:
    """Return the fields without zero values, which version 2 does not distinguish from absent ones.

    The numbers of users and groups may be 0.
    """
    return {
        name: value
        for name, value in rules.prune_fields(fields).items()
        if value or name in ("uid", "gid")
    }


def _reject_link_prefixes(config: IgnitionConfig) -> None:
    """Raise when a path begins with that of a link, as the MCO's conversion does."""
    nodes: list[rules.IgnitionNode] = [*config.files, *config.directories, *config.links]
    for link in config.links:
        for node in nodes:
            if node.path != link.path and node.path.startswith(link.path):
                raise IgnitionError(
                    f"{node.location}.path: begins with the path of a link, {link.path}",
                    remedy="write the config in Ignition 3.5",
                )


def _make_unsupported_error(what: str) -> IgnitionError:
    return IgnitionError(
        f"{what}: has no equivalent in Ignition 3",
        remedy="write the config in Ignition 3.5",
    )
