"""Removes one field of a YAML file, and leaves every other byte as it is. Pure."""

import re

from treenail.api import documents
from treenail.api.decode import Json
from treenail.api.yaml_positions import FieldRange, find_positions
from treenail.errors import ConfigError

_BOM = b"\xef\xbb\xbf"
_BLANK = " \t"
_COMMENT_LINE = re.compile(r"([ \t]*)#[^\r\n]*(?:\r\n|\r|\n|$)")
_EMPTY_LINE = re.compile(r"[ \t]*(?:\r\n|\r|\n)")


def remove_field(content: bytes, name: str, *, where: str) -> bytes:
    """Return the file without a field at the top; raise `ConfigError` if that is impossible.

    Comments beside and below the field go with it. The result is parsed again: every other field
    has the value that it had. A file without the field is returned as it is.
    """
    text = documents.decode_text(content, where)
    document = documents.load_document(text, where=where)
    found = find_positions(text, where=where)
    if name not in document:
        return content
    if name not in found.ranges:
        raise _make_error(name, where, "it comes from a merge key or a list of keys")
    expected = {key: value for key, value in document.items() if key != name}
    for candidate in _list_candidates(text, found.ranges[name]):
        if _has_fields(candidate, expected, where):
            mark = _BOM if content.startswith(_BOM) else b""
            return mark + candidate.encode()
    line = found.find_line(name)
    cause = "another field uses an anchor in it, or is on the same line"
    raise _make_error(name, f"{where}, line {line}", cause)


def _list_candidates(text: str, field: FieldRange) -> list[str]:
    """Return texts without the field, the best first."""
    if field.is_flow:
        return [_cut_flow(text, field)]
    start = _find_line_start(text, field.key_start)
    end = _find_line_end(text, field.value_end)
    # A comment with more indent than the key is the field's; it would become part of a text above.
    while (match := _COMMENT_LINE.match(text, end)) and len(match[1]) > field.key_start - start:
        end = match.end()
    later = end
    while match := _EMPTY_LINE.match(text, later):
        later = match.end()
    before, rest = text[:start], text[end:]
    if not field.is_only:
        # Empty lines may become part of the text before them.
        return [before + rest, before + text[later:]]
    newline = "\r\n" if "\r\n" in text else "\n"
    return [f"{before}{{}}{newline}{rest}"]


def _cut_flow(text: str, field: FieldRange) -> str:
    """Cut key, value and one comma."""
    start, end = field.key_start, field.value_end
    after = _skip_space(text, end)
    if after < len(text) and text[after] == ",":
        end = after + 1
        while end < len(text) and text[end] in _BLANK:
            end += 1
        return text[:start] + text[end:]
    before = len(text[:start].rstrip())
    if before and text[before - 1] == ",":
        # A comment may follow the comma.
        return text[: before - 1] + text[end:]
    return text[:start] + text[end:]


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _find_line_start(text: str, position: int) -> int:
    return max(text.rfind("\n", 0, position), text.rfind("\r", 0, position)) + 1


def _find_line_end(text: str, position: int) -> int:
    """Return the index behind the line break of a line; a value may end behind its own."""
    if position and text[position - 1] in "\r\n":
        return position
    match = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)").match(text, position)
    return match.end() if match else position


def _has_fields(text: str, expected: Json, where: str) -> bool:
    try:
        return documents.load_document(text, where=where) == expected
    except ConfigError:
        return False


def _make_error(name: str, where: str, why: str) -> ConfigError:
    return ConfigError(
        f"cannot remove the field {name} from {where}: {why}",
        remedy=f"write {name} as a field of its own at the top of the file, without anchors that "
        "other fields use",
    )
