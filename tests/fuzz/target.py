"""A reader of input from outside, as the fuzzer and the replay of its findings call it."""

import contextlib
import io
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TextIO

from treenail.cli.output import GuardedStream
from treenail.errors import TreenailError

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests" / "data" / "fuzz"
"""Inputs that a reader once failed on: DATA/TARGET/NAME."""

CPU_LIMIT_S = 2.0
MESSAGE_LIMIT = 8192
"""Maximum characters of an error and of its remedy."""
_CALLS = ("agent/treenail/", "lab/treenail_lab/")


class Grammar(Enum):
    """The structure that the mutator keeps valid in most inputs."""

    BYTES = "bytes"
    LINES = "lines"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """One reader.

    ``read`` raises a `TreenailError`, or one of ``errors``, for input that it refuses. Any other
    exception is a finding. It returns lines that a user sees, which a terminal must get escaped.
    """

    name: str
    read: Callable[[bytes], Iterable[str] | None]
    seeds: Callable[[], Iterable[bytes]]
    grammar: Grammar = Grammar.BYTES
    errors: tuple[type[Exception], ...] = ()
    max_bytes: int = 8192


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a reader with an input. Findings with an equal ``key`` have one cause."""

    key: str
    details: str


class _OutOfTime(BaseException):
    """The reader used more CPU time than an input may cost."""


def run_input(
    target: FuzzTarget,
    content: bytes,
    *,
    cpu_limit_s: float = CPU_LIMIT_S,
    open_terminal: Callable[[TextIO], TextIO] = GuardedStream,
) -> Finding | None:
    """Give the reader one input; return what is wrong with what it does, None if nothing is."""
    refused = (TreenailError, *target.errors)
    began = time.thread_time()
    shown: list[str] = []
    try:
        with _limit_cpu_time(cpu_limit_s):
            try:
                shown.extend(target.read(content) or ())
            except refused as error:
                shown.extend((str(error), getattr(error, "remedy", "")))
                if too_long := [each for each in shown if len(each) > MESSAGE_LIMIT]:
                    where = _find_place(error)
                    return Finding(f"long-{where}", f"{len(too_long[0])} characters at {where}")
    except _OutOfTime as error:
        return Finding(f"slow-{_find_place(error)}", traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - any other exception is what the fuzzer looks for
        return Finding(f"{type(error).__name__}-{_find_place(error)}", traceback.format_exc())
    if (seconds := time.thread_time() - began) > cpu_limit_s:
        return Finding("slow", f"{seconds:.1f} s of CPU time")
    return _check_display(shown, open_terminal)


def list_recorded(target: str) -> list[Path]:
    """Return the recorded inputs of a target."""
    return sorted((DATA / target).glob("*"))


@contextlib.contextmanager
def _limit_cpu_time(seconds: float) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _find_place(error: BaseException) -> str:
    """Return file and function of the innermost frame of the product."""
    place = "unknown"
    for frame in traceback.extract_tb(error.__traceback__):
        for part in _CALLS:
            if part in frame.filename:
                module = frame.filename.partition(part)[2].removesuffix(".py").replace("/", ".")
                place = f"{module}.{frame.name}"
    return place


def _check_display(shown: list[str], open_terminal: Callable[[TextIO], TextIO]) -> Finding | None:
    """Print the lines as a command does, and look for what a terminal would obey."""
    text = "\n".join(shown)
    if text.isprintable():
        return None
    written = io.StringIO()
    open_terminal(written).write(text)
    for char in written.getvalue():
        if not char.isprintable() and char not in "\n\t":
            return Finding("control-character", f"U+{ord(char):04X} in {written.getvalue()!r:.500}")
    try:
        json.dumps(shown).encode()
        written.getvalue().encode()
    except UnicodeEncodeError as error:
        return Finding("not-unicode", str(error))
    return None
