"""The deployment expected after a change is staged, and how a found one differs."""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.host.ostree.deployments import DeploymentChange, OstreeDeployment, parse_digest


@dataclass(frozen=True, slots=True)
class ExpectedDeployment:
    """The properties that a `DeploymentChange` sets, except kernel arguments."""

    image: str
    digest: str
    base_checksum: str
    """The commit of the image, where there is neither a digest nor a name."""
    packages: frozenset[str]
    removed_packages: frozenset[str]

    def list_differences(self, found: OstreeDeployment) -> tuple[str, ...]:
        """Return the differences of the found deployment, as ends of a sentence after ``it``."""
        return (
            *(
                ()
                if self._has_same_image(found)
                else (f"is of {_describe_origin(found)}, not {self._origin}",)
            ),
            *_format_difference("lacks", self.packages - set(found.requested_packages)),
            *_format_difference("has", set(found.requested_packages) - self.packages),
            *_format_difference(
                "has not left out", self.removed_packages - set(found.requested_base_removals)
            ),
            *_format_difference(
                "has left out", set(found.requested_base_removals) - self.removed_packages
            ),
        )

    @property
    def _origin(self) -> str:
        return self.image or self.digest or self.base_checksum

    def _has_same_image(self, found: OstreeDeployment) -> bool:
        if self.digest:
            return found.has_image(self.digest)
        return (
            found.image == self.image if self.image else found.base_checksum == self.base_checksum
        )


def compute_expected(booted: OstreeDeployment, change: DeploymentChange) -> ExpectedDeployment:
    """Return the deployment that the change derives from the booted one."""
    return ExpectedDeployment(
        image=change.image or booted.image,
        digest=parse_digest(change.image) if change.image else booted.digest,
        base_checksum=booted.base_checksum,
        packages=frozenset(booted.requested_packages) - {*change.uninstall_packages}
        | {*change.install_packages},
        removed_packages=frozenset(booted.requested_base_removals) - {*change.override_reset}
        | {*change.override_remove},
    )


def _describe_origin(found: OstreeDeployment) -> str:
    return found.image or found.origin or found.base_checksum


def _format_difference(verb: str, names: Iterable[str]) -> tuple[str, ...]:
    found = sorted(names)
    return (f"{verb} {', '.join(found)}",) if found else ()
