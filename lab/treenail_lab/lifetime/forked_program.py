"""A Python command line, run in a process that was forked instead of started.

A forked process has the modules of the fork server, and nothing else of it: descriptors, session,
directory, environment, signals, search path, standard streams, exit code and what /proc shows of it
are those of ``python COMMAND``.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_PATH_VARIABLE = "PYTHONPATH"
_MARKS = "TREENAIL_LAB_"
"""The beginning of the variables by which processes are found."""
_OUTPUT_LOST = 120
"""The exit code of a Python program whose last output cannot be written."""
_FIXED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
"""Signals without a handler, and those that Python ignores."""
_INHERITED = (
    *("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed_list"),
    *("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
)
_ARGUMENTS, _ENVIRONMENT = 45, 47
"""Places of arg_start and env_start after the name in /proc/PID/stat (proc(5))."""


class CallerContext:
    """The properties that a process inherits from the thread that starts it, from /proc."""

    def __init__(self, pid: int, thread: int) -> None:
        place = Path(f"/proc/{pid}/task/{thread}")
        lines = (place / "status").read_text("utf-8").splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        self.umask = int(status["Umask"], 8)
        self.blocked = _list_signals(status["SigBlk"])
        self.ignored = _list_signals(status["SigIgn"])
        files = ("cgroup", "limits", "oom_score_adj")
        self.properties = {
            **{name: status[name] for name in _INHERITED},
            **{name: (place / name).read_text("ascii") for name in files},
            **{path.name: str(path.readlink()) for path in (place / "ns").iterdir()},
            "root": str((place / "root").readlink()),
            "nice": str(os.getpriority(os.PRIO_PROCESS, thread)),
        }


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The process that a caller would have started."""

    command: list[str]
    environment: dict[str, str]
    directory: str
    thread: int
    """The thread that asks."""
    targets: list[int]
    """The numbers of the descriptors."""
    is_attached: bool = False
    """Whether `fork_client` asks."""
    has_session: bool = False


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """The words of a Python command line that a forked process can run."""

    has_safe_path: bool
    kind: str
    """``-m``, ``-c``, or empty for a script."""
    content: str
    """The module's name, the code or the script's path."""
    arguments: tuple[str, ...]

    def become_process(
        self, request: ForkRequest, caller: CallerContext, descriptors: list[int], connection: int
    ) -> NoReturn:
        """Run the program in this process, which was just forked.

        The caller gets the process id on ``connection`` when it may send signals.
        """
        try:
            if request.has_session:
                os.setsid()
            connection = _place_descriptors(request.targets, descriptors, connection)
            os.chdir(request.directory)
            os.umask(caller.umask)
            show_command(request.command)
            _replace_environment(request.environment)
            for number in signal.valid_signals() - _FIXED:
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, signal.SIG_IGN if number in caller.ignored else default)
            signal.pthread_sigmask(signal.SIG_SETMASK, caller.blocked)
            sys.orig_argv[:] = request.command
            sys.argv[:] = [self.kind or self.content, *self.arguments]
            sys.path[:] = self._build_search_path(request.environment)
            sys.stdin = open(0, encoding="utf-8", errors=sys.stdin.errors, closefd=False)  # noqa: SIM115  # stays open
            # Modules that are loaded may have a reference to this.
            sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
            # A collection writes to every object, so that the kernel would copy all modules.
            gc.unfreeze = lambda: None
            gc.enable()
            os.write(connection, str(os.getpid()).encode())
            os.close(connection)
            _end_process(*self._run())
        finally:
            os._exit(255)

    def _build_search_path(self, environment: Mapping[str, str]) -> list[str]:
        first = {"-m": os.getcwd(), "-c": "", "": str(Path(self.content).parent)}[self.kind]
        words = environment.get(_PATH_VARIABLE, "").split(os.pathsep)
        own = [] if self.has_safe_path else [first]
        return list(dict.fromkeys([*own, *filter(None, words), *sys.path]))

    def _run(self) -> tuple[int, int]:
        """Run the program; return its exit code, or the signal that ends it."""
        try:
            self._run_code()
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF, 0
            print(error.code, file=sys.stderr)
            return 1, 0
        except BaseException as error:  # noqa: BLE001  # the interpreter prints every exception
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_globals is globals():
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
        return 0, 0

    def _run_code(self) -> None:
        if self.kind == "-c":
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(self.content, "<string>", "exec"), module.__dict__)  # noqa: S102  # of the caller
        elif self.kind == "-m":
            if not hasattr(sys.modules.get(self.content), "__path__"):
                # runpy warns of a module that is loaded already.
                sys.modules.pop(self.content, None)
            runpy.run_module(self.content, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.content, run_name="__main__")


def parse_command(command: Sequence[str]) -> ForkedProgram | None:
    """Parse a command line; None for other programs, and for options with another meaning."""
    words = list(command[1:])
    options = set()
    while words and words[0] in ("-S", "-s", "-P"):
        options.add(words.pop(0))
    kind = words.pop(0) if words and words[0] in ("-m", "-c") else ""
    if command[:1] != [sys.executable] or not words or (not kind and words[0].startswith("-")):
        return None
    return ForkedProgram("-P" in options, kind, words[0], tuple(words[1:]))


def has_same_modules(environment: Mapping[str, str], directory: str) -> bool:
    """Return whether a process with this environment would load the modules of this process."""
    words = filter(None, environment.get(_PATH_VARIABLE, "").split(os.pathsep))
    paths = {os.path.join(directory, word) for word in words}
    return (
        _select_python_variables(environment) == _select_python_variables(os.environ)
        and _has_utf8(environment)
        and _has_utf8(os.environ)
        # A hook of an editable installation is no path.
        and not any(os.path.exists(path) for path in paths - set(sys.path))
    )


def show_command(command: Sequence[str]) -> None:
    """Let /proc/PID/cmdline show a command line, as far as there is room."""
    _write_area(_ARGUMENTS, command)


def _place_descriptors(targets: list[int], descriptors: list[int], connection: int) -> int:
    """Give each descriptor its number and close all others; return that of the connection."""
    above = max(targets) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    connection = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, above)
    for target, copy in zip(targets, copies, strict=True):
        os.dup2(copy, target)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in {*targets, connection}:
            with contextlib.suppress(OSError):  # that of the directory is closed
                os.close(number)
    return connection


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment, what Python derived from it, and what /proc/PID/environ shows."""
    # What other processes search for comes first.
    names = sorted(environment, key=lambda name: not name.startswith(_MARKS))
    _write_area(_ENVIRONMENT, [f"{name}={environment[name]}" for name in names])
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None


def _write_area(position: int, words: Sequence[str]) -> None:
    """Overwrite the memory of the arguments or the environment of this process."""
    fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(") ")[2].split()
    start, end = map(int, fields[position : position + 2])
    content = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


def _list_signals(mask: str) -> set[int]:
    bits = int(mask, 16)
    return {int(number) for number in signal.valid_signals() if bits >> (number - 1) & 1}


def _end_process(code: int, number: int) -> NoReturn:
    """Do what Python does at its end, except for the deletion of each object."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # no public name
    atexit._run_exitfuncs()  # noqa: SLF001  # no public name
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code if sys.stdout.closed else _OUTPUT_LOST
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    if number:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code)


def _select_python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith("PYTHON")} - {_PATH_VARIABLE}
    return {name: environment[name] for name in names}


def _has_utf8(environment: Mapping[str, str]) -> bool:
    """Return whether Python uses UTF-8, as it does in the locale C too (PEP 538)."""
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    name = next((environment[name] for name in names if environment.get(name)), "C")
    return name in ("C", "POSIX") or name.upper().replace("-", "").endswith("UTF8")
