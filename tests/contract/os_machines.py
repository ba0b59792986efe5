"""The machine that the contract of an operating system back end is tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from treenail.deployment_change import DeploymentChange
from treenail.host.ostree.deployments import (
    OSBackend,
    OstreeDeployment,
    TransactionProgress,
    TransactionVerdict,
)


@dataclass(frozen=True, slots=True)
class Images:
    """Pull specs: what the machine was installed from, one to move to, one that can't be pulled."""

    here: str
    there: str
    broken: str
    listed: str = ""
    """A manifest list with an image for this platform; empty if there is none."""
    listed_manifest: str = ""
    """The digest of that image's manifest."""
    complaint: str = "corrupt layer"
    """What is said of the broken one, as a regular expression."""
    insane: str = ""
    """An image in which /usr/bin/true fails; empty if there is none."""

    @property
    def to_there(self) -> DeploymentChange:
        return DeploymentChange(image=self.there)


class OsMachine(Protocol):
    """A machine with deployments, that was just installed and booted."""

    images: Images

    def os(self) -> OSBackend:
        """The back end as a new process has it."""

    def reboot(self) -> None:
        """In order, so that what is staged and not locked is booted next."""

    def slow_down(self) -> None:
        """Let the next pull take longer than a test has."""


def go_on(_: TransactionProgress) -> TransactionVerdict:
    return TransactionVerdict.CONTINUE


def at_once(verdict: TransactionVerdict) -> Callable[[TransactionProgress], TransactionVerdict]:
    """A watcher that answers so as soon as there is something to be seen."""
    return lambda progress: verdict if progress.text else TransactionVerdict.CONTINUE


def digests(os: OSBackend) -> list[str]:
    """In boot order, each with what is special about it."""
    return [_described(each) for each in os.read_deployments().in_boot_order]


def digest(image: str) -> str:
    return image.partition("@")[2]


def _described(found: OstreeDeployment) -> str:
    marks = {
        "booted": found.is_booted,
        "staged": found.is_staged,
        "locked": found.is_locked,
        "pinned": found.is_pinned,
    }
    return " ".join((found.digest, *(mark for mark, there in marks.items() if there)))
