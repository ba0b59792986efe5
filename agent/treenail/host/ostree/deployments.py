"""The interface of the OS back ends: deployments, and the progress of a transaction."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from treenail import deployment_change, sanitize
from treenail.encoding import json_text
from treenail.host.filesystem.root_directory import Root

_DIGEST = re.compile(r"@(sha256:[a-f0-9]{64})$")
# Refspecs of ostree-ext are a scheme, a transport of containers-transports(5) and the name.
# ostree-remote-registry and ostree-remote-image have a remote of ostree before the name.
_REMOTES = ("ostree-remote-registry:", "ostree-remote-image:")
_SCHEMES = ("ostree-unverified-registry:", "ostree-unverified-image:", "ostree-image-signed:")
_REGISTRIES = ("docker://", "registry:")
_PIVOT = "pivot://"
IMAGE_CONFIG_KEY = "ostree.container.image-config"
"""The metadata of a commit with the configuration of the image that it was imported from."""


@dataclass(frozen=True, slots=True)
class OstreeDeployment:
    """One bootable tree of this machine.

    ``image`` is a pull spec without ostree's scheme; a transport other than a registry stays.
    ``digest`` is that of the manifest, ``sha256:…``. Both are empty when unknown. For a multi-arch
    image the pull spec has the digest of the manifest list, and ``digest`` is that of the manifest
    for this platform.
    ``is_locked``: shutdown does not finalize the staged deployment until it is unlocked.
    ``requested_packages`` are layered on the image. ``requested_base_removals`` are packages of
    the image to leave out. ``origin`` is the refspec for display.
    """

    id: str
    checksum: str
    version: str
    image: str
    digest: str
    is_booted: bool
    is_staged: bool
    is_locked: bool
    is_pinned: bool
    requested_packages: tuple[str, ...] = ()
    requested_base_removals: tuple[str, ...] = ()
    origin: str = ""
    base_checksum: str = ""
    """The commit of the image alone: ``checksum`` unless packages are layered on it."""
    labels: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Labels of the image configuration; empty when unknown."""
    can_soft_reboot: bool = False
    """Whether a soft reboot can boot it, without restarting the kernel."""

    @property
    def list_digest(self) -> str:
        """The digest of the manifest list in the pull spec; empty if it names the manifest."""
        requested = parse_digest(self.image)
        return "" if requested == self.digest else requested

    def has_image(self, digest: str) -> bool:
        """Return whether it is of the image with this digest of a manifest or manifest list."""
        # A digest in the recorded pull spec counts: the pull verified what it names, and the
        # manifest list alone decides which manifest this platform gets.
        return digest != "" and digest in {self.digest, self.list_digest}


@dataclass(frozen=True, slots=True)
class ActiveTransaction:
    """A transaction of rpm-ostreed: its method, the caller's bus name, its private socket."""

    method: str
    sender: str
    address: str


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """All deployments in boot order, and the active transaction."""

    in_boot_order: tuple[OstreeDeployment, ...]
    transaction: ActiveTransaction | None = None

    @property
    def booted(self) -> OstreeDeployment | None:
        """The booted deployment."""
        return next((deployment for deployment in self.in_boot_order if deployment.is_booted), None)

    @property
    def staged(self) -> OstreeDeployment | None:
        """The deployment that a clean shutdown makes the default, unless it is locked."""
        return next((deployment for deployment in self.in_boot_order if deployment.is_staged), None)

    @property
    def pending(self) -> OstreeDeployment | None:
        """The deployment that boots next instead of the booted one, staged or not."""
        first = next(iter(self.in_boot_order), None)
        return first if first and self.booted and not first.is_booted else None

    @property
    def rollback(self) -> OstreeDeployment | None:
        """The deployment after the booted one in boot order."""
        booted = self.booted
        rest = self.in_boot_order[self.in_boot_order.index(booted) + 1 :] if booted else ()
        return next(iter(rest), None)


@dataclass(frozen=True, slots=True)
class TransactionProgress:
    """Last progress of a transaction. ``percent`` never falls and is 100 only at success."""

    text: str
    percent: int | None


class TransactionVerdict(StrEnum):
    """A watcher's decision about the transaction: continue, cancel, or let it run alone."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    DETACH = "detach"


def parse_deployment(properties: Mapping[str, object]) -> OstreeDeployment:
    """Parse an element of rpm-ostreed's ``Deployments``, from D-Bus or ``status --json``."""
    image = parse_image(properties)
    return OstreeDeployment(
        id=_get_text(properties, "id"),
        checksum=_get_text(properties, "checksum"),
        version=_get_text(properties, "version"),
        image=sanitize.sanitize_text(image),
        # rpm-ostreed omits the digest when it cannot look it up.
        digest=_get_text(properties, "container-image-reference-digest") or parse_digest(image),
        is_booted=properties.get("booted") is True,
        is_staged=properties.get("staged") is True,
        # rpm-ostreed omits this key when it is false, and with libostree 2023.8 and later always:
        # see is_staged_locked.
        is_locked=properties.get("finalization-locked") is True,
        is_pinned=properties.get("pinned") is True,
        requested_packages=_get_texts(properties, "requested-packages"),
        requested_base_removals=_get_texts(properties, "requested-base-removals"),
        # Only a deployment with layered packages has a base-checksum.
        base_checksum=_get_text(properties, "base-checksum") or _get_text(properties, "checksum"),
        labels=parse_labels(properties),
        # A deployment of a container has no origin, and one of a commit or branch has no reference.
        origin=sanitize.sanitize_text(
            _get_text(properties, "container-image-reference") or _get_text(properties, "origin")
        ),
    )


def parse_image(properties: Mapping[str, object]) -> str:
    """Return the pull spec of a deployment; empty when it is not a container image."""
    reference = _get_text(properties, "container-image-reference")
    if not reference:
        return _parse_pivot_image(properties.get("custom-origin"))
    for scheme in _REMOTES:
        if reference.startswith(scheme):
            _remote, _, reference = reference.removeprefix(scheme).partition(":")
    for prefix in (*_SCHEMES, *_REGISTRIES):
        reference = reference.removeprefix(prefix)
    return reference


def parse_labels(properties: Mapping[str, object]) -> dict[str, str]:
    """Return the labels of the image configuration in the commit; empty without one."""
    metadata = properties.get("base-commit-meta")
    text = metadata.get(IMAGE_CONFIG_KEY) if isinstance(metadata, Mapping) else None
    try:
        return parse_config_labels(json_text.parse_json(text) if isinstance(text, str) else None)
    except ValueError:
        return {}


def parse_config_labels(configuration: object) -> dict[str, str]:
    """Return the labels of an OCI image configuration; empty when it has none."""
    match configuration:
        case {"config": {"Labels": dict(labels)}}:
            return {str(key): value for key, value in labels.items() if isinstance(value, str)}
        case _:
            return {}


def parse_digest(image: str) -> str:
    """Return the digest at the end of a pull spec; empty when it has none."""
    match = _DIGEST.search(image)
    return match.group(1) if match else ""


def _parse_pivot_image(origin: object) -> str:
    # Before rpm-ostree supported containers, the MCO recorded the image in custom-origin.
    url = origin[0] if isinstance(origin, tuple | list) and origin else ""
    return url.removeprefix(_PIVOT) if isinstance(url, str) and url.startswith(_PIVOT) else ""


def _get_text(properties: Mapping[str, object], key: str) -> str:
    value = properties.get(key)
    return value if isinstance(value, str) else ""


def _get_texts(properties: Mapping[str, object], key: str) -> tuple[str, ...]:
    values = properties.get(key)
    return tuple(map(str, values)) if isinstance(values, list | tuple) else ()


TransactionWatch = Callable[[TransactionProgress], TransactionVerdict]


class OSBackend(Protocol):
    """The deployments of this machine, managed by rpm-ostree or bootc.

    Every method has its own time limit and is idempotent.
    """

    @property
    def name(self) -> str:
        """``rpm-ostree`` or ``bootc``."""

    def read_deployments(self) -> DeploymentStatus:
        """Read the deployments from the back end, without a cache."""

    def stage_deployment(
        self, change: deployment_change.DeploymentChange, *, watch: TransactionWatch
    ) -> None:
        """Stage the change as a locked deployment; do nothing when it is already staged.

        Calls ``watch`` at least once a second; its result says whether to continue. Raises
        `CancelledError` if it does not, also when the transaction continues without the caller.
        """

    def open_staged_tree(
        self, staged_id: str, paths: Sequence[str]
    ) -> AbstractContextManager[Root]:
        """Open the tree of the staged deployment of this ID; it has at least these paths.

        A path that ends with a slash is a directory with its content. Its /etc is the one of the
        image. Raises `HostError` when it is not staged.
        """

    def wait_for_other_transaction(self, *, watch: TransactionWatch) -> bool:
        """Wait until another program's transaction ends; return False when there is none."""

    def read_finalization_error(self) -> str:
        """Return why ostree did not finalize a deployment at the last shutdown; empty if it did."""

    def drop_staged(self, staged_id: str) -> None:
        """Drop the staged deployment of this ID and cancel our transaction that would create one.

        Keeps deployments that other programs staged.
        """

    def finalize_staged(self, staged_id: str, *, is_soft: bool = False) -> None:
        """Unlock the staged deployment of this ID, so that the next boot starts it.

        rpm-ostree's FinalizeDeployment also reboots at once unless ``is_soft``. The caller requests
        the reboot in either case.
        """

    def roll_back(self) -> None:
        """Make the previous deployment the default of the boot loader, without a reboot."""

    def release_daemon(self) -> None:
        """Unregister from the OS daemon, so that it can exit when idle."""
