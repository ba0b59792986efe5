"""Deployments, as both OS back ends report them, and what a running transaction says."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from treenail.host.system.sanitize import sanitize_text

_DIGEST = re.compile(r"@(sha256:[a-f0-9]{64})$")
_REMOTES = ("ostree-remote-registry:", "ostree-remote-image:")
_SCHEMES = ("ostree-unverified-registry:", "ostree-unverified-image:", "ostree-image-signed:")
_REGISTRIES = ("docker://", "registry:")
_PIVOT = "pivot://"
_CONFIGURATION = "ostree.container.image-config"


@dataclass(frozen=True, slots=True)
class OstreeDeployment:
    """One bootable tree of this machine.

    ``image`` is a pull spec without the scheme that ostree puts before it (a transport other than
    a registry stays); ``digest`` is of the manifest, ``sha256:…``. Both are empty when unknown.
    ``is_locked``: no reboot makes the staged deployment the default before it is unlocked.
    ``requested_packages`` were asked for beside the image, ``requested_base_removals`` are those of the image that were asked
    to be left out; ``origin`` is what it was made from, for people.
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
    """The commit of the image alone: ``checksum`` unless there are packages beside it."""
    labels: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Of the image's configuration; empty where they are not known."""
    can_soft_reboot: bool = False
    """It can be booted without restarting the kernel."""


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """What is asked of the operating system in one go; empty fields keep what is there."""

    image: str = ""
    """A pull spec by digest."""
    append_kargs: tuple[str, ...] = ()
    """Kernel arguments, in order, after those to ``delete_kargs`` are gone."""
    delete_kargs: tuple[str, ...] = ()
    install_packages: tuple[str, ...] = ()
    """Packages to layer on the image."""
    uninstall_packages: tuple[str, ...] = ()
    override_remove: tuple[str, ...] = ()
    """Packages of the image to leave out."""
    override_reset: tuple[str, ...] = ()
    """Packages of the image to leave out no longer."""
    extensions_image: str = ""
    """An image, by digest, with packages beside those of the configured repositories."""

    def __str__(self) -> str:
        packages = (
            self.install_packages
            or self.uninstall_packages
            or self.override_remove
            or self.override_reset
        )
        named = (
            (self.image, self.image),
            (packages, "packages"),
            (self.append_kargs or self.delete_kargs, "kernel arguments"),
        )
        return " and ".join(name for asked, name in named if asked) or "nothing"


@dataclass(frozen=True, slots=True)
class ActiveTransaction:
    """What rpm-ostreed is at: the method, the bus name that called it, its private socket."""

    method: str
    sender: str
    address: str


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """All deployments in boot order, and the transaction that runs."""

    in_boot_order: tuple[OstreeDeployment, ...]
    transaction: ActiveTransaction | None = None

    @property
    def booted(self) -> OstreeDeployment | None:
        """The one that runs."""
        return next((each for each in self.in_boot_order if each.is_booted), None)

    @property
    def staged(self) -> OstreeDeployment | None:
        """The one that a clean shutdown will make the default, unless it is locked."""
        return next((each for each in self.in_boot_order if each.is_staged), None)

    @property
    def pending(self) -> OstreeDeployment | None:
        """The one that boots next in place of the booted one, staged or not."""
        first = next(iter(self.in_boot_order), None)
        return first if first and self.booted and not first.is_booted else None

    @property
    def rollback(self) -> OstreeDeployment | None:
        """The one that comes after the booted one."""
        booted = self.booted
        rest = self.in_boot_order[self.in_boot_order.index(booted) + 1 :] if booted else ()
        return next(iter(rest), None)


@dataclass(frozen=True, slots=True)
class TransactionProgress:
    """What a transaction last said; ``percent`` never falls and is 100 only at success."""

    text: str
    percent: int | None


class WatchVerdict(StrEnum):
    """What is to become of the transaction that is being watched."""

    CONTINUE = "go on"
    CANCEL = "cancel"
    DETACH = "leave"


def parse_deployment(found: Mapping[str, object]) -> OstreeDeployment:
    """The deployment in an element of rpm-ostree's ``DeploymentStatus``, from D-Bus or its JSON."""
    image = parse_image(found)
    return OstreeDeployment(
        id=_get_text(found, "id"),
        checksum=_get_text(found, "checksum"),
        version=_get_text(found, "version"),
        image=sanitize_text(image),
        digest=_get_text(found, "container-image-reference-digest") or parse_digest(image),
        is_booted=found.get("booted") is True,
        is_staged=found.get("staged") is True,
        # Only there when true.
        is_locked=found.get("finalization-locked") is True,
        is_pinned=found.get("pinned") is True,
        requested_packages=_get_texts(found, "requested-packages"),
        requested_base_removals=_get_texts(found, "requested-base-removals"),
        base_checksum=_get_text(found, "base-checksum") or _get_text(found, "checksum"),
        labels=parse_labels(found),
        origin=sanitize_text(
            _get_text(found, "container-image-reference") or _get_text(found, "origin")
        ),
    )


def parse_image(found: Mapping[str, object]) -> str:
    """The pull spec that a deployment came from; empty when it was no container image."""
    reference = _get_text(found, "container-image-reference")
    if not reference:
        return _parse_pivot_image(found.get("custom-origin"))
    for scheme in _REMOTES:
        if reference.startswith(scheme):
            _remote, _, reference = reference.removeprefix(scheme).partition(":")
    for prefix in (*_SCHEMES, *_REGISTRIES):
        reference = reference.removeprefix(prefix)
    return reference


def parse_labels(found: Mapping[str, object]) -> dict[str, str]:
    """The labels in the image configuration that came with the commit; empty without one."""
    metadata = found.get("base-commit-meta")
    text = metadata.get(_CONFIGURATION) if isinstance(metadata, Mapping) else None
    try:
        return parse_config_labels(json.loads(text) if isinstance(text, str) else None)
    except ValueError:
        return {}


def parse_config_labels(configuration: object) -> dict[str, str]:
    """The labels in an OCI image configuration; empty when there are none."""
    match configuration:
        case {"config": {"Labels": dict(labels)}}:
            return {str(key): value for key, value in labels.items() if isinstance(value, str)}
        case _:
            return {}


def parse_digest(image: str) -> str:
    """The digest that a pull spec ends with; empty when it has none."""
    found = _DIGEST.search(image)
    return found.group(1) if found else ""


def _parse_pivot_image(origin: object) -> str:
    # Before rpm-ostree knew containers, this tied an image to the commit taken out of it.
    url = origin[0] if isinstance(origin, tuple | list) and origin else ""
    return url.removeprefix(_PIVOT) if isinstance(url, str) and url.startswith(_PIVOT) else ""


def _get_text(found: Mapping[str, object], key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) else ""


def _get_texts(found: Mapping[str, object], key: str) -> tuple[str, ...]:
    values = found.get(key)
    return tuple(map(str, values)) if isinstance(values, list | tuple) else ()
