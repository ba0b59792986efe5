"""Redaction of secrets in text, documents and file diffs, and of the parts of bug reports.

Redacted text goes to events, reports and bundles, which have more readers than the files. Uncertain
text is therefore withheld. A secret is recognized by its place (the path, the mode, the name of its
key) or by its form (a private key, a token, a password hash).

`treenail collect` and `treenail-controller install gather` write the parts into archives.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from treenail import sanitize
from treenail.api.decode import DEPTH_LIMIT
from treenail.config import node_paths

LINES_LIMIT = 200
"""Maximum number of lines in the diff of one file."""
SIZE_LIMIT = 256 * 1024
"""Maximum size in bytes of a file that is compared line by line."""

_LINE_LIMIT = 300
_REDACTED_LIMIT = 32 * 1024
_CONTEXT = 3

# The words match anywhere in the name of a key: db_password_file, passwordHash.
_WORDS = (
    r"passw(?:or)?d|passphrase|secret|token|credential|private[-_.]?key|pre[-_.]?shared[-_.]?key"
    r"|api[-_.]?key|access[-_.]?key|key[-_.]?data|(?<![a-z])(?:psk|auth|authorization|cookie)(?=\W)"
)
# These are common in sentences, so they match only before a value.
_SHORT = r"(?<!by)(?<!com)(?<!proxy)(?<!proxy_)(?:pass|pwd|pw)"
ANY_WORD = rf"(?:{_WORDS}|{_SHORT}(?=[\s\"'\\:=]))"
_VALUE = (
    rf"(?:{node_paths.WITHHELD}|\"(?:\\.|[^\"\\])*\"?|'[^']*'?|\\{{1,8}}[\"'].*?\\{{1,8}}[\"']|\S+)"
)
# Words that follow in sentences, in PAM lines and in on/off settings; they are no secrets.
_NO_VALUE = (
    r"(?!(?:for|from|is|was|has|of|to|in|on|by|and|or|not|with|file|hash|entry|check|changed?"
    r"|expired|authentication|required|requisite|sufficient|optional|include|substack"
    r"|yes|no|true|false|off)(?![^\s,.;:)])|[:=]|--|\[\w+=|[-|&]\s)"
)
# Not a login: a colon between two numbers, in a time, or before //.
_LOGIN = (
    r"(?:\"[^\":]{0,100}:[^\"]*\"?|'[^':]{0,100}:[^']*'?"
    r"|(?!\+|\d+:\d+(?!\S))[^\s\"':]{1,100}:(?!//)\S+)"
)
_KEY = re.compile(
    rf"(?P<key>{ANY_WORD}[\w.-]{{0,60}}\\{{0,8}}[\"']?\s{{0,8}}[:=]\s{{0,8}})(?P<value>\S.*)",
    re.IGNORECASE | re.DOTALL,
)
_BLOCK_BEGIN = re.compile(
    rf"{ANY_WORD}[\w.-]{{0,60}}[\"']?\s*:\s*(?:[|>][-+\d]*|\[|\{{)?\s*$", re.IGNORECASE
)
_QUOTED = re.compile(
    rf"{node_paths.WITHHELD}|\"(?:\\.|[^\"\\])*\"|'(?:''|[^'])*'|\\{{1,8}}[\"'].*?\\{{1,8}}[\"']"
)
_SECRET_KEY = re.compile(
    rf"{_WORDS}|^(?:auth|authorization|cookie|psk|httpHeaders)$|{_SHORT}$", re.IGNORECASE
)
_KEEP_PREFIX = rf"\1{node_paths.WITHHELD}"
_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=//)[^\s/@\"']*@", f"{node_paths.WITHHELD}@"),
        (
            r"(?<![^\s\"'(=])[^\s/@:\"'(=]{1,100}:[^\s/@]{1,300}@(?!sha\d+:)",
            f"{node_paths.WITHHELD}@",
        ),
        (r"(https?://[^\s?\"']{0,1000}\?)[^\s\"']+", rf"\1{node_paths.WITHHELD}"),
        (r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}", rf"\1 {node_paths.WITHHELD}"),
        (r"(\blogin\s+\S+\s+password\s+)\S+", rf"\1{node_paths.WITHHELD}"),
        # After an option, in an XML element, on a separate line, in a sentence.
        (
            rf"(?i)((?<![\w.-])--?[\w.-]{{0,40}}?{ANY_WORD}[\"'\\]{{0,8}}[\s,]+)(?!--){_VALUE}",
            _KEEP_PREFIX,
        ),
        (
            rf"((?<![\w-])(?:-[uU]|--(?:proxy-)?user)(?:[\"'\\]{{0,8}}[\s,=]+)?){_LOGIN}",
            _KEEP_PREFIX,
        ),
        (
            rf"(?i)(<[\w:.-]{{0,40}}?(?:{_WORDS}|{_SHORT})[\w.-]{{0,40}}(?:\s[^<>]{{0,200}})?>)[^<]+",
            _KEEP_PREFIX,
        ),
        (
            rf"(?i)^(\s*(?:[-+#;]\s*)?[\w.-]{{0,40}}?{ANY_WORD}\s+){_NO_VALUE}{_VALUE}\s*$",
            _KEEP_PREFIX,
        ),
        (rf"(?i)((?<=\s)[\w.-]{{0,40}}?passw(?:or)?d\s+){_NO_VALUE}{_VALUE}", _KEEP_PREFIX),
        (rf"(?i)((?:{_WORDS})\s+)(?=[^\s\d]*\d){_NO_VALUE}{_VALUE}", _KEEP_PREFIX),
        (r"(\b(?:echo|printf)\s)[^|]{1,300}(?=\|[^|]{0,200}passw)", _KEEP_PREFIX),
        (r"(\br[ow]community6?\s+)\S+", _KEEP_PREFIX),
        (r"(\bPSK\s+)\"[^\"]*\"", rf"\1{node_paths.WITHHELD}"),
        (r"(\bdata:[^,\s\"']{0,200},)[^\s\"']+", rf"\1{node_paths.WITHHELD}"),
        (r"\$(?:1|2[abxy]?|5|6|7|y|gy|sha1)\$[^\s:\"',]+", node_paths.WITHHELD),
        (r"grub\.pbkdf2\.[\w.]+", node_paths.WITHHELD),
        (r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[\w-]{10,}", node_paths.WITHHELD),
    )
)
# Lines of a certificate have 64 characters, digests have no upper case: both are shown.
_ENCODED = re.compile(r"(?<![\w+/=-])[\w+/-]{80,}={0,2}")
_LONG_WORD = re.compile(r"(?<!\S)[A-Za-z0-9+/_-]{64,}={0,2}\s*$")
_LONE_WORD = re.compile(r"(?:(?<=: )|^[\s#]*)[A-Za-z0-9+/_-]+={0,2}\s*$")
_BEGIN = re.compile(r"-----BEGIN [^-]*(?:PRIVATE KEY|Static key)[^-]*-----")
_END = re.compile(r"-----END [^-]*(?:PRIVATE KEY|Static key)[^-]*-----")


@dataclass(frozen=True, slots=True)
class FileDiff:
    """Difference between two files' contents, without secrets.

    ``lines`` are those of a unified diff, without its header and line ends. They are empty for
    secret, binary and long contents. ``note`` then contains the reason and the sizes.
    """

    lines: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return "\n".join((*self.lines, self.note) if self.note else self.lines)


def compute_redacted_diff(
    old: bytes | None, new: bytes | None, *, path: str, mode: int
) -> FileDiff:
    """Compare two contents without showing secrets; None means that the file does not exist.

    ``mode`` is the stricter of the two files' modes.
    """
    if old == new:
        return FileDiff()
    if node_paths.is_secret_file(path, mode):
        return FileDiff(note=f"contents withheld: {_format_sizes(old, new)}")
    texts = [_decode_text(content) for content in (old, new)]
    if any(text is None for text in texts):
        return FileDiff(note=f"binary: {_format_digests(old, new)}")
    if max(len(content or b"") for content in (old, new)) > SIZE_LIMIT:
        return FileDiff(note=f"long: {_format_digests(old, new)}")
    lines = list(_compare_lines(texts[0] or "", texts[1] or ""))
    if not lines:
        return FileDiff(note=_format_sizes(old, new))
    omitted = len(lines) - LINES_LIMIT
    return FileDiff(tuple(lines[:LINES_LIMIT]), f"{omitted} more lines" if omitted > 0 else "")


def redact_text(text: str) -> str:
    """Withhold the secrets of a text; the number of lines stays the same."""
    return "\n".join(redact_lines(text.split("\n")))


def redact_lines(lines: Iterable[str]) -> Iterator[str]:
    """Withhold the secrets of lines, one for one; a secret may span several lines."""
    end_pattern: re.Pattern[str] | None = None
    parent_indent: int | None = None
    wrapped = _WrappedSecrets()
    for line in lines:
        if end_pattern is not None:
            end_pattern = None if end_pattern.search(line) else end_pattern
            wrapped = _WrappedSecrets()
            yield node_paths.WITHHELD
        elif parent_indent is not None and _is_nested_below(line, parent_indent):
            yield node_paths.WITHHELD if line.strip() else line
        else:
            parent_indent = _count_indent(line) if _BLOCK_BEGIN.search(line) else None
            end_pattern = _find_secret_end(line)
            yield wrapped.redact_line(line)


class _WrappedSecrets:
    """Withholds base64 in lines of 64 or 76 columns, whose last line is short, and private keys.

    Each line may begin with the time and the name of a program.
    """

    def __init__(self) -> None:
        self._is_inside = False

    def redact_line(self, line: str) -> str:
        shown = redact_line(line)
        word = _LONE_WORD.search(line) if self._is_inside else None
        if word:
            shown = redact_line(line[: word.start()]) + node_paths.WITHHELD
        begin = _BEGIN.search(line)
        is_open = begin is not None and not _END.search(line, begin.end())
        is_wrapped = bool(word or _LONG_WORD.search(line)) and shown.endswith(node_paths.WITHHELD)
        self._is_inside = is_open or is_wrapped
        return shown


def redact_line(line: str) -> str:
    """Withhold the secrets of one line, except for those that began on an earlier line."""
    if len(line) > _REDACTED_LIMIT:
        return f"<a line of {len(line)} characters withheld>"
    line = sanitize.withhold_forms(line, node_paths.WITHHELD)
    for pattern, replacement in _REPLACEMENTS:
        line = pattern.sub(replacement, line)
    return _ENCODED.sub(_withhold_encoded, _withhold_values(line))


def redact_json(value: object, *, depth: int = 0) -> object:
    """Withhold the values of secret keys, and the secrets in keys and strings, of a JSON document.

    What is nested deeper than any valid document is withheld too.
    """
    if depth > DEPTH_LIMIT:
        return node_paths.WITHHELD
    if isinstance(value, dict):
        return {
            redact_text(key): node_paths.WITHHELD
            if _is_secret_entry(key, child)
            else redact_json(child, depth=depth + 1)
            for key, child in value.items()
        }
    if isinstance(value, list):
        return [redact_json(child, depth=depth + 1) for child in value]
    return redact_text(value) if isinstance(value, str) else value


def _is_secret_entry(key: str, value: object) -> bool:
    if not value or isinstance(value, bool) or not _SECRET_KEY.search(key):
        return False
    # The Ignition section passwd contains users, not a password.
    return not (key == "passwd" and isinstance(value, dict))


def _withhold_values(line: str) -> str:
    """Withhold the values of secret keys, up to the closing quote or the end of the line."""
    shown: list[str] = []
    while match := _KEY.search(line):
        value = match["value"]
        quoted = _QUOTED.match(value)
        shown += [line[: match.start("value")], node_paths.WITHHELD]
        line = value[quoted.end() :] if quoted else ""
    return "".join((*shown, line))


def _find_secret_end(line: str) -> re.Pattern[str] | None:
    """Return the pattern that ends an unfinished secret of this line; None without one."""
    begin = _BEGIN.search(line)
    if begin and not _END.search(line, begin.end()):
        return _END
    match = _KEY.search(line)
    while match:
        value = match["value"]
        if value[0] in "\"'" and not _QUOTED.match(value):
            return re.compile(re.escape(value[0]))
        if line.endswith("\\"):
            return re.compile(r"(?<!\\)$")
        match = _KEY.search(value)
    return None


def _is_nested_below(line: str, indent: int) -> bool:
    """Return whether a line of YAML or JSON is nested below a key with this indentation."""
    return not line.strip() or _count_indent(line) > indent or line[indent : indent + 2] == "- "


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _withhold_encoded(match: re.Match[str]) -> str:
    text = match[0]
    mixed = any(map(str.isupper, text)) and any(map(str.islower, text))
    return node_paths.WITHHELD if mixed and any(map(str.isdigit, text)) else text


def _decode_text(content: bytes | None) -> str | None:
    """Decode the contents as text; None for binary contents."""
    try:
        text = (content or b"").decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _compare_lines(old: str, new: str) -> Iterator[str]:
    """Compare the original lines and yield redacted ones, so that a new secret is a difference."""
    before, after = old.split("\n"), new.split("\n")
    if before[-1] == after[-1] == "":
        before, after = before[:-1], after[:-1]
    shown_before, shown_after = list(redact_lines(before)), list(redact_lines(after))
    if not old:
        before, shown_before = [], []
    if not new:
        after, shown_after = [], []
    matcher = SequenceMatcher(None, before, after)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        yield f"@@ -{_format_span(first[1], last[2])} +{_format_span(first[3], last[4])} @@"
        for tag, old_from, old_to, new_from, new_to in group:
            if tag == "equal":
                yield from (_truncate_line(f" {line}") for line in shown_before[old_from:old_to])
                continue
            yield from (_truncate_line(f"-{line}") for line in shown_before[old_from:old_to])
            yield from (_truncate_line(f"+{line}") for line in shown_after[new_from:new_to])


def _format_span(start: int, stop: int) -> str:
    length = stop - start
    return f"{start + bool(length)},{length}"


def _truncate_line(line: str) -> str:
    line = "".join(char if char.isprintable() or char == "\t" else "?" for char in line)
    return line if len(line) <= _LINE_LIMIT else f"{line[: _LINE_LIMIT - 1]}…"


def _format_sizes(old: bytes | None, new: bytes | None) -> str:
    return " -> ".join(
        "nothing" if content is None else f"{len(content)} bytes" for content in (old, new)
    )


def _format_digests(old: bytes | None, new: bytes | None) -> str:
    return " -> ".join(
        "nothing"
        if content is None
        else f"{len(content)} bytes, sha256:{hashlib.sha256(content).hexdigest()}"
        for content in (old, new)
    )


_TRUNCATION_NOTE = "… truncated at the start\n"


def format_redacted_document(document: object) -> bytes:
    """Format a JSON document without its secrets."""
    return _encode(json.dumps(redact_json(document), indent=1, default=str) + "\n")


def format_redacted_text(text: str) -> bytes:
    """Format a text; redact also secrets that span several lines."""
    return _encode("\n".join(redact_lines(text.split("\n"))))


def format_redacted_lines(text: str) -> bytes:
    """Format independent lines, such as journal records; an open quote ends with its line."""
    return _encode("\n".join(map(_WrappedSecrets().redact_line, text.split("\n"))))


def truncate_start(content: bytes, limit: int) -> bytes:
    """Return the end of a part, which has the latest records, as whole lines with a note."""
    if len(content) <= limit:
        return content
    return _TRUNCATION_NOTE.encode() + content[-limit:].partition(b"\n")[2]


def format_redacted_ends(head: bytes, tail: bytes, *, overlap: int, omitted: int) -> bytes:
    """Format both ends of a long text; ``omitted`` is the number of bytes between them.

    The first ``overlap`` bytes of the tail are not shown: a secret that begins there, such as a
    private key, would otherwise be shown without the line that reveals it.
    """
    hidden = tail[:overlap].count(b"\n") + 1
    shown_head = format_redacted_text(head.rpartition(b"\n")[0].decode("utf-8", "replace"))
    lines = list(redact_lines(tail.decode("utf-8", "replace").split("\n")))[hidden:]
    note = f"\n… {omitted + overlap} bytes left out\n"
    return shown_head + _encode(note) + _encode("\n".join(lines))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")
