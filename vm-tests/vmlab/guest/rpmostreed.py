"""``org.projectatomic.rpmostree1`` on real libostree: the lab's daemon, with another back end."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.objects import open_connection
from treenail_lab.machine.rpmostree.daemon import NAME, EmulatedRpmOstree
from vmlab.guest.pulling import Pulling
from vmlab.guest.realsysroot import RealSysroot


def main() -> int:
    """Serve the system bus until stopped."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # /sysroot and /boot are read-only for everybody else, as on a real host.
    for place in ("/sysroot", "/boot"):
        subprocess.run(["mount", "-o", "remount,rw", place], check=False)
    loop = GLib.MainLoop()
    for number in (signal.SIGTERM, signal.SIGINT):
        GLib.unix_signal_add(GLib.PRIORITY_HIGH, number, loop.quit)
    connection = open_connection(os.environ["DBUS_SYSTEM_BUS_ADDRESS"])
    connection.connect("closed", lambda *_: loop.quit())
    sysroot = RealSysroot()
    daemon = EmulatedRpmOstree(connection, Path("/"), sysroot, Pulling(sysroot).pull)
    Gio.bus_own_name_on_connection(
        connection, NAME, Gio.BusNameOwnerFlags.NONE, None, lambda *_: loop.quit()
    )
    loop.run()
    return 0 if daemon.is_idle() else 1


if __name__ == "__main__":
    sys.exit(main())
