"""What a registry says of an image, by skopeo: it knows the host's mirrors, proxies and CAs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from treenail.errors import CommandError
from treenail.host.system.command import CommandRunner
from treenail.host.system.sanitize import sanitize_text

Json = Mapping[str, object]

_MESSAGE_LIMIT = 300


@dataclass(frozen=True, slots=True)
class RegistryLayer:
    """A layer as it travels."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ImageInspection:
    """An image that the registry has and gives away; what it does not say is empty."""

    architecture: str
    created: float | None
    layers: tuple[RegistryLayer, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class InspectionProblem:
    """Why there is no answer: ``kind`` for programs, ``text`` in skopeo's words."""

    kind: str
    text: str


# Names of hosts, repositories and files are none of what is said.
_WHOLE_WORD = r"(?<![a-z0-9./-]){}(?![a-z0-9/-]|\.[a-z0-9])"
# Patterns of what skopeo says, in lower case, to what it means; the first that fits counts.
_ERROR_PATTERNS: tuple[tuple[str, str], ...] = (
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
    (_WHOLE_WORD.format("unauthorized"), "RegistryUnauthorized"),
    ("authentication required", "RegistryUnauthorized"),
    ("invalid username/password", "RegistryUnauthorized"),
    (_WHOLE_WORD.format("denied"), "RegistryForbidden"),
    (r"status(?: ?code)?(?: from registry)?:? 403\b|\b403 \(?forbidden", "RegistryForbidden"),
)


def is_unauthorized(text: str) -> bool:
    """Whether rpm-ostree, bootc or skopeo say with this that the registry wants another login."""
    return _classify_text(text) == "RegistryUnauthorized"


class SkopeoClient:
    """Asks registries what they have; nothing is fetched."""

    def __init__(self, programs: CommandRunner, *, timeout_s: float) -> None:
        self._programs = programs
        self._timeout_s = timeout_s

    def inspect_image(
        self, image: str, *, auth_file: str = ""
    ) -> ImageInspection | InspectionProblem | None:
        """What the registry says of the pull spec; None where there is no skopeo to ask with.

        ``auth_file`` holds the logins; none of them is among skopeo's arguments.
        """
        login = ["--authfile", auth_file] if auth_file else []
        # Of an image with many tags, their list would take longer than everything else.
        argv = ["skopeo", "inspect", "--no-tags", *login, f"docker://{image}"]
        try:
            output = self._programs.run_command(argv, timeout_s=self._timeout_s)
        except CommandError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            return _classify_error(error)
        return _parse_inspection(output)


def _classify_error(error: CommandError) -> InspectionProblem:
    if not error.stderr:
        return InspectionProblem(
            "RegistryTimeout" if "not done within" in str(error) else "", str(error)
        )
    kind = _classify_text(error.stderr)
    if kind == "CertificateTime":
        early = " is before " in error.stderr.lower()
        kind = "ClockBehindCertificate" if early else "RegistryCertificateExpired"
    return InspectionProblem(kind or "RegistryFailed", _shorten_message(error.stderr))


def _classify_text(text: str) -> str:
    """What it means; empty when none of the signs is there."""
    lowered = text.lower()
    return next((kind for sign, kind in _ERROR_PATTERNS if re.search(sign, lowered)), "")


def _shorten_message(text: str) -> str:
    """The end of the message: it begins with what was asked and ends with what went wrong."""
    message = text.rpartition('msg="')[2].rstrip('"').replace('\\"', '"')
    return message if len(message) <= _MESSAGE_LIMIT else "…" + message[-_MESSAGE_LIMIT:]


def _parse_inspection(output: bytes) -> ImageInspection | InspectionProblem:
    try:
        document: object = json.loads(output)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        shown = sanitize_text(output[:_MESSAGE_LIMIT].decode("utf-8", "replace"))
        return InspectionProblem(
            "RegistryFailed", f"skopeo answers {shown!r}, which is no JSON object"
        )
    labels, layers = document.get("Labels"), document.get("LayersData")
    return ImageInspection(
        architecture=_get_text(document, "Architecture"),
        created=_parse_time(_get_text(document, "Created")),
        layers=tuple(_parse_layer(each) for each in layers) if isinstance(layers, list) else (),
        labels={str(name): str(value) for name, value in labels.items()}
        if isinstance(labels, dict)
        else {},
    )


def _parse_layer(layer: object) -> RegistryLayer:
    document = layer if isinstance(layer, dict) else {}
    size = document.get("Size")
    return RegistryLayer(
        _get_text(document, "Digest"), size if isinstance(size, int) and size > 0 else 0
    )


def _parse_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _get_text(document: Json, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""
