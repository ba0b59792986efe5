"""What the work of a transaction consists of: signals to send and time that passes.

Work is a generator of these, driven by the daemon's main loop: the daemon answers calls between
any two steps, and work that is cancelled just ends where it is.
"""

from collections.abc import Generator
from dataclasses import dataclass


class OperationFailed(Exception):
    """The transaction ends without success, with this text."""


@dataclass(frozen=True, slots=True)
class Emit:
    """A signal of the transaction."""

    name: str
    signature: str = "()"
    values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """Time that the work takes."""

    seconds: float


Work = Generator[Emit | Pause, None, None]


def message(text: str) -> Emit:
    return Emit("Message", "(s)", (text,))


def task_begin(text: str) -> Emit:
    return Emit("TaskBegin", "(s)", (text,))


def task_end(text: str = "done") -> Emit:
    return Emit("TaskEnd", "(s)", (text,))


def percent(text: str, percentage: int) -> Emit:
    return Emit("PercentProgress", "(su)", (text, percentage))


def progress_end() -> Emit:
    return Emit("ProgressEnd")
