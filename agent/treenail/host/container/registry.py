"""What a registry says of an image, by skopeo: it knows the host's mirrors, proxies and CAs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from treenail.errors import CommandError
from treenail.host.system.command import Programs
from treenail.host.system.sanitize import scrub

Json = Mapping[str, object]

_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Blob:
    """A layer as it travels."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """An image that the registry has and gives away; what it does not say is empty."""

    architecture: str
    created: float | None
    layers: tuple[Blob, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no answer: ``kind`` for programs, ``text`` in skopeo's words."""

    kind: str
    text: str


# Names of hosts, repositories and files are none of what is said.
_A_WORD = r"(?<![a-z0-9./-]){}(?![a-z0-9/-]|\.[a-z0-9])"
# Patterns of what skopeo says, in lower case, to what it means; the first that fits counts.
_SIGNS: tuple[tuple[str, str], ...] = (
    # Files of this machine, which the words further down would lay to the registry's charge.
    ("loading registries configuration", "RegistryFailed"),
    (r"\s/\S*: permission denied", "RegistryFailed"),
    ("no such host", "RegistryNameUnknown"),
    ("name resolution", "RegistryNameUnknown"),
    ("server misbehaving", "RegistryNameUnknown"),
    ("is not yet valid: current time", "CertificateTime"),
    ("certificate has expired", "CertificateTime"),
    ("x509:", "RegistryUntrusted"),
    ("server gave http response to https client", "RegistryUntrusted"),
    ("connect: permission denied", "RegistryUnreachable"),
    ("connection refused", "RegistryUnreachable"),
    ("no route to host", "RegistryUnreachable"),
    ("network is unreachable", "RegistryUnreachable"),
    ("connection reset", "RegistryUnreachable"),
    ("i/o timeout", "RegistryTimeout"),
    ("deadline exceeded", "RegistryTimeout"),
    (r"client\.timeout", "RegistryTimeout"),
    ("handshake timeout", "RegistryTimeout"),
    ("no image found in", "WrongArchitecture"),
    ("manifest unknown", "ImageNotFound"),
    ("name unknown", "ImageNotFound"),
    ("not found", "ImageNotFound"),
    (_A_WORD.format("unauthorized"), "RegistryUnauthorized"),
    ("authentication required", "RegistryUnauthorized"),
    ("invalid username/password", "RegistryUnauthorized"),
    (_A_WORD.format("denied"), "RegistryForbidden"),
    (r"status(?: ?code)?(?: from registry)?:? 403\b|\b403 \(?forbidden", "RegistryForbidden"),
)


def refuses_login(text: str) -> bool:
    """Whether rpm-ostree, bootc or skopeo say with this that the registry wants another login."""
    return _kind(text) == "RegistryUnauthorized"


class Registry:
    """Asks registries what they have; nothing is fetched."""

    def __init__(self, programs: Programs, *, limit_s: float) -> None:
        self._programs = programs
        self._limit_s = limit_s

    def inspect(self, image: str, *, auth_file: str = "") -> Inspected | Trouble | None:
        """What the registry says of the pull spec; None where there is no skopeo to ask with.

        ``auth_file`` holds the logins; none of them is among skopeo's arguments.
        """
        login = ["--authfile", auth_file] if auth_file else []
        # Of an image with many tags, their list would take longer than everything else.
        argv = ["skopeo", "inspect", "--no-tags", *login, f"docker://{image}"]
        try:
            output = self._programs.run(argv, limit_s=self._limit_s)
        except CommandError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            return _trouble(error)
        return _inspected(output)


def _trouble(error: CommandError) -> Trouble:
    if not error.told:
        return Trouble("RegistryTimeout" if "not done within" in str(error) else "", str(error))
    kind = _kind(error.told)
    if kind == "CertificateTime":
        early = " is before " in error.told.lower()
        kind = "ClockBehindCertificate" if early else "RegistryCertificateExpired"
    return Trouble(kind or "RegistryFailed", _shown(error.told))


def _kind(told: str) -> str:
    """What it means; empty when none of the signs is there."""
    lowered = told.lower()
    return next((kind for sign, kind in _SIGNS if re.search(sign, lowered)), "")


def _shown(told: str) -> str:
    """The end of the message: it begins with what was asked and ends with what went wrong."""
    message = told.rpartition('msg="')[2].rstrip('"').replace('\\"', '"')
    return message if len(message) <= _SHOWN else "…" + message[-_SHOWN:]


def _inspected(output: bytes) -> Inspected | Trouble:
    try:
        document: object = json.loads(output)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        shown = scrub(output[:_SHOWN].decode("utf-8", "replace"))
        return Trouble("RegistryFailed", f"skopeo answers {shown!r}, which is no JSON object")
    labels, layers = document.get("Labels"), document.get("LayersData")
    return Inspected(
        architecture=_text(document, "Architecture"),
        created=_moment(_text(document, "Created")),
        layers=tuple(_blob(each) for each in layers) if isinstance(layers, list) else (),
        labels={str(name): str(value) for name, value in labels.items()}
        if isinstance(labels, dict)
        else {},
    )


def _blob(found: object) -> Blob:
    document = found if isinstance(found, dict) else {}
    size = document.get("Size")
    return Blob(_text(document, "Digest"), size if isinstance(size, int) and size > 0 else 0)


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _text(document: Json, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""
