"""The steps of a transaction's work: signals and pauses.

Work is a generator of steps that the daemon's main loop drives. The daemon answers calls between
two steps; cancelled work ends at the current step.
"""

from collections.abc import Generator
from dataclasses import dataclass


class OperationError(Exception):
    """The transaction fails with this text."""


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


def emit_progress_end() -> EmitSignal:
    return EmitSignal("ProgressEnd")
