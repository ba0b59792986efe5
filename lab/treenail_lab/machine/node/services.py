"""The process that is systemd and logind for one machine.

    python -m treenail_lab.machine.node.services --root ROOT [--settings FILE]

What only the machine's supervisor can do, it is told of in lines on standard output: ``ready``
once the names are owned, ``reboot``, ``soft-reboot``, and ``unit VERB NAME`` for each job that
somebody asked for.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from gi.repository import Gio, GLib

from treenail_lab.machine import settings
from treenail_lab.machine.bus.connections import connect
from treenail_lab.machine.logind import login1
from treenail_lab.machine.settings import Settings
from treenail_lab.machine.systemd import systemd1, units


class Supervisor:
    """The lines that go to the machine's supervisor."""

    def ready(self) -> None:
        self._tell("ready")

    def reboot(self) -> None:
        self._tell("reboot")

    def soft_reboot(self) -> None:
        self._tell("soft-reboot")

    def unit(self, verb: str, name: str) -> None:
        self._tell(f"unit {verb} {name}")

    def _tell(self, line: str) -> None:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop, or the bus is gone."""
    parser = argparse.ArgumentParser(prog="services", description="systemd and logind stand-ins")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--settings", type=Path)
    chosen = parser.parse_args(arguments)
    loop = GLib.MainLoop()
    for number in (signal.SIGTERM, signal.SIGINT):
        GLib.unix_signal_add(GLib.PRIORITY_HIGH, number, loop.quit)
    connection = connect(os.environ["DBUS_SYSTEM_BUS_ADDRESS"])
    connection.connect("closed", lambda *_: loop.quit())

    def now() -> Settings:
        return settings.load(chosen.settings)

    supervisor = Supervisor()
    logind = login1.Login1(connection, now, supervisor.reboot, supervisor.soft_reboot)
    manager = systemd1.Systemd1(
        connection, chosen.root, now, told=supervisor.unit, reboot=supervisor.reboot
    )
    missing = {login1.NAME, units.NAME}

    def acquired(_connection: object, name: str) -> None:
        missing.discard(name)
        if not missing:
            supervisor.ready()

    for name in sorted(missing):
        Gio.bus_own_name_on_connection(
            connection, name, Gio.BusNameOwnerFlags.NONE, acquired, lambda *_: loop.quit()
        )
    loop.run()
    del logind, manager
    return 0


if __name__ == "__main__":
    sys.exit(main())
