"""Image inspection by skopeo, which uses the host's registry mirrors, proxies and CAs."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from treenail import clocks, errors, observations, process, retry, sanitize
from treenail.encoding import json_text

log = logging.getLogger(__name__)

Json = Mapping[str, object]

_MESSAGE_LIMIT = 300
_PLATFORM_LIMIT = 60


# Match a word of the message, not part of the name of a host, repository or file.
_WHOLE_WORD = r"(?<![a-z0-9./-]){}(?![a-z0-9/-]|\.[a-z0-9])"
# Patterns of skopeo's errors in lower case, and the kind of each. The first match counts.
_ERROR_PATTERNS: tuple[tuple[str, str], ...] = (
    # Unreadable files of this node: the patterns below would blame the registry.
    ("loading registries configuration", "RegistryFailed"),
    (r"\s/\S*: permission denied", "RegistryFailed"),
    # Texts of Go's packages net and crypto/x509, which are the same in each locale.
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
    # From the choice of a platform in a manifest list (containers/image).
    ("no image found in", "WrongArchitecture"),
    # Error codes of the OCI distribution specification, such as MANIFEST_UNKNOWN, in words.
    ("manifest unknown", "ImageNotFound"),
    ("name unknown", "ImageNotFound"),
    ("not found", "ImageNotFound"),
    (_WHOLE_WORD.format("unauthorized"), "RegistryUnauthorized"),
    ("authentication required", "RegistryUnauthorized"),
    ("invalid username/password", "RegistryUnauthorized"),
    (_WHOLE_WORD.format("denied"), "RegistryForbidden"),
    (r"status(?: ?code)?(?: from registry)?:? 403\b|\b403 \(?forbidden", "RegistryForbidden"),
)


# Answers of a registry, or of a proxy before it, that has too many requests or restarts.
_OVERLOADED = re.compile(r"toomanyrequests|unexpected http status: 50[234]\b|\b429 too many")


def is_unauthorized(text: str) -> bool:
    """Whether an error of rpm-ostree, bootc or skopeo means that the login was rejected."""
    return _classify_text(text) == "RegistryUnauthorized"


class SkopeoClient:
    """Inspects images in registries without pulling them."""

    def __init__(
        self, programs: process.ProgramRunner, clock: clocks.Clock, *, timeout_s: float
    ) -> None:
        """``timeout_s`` is the time limit of one attempt."""
        self._programs = programs
        self._clock = clock
        self._timeout_s = timeout_s

    def inspect_image(
        self, image: str, *, auth_file: str = ""
    ) -> observations.ImageInspection | observations.InspectionProblem | None:
        """Inspect the image with this pull spec; return None if skopeo is not installed.

        ``auth_file`` holds the pull secret; skopeo's arguments, visible in /proc, contain none.
        """
        try:
            # Without --no-tags, skopeo also lists all tags: with many, that is most of the time.
            output = self._run_inspect("--no-tags", image, auth_file)
        except errors.CommandError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            problem = _classify_error(error)
            if problem.kind != "WrongArchitecture":
                return problem
            log.info("cannot inspect %s: %s", image, problem.text)
            return replace(problem, platforms=self.list_platforms(image, auth_file=auth_file))
        return _parse_inspection(output)

    def list_platforms(self, image: str, *, auth_file: str = "") -> tuple[str, ...]:
        """Return the platforms of a manifest list, each as ``OS/ARCHITECTURE``.

        Empty for a single manifest, or on failure.
        """
        try:
            return _parse_platforms(self._run_inspect("--raw", image, auth_file))
        except errors.CommandError as error:
            log.info("cannot list the platforms of %s: %s", image, error)
            return ()

    def _run_inspect(self, option: str, image: str, auth_file: str) -> bytes:
        login = ["--authfile", auth_file] if auth_file else []
        argv = ["skopeo", "inspect", option, *login, f"docker://{image}"]
        return retry.retry_registry_probe(
            lambda: self._programs.run_command(argv, timeout_s=self._timeout_s),
            self._clock,
            _is_outage,
        )


def _is_outage(error: BaseException) -> bool:
    """Return whether a registry failed quickly and may answer in a moment."""
    # A timeout is no such error: a retry would take the whole time limit again.
    return isinstance(error, errors.CommandError) and (
        _classify_text(error.stderr) == "RegistryUnreachable"
        or _OVERLOADED.search(error.stderr.lower()) is not None
    )


def _classify_error(error: errors.CommandError) -> observations.InspectionProblem:
    if not error.stderr:
        is_timeout = isinstance(error, errors.CommandTimeoutError)
        return observations.InspectionProblem(
            "RegistryTimeout" if is_timeout else "RegistryFailed", str(error)
        )
    kind = _classify_text(error.stderr)
    if kind == "CertificateTime":
        early = " is before " in error.stderr.lower()
        kind = "ClockBehindCertificate" if early else "RegistryCertificateExpired"
    return observations.InspectionProblem(kind or "RegistryFailed", _shorten_message(error.stderr))


def _classify_text(text: str) -> str:
    """Return the kind of the first matching pattern; empty when none matches."""
    lowered = text.lower()
    return next((kind for pattern, kind in _ERROR_PATTERNS if re.search(pattern, lowered)), "")


def _shorten_message(text: str) -> str:
    """Return the end of skopeo's message, where the cause stands."""
    message = text.rpartition('msg="')[2].rstrip('"').replace('\\"', '"')
    return message if len(message) <= _MESSAGE_LIMIT else "…" + message[-_MESSAGE_LIMIT:]


def _parse_inspection(
    output: bytes,
) -> observations.ImageInspection | observations.InspectionProblem:
    try:
        document: object = json_text.parse_json(output)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        shown = sanitize.sanitize_text(output[:_MESSAGE_LIMIT].decode("utf-8", "replace"))
        return observations.InspectionProblem(
            "RegistryFailed",
            f"cannot inspect the image: skopeo printed {shown!r}, not a JSON object",
        )
    # An old skopeo prints Layers alone, without sizes.
    labels, layers = document.get("Labels"), document.get("LayersData")
    return observations.ImageInspection(
        architecture=_get_text(document, "Architecture"),
        created=_parse_time(_get_text(document, "Created")),
        layers=tuple(_parse_layer(layer) for layer in layers) if isinstance(layers, list) else (),
        labels={str(name): str(value) for name, value in labels.items()}
        if isinstance(labels, dict)
        else {},
    )


def _parse_platforms(output: bytes) -> tuple[str, ...]:
    try:
        document: object = json_text.parse_json(output)
    except ValueError:
        return ()
    manifests = document.get("manifests") if isinstance(document, dict) else None
    entries = manifests if isinstance(manifests, list) else []
    platforms = (_parse_platform(entry) for entry in entries if isinstance(entry, dict))
    # buildx lists attestations of its builds as manifests of the platform unknown/unknown.
    return tuple(platform for platform in platforms if "unknown" not in platform)


def _parse_platform(entry: Json) -> str:
    value = entry.get("platform")
    platform: Json = value if isinstance(value, dict) else {}
    names = (_get_text(platform, name) for name in ("os", "architecture", "variant"))
    named = "/".join(filter(None, names)) or "unknown"
    return sanitize.sanitize_text(named, limit=_PLATFORM_LIMIT)


def _parse_layer(layer: object) -> observations.ImageLayer:
    document = layer if isinstance(layer, dict) else {}
    size = document.get("Size")
    return observations.ImageLayer(
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
