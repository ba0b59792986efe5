"""Sanitizing of other programs' text for logs, Events and errors."""

import re

# Compiled at the first use (re keeps them): a command seldom has a text to sanitize.
# Text between a scheme or a space and an @ is userinfo, but @sha256: begins a digest.
_USERINFO = r"(?<=//)[^\s/@]*@|(?<![^\s\"'(=])[^\s/@:\"'(=]+:[^\s/@]+@(?!sha\d+:)"
# Registries redirect to blob storage with a signature, a credential, in the query.
_QUERY = r"(https?://[^\s?\"']*\?)[^\s\"']+"
_AUTHORIZATION = r"(?i)(Authorization:\s*\w+)\s+\S+"
# Logins as programs print them: NAME_PASSWORD=value, --token value, and values of auth.json.
_NAMES = r"(?:password|passwd|passphrase|secret|token|api_?key|access_?key|private_?key)"
# No pattern begins with an unbounded repetition: a line of a program may be long and hostile.
_ASSIGNMENT = rf"(?i)({_NAMES}=)(?:\"[^\"]*\"|'[^']*'|[^\s&;,\"']+)"
_OPTION = rf"(?i)((?<!\S)--?(?:[a-z]{{1,20}}-){{0,4}}{_NAMES}\s+)(?![-|&;])\S+"
_JSON_VALUE = (
    r"(?i)(\"(?:auth|identitytoken|registrytoken|[a-z0-9_-]{0,40}"
    rf"{_NAMES})\\?\"\s*:\s*\\?\")[^\"\\]+"
)
# curl --user NAME:PASSWORD; two numbers are IDs of a user and a group.
_USER_OPTION = r"((?:^|\s)(?:-u|--user|--(?:[a-z]+-)?creds)[ =])(?!\d+:\d+(?:\s|$))[^\s:/=]+:\S+"
_LIMIT = 2000


def sanitize_text(text: str, *, limit: int = _LIMIT) -> str:
    """Return ``text`` on one line, bounded, without credentials.

    Found are those of URLs, HTTP headers, assignments, options and auth.json. No pattern finds a
    password that a program prints alone.
    """
    line = " ".join(text.split())
    line = re.sub(_USERINFO, "", line)
    line = re.sub(_QUERY, r"\1…", line)
    line = re.sub(_AUTHORIZATION, r"\1 …", line)
    for pattern in (_ASSIGNMENT, _OPTION, _JSON_VALUE, _USER_OPTION):
        line = re.sub(pattern, r"\1…", line)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def quote_value(value: object, *, limit: int = 100) -> str:
    """Return a value of an untrusted document in quotes, as `sanitize_text` returns texts."""
    return sanitize_text(repr(value), limit=limit)
