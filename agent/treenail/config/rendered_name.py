"""Names of rendered MachineConfigs: equal specs have equal names.

The Machine Config Operator hashes the output of go-yaml 2.4 for a structure that went through Go's
JSON. The encoder here writes the same bytes. It follows the rules of that emitter: block style,
width 80, and its reading of YAML 1.1 to decide about quotes. It supports the types of a
MachineConfigSpec: mappings with fixed keys, lists, strings, integers, booleans and null.
"""

import hashlib
import math
import re
from functools import lru_cache

from treenail.api import decode

# The Machine Config Operator hashes these bytes into every name. Without them, a migrated cluster
# would roll out new configs to all nodes that differ only in the name.
_SALT = bytes.fromhex(
    "107ccee48b38afaf4fe586769d9ad36e195d2ffdac6a2507ae0da0b96e115734db830cceda8d7487"
    "bcb5c097e93e7ea54053b3770fa8d0c5926b3ae385bcee1a211aebca20ad1fea2990944f06ce1716"
)


def rendered_name(pool: str, spec: decode.Json) -> str:
    """Return ``rendered-<pool>-<hash>`` for a merged MachineConfig's spec.

    ``spec`` has all seven keys of a MachineConfigSpec, as `treenail.config.merge` returns it:
    the Machine Config Operator also hashes empty values.
    """
    return f"rendered-{pool}-{digest(spec)}"


def digest(*documents: decode.Json) -> str:
    """Return the salted hash of the documents, in order, as 32 hex digits."""
    # MD5 only makes names here. Without usedforsecurity=False hashlib rejects it in FIPS mode.
    salted = hashlib.md5(_SALT, usedforsecurity=False)
    for document in documents:
        salted.update(encode_yaml(document))
    return salted.hexdigest()


_WIDTH = 80
_KEY = re.compile(r"([A-Za-z]+)([0-9]*)")
_BREAKS = "\n\u2028\u2029"  # the line breaks of YAML 1.1 that are printable
_BREAK = re.compile(f"[{_BREAKS}]")
_SPECIAL = re.compile("[^\n -~\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd]")
_LONE_SPACE = re.compile("[\u2028\u2029]|(?<=[^ ]) (?=[^ ])")
_ESCAPED_OR_SPACE = re.compile(_SPECIAL.pattern + '|[\n\u2028\u2029"\\\\ ]')
_NEL = re.compile(" *((?:\u0085 *)+)")
_BASE60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_FRACTION = re.compile(r"\.[0-9](_?[0-9])*([eE][-+]?[0-9](_?[0-9])*)?")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})"
    r"(?:[Tt](\d{1,2}):(\d{1,2}):(\d{1,2})(?:[.,]\d+)?(?:Z|[-+](?:[01]\d|2[0-4]):(?:[0-5]\d|60))"
    r"| +(\d{1,2}):(\d{1,2}):(\d{1,2})(?:[.,]\d+)?)?",
    re.ASCII,
)
_ESCAPES = {
    "\0": "0", "\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r",
    "\x1b": "e", '"': '"', "\\": "\\", "\x85": "N", "\u2028": "L", "\u2029": "P",
}  # fmt: skip


def encode_yaml(value: decode.Json) -> bytes:
    """Encode ``value`` as go-yaml does, with a line feed at the end.

    Keys must be ASCII letters with a number at the end or none, as in Kubernetes structures: for
    such keys go-yaml omits quotes and its order is simple. Raises `ValueError` for any other value.
    """
    out: list[str] = []
    if value:
        _write_mapping(value, 0, out, is_begun=False)
    else:
        out.append("{}\n")
    return "".join(out).encode()


def _write_mapping(value: decode.Json, indent: int, out: list[str], *, is_begun: bool) -> None:
    for key in sorted(value, key=_split_key):
        prefix = "" if is_begun else " " * indent
        is_begun = False
        out.append(f"{prefix}{key}:")
        match value[key]:
            case dict() as inner if inner:
                out.append("\n")
                _write_mapping(inner, indent + 2, out, is_begun=False)
            case list() as items if items:
                out.append("\n")
                _write_sequence(items, indent, out, is_begun=False)
            case scalar:
                out.append(" ")
                out.append(_format_value(scalar, indent + len(key) + 2, indent + 2))


@lru_cache(256)
def _split_key(key: str) -> tuple[str, int]:
    """Return the letters and the number of a key: go-yaml sorts the key a2 before a10."""
    match = _KEY.fullmatch(key)
    if match is None or not _is_text(key):
        raise ValueError(f"{key!r} is not a key of a Kubernetes structure")
    return match[1], int(match[2] or -1)


def _write_sequence(items: list[object], indent: int, out: list[str], *, is_begun: bool) -> None:
    for item in items:
        out.append("- " if is_begun else " " * indent + "- ")
        is_begun = False
        match item:
            case dict() as inner if inner:
                _write_mapping(inner, indent + 2, out, is_begun=True)
            case list() as inners if inners:
                _write_sequence(inners, indent + 2, out, is_begun=True)
            case scalar:
                out.append(_format_value(scalar, indent + 2, indent + 2))


def _format_value(value: object, column: int, indent: int) -> str:
    """Format a value that follows a colon or a dash, with the end of the line."""
    match value:
        case str():
            return _format_string(
                _NEL.sub(_fold_nel, value) if "\x85" in value else value, column, indent
            )
        case None:
            return "null\n"
        case bool():
            return "true\n" if value else "false\n"
        case int():
            return f"{value}\n"
        case list():
            return "[]\n"
        case dict():
            return "{}\n"
        case _:
            raise ValueError(f"cannot encode {type(value).__name__} in a hashed structure")


def _fold_nel(match: re.Match[str]) -> str:
    # Go's JSON does not escape U+0085, and go-yaml folds it as a line break when it reads that.
    breaks = match[1].count("\u0085")
    return " " if breaks == 1 else "\n" * (breaks - 1)


def _format_string(text: str, column: int, indent: int) -> str:
    # The contents of files are long, and mostly of these characters.
    is_plain = text.isascii() and text.isprintable()
    special = not is_plain and _SPECIAL.search(text) is not None
    breaks = not is_plain and _BREAK.search(text) is not None
    space_break = breaks and re.search(f" [{_BREAKS}]", text) is not None
    break_space = breaks and re.search(f"[{_BREAKS}] ", text) is not None
    if "\n" in text and not (special or space_break or text.endswith(" ")):
        return _format_literal(text, indent)
    if "\n" in text or special or space_break or break_space or _is_read_as_other_type(text):
        return _format_double_quoted(text, column, indent)
    if breaks or _has_indicators(text) or text.startswith(" ") or text.endswith(" "):
        return _format_single_quoted(text, column, indent)
    return _fold_lines(text, column, indent) + "\n"


def _has_indicators(text: str) -> bool:
    return (
        text[0] in "#,[]{}&*!|>'\"%@`"
        or text[:3] in ("---", "...")
        or text[:2] in ("?", "? ", "-", "- ")
        or text.endswith(":")
        or ": " in text
        or " #" in text
    )


def _is_text(text: str) -> bool:
    # Imported late: the Ignition server computes no names, and PyYAML takes 2 MiB.
    from treenail.encoding import yaml11  # noqa: PLC0415

    return isinstance(yaml11.resolve_scalar(text), str)


def _is_read_as_other_type(text: str) -> bool:
    """Return whether go-yaml or a parser with base 60 reads the unquoted text as another type."""
    return (
        not _is_text(text)
        or _BASE60.fullmatch(text) is not None
        or (_FRACTION.fullmatch(text) is not None and math.isfinite(float(text)))
        or _is_timestamp(text)
    )


def _is_timestamp(text: str) -> bool:
    match = _TIMESTAMP.fullmatch(text)
    if not match:
        return False
    year, month, day, *clock = (int(part) for part in match.groups() if part is not None)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    days = (31, 29 if leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    date = 1 <= month <= 12 and 1 <= day <= days[month - 1]
    return date and all(part < most for part, most in zip(clock, (24, 60, 60), strict=False))


def _format_literal(text: str, indent: int) -> str:
    hint = "2" if text[0] in " " + _BREAKS else ""
    if text[-1] not in _BREAKS:
        hint += "-"
    elif len(text) == 1 or text[-2] in _BREAKS:
        hint += "+"
    body = re.sub(f"(?:^|(?<=[{_BREAKS}]))(?=[^{_BREAKS}])", " " * indent, text)
    return f"|{hint}\n{body}" + ("" if text[-1] in _BREAKS else "\n")


def _format_single_quoted(text: str, column: int, indent: int) -> str:
    inner = text.replace("'", "''")
    if any(char in _BREAKS for char in inner):
        inner = re.sub(f"(?<=[{_BREAKS}])(?=[^{_BREAKS}])", " " * indent, inner)
    return f"'{_fold_lines(inner, column + 1, indent)}'\n"


def _fold_lines(text: str, column: int, indent: int) -> str:
    """Fold lines that are too long at single spaces."""
    if column + len(text) <= _WIDTH or (" " not in text and text.isascii()):
        return text
    out = []
    position = 0
    for match in _LONE_SPACE.finditer(text):
        at = match.start()
        out.append(text[position:at])
        column += at - position
        position = at + 1
        if match[0] != " ":
            out.append(match[0])
            column = 0
        elif column > _WIDTH:
            out.append("\n" + " " * indent)
            column = indent
        else:
            out.append(" ")
            column += 1
    return "".join(out) + text[position:]


def _format_double_quoted(text: str, column: int, indent: int) -> str:
    if text.startswith("\ufeff"):
        # go-yaml checks the start of the text for a byte order mark at every character.
        return f'"{"".join(map(_escape_char, text))}"\n'
    out = ['"']
    column += 1
    position = 0
    for match in _ESCAPED_OR_SPACE.finditer(text):
        at = match.start()
        out.append(text[position:at])
        column += at - position
        position = at + 1
        lone = 0 < at < len(text) - 1 and text[at - 1] != " "
        if match[0] != " ":
            piece = _escape_char(match[0])
        elif lone and column > _WIDTH:
            out.append("\n" + " " * indent)
            column = indent
            piece = "\\" if text[at + 1] == " " else ""
        else:
            piece = " "
        out.append(piece)
        column += len(piece)
    return "".join(out) + text[position:] + '"\n'


def _escape_char(char: str) -> str:
    if char in _ESCAPES:
        return "\\" + _ESCAPES[char]
    code = ord(char)
    if code == 0xA0:
        return "\\_"
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
