"""Parts of bundles for bug reports: bytes that pass the redaction, and their size limits.

`treenail collect` and `treenail-controller install gather` write them into archives.
"""

import json

from treenail.config.redact import redact_json, redact_line, redact_lines

_TRUNCATION_NOTE = "… truncated at the start\n"


def format_redacted_document(document: object) -> bytes:
    """Format a JSON document without its secrets."""
    return _encode(json.dumps(redact_json(document), indent=1, default=str) + "\n")


def format_redacted_text(text: str) -> bytes:
    """Format a text; redact also secrets that span several lines."""
    return _encode("\n".join(redact_lines(text.split("\n"))))


def format_redacted_lines(text: str) -> bytes:
    """Format independent lines, such as journal records; redact line by line."""
    return _encode("\n".join(map(redact_line, text.split("\n"))))


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
