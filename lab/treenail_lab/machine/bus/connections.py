"""Connections of the lab's own: to a machine's bus, or to a peer's socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gi.repository import Gio, GLib

_CALL_TIMEOUT_MS = 20_000


def open_connection(address: str, *, bus: bool = True) -> Any:
    """A private connection; Gio would share one of the well-known buses with everybody."""
    flags = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT
    if bus:
        flags |= Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
    return Gio.DBusConnection.new_for_address_sync(address, flags, None, None)


@contextmanager
def scoped_connection(address: str, *, bus: bool = True) -> Iterator[Any]:
    """A connection for a while, whose events trouble no loop but one of its own."""
    context = GLib.MainContext.new()
    context.push_thread_default()
    try:
        connection = open_connection(address, bus=bus)
    finally:
        context.pop_thread_default()
    try:
        yield connection
    finally:
        if not connection.is_closed():
            connection.close_sync(None)


def call_method(
    connection: Any, method: tuple[str | None, str, str, str], arguments: Any = None
) -> tuple[Any, ...]:
    """Call (name, path, interface, method) and return the answer's plain values."""
    flags = Gio.DBusCallFlags.NONE
    reply = connection.call_sync(*method, arguments, None, flags, _CALL_TIMEOUT_MS, None)
    return tuple(reply.unpack())


def bus_method(method: str) -> tuple[str, str, str, str]:
    """A method of the bus itself."""
    return ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", method)
