"""Ignition 2.2, still found in clusters that were installed with it, read as version 3.

In version 2 the last of several entries with one name wins, and files are overwritten unless they
say otherwise. What version 3 has no word for is refused.
"""

import posixpath
from dataclasses import replace

from treenail.api import ignition_rules as rules
from treenail.api.contents import Contents
from treenail.api.decode import Fields
from treenail.api.ignition_model import Directory, Dropin, File, Ignition, Link, Owner, Unit, User
from treenail.errors import IgnitionError

VERSION = "2.2.0"
ROOT_FILESYSTEM = "root"
ONLY_USER = "core"


def read(fields: Fields) -> Ignition:
    """The config, in the order that Go's conversion leaves: files and units last to first."""
    storage, passwd = fields.nested("storage"), fields.nested("passwd")
    for section, name in (
        (fields.nested("networkd"), "units"),
        (storage, "disks"),
        (storage, "raid"),
        (passwd, "groups"),
    ):
        if section.list_of(name):
            raise _unknown(section.at(name))
    for filesystem in storage.objects("filesystems"):
        if filesystem.text("name") != ROOT_FILESYSTEM:
            raise _unknown(filesystem.path)
    if rules.prune(fields.nested("ignition"), "version"):
        raise _unknown(f"{fields.at('ignition')} beside the version")
    config = Ignition(
        version=VERSION,
        files=_last_of_each(storage.each("files", _file)),
        directories=storage.each("directories", _directory),
        links=storage.each("links", _link),
        units=_merged_units(fields.nested("systemd").each("units", _unit)),
        users=_one_user(passwd),
    )
    rules.check(config, Fields({}, fields.path, fields.error))
    return config


def _file(fields: Fields) -> File:
    if fields.flag("append"):
        raise _unknown(fields.at("append"))
    contents = fields.nested("contents")
    found = Contents.from_fields(contents)
    overwrite = fields.optional_flag("overwrite")
    return File(
        path=_path(fields),
        contents=replace(found, source=found.source or "", compression=found.compression or None),
        mode=rules.mode(fields),
        user=_owner(fields, "user"),
        group=_owner(fields, "group"),
        overwrite=True if overwrite is None else overwrite,
        place=fields.path,
    )


def _directory(fields: Fields) -> Directory:
    return Directory(
        path=_path(fields),
        mode=rules.mode(fields),
        user=_owner(fields, "user"),
        group=_owner(fields, "group"),
        overwrite=fields.optional_flag("overwrite"),
        place=fields.path,
    )


def _link(fields: Fields) -> Link:
    return Link(
        path=_path(fields),
        target=fields.required_text("target"),
        hard=fields.flag("hard") or None,
        user=_owner(fields, "user"),
        group=_owner(fields, "group"),
        overwrite=fields.optional_flag("overwrite"),
        place=fields.path,
    )


def _unit(fields: Fields) -> Unit:
    enabled = fields.optional_flag("enabled")
    dropins = fields.each("dropins", rules.dropin)
    return Unit(
        name=rules.unit_name(fields),
        contents=fields.text("contents") or None,
        # "enable" is the older word, and the newer one wins.
        enabled=fields.flag("enable") or None if enabled is None else enabled,
        mask=fields.flag("mask") or None,
        dropins=tuple(Dropin(dropin.name, dropin.contents or None) for dropin in dropins),
        place=fields.path,
    )


def _path(fields: Fields) -> str:
    filesystem = fields.text("filesystem")
    if filesystem != ROOT_FILESYSTEM:
        raise fields.error(
            f"{fields.at('filesystem')}: expected {ROOT_FILESYSTEM}, found {filesystem!r:.40}"
        )
    found = fields.text("path")
    # Version 2 lets a path be untidy; version 3 does not.
    tidy = posixpath.normpath(f"/{found.lstrip('/')}") if found.startswith("/") else found
    return rules.path(Fields({"path": tidy}, fields.path, fields.error))


def _owner(fields: Fields, name: str) -> Owner:
    found = rules.owner(fields, name)
    return replace(found, name=found.name or None)


def _last_of_each(files: tuple[File, ...]) -> tuple[File, ...]:
    found: dict[str, File] = {}
    for file in reversed(files):
        found.setdefault(file.path, file)
    return tuple(found.values())


def _merged_units(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The last unit of each name, with the drop-ins that only earlier ones have behind its own."""
    found: dict[str, Unit] = {}
    for unit in reversed(units):
        merged = found.setdefault(unit.name, unit)
        present = {dropin.name for dropin in merged.dropins}
        more = tuple(dropin for dropin in unit.dropins if dropin.name not in present)
        found[unit.name] = replace(merged, dropins=merged.dropins + more)
    return tuple(found.values())


def _one_user(passwd: Fields) -> tuple[User, ...]:
    """All entries of the one user: the last one's, with the keys of all, each once."""
    found: User | None = None
    for fields in reversed(list(passwd.objects("users"))):
        user = rules.user(fields)
        if user.name != ONLY_USER:
            raise fields.error(
                f"{fields.at('name')}: expected {ONLY_USER}, found {user.name!r:.40}"
            )
        merged = found or user
        found = replace(merged, ssh_keys=tuple(dict.fromkeys(merged.ssh_keys + user.ssh_keys)))
    return () if found is None else (found,)


def _unknown(what: str) -> IgnitionError:
    return IgnitionError(
        f"{what}: can't be said in Ignition 3, which the agent understands",
        remedy="write the config in Ignition 3.5",
    )
