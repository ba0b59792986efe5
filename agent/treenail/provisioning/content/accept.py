"""Chooses the Ignition version of a response from the Accept header of the request.

Ignition 2 sends ``application/vnd.coreos.ignition+json;version=3.3.0, */*;q=0.1``, and Ignition
0.35, which reads version 2, sends ``version=2.4.0``. The rules are those of the MCO's server.
"""

import re

from treenail.config.ignition_emit import VERSIONS_SERVED
from treenail.errors import UsageError

IGNITION_SUBTYPE = "vnd.coreos.ignition+json"
DEFAULT_VERSION = VERSIONS_SERVED[0]
"""The version for clients that request none, as curl."""

# Two digits more than any version needs: int() has a limit of its own.
_VERSION = re.compile(
    r"([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?"
)
_QUALITY = re.compile(r"[0-9]{1,6}(\.[0-9]{0,6})?")
_END = (4, 0, 0, False)

_Version = tuple[int, int, int, bool]


class AcceptError(UsageError):
    """The client reads no Ignition version that the server has; respond with 400."""


def choose_version(accept: str) -> str:
    """Return one of `VERSIONS_SERVED` for an Accept header, which may be empty.

    Of the requested versions the one with the highest q decides. The result is the newest version
    served that is not newer than that. Without a valid version the result is
    `DEFAULT_VERSION`. Raises `AcceptError` when all valid versions are older than 2.2.0 or not
    older than 4.0.0.
    """
    requested = sorted(_list_versions(accept), key=lambda each: each[0], reverse=True)
    for _quality, version in requested:
        if _parse_served(DEFAULT_VERSION) <= version < _END:
            return max(each for each in VERSIONS_SERVED if _parse_served(each) <= version)
    if requested:
        major, minor, patch, _ = requested[0][1]
        raise AcceptError(
            f"cannot serve Ignition {major}.{minor}.{patch}: treenail has "
            f"{', '.join(VERSIONS_SERVED)}",
            remedy="request one of these in the Accept header",
        )
    return DEFAULT_VERSION


def _list_versions(accept: str) -> list[tuple[float, _Version]]:
    """Return the valid versions of Ignition's type with their q, in the order of the header."""
    found = []
    for entry in accept.split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        _, slash, subtype = kind.partition("/")
        if not slash or subtype.lower() != IGNITION_SUBTYPE:
            continue
        pairs = [each.partition("=") for each in parameters]
        versions = [_parse_version(text) for name, _, text in pairs if name.lower() == "version"]
        qualities = [
            float(text) for name, _, text in pairs if name == "q" and _QUALITY.fullmatch(text)
        ]
        version = next((each for each in versions if each is not None), None)
        if version is not None:
            found.append((qualities[0] if qualities else 1.0, version))
    return found


def _parse_version(text: str) -> _Version | None:
    """Parse a semantic version; a pre-release is older than its release."""
    found = _VERSION.fullmatch(text.strip('"'))
    if found is None:
        return None
    return int(found[1]), int(found[2]), int(found[3]), found[4] is None


def _parse_served(version: str) -> _Version:
    major, minor, patch = map(int, version.split("."))
    return major, minor, patch, True
