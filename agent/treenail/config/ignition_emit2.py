"""Converts an Ignition 3.0 document to 2.2, for machines with an old boot image.

In version 2 a file has one source of contents and overwrites by default, and files name their
filesystem.
"""

from collections.abc import Iterator

from treenail.api.decode import Fields, Json
from treenail.api.ignition2 import ROOT_FILESYSTEM, VERSION
from treenail.errors import IgnitionError

VERSION2 = VERSION

_FILE_MODE, _DIRECTORY_MODE = 0o644, 0o755
"""Modes of version 3 where none is set. Ignition 0.35 then sets 0000."""


def find_unsupported_field(document: Json) -> str:
    """Return the location of a field that 2.2 does not have, empty if there is none."""
    return next(_list_unsupported_fields(Fields(document, "", IgnitionError)), "")


def convert_to_ignition2(document: Json) -> Json:
    """Return a valid 3.0 document, without unsupported fields, as a document of 2.2."""
    fields = Fields(document, "", IgnitionError)
    found = {**document, "ignition": _convert_ignition(fields.get_object("ignition"))}
    if "storage" in document:
        storage = fields.get_object("storage")
        nodes = {
            "directories": storage.map_objects("directories", _convert_directory),
            "files": storage.map_objects("files", _convert_file),
            "links": storage.map_objects("links", _convert_node),
        }
        converted = {name: list(entries) for name, entries in nodes.items() if entries}
        found["storage"] = {
            name: converted.get(name, value) for name, value in storage.values.items()
        }
    return found


def _list_unsupported_fields(document: Fields) -> Iterator[str]:
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


def _convert_ignition(fields: Fields) -> Json:
    config = dict(fields.get_object("config").values)
    if "merge" in config:
        config["append"] = config.pop("merge")
    found = {**fields.values, "version": VERSION2}
    return {**found, "config": config} if config else found


def _convert_file(fields: Fields) -> Json:
    node = {**_convert_node(fields), "mode": fields.values.get("mode", _FILE_MODE)}
    if parts := fields.get_list("append"):
        # Version 2 rejects an appended file that overwrites.
        node.pop("overwrite", None)
        return {**node, "append": True, "contents": parts[0]}
    return {**node, "overwrite": fields.get_bool("overwrite")}


def _convert_directory(fields: Fields) -> Json:
    return {**_convert_node(fields), "mode": fields.values.get("mode", _DIRECTORY_MODE)}


def _convert_node(fields: Fields) -> Json:
    return {"filesystem": ROOT_FILESYSTEM, **fields.values}
