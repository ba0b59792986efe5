"""The machine that the contract of an operating system back end is tried on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from treenail.daemon.reconcile.interfaces import OperatingSystem
from treenail.host.ostree.deployments import Change, Deployment, Progress, Verdict


@dataclass(frozen=True, slots=True)
class Images:
    """Pull specs: what the machine was installed from, one to move to, one that can't be pulled."""

    here: str
    there: str
    broken: str
    complaint: str = "corrupt layer"
    """What is said of the broken one, as a regular expression."""

    @property
    def to_there(self) -> Change:
        return Change(image=self.there)


class OsMachine(Protocol):
    """A machine with deployments, that was just installed and booted."""

    images: Images

    def os(self) -> OperatingSystem:
        """The back end as a new process has it."""

    def reboot(self) -> None:
        """In order, so that what is staged and not locked is booted next."""

    def slow_down(self) -> None:
        """Let the next pull take longer than a test has."""


def go_on(_: Progress) -> Verdict:
    return Verdict.GO_ON


def at_once(verdict: Verdict) -> Callable[[Progress], Verdict]:
    """A watcher that answers so as soon as there is something to be seen."""
    return lambda progress: verdict if progress.text else Verdict.GO_ON


def digests(os: OperatingSystem) -> list[str]:
    """In boot order, each with what is special about it."""
    return [_described(each) for each in os.look().all]


def digest(image: str) -> str:
    return image.partition("@")[2]


def _described(found: Deployment) -> str:
    marks = {"booted": found.booted, "staged": found.staged, "locked": found.locked}
    return " ".join((found.digest, *(mark for mark, there in marks.items() if there)))
