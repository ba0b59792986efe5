"""Inhibitor locks of other programs, as systemd-inhibit(1) takes them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from gi.repository import Gio, GLib


@contextmanager
def hold_inhibitor(
    what: str, who: str, why: str, mode: str, *, address: str = ""
) -> Iterator[None]:
    """Hold a lock inside the context; ``address`` is a bus, by default the system bus."""
    # A context of its own: tests check that GLib's default context is empty.
    context = GLib.MainContext()
    context.push_thread_default()
    try:
        bus = Gio.DBusConnection.new_for_address_sync(
            address or Gio.dbus_address_get_for_bus_sync(Gio.BusType.SYSTEM),
            Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT
            | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION,
        )
    finally:
        context.pop_thread_default()
    reply, descriptors = bus.call_with_unix_fd_list_sync(
        "org.freedesktop.login1",
        "/org/freedesktop/login1",
        "org.freedesktop.login1.Manager",
        "Inhibit",
        GLib.Variant("(ssss)", (what, who, why, mode)),
        GLib.VariantType("(h)"),
        Gio.DBusCallFlags.NONE,
        10_000,
    )
    lock = descriptors.get(reply.unpack()[0])
    try:
        yield
    finally:
        os.close(lock)
        bus.close_sync()
