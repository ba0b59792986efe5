"""Parse ``bootc status --json --format-version=1`` into deployments.

https://bootc.dev/bootc/host-v1.schema.json
"""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail import errors, sanitize
from treenail.encoding import json_text
from treenail.host.ostree import deployments

Json = Mapping[str, object]

_API = "org.containers.bootc/v1"
# Where an image was taken from on this host is no part of its name.
_PLAIN_TRANSPORTS = ("registry", "containers-storage", "")


@dataclass(frozen=True, slots=True)
class BootcStatus:
    """The status of a host that bootc manages."""

    booted: deployments.OstreeDeployment
    staged: deployments.OstreeDeployment | None
    rollback: deployments.OstreeDeployment | None
    other_deployments: tuple[deployments.OstreeDeployment, ...]
    is_rollback_queued: bool
    is_incompatible: bool
    """The booted deployment has local changes, so that bootc refuses to replace it."""
    origin_path: str
    """The origin file of the booted deployment, below /sysroot."""

    @property
    def in_boot_order(self) -> tuple[deployments.OstreeDeployment, ...]:
        """The deployments in boot order, as in `DeploymentStatus`."""
        finished: list[deployments.OstreeDeployment | None] = [self.booted, self.rollback]
        if self.is_rollback_queued:
            finished.reverse()
        return tuple(filter(None, (self.staged, *finished, *self.other_deployments)))


def parse_status(content: bytes) -> BootcStatus:
    """Parse the status; raise `HostError` when it is invalid or bootc does not manage the host."""
    try:
        document = json_text.parse_json(content)
    except ValueError as error:
        raise errors.HostError(f"cannot read bootc status: it is no JSON: {error}") from error
    table = _get_table(document)
    if table.get("apiVersion") != _API:
        raise errors.HostError(
            "cannot read bootc status: its apiVersion is "
            f"{sanitize.quote_value(table.get('apiVersion'))}, not {_API}",
            remedy="update treenail or bootc",
        )
    status = _get_table(table.get("status"))
    booted = _get_table(status.get("booted"))
    if _is_composefs(booted):
        raise errors.HostError(
            "cannot manage this host: bootc uses its composefs back end, which has no OSTree "
            "deployments to stage, pin and roll back to",
            remedy="install the host with the OSTree back end of bootc, or stop treenail: "
            "systemctl disable --now treenail",
        )
    if not booted:
        raise errors.HostError(
            "cannot manage this host with bootc: it was not booted from a container image",
            remedy='set backend = "rpm-ostree" in agent.toml, or install the host from an image',
        )
    found_others = status.get("otherDeployments")
    others = found_others if isinstance(found_others, list) else []
    return BootcStatus(
        booted=_parse_entry(booted, is_booted=True),
        staged=_parse_optional_entry(status.get("staged"), is_staged=True),
        rollback=_parse_optional_entry(status.get("rollback")),
        other_deployments=tuple(_parse_entry(_get_table(other)) for other in others),
        is_rollback_queued=status.get("rollbackQueued") is True,
        is_incompatible=booted.get("incompatible") is True,
        origin_path=_build_origin_path(_get_table(booted.get("ostree"))),
    )


def is_composefs(content: bytes) -> bool:
    """Whether it is the status of a host that bootc manages without OSTree."""
    try:
        document = _get_table(json_text.parse_json(content))
    except ValueError:
        return False
    return _is_composefs(_get_table(_get_table(document.get("status")).get("booted")))


def _is_composefs(booted: Json) -> bool:
    # One of the two is null, depending on the back end of bootc.
    return bool(booted.get("composefs")) and not booted.get("ostree")


def _parse_optional_entry(
    entry: object, *, is_staged: bool = False
) -> deployments.OstreeDeployment | None:
    return _parse_entry(_get_table(entry), is_staged=is_staged) if entry else None


def _parse_entry(
    entry: Json, *, is_booted: bool = False, is_staged: bool = False
) -> deployments.OstreeDeployment:
    image = _get_table(entry.get("image"))
    reference = _get_table(image.get("image"))
    checksum = _get_text(_get_table(entry.get("ostree")), "checksum")
    digest = _get_text(image, "imageDigest")
    return deployments.OstreeDeployment(
        # Unlike rpm-ostree's it is known before the image is deployed, and stays. The manifest of a
        # manifest list is known only afterwards.
        id=deployments.parse_digest(_get_text(reference, "image")) or digest or checksum,
        checksum=checksum,
        version=_get_text(image, "version"),
        image=_format_image(reference),
        digest=digest,
        is_booted=is_booted,
        is_staged=is_staged,
        # Set by --download-only of bootc, which other programs may use.
        is_locked=is_staged and entry.get("downloadOnly") is True,
        is_pinned=entry.get("pinned") is True,
        origin=_format_image(reference),
        base_checksum=checksum,
        # True where kernel and arguments are equal, even if libostree cannot prepare a soft reboot
        # (bootc 1.16.9).
        can_soft_reboot=entry.get("softRebootCapable") is True,
    )


def _format_image(reference: Json) -> str:
    transport, image = (
        _get_text(reference, "transport"),
        sanitize.sanitize_text(_get_text(reference, "image")),
    )
    return image if transport in _PLAIN_TRANSPORTS else f"{transport}:{image}"


def _build_origin_path(ostree: Json) -> str:
    if not ostree:
        return ""
    # As ostree_deployment_get_origin_relpath() of libostree names it.
    name = f"{_get_text(ostree, 'checksum')}.{ostree.get('deploySerial')}.origin"
    return f"/ostree/deploy/{_get_text(ostree, 'stateroot')}/deploy/{name}"


def _get_table(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _get_text(table: Json, key: str) -> str:
    value = table.get(key)
    return value if isinstance(value, str) else ""
