"""What others do on a machine besides the agent: hold the OS, hold up the shutdown, look."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.connections import call, connected

_RPM_OSTREE = "org.projectatomic.rpmostree1"
_OS_PATH = "/org/projectatomic/rpmostree1/fedora_coreos"
_SYSTEMD1 = "org.freedesktop.systemd1"
_LOGIN1 = "org.freedesktop.login1"
_CALL_LIMIT_MS = 10_000


def begin_refresh(address: str) -> None:
    """Start an ``rpm-ostree refresh-md`` and leave: the transaction runs without us."""
    options = {"initiating-command-line": GLib.Variant("s", "rpm-ostree refresh-md")}
    with connected(address) as bus:
        (peer_address,) = call(
            bus,
            (_RPM_OSTREE, _OS_PATH, f"{_RPM_OSTREE}.OS", "RefreshMd"),
            GLib.Variant("(a{sv})", (options,)),
        )
        with connected(peer_address, bus=False) as peer:
            call(peer, (None, "/", f"{_RPM_OSTREE}.Transaction", "Start"))


@contextmanager
def shutdown_inhibited(address: str, *, who: str, why: str, mode: str) -> Iterator[None]:
    """Hold an inhibitor lock for shutdown."""
    with connected(address) as bus:
        _, fds = bus.call_with_unix_fd_list_sync(
            _LOGIN1,
            "/org/freedesktop/login1",
            f"{_LOGIN1}.Manager",
            "Inhibit",
            GLib.Variant("(ssss)", ("shutdown", who, why, mode)),
            None,
            Gio.DBusCallFlags.NONE,
            _CALL_LIMIT_MS,
            None,
            None,
        )
        # The list would keep a copy of the descriptor open as long as it lives.
        (lock,) = fds.steal_fds()
        try:
            yield
        finally:
            os.close(lock)


def unit_runs(address: str, name: str) -> bool:
    """Whether the unit is active."""
    with connected(address) as bus:
        (rows,) = call(
            bus,
            (_SYSTEMD1, "/org/freedesktop/systemd1", f"{_SYSTEMD1}.Manager", "ListUnitsByNames"),
            GLib.Variant("(as)", ([name],)),
        )
    return any(row[3] == "active" for row in rows)
