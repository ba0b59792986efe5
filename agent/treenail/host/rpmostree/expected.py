"""What a deployment has to be once a change is staged, and in what another differs from that."""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.host.ostree.deployments import Change, Deployment, digest_of


@dataclass(frozen=True, slots=True)
class Intended:
    """Everything of a deployment that a `Change` is about, except kernel arguments."""

    image: str
    digest: str
    base: str
    """The commit of the image, where there is neither a digest nor a name."""
    packages: frozenset[str]
    removed: frozenset[str]

    def differences(self, found: Deployment) -> tuple[str, ...]:
        """In what the deployment is another than this one, each to follow ``it``."""
        return (
            *(() if self._is_image(found) else (f"is of {_origin(found)}, not {self._origin}",)),
            *_listed("lacks", self.packages - set(found.packages)),
            *_listed("has", set(found.packages) - self.packages),
            *_listed("has not left out", self.removed - set(found.removed)),
            *_listed("has left out", set(found.removed) - self.removed),
        )

    @property
    def _origin(self) -> str:
        return self.image or self.digest or self.base

    def _is_image(self, found: Deployment) -> bool:
        if self.digest:
            return found.digest == self.digest
        return found.image == self.image if self.image else found.base == self.base


def intended(booted: Deployment, change: Change) -> Intended:
    """What the change makes of the booted deployment."""
    return Intended(
        image=change.image or booted.image,
        digest=digest_of(change.image) if change.image else booted.digest,
        base=booted.base,
        packages=frozenset(booted.packages) - {*change.uninstall} | {*change.install},
        removed=frozenset(booted.removed) - {*change.reset} | {*change.remove},
    )


def _origin(found: Deployment) -> str:
    return found.image or found.origin or found.base


def _listed(verb: str, names: Iterable[str]) -> tuple[str, ...]:
    found = sorted(names)
    return (f"{verb} {', '.join(found)}",) if found else ()
