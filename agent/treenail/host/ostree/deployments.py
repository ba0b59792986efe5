"""Deployments, as both OS back ends report them, and what a running transaction says."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from treenail.host.system.sanitize import scrub

_DIGEST = re.compile(r"@(sha256:[a-f0-9]{64})$")
_REMOTES = ("ostree-remote-registry:", "ostree-remote-image:")
_SCHEMES = ("ostree-unverified-registry:", "ostree-unverified-image:", "ostree-image-signed:")
_REGISTRIES = ("docker://", "registry:")
_PIVOT = "pivot://"
_CONFIGURATION = "ostree.container.image-config"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One bootable tree of this machine.

    ``image`` is a pull spec without the scheme that ostree puts before it (a transport other than
    a registry stays); ``digest`` is of the manifest, ``sha256:…``. Both are empty when unknown.
    ``locked``: no reboot makes the staged deployment the default before it is unlocked.
    ``packages`` were asked for beside the image, ``removed`` are those of the image that were asked
    to be left out; ``origin`` is what it was made from, for people.
    """

    id: str
    checksum: str
    version: str
    image: str
    digest: str
    booted: bool
    staged: bool
    locked: bool
    pinned: bool
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    origin: str = ""
    base: str = ""
    """The commit of the image alone: ``checksum`` unless there are packages beside it."""
    labels: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Of the image's configuration; empty where they are not known."""
    soft_reboot: bool = False
    """It can be booted without restarting the kernel."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is asked of the operating system in one go; empty fields keep what is there."""

    image: str = ""
    """A pull spec by digest."""
    append: tuple[str, ...] = ()
    """Kernel arguments, in order, after those to ``delete`` are gone."""
    delete: tuple[str, ...] = ()
    install: tuple[str, ...] = ()
    """Packages to layer on the image."""
    uninstall: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    """Packages of the image to leave out."""
    reset: tuple[str, ...] = ()
    """Packages of the image to leave out no longer."""
    packages_from: str = ""
    """An image, by digest, with packages beside those of the configured repositories."""

    def __str__(self) -> str:
        packages = self.install or self.uninstall or self.remove or self.reset
        named = (
            (self.image, self.image),
            (packages, "packages"),
            (self.append or self.delete, "kernel arguments"),
        )
        return " and ".join(name for asked, name in named if asked) or "nothing"


@dataclass(frozen=True, slots=True)
class Transaction:
    """What rpm-ostreed is at: the method, the bus name that called it, its private socket."""

    method: str
    sender: str
    address: str


@dataclass(frozen=True, slots=True)
class Deployments:
    """All deployments in boot order, and the transaction that runs."""

    all: tuple[Deployment, ...]
    transaction: Transaction | None = None

    @property
    def booted(self) -> Deployment | None:
        """The one that runs."""
        return next((each for each in self.all if each.booted), None)

    @property
    def staged(self) -> Deployment | None:
        """The one that a clean shutdown will make the default, unless it is locked."""
        return next((each for each in self.all if each.staged), None)

    @property
    def pending(self) -> Deployment | None:
        """The one that boots next in place of the booted one, staged or not."""
        first = next(iter(self.all), None)
        return first if first and self.booted and not first.booted else None

    @property
    def rollback(self) -> Deployment | None:
        """The one that comes after the booted one."""
        booted = self.booted
        rest = self.all[self.all.index(booted) + 1 :] if booted else ()
        return next(iter(rest), None)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a transaction last said; ``percent`` never falls and is 100 only at success."""

    text: str
    percent: int | None


class Verdict(StrEnum):
    """What is to become of the transaction that is being watched."""

    GO_ON = "go on"
    CANCEL = "cancel"
    LEAVE = "leave"


def deployment(found: Mapping[str, object]) -> Deployment:
    """The deployment in an element of rpm-ostree's ``Deployments``, from D-Bus or its JSON."""
    image = image_of(found)
    return Deployment(
        id=_text(found, "id"),
        checksum=_text(found, "checksum"),
        version=_text(found, "version"),
        image=scrub(image),
        digest=_text(found, "container-image-reference-digest") or digest_of(image),
        booted=found.get("booted") is True,
        staged=found.get("staged") is True,
        # Only there when true.
        locked=found.get("finalization-locked") is True,
        pinned=found.get("pinned") is True,
        packages=_texts(found, "requested-packages"),
        removed=_texts(found, "requested-base-removals"),
        base=_text(found, "base-checksum") or _text(found, "checksum"),
        labels=labels_of(found),
        origin=scrub(_text(found, "container-image-reference") or _text(found, "origin")),
    )


def image_of(found: Mapping[str, object]) -> str:
    """The pull spec that a deployment came from; empty when it was no container image."""
    reference = _text(found, "container-image-reference")
    if not reference:
        return _pivoted(found.get("custom-origin"))
    for scheme in _REMOTES:
        if reference.startswith(scheme):
            _remote, _, reference = reference.removeprefix(scheme).partition(":")
    for prefix in (*_SCHEMES, *_REGISTRIES):
        reference = reference.removeprefix(prefix)
    return reference


def labels_of(found: Mapping[str, object]) -> dict[str, str]:
    """The labels in the image configuration that came with the commit; empty without one."""
    metadata = found.get("base-commit-meta")
    text = metadata.get(_CONFIGURATION) if isinstance(metadata, Mapping) else None
    try:
        return labels_in(json.loads(text) if isinstance(text, str) else None)
    except ValueError:
        return {}


def labels_in(configuration: object) -> dict[str, str]:
    """The labels in an OCI image configuration; empty when there are none."""
    match configuration:
        case {"config": {"Labels": dict(labels)}}:
            return {str(key): value for key, value in labels.items() if isinstance(value, str)}
        case _:
            return {}


def digest_of(image: str) -> str:
    """The digest that a pull spec ends with; empty when it has none."""
    found = _DIGEST.search(image)
    return found.group(1) if found else ""


def _pivoted(origin: object) -> str:
    # Before rpm-ostree knew containers, this tied an image to the commit taken out of it.
    url = origin[0] if isinstance(origin, tuple | list) and origin else ""
    return url.removeprefix(_PIVOT) if isinstance(url, str) and url.startswith(_PIVOT) else ""


def _text(found: Mapping[str, object], key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) else ""


def _texts(found: Mapping[str, object], key: str) -> tuple[str, ...]:
    values = found.get(key)
    return tuple(map(str, values)) if isinstance(values, list | tuple) else ()
