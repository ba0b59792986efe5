"""Ignition configs of every version a cluster may hold, read into one model."""

from treenail.api import ignition2
from treenail.api import ignition_rules as rules
from treenail.api.contents import Contents
from treenail.api.decode import Fields
from treenail.api.ignition_model import VERSION, Directory, File, Ignition, Link, Unit
from treenail.errors import IgnitionError

VERSIONS = (ignition2.VERSION, "3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", VERSION)


def read(document: object, *, place: str = "spec.config") -> Ignition:
    """The config in the document; raises `IgnitionError` that names the place of what is wrong.

    No document is an empty config. What Ignition refuses is refused, but for unknown fields, which
    Ignition ignores too. Contents are decoded by whoever needs them.
    """
    if document is None:
        return Ignition()
    fields = Fields.of(document, place, IgnitionError)
    version = fields.nested("ignition").text("version")
    if version not in VERSIONS:
        raise IgnitionError(
            f"{fields.nested('ignition').at('version')}: expected one of {', '.join(VERSIONS)}, "
            f"found {version!r:.40}",
            remedy=f"write the config in version {VERSION} of Ignition's format",
        )
    return ignition2.read(fields) if version == ignition2.VERSION else _read3(fields, version)


def _read3(fields: Fields, version: str) -> Ignition:
    for name, since in (("kernelArguments", "3.3.0"), ("storage.luks", "3.2.0")):
        parent, _, leaf = name.rpartition(".")
        section = fields.nested(parent) if parent else fields
        if section.values.get(leaf) and version < since:
            raise IgnitionError(
                f"{section.at(leaf)}: needs Ignition {since} or later, found {version}",
                remedy=f"write {since} as the version, if the rest of the config allows it",
            )
    storage, passwd = fields.nested("storage"), fields.nested("passwd")
    arguments = fields.nested("kernelArguments")
    config = Ignition(
        version=version,
        files=storage.each("files", _file),
        directories=storage.each("directories", _directory),
        links=storage.each("links", _link),
        units=fields.nested("systemd").each("units", _unit),
        users=passwd.each("users", rules.user),
        groups=rules.kept(passwd, "groups"),
        disks=rules.kept(storage, "disks"),
        filesystems=rules.kept(storage, "filesystems"),
        raid=rules.kept(storage, "raid"),
        luks=rules.kept(storage, "luks"),
        kernel_arguments=arguments.texts("shouldExist"),
        absent_kernel_arguments=arguments.texts("shouldNotExist"),
        section=rules.prune(fields.nested("ignition"), "version"),
    )
    rules.check(config, fields)
    return config


def _file(fields: Fields) -> File:
    found = File(
        path=rules.path(fields),
        contents=Contents.from_fields(fields.nested("contents")),
        append=fields.each("append", Contents.from_fields),
        mode=rules.mode(fields),
        user=rules.owner(fields, "user"),
        group=rules.owner(fields, "group"),
        overwrite=fields.optional_flag("overwrite"),
        place=fields.path,
    )
    if found.overwrite and found.contents.source is None:
        raise fields.error(f"{fields.at('overwrite')}: a file to overwrite needs contents.source")
    return found


def _directory(fields: Fields) -> Directory:
    return Directory(
        path=rules.path(fields),
        mode=rules.mode(fields),
        user=rules.owner(fields, "user"),
        group=rules.owner(fields, "group"),
        overwrite=fields.optional_flag("overwrite"),
        place=fields.path,
    )


def _link(fields: Fields) -> Link:
    return Link(
        path=rules.path(fields),
        target=fields.required_text("target"),
        hard=fields.optional_flag("hard"),
        user=rules.owner(fields, "user"),
        group=rules.owner(fields, "group"),
        overwrite=fields.optional_flag("overwrite"),
        place=fields.path,
    )


def _unit(fields: Fields) -> Unit:
    return Unit(
        name=rules.unit_name(fields),
        contents=fields.optional_text("contents"),
        enabled=fields.optional_flag("enabled"),
        mask=fields.optional_flag("mask"),
        dropins=fields.each("dropins", rules.dropin),
        place=fields.path,
    )
