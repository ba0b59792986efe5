"""Text of other programs, made fit for logs, events and errors."""

import re

# What stands between a scheme or a space and an @ names a person; @sha256: is a digest.
_USERINFO = re.compile(r"(?<=//)[^\s/@]*@|(?<![^\s\"'(=])[^\s/@:\"'(=]+:[^\s/@]+@(?!sha\d+:)")
# Registries hand out blobs from storage that takes a signature in the query.
_QUERY = re.compile(r"(https?://[^\s?\"']*\?)[^\s\"']+")
_AUTHORIZATION = re.compile(r"(Authorization:\s*\w+)\s+\S+", re.IGNORECASE)
_LIMIT = 2000


def sanitize_text(text: str, *, limit: int = _LIMIT) -> str:
    """``text`` on one line, bounded, without the credentials of URLs and HTTP headers."""
    line = " ".join(text.split())
    line = _USERINFO.sub("", line)
    line = _QUERY.sub(r"\1…", line)
    line = _AUTHORIZATION.sub(r"\1 …", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"
