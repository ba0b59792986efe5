"""Parses Ignition configs of all supported versions into one model."""

from treenail.api import ignition2, ignition_schema
from treenail.api import ignition_rules as rules
from treenail.api.contents import Contents
from treenail.api.decode import Fields, Json
from treenail.api.ignition_model import (
    VERSION,
    IgnitionConfig,
    IgnitionDirectory,
    IgnitionFile,
    IgnitionLink,
    IgnitionUnit,
)
from treenail.errors import IgnitionError

VERSIONS = (ignition2.VERSION, "3.0.0", "3.1.0", "3.2.0", "3.3.0", "3.4.0", VERSION)


def parse_ignition(document: object, *, location: str = "spec.config") -> IgnitionConfig:
    """Parse the document; raise `IgnitionError` with the location of the error.

    None is an empty config. Like Ignition this ignores fields that the version of the document does
    not have. A merged config may be valid here although Ignition would reject it as a document:
    `treenail.api.ignition_checks` has the checks for documents. Contents stay encoded.
    """
    if document is None:
        return IgnitionConfig()
    fields = Fields.from_json(document, location, IgnitionError)
    version = fields.get_object("ignition").get_text("version")
    if version not in VERSIONS:
        raise IgnitionError(
            f"{fields.get_object('ignition').path_of('version')}: expected one of "
            f"{', '.join(VERSIONS)}, found {version!r:.40}",
            remedy=f"write the config in version {VERSION} of Ignition's format",
        )
    values = ignition_schema.drop_newer_fields(fields.values, version)
    fields = Fields(values, location, IgnitionError)
    return (
        ignition2.parse_ignition2(fields)
        if version == ignition2.VERSION
        else _parse_ignition3(fields, version)
    )


def _parse_ignition3(fields: Fields, version: str) -> IgnitionConfig:
    storage, passwd = fields.get_object("storage"), fields.get_object("passwd")
    arguments = fields.get_object("kernelArguments")
    config = IgnitionConfig(
        version=version,
        files=storage.map_objects("files", _parse_file),
        directories=storage.map_objects("directories", _parse_directory),
        links=storage.map_objects("links", _parse_link),
        units=fields.get_object("systemd").map_objects("units", _parse_unit),
        users=passwd.map_objects("users", rules.parse_user),
        groups=rules.prune_objects(passwd, "groups"),
        disks=rules.prune_objects(storage, "disks"),
        filesystems=rules.prune_objects(storage, "filesystems"),
        raid=rules.prune_objects(storage, "raid"),
        luks=storage.map_objects("luks", lambda entry: _parse_luks(entry, version)),
        kernel_arguments=arguments.get_text_list("shouldExist"),
        absent_kernel_arguments=arguments.get_text_list("shouldNotExist"),
        ignition_section=rules.prune_fields(fields.get_object("ignition"), "version"),
    )
    rules.validate_config(config, fields)
    return config


def _parse_file(fields: Fields) -> IgnitionFile:
    return IgnitionFile(
        path=rules.parse_path(fields),
        contents=Contents.from_fields(fields.get_object("contents")),
        append=fields.map_objects("append", Contents.from_fields),
        mode=rules.parse_mode(fields),
        user=rules.parse_owner(fields, "user"),
        group=rules.parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_luks(fields: Fields, version: str) -> Json:
    found = rules.prune_fields(fields)
    clevis = fields.get_object("clevis")
    if version == "3.2.0" and clevis.values.get("custom") is not None:
        # Both texts are required in version 3.2 and optional in 3.3, so that empty ones stay.
        custom = {"config": "", "pin": "", **rules.prune_fields(clevis.get_object("custom"))}
        found["clevis"] = {**rules.prune_fields(clevis), "custom": custom}
    return found


def _parse_directory(fields: Fields) -> IgnitionDirectory:
    return IgnitionDirectory(
        path=rules.parse_path(fields),
        mode=rules.parse_mode(fields),
        user=rules.parse_owner(fields, "user"),
        group=rules.parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_link(fields: Fields) -> IgnitionLink:
    return IgnitionLink(
        path=rules.parse_path(fields),
        target=fields.get_required_text("target"),
        hard=fields.get_optional_bool("hard"),
        user=rules.parse_owner(fields, "user"),
        group=rules.parse_owner(fields, "group"),
        overwrite=fields.get_optional_bool("overwrite"),
        location=fields.path,
    )


def _parse_unit(fields: Fields) -> IgnitionUnit:
    return IgnitionUnit(
        name=rules.parse_unit_name(fields),
        contents=fields.get_optional_text("contents"),
        enabled=fields.get_optional_bool("enabled"),
        mask=fields.get_optional_bool("mask"),
        dropins=fields.map_objects("dropins", rules.parse_dropin),
        location=fields.path,
    )
