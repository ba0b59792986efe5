"""systemd and logind as the lab has them, on a bus of their own, over a mere directory."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from tests.fakes.private_bus import PrivateBus
from treenail_lab.lifetime.fork_server import LabProcess
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine import settings
from treenail_lab.machine.settings import MachineSettings


class Services:
    """Runs while entered; its bus is at ``address``, its unit files are below ``root``."""

    def __init__(
        self, now: MachineSettings | None = None, units: dict[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tn", dir="/tmp")
        self._settings = Path(self._folder.name, "settings.json")
        self._bus = PrivateBus()
        self._process: subprocess.Popen[str] | None = None
        self.root = Path(self._folder.name, "root")
        self.address = self._bus.address
        vendor = self.root / "usr/lib/systemd/system"
        vendor.mkdir(parents=True)
        for name, text in (units or {}).items():
            (vendor / name).write_text(text, encoding="utf-8")
        self.change(now or MachineSettings())

    def change(self, now: MachineSettings) -> None:
        """Put other settings in force."""
        settings.save_settings(now, self._settings)

    def read_line(self) -> str:
        """The next line that they print for the machine's supervisor."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def vanish(self) -> None:
        """End the bus, and with it everybody on it."""
        self._bus.stop()

    def __enter__(self) -> Self:
        self._bus.__enter__()
        environment = {
            **os.environ,
            **owner.mark_environment(),
            "DBUS_SYSTEM_BUS_ADDRESS": self.address,
        }
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        module = ["-m", "treenail_lab.machine.node.services"]
        places = ["--root", str(self.root), "--settings", str(self._settings)]
        self._process = LabProcess(
            [sys.executable, *module, *places],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read_line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=10)
        self._bus.__exit__()
        self._folder.cleanup()
