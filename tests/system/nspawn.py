"""A container with this machine's own files and its real systemd, journald and D-Bus.

What it writes goes to a file system in memory, and it has no network.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.waiting import wait_until
from treenail.errors import BusError
from treenail.host.systemd.system_bus import BusInterface, SystemBus

REPOSITORY = Path(__file__).parents[2]
_SYSTEMD = BusInterface(
    "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"
)
_NEEDED = ("systemd-nspawn", "unshare", "nsenter", "dbus-daemon", "journalctl")
_INIT = Path("/lib/systemd/systemd")
# Starts no unit that this machine has enabled.
_ARGUMENTS = ("systemd.unit=basic.target", "systemd.mask=tmp.mount")
_LIMIT_S = 60.0


def missing() -> str:
    """Why there can be no container here; empty when there can."""
    if os.geteuid() != 0:
        return "not root"
    tools = [tool for tool in _NEEDED if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not installed"
    return "" if _INIT.exists() else "systemd not installed"


class Container:
    """Booted while entered. ``shared`` is a directory at the same path inside and outside."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._log = shared / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0

    @property
    def address(self) -> str:
        """Of its system bus, for processes outside."""
        return f"unix:path=/proc/{self.leader}/root/run/dbus/system_bus_socket"

    def inside(self, *command: str) -> list[str]:
        """The command line that runs the command inside."""
        spaces = ("--mount", "--pid", "--uts", "--ipc", "--net", "--root", "--wd")
        return ["nsenter", f"--target={self.leader}", *spaces, "--", *command]

    def wait(self) -> int:
        """Its exit code, once it has gone down."""
        assert self._nspawn is not None
        return self._nspawn.wait(_LIMIT_S)

    def __enter__(self) -> Self:
        top = self.shared / "top"
        top.mkdir()
        nspawn = (
            "systemd-nspawn", "--quiet", f"--directory={top}", "--volatile=overlay", "--boot",
            "--register=no", "--keep-unit", f"--machine=treenail-{os.getpid()}",
            "--private-network", "--link-journal=no", "--console=pipe", "--resolv-conf=off",
            "--timezone=off", f"--bind-ro={REPOSITORY}", f"--bind-ro={sys.prefix}",
            f"--bind={self.shared}", *_ARGUMENTS,
        )  # fmt: skip
        # systemd-nspawn refuses / as the directory of a container; a bind mount of it works.
        script = 'mount --make-rprivate / && mount --bind / "$0" && exec "$@"'
        with self._log.open("wb") as log:
            self._nspawn = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script, str(top), *nspawn],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.leader = wait_until(self._find_leader, limit_s=_LIMIT_S)
            wait_until(self._answers, limit_s=_LIMIT_S)
        except AssertionError as error:
            output = self._log.read_text("utf-8", "replace")[-2000:]
            self._end()
            raise AssertionError(f"the container did not start: {error}\n{output}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _find_leader(self) -> int:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, "systemd-nspawn ended"
        tasks = Path(f"/proc/{self._nspawn.pid}/task").glob("*/children")
        for child in " ".join(path.read_text() for path in tasks).split():
            # nspawn has short-lived children before its payload.
            with suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
        return 0

    def _answers(self) -> bool:
        bus = SystemBus(self.address)
        try:
            return bus.call_method(_SYSTEMD, "GetUnitFileState", "dbus.service", timeout_s=5) != ""
        except BusError:
            return False
        finally:
            bus.close_connection()

    def _end(self) -> None:
        nspawn, self._nspawn = self._nspawn, None
        if nspawn is None or nspawn.poll() is not None:
            return
        if self.leader:
            # The end of its init ends the whole container.
            os.kill(self.leader, signal.SIGKILL)
        try:
            nspawn.wait(10)
        except subprocess.TimeoutExpired:
            nspawn.kill()
            nspawn.wait()
