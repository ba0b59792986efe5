"""What ``bootc status --json --format-version=1`` says, as `Deployments`.

https://bootc.dev/bootc/host-v1.schema.json
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from treenail.errors import HostError
from treenail.host.ostree.deployments import Deployment
from treenail.host.system.sanitize import scrub

Json = Mapping[str, object]

_API = "org.containers.bootc/v1"
# Where an image was taken from on this host is no part of its name.
_PLAIN_TRANSPORTS = ("registry", "containers-storage", "")


@dataclass(frozen=True, slots=True)
class Status:
    """The host as bootc sees it."""

    booted: Deployment
    staged: Deployment | None
    rollback: Deployment | None
    others: tuple[Deployment, ...]
    rollback_queued: bool
    incompatible: bool
    """The booted deployment has local changes, so that bootc refuses to replace it."""
    origin: str
    """The file, below the root, that says what the booted deployment was made of."""

    @property
    def in_boot_order(self) -> tuple[Deployment, ...]:
        """As `Deployments.all` wants them."""
        finished: list[Deployment | None] = [self.booted, self.rollback]
        if self.rollback_queued:
            finished.reverse()
        return tuple(filter(None, (self.staged, *finished, *self.others)))


def parse(content: bytes) -> Status:
    """Raises `HostError` when that is no status, or the host is none of bootc's."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise HostError(f"bootc status answered no JSON: {error}") from error
    found = _table(document)
    if found.get("apiVersion") != _API:
        raise HostError(
            f"bootc status answered apiVersion {found.get('apiVersion')!r}, not {_API}",
            remedy="update treenail, or bootc",
        )
    status = _table(found.get("status"))
    booted = _table(status.get("booted"))
    if _is_composefs(booted):
        raise HostError(
            "bootc manages this host with its composefs back end, where there are no OSTree "
            "deployments to stage, keep and go back to",
            remedy="install the host with bootc's OSTree back end, or leave it to bootc",
        )
    if not booted:
        raise HostError(
            "bootc does not manage this host: it was not booted from a container image",
            remedy="set backend to the one that manages it, or install the host from an image",
        )
    found_others = status.get("otherDeployments")
    others = found_others if isinstance(found_others, list) else []
    return Status(
        booted=_entry(booted, booted=True),
        staged=_optional(status.get("staged"), staged=True),
        rollback=_optional(status.get("rollback")),
        others=tuple(_entry(_table(each)) for each in others),
        rollback_queued=status.get("rollbackQueued") is True,
        incompatible=booted.get("incompatible") is True,
        origin=_origin(_table(booted.get("ostree"))),
    )


def is_composefs(content: bytes) -> bool:
    """Whether it is the status of a host that bootc manages without OSTree."""
    try:
        found = _table(json.loads(content))
    except ValueError:
        return False
    return _is_composefs(_table(_table(found.get("status")).get("booted")))


def _is_composefs(booted: Json) -> bool:
    return bool(booted.get("composefs")) and not booted.get("ostree")


def _optional(found: object, *, staged: bool = False) -> Deployment | None:
    return _entry(_table(found), staged=staged) if found else None


def _entry(entry: Json, *, booted: bool = False, staged: bool = False) -> Deployment:
    image = _table(entry.get("image"))
    reference = _table(image.get("image"))
    checksum = _text(_table(entry.get("ostree")), "checksum")
    digest = _text(image, "imageDigest")
    return Deployment(
        # Unlike rpm-ostree's it is known before the image is deployed, and stays.
        id=digest or checksum,
        checksum=checksum,
        version=_text(image, "version"),
        image=_named(reference),
        digest=digest,
        booted=booted,
        staged=staged,
        locked=staged and entry.get("downloadOnly") is True,
        pinned=entry.get("pinned") is True,
        origin=_named(reference),
        base=checksum,
        soft_reboot=entry.get("softRebootCapable") is True,
    )


def _named(reference: Json) -> str:
    transport, image = _text(reference, "transport"), scrub(_text(reference, "image"))
    return image if transport in _PLAIN_TRANSPORTS else f"{transport}:{image}"


def _origin(ostree: Json) -> str:
    if not ostree:
        return ""
    name = f"{_text(ostree, 'checksum')}.{ostree.get('deploySerial')}.origin"
    return f"/ostree/deploy/{_text(ostree, 'stateroot')}/deploy/{name}"


def _table(found: object) -> Json:
    return found if isinstance(found, Mapping) else {}


def _text(table: Json, key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""
