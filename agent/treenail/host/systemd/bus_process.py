"""D-Bus in a process of its own, which lives while the agent works.

gi and pydbus take 11 MiB and two threads. The agent needs them during an update and for a check of
its units, so that it ends this process when it has been idle for some seconds. Both processes
exchange requests and answers over a socket pair, each with its length, in the format of `marshal`:
they run the same interpreter.

The process ends with the agent, as the agent's own connection to the bus would. It is in the
control group of the agent's unit, and ignores SIGTERM: the agent finishes the step in progress.
"""

import ctypes
import marshal
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

from treenail import errors

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20
_DESCRIPTOR = 3
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_GRACE_S = 60.0
"""Time for an answer above the time limit of the call: connecting to the bus may take 25 s."""
_LOST_REMEDY = "see: journalctl -u treenail"

_ERRORS = {"busy": errors.BusyError, "late": errors.BusTimeoutError, "failed": errors.BusError}
"""The error of each outcome of a request."""

_Address = tuple[str, str, str]


class BusProcess:
    """A `treenail.host.systemd.system_bus.BusService` in another process. For one thread.

    The first call starts the process, and `close_connection` ends it. When the process dies, the
    call in progress fails like one whose service gave no reply, and the next one starts it again.
    """

    def __init__(
        self, environ: Mapping[str, str], address: str = "", *, interpreter: str = sys.executable
    ) -> None:
        """``address`` is a D-Bus address; by default that of the system bus of this host."""
        self._interpreter = interpreter
        self._environ = environ
        self._address = address
        self._link: socket.socket | None = None
        self._pid = 0
        self._sources: set[int] = set()

    @property
    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._link is not None

    def start(self) -> None:
        """Start the process unless it runs; it loads its modules while the caller continues."""
        if self._link is None:
            self._link, self._pid = _start_process(self._interpreter, self._environ, self._address)

    def call_method(
        self,
        address: _Address,
        member: str,
        arguments: Sequence[tuple[str, object]],
        timeout_s: float,
    ) -> object:
        return self._request(timeout_s, "call_method", address, member, arguments, timeout_s)

    def read_properties(self, address: _Address, timeout_s: float) -> dict[str, object]:
        properties = self._request(timeout_s, "read_properties", address, timeout_s)
        return cast("dict[str, object]", properties)

    def subscribe(self, address: _Address) -> int:
        return self._add_source(self._request(0, "subscribe", address))

    def open_peer(self, address: str, interface: str, timeout_s: float) -> int:
        return self._add_source(
            self._request(timeout_s, "open_peer", address, interface, timeout_s)
        )

    def call_peer(self, peer: int, member: str, timeout_s: float) -> object:
        self._check_source(peer, f"call {member}")
        return self._request(timeout_s, "call_peer", peer, member, timeout_s)

    def read_peer(self, peer: int, timeout_s: float) -> dict[str, object]:
        self._check_source(peer, "read the properties")
        return cast("dict[str, object]", self._request(timeout_s, "read_peer", peer, timeout_s))

    def wait_for_signals(
        self, source: int
    ) -> tuple[Sequence[tuple[str, tuple[object, ...]] | None], bool]:
        # A source of a process that died is like one whose bus has closed.
        if source not in self._sources:
            return (), True
        try:
            answer = self._request(0, "wait_for_signals", source)
        except errors.BusError:
            if source in self._sources:
                raise
            return (), True
        return cast("tuple[Sequence[tuple[str, tuple[object, ...]] | None], bool]", answer)

    def close_source(self, source: int) -> None:
        if source in self._sources:
            self._sources.discard(source)
            with suppress(errors.BusError):  # its end closes the source too
                self._request(0, "close_source", source)

    def close_connection(self) -> None:
        """End the process, and with it all connections."""
        if self._link is None:
            return
        link, self._link = self._link, None
        self._sources.clear()
        link.close()
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _request(self, timeout_s: float, operation: str, *values: object) -> object:
        self.start()
        link = cast("socket.socket", self._link)
        try:
            link.settimeout(timeout_s + _GRACE_S)
            _send(link, (operation, values))
            outcome, answer = cast("tuple[str, object]", _receive(link))
        except (OSError, EOFError) as error:
            self.close_connection()
            is_late = isinstance(error, TimeoutError)
            cause = "it did not answer" if is_late else "it ended"
            raise (errors.BusTimeoutError if is_late else errors.BusError)(
                f"cannot use D-Bus ({operation}): lost the process that talks to it: {cause}",
                remedy=_LOST_REMEDY,
            ) from error
        except BaseException:
            # An answer that is not read would be taken for that of the next request.
            self.close_connection()
            raise
        if outcome == "returned":
            return answer
        text, name, remedy = cast("tuple[str, str, str]", answer)
        raise _ERRORS[outcome](text, name=name, remedy=remedy)

    def _add_source(self, number: object) -> int:
        source = cast("int", number)
        self._sources.add(source)
        return source

    def _check_source(self, source: int, operation: str) -> None:
        if source not in self._sources:
            raise errors.BusError(
                f"cannot {operation}: the connection is closed", remedy=_LOST_REMEDY
            )


def _start_process(
    interpreter: str, environ: Mapping[str, str], address: str
) -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    # Without site the process starts in half the time. It finds modules where this one does.
    argv = [interpreter, "-S", "-s", "-P"]
    argv += ["-B"] if sys.flags.dont_write_bytecode else []
    path = os.pathsep.join(filter(None, sys.path))
    argv += ["-m", __name__, str(os.getpid()), address]
    try:
        pid = os.posix_spawn(
            interpreter,
            argv,
            {**environ, "PYTHONPATH": path},
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), _DESCRIPTOR)],
        )
    except OSError as error:
        ours.close()
        raise errors.BusError(
            f"cannot start the process that talks to D-Bus: {error.strerror}", remedy=_LOST_REMEDY
        ) from error
    finally:
        theirs.close()
    return ours, pid


def _send(link: socket.socket, message: tuple[str, object]) -> None:
    content = marshal.dumps(message)  # type: ignore[arg-type]  # values of D-Bus are plain
    link.sendall(_LENGTH.pack(len(content)) + content)


def _receive(link: socket.socket) -> object:
    """Return the next message; raise EOFError at the end."""
    (length,) = _LENGTH.unpack(_receive_bytes(link, _LENGTH.size))
    return marshal.loads(_receive_bytes(link, length))  # noqa: S302 - from our own process


def _receive_bytes(link: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        chunk = link.recv(min(count - len(content), _CHUNK))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


def main() -> None:
    """Answer requests until the agent closes the socket or ends."""
    # systemd sends SIGTERM to every process in the control group of a unit (systemd.kill(5)).
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    agent, address = sys.argv[1:]
    # The kernel sends no signal for a parent that has ended before this call (prctl(2)): compare
    # the parent afterwards.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(agent):
        return
    link = socket.socket(fileno=_DESCRIPTOR)
    # Imported late: a process whose agent has ended must not load gi.
    from treenail.host.systemd.gio_bus import GioBus

    service = GioBus(address)
    try:
        while True:
            operation, values = cast("tuple[str, Sequence[object]]", _receive(link))
            _send(link, _answer(service, operation, values))
    except (EOFError, ConnectionError):
        pass
    except MemoryError:
        sys.exit("the process that talks to D-Bus cannot allocate memory")


def _answer(service: object, operation: str, values: Sequence[object]) -> tuple[str, object]:
    try:
        return "returned", getattr(service, operation)(*values)
    except errors.BusError as error:
        return _name_outcome(error), (str(error), error.name, error.remedy)


def _name_outcome(error: errors.BusError) -> str:
    if isinstance(error, errors.BusyError):
        return "busy"
    return "late" if isinstance(error, errors.BusTimeoutError) else "failed"


if __name__ == "__main__":
    main()
