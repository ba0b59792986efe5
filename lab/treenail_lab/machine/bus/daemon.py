"""The D-Bus daemon of one machine, on a socket in the machine's directory."""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from treenail.errors import HostError

SOCKET_PATH_MAX = 107
_STOP_LIMIT_S = 5.0


class PrivateBus:
    """A ``dbus-daemon`` whose policy allows everything.

    ``services`` maps bus names to the command that the daemon starts when a client calls a name
    without an owner. These programs find the bus in DBUS_SYSTEM_BUS_ADDRESS. The daemon and they
    write to the file ``log``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        services: Mapping[str, str] | None = None,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._socket = directory / "bus"
        self.address = f"unix:path={self._socket}"
        self._configuration = directory / "bus.conf"
        self._services = directory / "bus-services"
        self._activatable = dict(services or {})
        self._environment = {**environment, "DBUS_SYSTEM_BUS_ADDRESS": self.address}
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Return the daemon's process id; 0 when it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the daemon; it accepts connections when this returns."""
        self._socket.unlink(missing_ok=True)
        self._services.mkdir(exist_ok=True)
        for name, command in self._activatable.items():
            entry = f"[D-BUS Service]\nName={name}\nExec={command}\n"
            (self._services / f"{name}.service").write_text(entry, encoding="utf-8")
        self._configuration.write_text(self._render_configuration(), encoding="utf-8")
        arguments = [f"--config-file={self._configuration}", "--nofork", "--print-address"]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                ["dbus-daemon", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                # What it activates runs in its session: Ctrl-C in the terminal reaches neither.
                start_new_session=True,
            )
        pipe = self._process.stdout
        # The address is printed once the socket listens.
        if pipe is None or not pipe.readline():
            raise HostError("cannot start dbus-daemon", remedy=f"see {self._log}")

    def stop(self, *, hard: bool = False) -> None:
        """Stop the daemon, which closes every connection."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._socket.unlink(missing_ok=True)

    def __enter__(self) -> "PrivateBus":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _render_configuration(self) -> str:
        return f"""<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <listen>{escape(self.address)}</listen>
  <auth>EXTERNAL</auth>
  <servicedir>{escape(str(self._services))}</servicedir>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
    <allow user="*"/>
  </policy>
</busconfig>
"""
