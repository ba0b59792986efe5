r"""Text from outside: control characters are escaped, credentials are removed.

Users, other programs and the cluster write such text; terminals, logs, Events and errors show it.
Escapes are those of JSON: ``\u001b`` stands for ESC.
"""

import binascii
import re
from collections.abc import Mapping

_ALLOWED = frozenset("\n\t")


def escape_text(text: str, *, styles: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with escapes in place of characters that are not printable.

    Newlines and tabs stay. ``styles`` maps the marks of colours to sequences of the terminal.
    """
    if all(part.isprintable() for part in text.split("\n")):
        return text
    return "".join(
        char
        if char.isprintable() or char in _ALLOWED
        else (styles or {}).get(char) or _escape_char(char)
        for char in text
    )


def escape_line(text: str) -> str:
    """Return ``text`` as one line: newlines and tabs are escaped too."""
    return escape_text(text).replace("\n", r"\n").replace("\t", r"\t")


def _escape_char(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


# Compiled at the first use (re keeps them): a command seldom has a text to sanitize.
# Text between a scheme or a space and an @ is userinfo, but @sha256: begins a digest.
_USERINFO = r"(?<=//)[^\s/@]*@|(?<![^\s\"'(=])[^\s/@:\"'(=]{1,300}:[^\s/@]{1,4096}@(?!sha\d+:)"
# Registries redirect to blob storage with a signature, a credential, in the query.
_QUERY = r"(https?://[^\s?\"']{0,1000}\?)[^\s\"']+"
_AUTHORIZATION = r"(?i)(Authorization:\s*\w+)\s+\S+"
# Logins as programs print them: NAME_PASSWORD=value, --token value, and values of auth.json.
_NAMES = r"(?:password|passwd|passphrase|secret|token|api_?key|access_?key|private_?key)"
# A line of a program may be long and hostile: no pattern begins with an unbounded repetition, or
# has one before a required character, so that an attempt ends soon at each of its places.
_ASSIGNMENT = rf"(?i)({_NAMES}=)(?:\"[^\"]*\"|'[^']*'|[^\s&;,\"']+)"
_OPTION = rf"(?i)((?<!\S)--?(?:[a-z]{{1,20}}-){{0,4}}{_NAMES}\s+)(?![-|&;])\S+"
_JSON_VALUE = (
    r"(?i)(\"(?:auth|identitytoken|registrytoken|[a-z0-9_-]{0,40}"
    rf"{_NAMES})\\?\"\s*:\s*\\?\")[^\"\\]+"
)
# curl --user NAME:PASSWORD; two numbers are IDs of a user and a group.
_USER_OPTION = r"((?:^|\s)(?:-u|--user|--(?:[a-z]+-)?creds)[ =])(?!\d+:\d+(?:\s|$))[^\s:/=]+:\S+"
# Secrets that have a form of their own: private keys, also in JSON or in a URL; access tokens,
# bootstrap tokens, those of service accounts and of OAuth; headers; logins with a colon as %3A.
_FORMS = (
    r"(?s)-----BEGIN[^-]{0,40}(?:PRIVATE|Static)[^-]{0,40}-----.*?(?:-----END[^-]*-----|$)",
    r"(?<![A-Za-z0-9])tn_[a-z0-9]{1,20}_[\w-]{20,64}",
    r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b",
    r"\beyJ[\w-]{5,2000}\.[\w-]*\.?[\w-]*",
    r"\bsha256~[\w-]{10,}",
    r"(?i:(?<=\bbasic )|(?<=\bbearer ))(?=\S*[\d=])[\w.~+/=-]{8,}",
    r"(?i)(?<![^\s\"'=&?,;/])[^\s\"'=&?,;/]{1,300}%3A(?!%2F)[^\s\"'&@]+",
)
_WRAPPED = r"(?<!\S)(?:(?:[A-Za-z0-9+/_-]{64}|[A-Za-z0-9+/_-]{76})\s+)+[A-Za-z0-9+/_-]+={0,2}(?!\S)"
ENCODED = r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{16,}(?![A-Za-z0-9+/_-])={0,2}"
_LIMIT = 2000
_READ_CHARS = 16 * 1024
"""Of a text, whatever is shown of it: the patterns take up to 0.2 s for these."""


_BLANKS = {ord(blank): " " for blank in "\n\r\t"}


def decode_text(word: str) -> str:
    """Return the text that a word of base64 contains, also in its URL-safe form; empty if none."""
    plain = "".join(word.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        content = binascii.a2b_base64(plain + "=" * (-len(plain) % 4))
        text = content.decode("ascii")
    except ValueError:
        return ""
    return text if text.translate(_BLANKS).isprintable() else ""


def withhold_forms(line: str, mark: str) -> str:
    """Replace secrets that are recognized by their form, also in base64 of any kind, with a mark.

    Text in base64 is withheld whatever it says: only random bytes and certificates are no text.
    """
    for form in _FORMS:
        line = re.sub(form, mark, line)
    for form in (_WRAPPED, ENCODED):
        line = re.sub(form, lambda word: mark if decode_text(word[0]) else word[0], line)
    return line


def sanitize_text(text: str, *, limit: int = _LIMIT) -> str:
    """Return ``text`` on one line, bounded, without credentials.

    Found are those of URLs, HTTP headers, assignments, options and auth.json. No pattern finds a
    password that a program prints alone.
    """
    line = " ".join(text[:_READ_CHARS].split())
    line = re.sub(_USERINFO, "", line)
    line = re.sub(_QUERY, r"\1…", line)
    line = re.sub(_AUTHORIZATION, r"\1 …", line)
    for pattern in (_ASSIGNMENT, _OPTION, _JSON_VALUE, _USER_OPTION):
        line = re.sub(pattern, r"\1…", line)
    line = withhold_forms(line, "…")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def quote_value(value: object, *, limit: int = 100) -> str:
    """Return a value of an untrusted document in quotes, as `sanitize_text` returns texts."""
    return sanitize_text(repr(value), limit=limit)
