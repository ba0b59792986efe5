"""A real dbus-daemon of its own for a test."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from treenail_lab.lifetime.owner import owner

_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/>
    <allow own="*"/>
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
    <deny send_interface="org.example.Denied"/>
  </policy>
</busconfig>
"""


class PrivateBus:
    """Runs while entered; ``stop`` and ``start`` end it and start it again."""

    def __init__(self) -> None:
        # Short: the path of a Unix socket has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="tn", dir="/tmp")
        socket = Path(self._folder.name, "bus")
        self._config = Path(self._folder.name, "bus.conf")
        self._config.write_text(_CONFIG.format(socket=socket), encoding="utf-8")
        self._daemon: subprocess.Popen[str] | None = None
        self.address = f"unix:path={socket}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Return once it listens."""
        arguments = ["dbus-daemon", f"--config-file={self._config}", "--nofork", "--print-address"]
        self._daemon = subprocess.Popen(
            arguments,
            env={**os.environ, **owner.mark_environment()},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._daemon.stdout is not None
        assert self._daemon.stdout.readline().startswith(self.address)

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait(timeout=10)
            if self._daemon.stdout is not None:
                self._daemon.stdout.close()
            self._daemon = None
