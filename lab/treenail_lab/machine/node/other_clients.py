"""Other clients of a machine's bus: a transaction, an inhibitor lock and a query."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.connections import call_method, scoped_connection

_RPM_OSTREE = "org.projectatomic.rpmostree1"
_OS_PATH = "/org/projectatomic/rpmostree1/fedora_coreos"
_SYSTEMD1 = "org.freedesktop.systemd1"
_LOGIN1 = "org.freedesktop.login1"
_CALL_TIMEOUT_MS = 10_000


def start_metadata_refresh(address: str) -> None:
    """Start an ``rpm-ostree refresh-md`` and disconnect; the transaction goes on."""
    options = {"initiating-command-line": GLib.Variant("s", "rpm-ostree refresh-md")}
    with scoped_connection(address) as bus:
        (peer_address,) = call_method(
            bus,
            (_RPM_OSTREE, _OS_PATH, f"{_RPM_OSTREE}.OS", "RefreshMd"),
            GLib.Variant("(a{sv})", (options,)),
        )
        with scoped_connection(peer_address, bus=False) as peer:
            call_method(peer, (None, "/", f"{_RPM_OSTREE}.Transaction", "Start"))


@contextmanager
def inhibit_shutdown(address: str, *, who: str, why: str, mode: str) -> Iterator[None]:
    """Hold an inhibitor lock for shutdown while inside."""
    with scoped_connection(address) as bus:
        _, fds = bus.call_with_unix_fd_list_sync(
            _LOGIN1,
            "/org/freedesktop/login1",
            f"{_LOGIN1}.Manager",
            "Inhibit",
            GLib.Variant("(ssss)", ("shutdown", who, why, mode)),
            None,
            Gio.DBusCallFlags.NONE,
            _CALL_TIMEOUT_MS,
            None,
            None,
        )
        # Gio.UnixFDList would keep a copy of the descriptor open until it is collected.
        (lock,) = fds.steal_fds()
        try:
            yield
        finally:
            os.close(lock)


def is_unit_active(address: str, name: str) -> bool:
    """Return whether the unit is active."""
    with scoped_connection(address) as bus:
        (rows,) = call_method(
            bus,
            (_SYSTEMD1, "/org/freedesktop/systemd1", f"{_SYSTEMD1}.Manager", "ListUnitsByNames"),
            GLib.Variant("(as)", ([name],)),
        )
    return any(row[3] == "active" for row in rows)
