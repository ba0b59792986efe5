"""A virtual machine: its disk, its console, a shell in it, its reset button."""

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vmlab.drivers import Driver, Hardware
from vmlab.tools import PATIENCE, GuestCommandError, GuestPanicError, ToolError

Json = dict[str, object]

SNAPSHOT = "booted"
BOOT_LIMIT_S = 300.0
_CONNECT_LIMIT_S = 30.0
_SHELL_LIMIT_S = 120.0
_LAST_LINES = 60
_PANIC = b"Kernel panic - not syncing"


class Machine:
    """One run of a machine on a disk of its own; ``booted`` is called at every boot.

    What the guest has not written to its disk is lost at `reset`: its page cache goes with it.
    """

    def __init__(
        self,
        directory: Path,
        disk: Path,
        *,
        driver: Driver,
        booted: Callable[[Json], None],
        ignition: Path | None = None,
        disk_format: str = "qcow2",
        write_log: Path | None = None,
    ) -> None:
        self.serial = directory / "serial.log"
        self._driver = driver
        # A socket's path must be short.
        self._sockets = Path(tempfile.mkdtemp(prefix="tnvm", dir="/tmp"))
        name = f"treenail-{os.getpid()}"
        self._hardware = Hardware(
            name, disk, self._sockets, directory / "qemu.log", ignition, disk_format, write_log
        )
        self._booted = booted
        self._shell: Shell | None = None
        self._boots = 0
        self._panic = ""
        self._changed = threading.Condition()

    def start(self, snapshot: str = "") -> None:
        """Power on, or go on from where a snapshot was taken."""
        self._driver.start(self._hardware, snapshot)
        for name, heard in (("console", self._note), ("boot", self._tell)):
            line = self._connect(name)
            threading.Thread(target=_listen, args=(line, heard), daemon=True).start()
        self._shell = Shell(self._connect("shell"))
        if snapshot:
            # The guest's clock goes on from the time of the snapshot.
            self.sh(f"date -s @{time.time():.0f}")

    def wait_boots(self, count: int, limit_s: float = BOOT_LIMIT_S) -> None:
        """Wait until so many boots were reported."""
        limit_s *= PATIENCE
        with self._changed:
            came = self._changed.wait_for(lambda: self._boots >= count or self._panic, limit_s)
            self.check()
            if not came:
                raise ToolError(f"boot {count} not within {limit_s:g} s; see {self.serial}")

    def sh(self, command: str, *, stdin: str = "", limit_s: float = _SHELL_LIMIT_S) -> str:
        """The output of a command as root; raises `ToolError` unless it returns 0."""
        if self._shell is None:
            raise ToolError(f"no machine runs for {command!r}")
        try:
            return self._shell.run(command, stdin=stdin, limit_s=limit_s)
        except ToolError:
            self.check()
            raise

    def check(self) -> None:
        """Raise `GuestPanicError` if the guest's kernel has given up."""
        if self._panic:
            raise GuestPanicError(f"the guest said: {self._panic}; see {self.serial}")

    def reset(self) -> None:
        """Cut the power for an instant."""
        self._driver.monitor("system_reset")

    def save(self) -> None:
        """Take the snapshot that others start from."""
        self._driver.monitor(f"savevm {SNAPSHOT}")

    def stop(self) -> None:
        """Pull the plug; the machine does not start again."""
        self._driver.stop()
        if self._shell is not None:
            self._shell.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def last_lines(self) -> str:
        """The end of the console's log."""
        text = self.serial.read_text(errors="replace") if self.serial.exists() else ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _connect(self, name: str) -> socket.socket:
        end = time.monotonic() + _CONNECT_LIMIT_S
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(str(self._hardware.socket(name)))
            except OSError as error:
                line.close()
                if time.monotonic() > end:
                    raise ToolError(f"the machine has no {name}; see {self.serial}") from error
                time.sleep(0.05)
            else:
                return line

    def _note(self, line: bytes) -> None:
        with self.serial.open("ab") as log:
            log.write(line + b"\n")
        if _PANIC in line:
            with self._changed:
                self._panic = line.decode(errors="replace").strip()
                self._changed.notify_all()
            if self._shell is not None:
                self._shell.give_up()

    def _tell(self, line: bytes) -> None:
        self._booted(json.loads(line))
        with self._changed:
            self._boots += 1
            self._changed.notify_all()


class Shell:
    """Commands by a virtio port, one at a time; answers to lost ones are thrown away."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._pending = b""
        self._count = time.monotonic_ns()
        self._lock = threading.Lock()

    def run(self, command: str, *, stdin: str, limit_s: float) -> str:
        """The command's output; the guest may have to boot first."""
        limit_s *= PATIENCE
        end = time.monotonic() + limit_s
        with self._lock:
            self._count += 1
            order = {"id": self._count, "command": command, "stdin": stdin, "limit_s": limit_s}
            self._line.settimeout(limit_s)
            self._line.sendall(json.dumps(order).encode() + b"\n")
            while time.monotonic() < end:
                answer = self._answer(end)
                if answer is None:
                    break
                if answer.get("id") == self._count:
                    if answer["code"]:
                        code = answer["code"]
                        raise GuestCommandError(f"{command!r} returned {code}: {answer['output']}")
                    return str(answer["output"])
        raise ToolError(f"{command!r} was not answered within {limit_s:g} s")

    def give_up(self) -> None:
        """End what waits for an answer."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._line.close()

    def _answer(self, end: float) -> Json | None:
        while b"\n" not in self._pending:
            self._line.settimeout(max(0.1, end - time.monotonic()))
            content = _received(self._line)
            if not content:
                return None
            self._pending += content
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def _listen(line: socket.socket, heard: Callable[[bytes], None]) -> None:
    """Read all the time, for a full channel stops the guest."""
    pending = b""
    with line:
        while content := _received(line):
            *whole, pending = (pending + content).split(b"\n")
            for each in whole:
                heard(each)


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(65536)
    except OSError:
        return b""
