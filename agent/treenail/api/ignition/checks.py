"""Ignition's checks of a complete document, as the Machine Config Operator runs them.

They are stricter than parsing: a merged config can fail them, and nodes apply it nevertheless.
Sections for the first boot, and the syntax of units, are not interpreted anywhere else.
"""

import json
import re
from collections.abc import Iterator

from treenail.api.decode import Fields
from treenail.api.ignition import model, schema
from treenail.errors import IgnitionError

URL_SCHEMES = {
    **dict.fromkeys(("http", "https", "tftp", "data", "s3"), schema.OLDEST),
    "gs": "3.2.0",
    "arn": "3.4.0",
}
"""Schemes of URLs, with the version that introduced them."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
# What Go's net/url accepts: an opaque URL, or one with a valid host and escapes.
_OPAQUE = re.compile(r"[^\x00-\x1f\x7f]*")
_HIERARCHICAL = re.compile(
    r"(//([^/?#@]*@)?(\[[^\]/?#]*\]|[^][/?#@ {}|\\^`%:]*)(:[0-9]*)?(?=[/?#]|$)|(?!//))"
    r"([^%?#]|%[0-9A-Fa-f]{2})*(\?[^#]*)?(#([^%]|%[0-9A-Fa-f]{2})*)?"
)
_EMPTY_VERSION = re.compile(r"(^|&)versionId=?(&|#|$)")
_ARN = re.compile(r"arn:[^:]*:s3:[^:]*:[^:]*:(.*)", re.DOTALL)
_GUID = re.compile(r"(|[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12})")
_FORMATS = {"ext4": 16, "btrfs": 256, "xfs": 12, "swap": 15, "vfat": 11}
"""Maximum length of a label in bytes, for each format of a filesystem."""
_STRIPED = ("linear", "raid0", "0", "stripe")
_LEVELS = (
    *_STRIPED,
    "raid1",
    "1",
    "mirror",
    "raid4",
    "4",
    "raid5",
    "5",
    "raid6",
    "6",
    "raid10",
    "10",
)
_MAX_LABEL_BYTES = 36
_MAX_LUKS_LABEL_BYTES = 47
_PINS = ("tpm2", "tang", "sss")


def check_document(document: Fields, parsed: model.IgnitionConfig) -> None:
    """Raise `IgnitionError` when Ignition rejects the document; ``parsed`` is its parsed form."""
    if parsed.version >= schema.OLDEST:
        values = schema.drop_newer_fields(document.values, parsed.version)
        _check_version3(Fields(values, document.path, document.error), parsed.version)
        return
    checks = _DocumentChecks(schema.OLDEST)
    checks.check_object(document, schema.CONFIG2, is_unique=False)
    storage = document.get_object("storage")
    for file in storage.iter_objects("files"):
        if file.get_bool("append") and file.get_bool("overwrite"):
            raise file.error(f"{file.path_of('overwrite')}: cannot append and overwrite")
    for filesystem in storage.iter_objects("filesystems"):
        _check_filesystem2(filesystem)
    checks.check_nodes(document)
    _check_version3(
        Fields(parsed.to_json(), "converted to Ignition 3", document.error), schema.OLDEST
    )


def _check_version3(document: Fields, version: str) -> None:
    checks = _DocumentChecks(version)
    checks.check_object(document, schema.CONFIG)
    checks.check_nodes(document)
    checks.check_first_boot(document)


class _DocumentChecks:
    """Checks for one version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def check_object(
        self, fields: Fields, shape: schema.ObjectShape, *, is_unique: bool = True
    ) -> None:
        """Check the types of all fields, and lists for duplicates unless they may have them."""
        values, nested = fields.values, shape.nested
        for name, kind in shape.plain.items():
            if name not in values:
                continue
            if kind is str:
                fields.get_optional_text(name)
            elif kind is int:
                fields.get_optional_integer(name)
            else:
                fields.get_optional_bool(name)
        # An object has few of the parts that it may have.
        parts = [name for name, value in values.items() if name in nested and value is not None]
        for name in parts:
            self._check_part(fields, name, nested[name], is_unique=is_unique)
        if is_unique and parts:
            _reject_duplicates(fields, shape)

    def _check_part(
        self,
        fields: Fields,
        name: str,
        part: schema.ObjectShape | schema.ListShape,
        *,
        is_unique: bool,
    ) -> None:
        if isinstance(part, schema.ObjectShape):
            self.check_object(fields.get_object(name), part, is_unique=is_unique)
        elif part.entry is None:
            fields.get_text_list(name)
        else:
            for entry in fields.iter_objects(name):
                self.check_object(entry, part.entry, is_unique=is_unique)

    def check_nodes(self, config: Fields) -> None:
        """Check the values of files, directories, links and units."""
        storage = config.get_object("storage")
        for file in storage.iter_objects("files"):
            self._check_file(file)
        for name in ("files", "directories", "links"):
            for node in storage.iter_objects(name):
                _check_owner(node, "user")
                _check_owner(node, "group")
        for unit in config.get_object("systemd").iter_objects("units"):
            for part in (unit, *unit.iter_objects("dropins")):
                check_unit_syntax(part.get_text("contents"), part.path_of("contents"))

    def check_first_boot(self, config: Fields) -> None:
        """Check the values of the sections that only the first boot applies."""
        self._check_ignition(config.get_object("ignition"))
        storage = config.get_object("storage")
        for disk in storage.iter_objects("disks"):
            _check_disk(disk)
        for array in storage.iter_objects("raid"):
            _check_raid(array)
        for filesystem in storage.iter_objects("filesystems"):
            self._check_filesystem(filesystem)
        for volume in storage.iter_objects("luks"):
            self._check_luks(volume)

    def _check_file(self, file: Fields) -> None:
        contents = file.get_object("contents")
        if contents.values:
            self._check_resource(contents)
        if isinstance(file.values.get("append"), bool):
            return  # version 2
        for part in file.iter_objects("append"):
            self._check_resource(part)
        if file.get_bool("overwrite") and contents.get_optional_text("source") is None:
            raise file.error(
                f"{contents.path_of('source')}: expected the contents of the file, found nothing",
                remedy='write "data:," for an empty file',
            )

    def _check_ignition(self, ignition: Fields) -> None:
        if ignition.values.keys() <= {"version"}:
            return
        config = ignition.get_object("config")
        authorities = ignition.get_object("security").get_object("tls")
        self._check_resource(config.get_object("replace"))
        for resource in config.iter_objects("merge"):
            self._check_resource(resource, is_required=self._version > schema.OLDEST)
        for resource in authorities.iter_objects("certificateAuthorities"):
            self._check_resource(resource, is_required=True)
        proxy = ignition.get_object("proxy")
        for name in ("httpProxy", "httpsProxy"):
            url = proxy.get_optional_text(name)
            if url is not None and read_scheme(url) not in ("http", "https"):
                raise proxy.make_error(name, "an http or https URL")

    def _check_resource(self, fields: Fields, *, is_required: bool = False) -> None:
        source = fields.get_optional_text("source")
        if is_required and not source:
            raise fields.error(f"{fields.path_of('source')}: expected a URL, found nothing")
        if source:
            self._check_url(fields, source)
        compression = fields.get_text("compression")
        if compression not in ("", model.GZIP):
            raise fields.error(
                f"{fields.path_of('compression')}: expected gzip or nothing, found "
                f"{compression!r:.40}"
            )
        has_verification = fields.values.get("verification") is not None
        verification = fields.get_object("verification") if has_verification else None
        digest = verification.get_optional_text("hash") if verification else None
        if verification and digest is not None:
            name, _, digits = digest.partition("-")
            known = (
                model.DIGEST_SIZES
                if self._version > schema.OLDEST
                else {"sha512": model.DIGEST_SIZES["sha512"]}
            )
            if len(digits.encode()) != known.get(name, -1):
                expected = " or ".join(f"{algorithm}-" for algorithm in known)
                raise verification.make_error("hash", f"{expected} and as many digits")
            if source is None:
                raise fields.error(f"{verification.path_of('hash')}: needs a source")
        headers = list(fields.iter_objects("httpHeaders"))
        for header in headers:
            header.get_required_text("name")
            if header.get_optional_text("value") == "":
                raise header.make_error("value", "a value, or null to remove the header")
        if headers and read_scheme(source or "") not in ("http", "https"):
            raise fields.error(f"{fields.path_of('httpHeaders')}: need an http or https source")

    def _check_url(self, fields: Fields, url: str) -> None:
        scheme = read_scheme(url)
        if URL_SCHEMES.get(scheme, "none") > self._version:
            known = ", ".join(name for name, since in URL_SCHEMES.items() if since <= self._version)
            raise fields.error(
                f"{fields.path_of('source')}: expected a URL of {known}, found scheme "
                f"{scheme!r:.40}"
            )
        if scheme == "data":
            model.Contents(source=url, location=fields.path).check_source()
        elif scheme == "arn":
            arn = _ARN.match(url.partition("?")[0])
            least = 3 if arn and arn[1].startswith("accesspoint/") else 2
            if arn is None or len(url.partition("?")[0].split("/")) < least:
                raise fields.make_error("source", "the ARN of an object in S3")
        if scheme in ("s3", "arn") and _EMPTY_VERSION.search(url.partition("?")[2]):
            raise fields.make_error("source", "a version of the object")

    def _check_filesystem(self, fields: Fields) -> None:
        _check_path(fields, "device")
        if fields.get_text("path"):
            _check_path(fields, "path")
        kind, label = fields.get_text("format"), fields.get_text("label")
        if not kind:
            others = ("path", "label", "uuid", "wipeFilesystem", "mountOptions", "options")
            if any(fields.values.get(name) for name in others):
                raise fields.error(f"{fields.path_of('format')}: expected a format, found nothing")
            return
        if kind not in _FORMATS and (kind != "none" or self._version < "3.3.0"):
            raise fields.error(
                f"{fields.path_of('format')}: expected one of {', '.join(_FORMATS)}, none; found "
                f"{kind!r:.40}"
            )
        limit = _FORMATS.get(kind)
        if limit is not None and len(label.encode()) > limit:
            raise fields.error(f"{fields.path_of('label')}: expected at most {limit} bytes")

    def _check_luks(self, fields: Fields) -> None:
        if "/" in fields.get_text("name"):
            raise fields.error(f"{fields.path_of('name')}: expected no slash")
        if len(fields.get_text("label").encode()) > _MAX_LUKS_LABEL_BYTES:
            raise fields.error(
                f"{fields.path_of('label')}: expected at most {_MAX_LUKS_LABEL_BYTES} bytes"
            )
        _check_path(fields, "device")
        self._check_resource(fields.get_object("keyFile"))
        clevis, has_cex = fields.get_object("clevis"), fields.get_object("cex").get_bool("enabled")
        custom = clevis.get_object("custom")
        pin = custom.get_text("pin")
        # Version 3.2 looks whether the object exists, later ones whether it has a pin.
        is_custom = (
            clevis.values.get("custom") is not None if self._version == "3.2.0" else bool(pin)
        )
        has_others = bool(
            clevis.get_list("tang") or clevis.get_bool("tpm2") or clevis.values.get("threshold")
        )
        if is_custom and has_others:
            raise fields.error(f"{clevis.path}: expected custom or other pins, found both")
        _check_custom_pin(custom)
        for server in clevis.iter_objects("tang"):
            _check_tang(server)
        if has_cex and (pin or has_others):
            raise fields.error(f"{fields.path_of('cex')}: expected cex or clevis, found both")
        if has_cex and fields.get_object("keyFile").get_text("source"):
            raise fields.error(f"{fields.path_of('cex')}: expected cex or keyFile, found both")


def _check_owner(node: Fields, name: str) -> None:
    if node.values.get(name) is None:
        return
    owner = node.get_object(name)
    if owner.get_optional_integer("id") is not None and owner.get_text("name"):
        raise node.error(f"{owner.path}: expected an id or a name, found both")


def _check_disk(fields: Fields) -> None:
    _check_path(fields, "device")
    partitions = list(fields.iter_objects("partitions"))
    for partition in partitions:
        _check_partition(partition)
    numbers = [entry.get_optional_integer("number") for entry in partitions]
    numbers = [number for number in numbers if number]
    place = fields.path_of("partitions")
    if len(numbers) != len(set(numbers)):
        raise fields.error(f"{place}: two partitions have the same number")
    labels = [entry.get_optional_text("label") for entry in partitions]
    labels = [label for label in labels if label is not None]
    if len(labels) != len(set(labels)):
        raise fields.error(f"{place}: two partitions have the same label")
    is_removed = [entry for entry in partitions if entry.get_optional_bool("shouldExist") is False]
    if is_removed and len(numbers) != len(partitions):
        raise fields.error(f"{place}: shouldExist false needs numbers of all partitions")
    _check_overlap(partitions, place)


def _check_partition(fields: Fields) -> None:
    label = fields.get_optional_text("label")
    others = ("startMiB", "sizeMiB")
    if fields.get_optional_bool("shouldExist") is False and (
        label is not None
        or fields.get_text("typeGuid")
        or fields.get_text("guid")
        or any(fields.values.get(name) is not None for name in others)
    ):
        raise fields.error(
            f"{fields.path_of('shouldExist')}: a partition to remove has only a number"
        )
    if not fields.get_optional_integer("number") and label is None:
        raise fields.error(f"{fields.path}: expected a number or a label, found neither")
    if label is not None and (len(label.encode()) > _MAX_LABEL_BYTES or ":" in label):
        raise fields.error(
            f"{fields.path_of('label')}: expected at most {_MAX_LABEL_BYTES} bytes without colons"
        )
    for name in ("guid", "typeGuid"):
        if not _GUID.fullmatch(fields.get_text(name)):
            raise fields.make_error(name, "a GUID")


def _check_overlap(partitions: list[Fields], place: str) -> None:
    spans: list[tuple[object, int, int]] = []
    for partition in partitions:
        start, size = (partition.get_optional_integer(name) for name in ("startMiB", "sizeMiB"))
        if start and size is not None:
            spans.append((partition.values, start, start + max(size, 1) - 1))
    for one, start, end in spans:
        for other, first, last in spans:
            if one is not other and start <= last and first <= end:
                raise IgnitionError(f"{place}: two partitions overlap")


def _check_raid(fields: Fields) -> None:
    level = fields.get_text("level")
    if level not in _LEVELS:
        raise fields.make_error("level", "the level of a RAID array")
    if level in _STRIPED and fields.get_optional_integer("spares"):
        raise fields.error(f"{fields.path_of('spares')}: level {level} has no spares")
    if not fields.get_list("devices"):
        raise fields.error(f"{fields.path_of('devices')}: expected a device, found none")
    for index, device in enumerate(fields.get_text_list("devices")):
        _check_path_text(device, f"{fields.path_of('devices')}[{index}]")


def _check_custom_pin(custom: Fields) -> None:
    pin, config = custom.get_text("pin"), custom.get_text("config")
    if not (pin or config or custom.get_bool("needsNetwork")):
        return
    if pin not in _PINS:
        raise custom.error(f"{custom.path_of('pin')}: expected one of {', '.join(_PINS)}")
    if not config:
        raise custom.error(f"{custom.path_of('config')}: expected a configuration, found nothing")


def _check_tang(server: Fields) -> None:
    if read_scheme(server.get_text("url")) not in ("http", "https"):
        raise server.error(f"{server.path_of('url')}: expected an http or https URL")
    server.get_required_text("thumbprint")
    if advertisement := server.get_text("advertisement"):
        try:
            json.loads(advertisement)
        except (ValueError, RecursionError) as error:
            raise server.error(f"{server.path_of('advertisement')}: expected JSON") from error


def _check_path(fields: Fields, name: str) -> None:
    _check_path_text(fields.get_required_text(name), fields.path_of(name))


def _check_path_text(path: str, place: str) -> None:
    """Check an absolute, clean path; the root is one."""
    parts = path.split("/")
    is_clean = not parts[0] and not any(part in ("", ".", "..") for part in parts[1:])
    if path != "/" and not (path and is_clean):
        raise IgnitionError(
            f"{place}: expected an absolute path without '.', '..' and '//', found {path!r:.200}"
        )


def read_scheme(url: str) -> str:
    """Return the scheme of a URL that Go parses, else an empty text."""
    match = _SCHEME.match(url)
    # A printable text has no control characters. The regular expression takes 8 times as long.
    if match is None or not (url.isprintable() or _OPAQUE.fullmatch(url)):
        return ""
    rest = url[match.end() :]
    is_valid = not rest.startswith("/") or _HIERARCHICAL.fullmatch(rest)
    return match[1].lower() if is_valid else ""


def _reject_duplicates(fields: Fields, shape: schema.ObjectShape) -> None:
    """Raise when two entries of a list, or of lists that share their keys, have the same key."""
    families: dict[object, dict[object, tuple[str, int]]] = {}
    values = fields.values
    for name, part in shape.nested.items():
        if name not in values or values[name] is None or isinstance(part, schema.ObjectShape):
            continue
        if part.is_appended or not (part.key or not part.entry):
            continue
        locations = families.setdefault(part.family or name, {})
        for index, key in enumerate(_list_keys(fields, name, part)):
            if key in locations:
                earlier, number = locations[key]
                raise fields.error(
                    f"{fields.path_of(name)}[{index}]: duplicate of "
                    f"{fields.path_of(earlier)}[{number}]"
                )
            locations[key] = name, index


def _list_keys(fields: Fields, name: str, part: schema.ListShape) -> Iterator[object]:
    if part.entry is None:
        yield from fields.get_text_list(name)
        return
    # The types of the entries are checked before their keys.
    for entry in fields.get_list(name):
        if isinstance(entry, dict):
            yield next(filter(None, map(entry.get, part.key)), "")


def _check_filesystem2(fields: Fields) -> None:
    if (fields.values.get("mount") is None) == (fields.values.get("path") is None):
        raise fields.error(f"{fields.path}: expected a mount or a path, found both or neither")
    mount = fields.get_object("mount")
    if mount.values and mount.get_text("format") not in _FORMATS:
        raise mount.make_error("format", f"one of {', '.join(_FORMATS)}")


_BEFORE_SECTION = re.compile(r"[\[#;]")


def check_unit_syntax(text: str, place: str) -> None:
    """Raise `IgnitionError` when Ignition cannot parse the contents of a unit or drop-in.

    Like Ignition this skips everything before the first section, and knows no section's options.
    """
    position = _find_section(text)
    while position < len(text):
        line_end = _find_line_end(text, position)
        char = text[position]
        if char.isspace():
            position += 1
        elif char in "#;":
            position = _skip_comment(text, position)
        elif char == "[":
            close = text.find("]", position)
            if close < 0:
                raise _make_error(text, position, place, "expected ']' after the section name")
            line_end = _find_line_end(text, close)
            if text[close + 1 : line_end].strip():
                raise _make_error(text, close, place, "expected nothing after the section name")
            position = line_end + 1
        else:
            equals = text.find("=", position, line_end)
            if equals < 0 or "\r" in text[position:equals]:
                raise _make_error(text, position, place, "expected an option and '='")
            position = _skip_value(text, equals + 1)


def _find_section(text: str) -> int:
    position = 0
    while match := _BEFORE_SECTION.search(text, position):
        if match[0] == "[":
            return match.start()
        position = _skip_comment(text, match.start())
    return len(text)


def _skip_comment(text: str, position: int) -> int:
    while position < len(text):
        line_end = _find_line_end(text, position)
        line = text[position:line_end]
        position = line_end + 1
        if not line.removesuffix(" ").endswith("\\"):
            break
    return position


def _skip_value(text: str, position: int) -> int:
    while position < len(text):
        line_end = _find_line_end(text, position)
        line = text[position:line_end]
        position = line_end + 1
        if not (line.strip() and line.endswith("\\")):
            break
    return position


def _find_line_end(text: str, position: int) -> int:
    newline = text.find("\n", position)
    return len(text) if newline < 0 else newline


def _make_error(text: str, position: int, place: str, problem: str) -> IgnitionError:
    line = text.count("\n", 0, position) + 1
    return IgnitionError(f"{place}, line {line}: {problem}")
