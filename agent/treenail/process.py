"""Run programs to their end, with limits on their time and output."""

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail import clocks, sanitize
from treenail.errors import CommandError, CommandTimeoutError

_STDERR_MESSAGE_LIMIT = 256  # characters
_STDERR_LIMIT = 4096
_STDOUT_LIMIT = 1024 * 1024
_CHUNK = 64 * 1024


@dataclass(frozen=True, slots=True)
class _OutputLimits:
    """Limits of a running program; ``deadline`` is in monotonic seconds."""

    deadline: float
    timeout_s: float
    output_bytes: int


def stop_process(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str]", timeout_s: float
) -> None:
    """End a process with SIGTERM, or with SIGKILL after ``timeout_s``, and wait for its end."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ProgramRunner:
    """Runs programs to their end, without a shell and in a session of their own.

    Every user of the machine can read arguments in /proc. Pass secrets through ``stdin``, which is
    memory that only the program can read.
    """

    def __init__(
        self,
        clock: clocks.Clock,
        environ: Mapping[str, str],
        *,
        read_variables: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``read_variables`` returns more variables before each program starts."""
        self._clock = clock
        self._read_variables = read_variables
        self._environ = {**environ, "LC_ALL": "C.UTF-8"}

    def run_command(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        output_limit: int = _STDOUT_LIMIT,
    ) -> bytes:
        """Run the program, and return its standard output, at most ``output_limit`` bytes (1 MiB).

        Raises `CommandError` with the program's name, its exit code and the beginning of its
        standard error when it fails, does not start or writes more, and `CommandTimeoutError` when
        it exceeds ``timeout_s`` seconds. In the last two cases all its child processes are killed.
        """
        deadline = self._clock.monotonic() + timeout_s
        with _open_memfd(stdin) as source:
            try:
                program = subprocess.Popen(
                    argv,
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**self._environ, **self._read_variables()},
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(f"cannot run {argv[0]}: {error.strerror}") from error
        with program:
            try:
                limits = _OutputLimits(deadline, timeout_s, output_limit)
                output, errors = self._collect_output(program, argv[0], limits)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                raise
        if program.returncode != 0:
            stderr = sanitize.sanitize_text(errors.decode("utf-8", "replace"), limit=_STDERR_LIMIT)
            shown = sanitize.sanitize_text(stderr, limit=_STDERR_MESSAGE_LIMIT)
            raise CommandError(
                f"{argv[0]} {_describe_exit(program.returncode)}{': ' if shown else ''}{shown}",
                stderr=stderr,
            )
        return output

    def _collect_output(
        self, program: "subprocess.Popen[bytes]", name: str, limits: "_OutputLimits"
    ) -> tuple[bytes, bytes]:
        """Return both outputs once the program has ended."""
        output, errors = bytearray(), bytearray()
        with selectors.DefaultSelector() as open_ends:
            open_ends.register(program.stdout or -1, selectors.EVENT_READ, output)
            open_ends.register(program.stderr or -1, selectors.EVENT_READ, errors)
            while open_ends.get_map():
                left_s = limits.deadline - self._clock.monotonic()
                if left_s <= 0:
                    raise CommandTimeoutError(f"{name} did not exit within {limits.timeout_s:g} s")
                for end, _ in open_ends.select(left_s):
                    chunk = os.read(end.fd, _CHUNK)
                    if not chunk:
                        open_ends.unregister(end.fileobj)
                    end.data.extend(chunk)
                del errors[_STDERR_LIMIT:]
                if len(output) > limits.output_bytes:
                    raise CommandError(f"{name} wrote more than {limits.output_bytes} bytes")
        try:
            program.wait(max(0.0, limits.deadline - self._clock.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise CommandTimeoutError(
                f"{name} did not exit within {limits.timeout_s:g} s"
            ) from error
        return bytes(output), bytes(errors)


@contextmanager
def _open_memfd(content: bytes) -> Iterator[int]:
    """Open the content as an anonymous file; unlike a pipe it needs no writer."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
