"""Sanitizing of other programs' text for logs, Events and errors."""

import re

# Text between a scheme or a space and an @ is userinfo, but @sha256: begins a digest.
_USERINFO = re.compile(r"(?<=//)[^\s/@]*@|(?<![^\s\"'(=])[^\s/@:\"'(=]+:[^\s/@]+@(?!sha\d+:)")
# Registries redirect to blob storage with a signature, a credential, in the query.
_QUERY = re.compile(r"(https?://[^\s?\"']*\?)[^\s\"']+")
_AUTHORIZATION = re.compile(r"(Authorization:\s*\w+)\s+\S+", re.IGNORECASE)
_LIMIT = 2000


def sanitize_text(text: str, *, limit: int = _LIMIT) -> str:
    """Return ``text`` on one line, bounded, without credentials of URLs and HTTP headers."""
    line = " ".join(text.split())
    line = _USERINFO.sub("", line)
    line = _QUERY.sub(r"\1…", line)
    line = _AUTHORIZATION.sub(r"\1 …", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"
