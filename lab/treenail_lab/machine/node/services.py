"""The process that emulates systemd and logind for one machine.

    python -m treenail_lab.machine.node.services --root ROOT [--settings FILE]

It prints requests to the machine, one on each line: ``ready`` once it owns the bus names,
``reboot``, ``soft-reboot``, and ``unit VERB NAME`` for each job that a client requested.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from gi.repository import Gio, GLib

from treenail_lab.machine import settings
from treenail_lab.machine.bus.objects import open_connection
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd import login1, systemd1, units


class SupervisorPipe:
    """Prints the requests to the machine."""

    def report_ready(self) -> None:
        self._print_line("ready")

    def request_reboot(self) -> None:
        self._print_line("reboot")

    def request_soft_reboot(self) -> None:
        self._print_line("soft-reboot")

    def report_job(self, verb: str, name: str) -> None:
        self._print_line(f"unit {verb} {name}")

    def _print_line(self, line: str) -> None:
        print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM, or until the bus is gone."""
    parser = argparse.ArgumentParser(prog="services", description="emulated systemd and logind")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--settings", type=Path)
    chosen = parser.parse_args(arguments)
    loop = GLib.MainLoop()
    for number in (signal.SIGTERM, signal.SIGINT):
        GLib.unix_signal_add(GLib.PRIORITY_HIGH, number, loop.quit)
    connection = open_connection(os.environ["DBUS_SYSTEM_BUS_ADDRESS"])
    connection.connect("closed", lambda *_: loop.quit())

    def now() -> MachineSettings:
        return settings.load_settings(chosen.settings)

    supervisor = SupervisorPipe()
    logind = login1.EmulatedLogind(
        connection, now, supervisor.request_reboot, supervisor.request_soft_reboot
    )
    manager = systemd1.EmulatedSystemd(
        connection, chosen.root, now, on_job=supervisor.report_job, reboot=supervisor.request_reboot
    )
    missing = {login1.NAME, units.NAME}

    def acquired(_connection: object, name: str) -> None:
        missing.discard(name)
        if not missing:
            supervisor.report_ready()

    for name in sorted(missing):
        Gio.bus_own_name_on_connection(
            connection, name, Gio.BusNameOwnerFlags.NONE, acquired, lambda *_: loop.quit()
        )
    loop.run()
    del logind, manager
    return 0


if __name__ == "__main__":
    sys.exit(main())
