"""What the work of a transaction consists of: signals to send and time that passes.

Work is a generator of these, driven by the daemon's main loop: the daemon answers calls between
any two steps, and work that is cancelled just ends where it is.
"""

from collections.abc import Generator
from dataclasses import dataclass


class OperationError(Exception):
    """The transaction ends without success, with this text."""


@dataclass(frozen=True, slots=True)
class EmitSignal:
    """A signal of the transaction."""

    name: str
    signature: str = "()"
    values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class PauseWork:
    """Time that the work takes."""

    seconds: float


TransactionWork = Generator[EmitSignal | PauseWork, None, None]


def emit_message(text: str) -> EmitSignal:
    return EmitSignal("Message", "(s)", (text,))


def emit_task_begin(text: str) -> EmitSignal:
    return EmitSignal("TaskBegin", "(s)", (text,))


def emit_task_end(text: str = "done") -> EmitSignal:
    return EmitSignal("TaskEnd", "(s)", (text,))


def emit_percent(text: str, percentage: int) -> EmitSignal:
    return EmitSignal("PercentProgress", "(su)", (text, percentage))


def emit_progress_end() -> EmitSignal:
    return EmitSignal("ProgressEnd")
