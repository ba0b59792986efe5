"""Withhold the secrets of an Ignition document, so that it can be reviewed.

The result has sizes in place of the secrets, and no digests: a digest of a short secret reveals it.
"""

import re

from treenail.api import decode
from treenail.api.ignition.model import Contents
from treenail.config import node_paths, redact
from treenail.errors import IgnitionError

DEFAULT_MODE = 0o644
"""Mode that Ignition gives to a file without one."""

_URLS = frozenset({"source", "httpProxy", "httpsProxy", "url"})
_SPACE_OR_COMMA = re.compile(r"[ ,]")


def withhold_secrets(document: decode.Json) -> decode.Json:
    """Return a copy of a valid document, of any version, without its secrets.

    They are the contents of files that not every user may read, or whose path is one for secrets,
    password hashes, key files and pins of disks, and the values of HTTP headers. The contents of
    units stay: every user of the machine may read them. Logins and queries in URLs are withheld.
    """
    shown = _withhold_everywhere(document)
    fields = decode.Fields(shown, "", IgnitionError)
    for file in fields.get_object("storage").iter_objects("files"):
        mode = file.get_optional_integer("mode")
        if node_paths.is_secret_file(file.get_text("path"), DEFAULT_MODE if mode is None else mode):
            _withhold_file(file)
    for volume in fields.get_object("storage").iter_objects("luks"):
        if volume.get_object("keyFile").values:
            volume.values["keyFile"] = _describe_contents(volume.get_object("keyFile"))
        custom = volume.get_object("clevis").get_object("custom")
        if custom.get_text("config"):
            custom.values["config"] = node_paths.WITHHELD
    for name in ("users", "groups"):
        for entry in fields.get_object("passwd").iter_objects(name):
            if entry.get_text("passwordHash"):
                entry.values["passwordHash"] = node_paths.WITHHELD
    return shown


def _withhold_file(file: decode.Fields) -> None:
    if file.get_object("contents").values:
        file.values["contents"] = _describe_contents(file.get_object("contents"))
    # In version 2 `append` is a boolean.
    if isinstance(file.values.get("append"), list):
        file.values["append"] = [
            _describe_contents(contents) for contents in file.iter_objects("append")
        ]


def _describe_contents(fields: decode.Fields) -> decode.Json:
    """Return contents that say how many bytes are withheld, or a remote source."""
    contents = Contents.from_fields(fields)
    if contents.source and not contents.source.startswith("data:"):
        return {"source": contents.source}
    try:
        text = f"withheld, {len(contents.decode_bytes())} bytes"
    except IgnitionError:
        text = "withheld"
    return {"source": f"data:,{_SPACE_OR_COMMA.sub(_escape, text)}"}


def _escape(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"


def _withhold_everywhere(document: decode.Json) -> decode.Json:
    """Copy the document without the values of HTTP headers and without secrets in URLs."""
    shown: decode.Json = {}
    for name, value in document.items():
        shown[name] = _withhold_value(name, value)
    if "httpHeaders" in shown:
        headers = decode.Fields(shown, "", IgnitionError).iter_objects("httpHeaders")
        shown["httpHeaders"] = [
            {**header.values, "value": node_paths.WITHHELD}
            if "value" in header.values
            else header.values
            for header in headers
        ]
    return shown


def _withhold_value(name: str, value: object) -> object:
    if isinstance(value, dict):
        return _withhold_everywhere(value)
    if isinstance(value, list):
        return [_withhold_value(name, child) for child in value]
    if isinstance(value, str) and name in _URLS and not value.startswith("data:"):
        return redact.redact_line(value)
    return value
