"""Functions in a forked process: what they import takes no memory of this process afterwards."""

import os
import pickle
from collections.abc import Callable
from typing import TypeVar, cast

from treenail.errors import HostError

T = TypeVar("T")


def run_forked(function: Callable[[], T]) -> T:
    """Return the result of the function, or raise its exception; both must be picklable.

    Raises `HostError` when the process is killed.

    The function must not use threads or locks of this process: other threads do not exist in the
    fork.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(function, reader, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as stream:
            content = stream.read()
    finally:
        _, status = os.waitpid(pid, 0)
    if not content:
        raise HostError(f"a forked process ended without an answer, with wait status {status}")
    # Of the own program.
    result, error = cast("tuple[T, BaseException | None]", pickle.loads(content))  # noqa: S301
    if error is not None:
        raise error
    return result


def _answer(function: Callable[[], object], reader: int, writer: int) -> None:
    """Write the outcome, and end the process without the exit handlers of the original one."""
    try:
        os.close(reader)
        outcome: tuple[object, BaseException | None]
        try:
            outcome = (function(), None)
        except BaseException as error:  # noqa: BLE001  # it is raised in the original process
            outcome = (None, error)
        with os.fdopen(writer, "wb") as stream:
            pickle.dump(outcome, stream)
    finally:
        os._exit(0)
