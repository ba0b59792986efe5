"""Logs of errors that no code expects, without their messages."""

from types import TracebackType

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None]


def withhold_message(error: BaseException) -> ExceptionInfo:
    """Return the error for the argument ``exc_info`` of a log, with its type and traceback only.

    The message of a KeyError or ValueError may contain a part of a request or of a config.
    """
    named = RuntimeError(f"{type(error).__name__}, message withheld")
    return RuntimeError, named, error.__traceback__
