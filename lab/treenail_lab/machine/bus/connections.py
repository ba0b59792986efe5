"""Connections to the bus of a machine, or to the socket of a peer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gi.repository import Gio, GLib

_CALL_TIMEOUT_MS = 20_000


def open_connection(address: str, *, bus: bool = True) -> Any:
    """Open a private connection; Gio shares connections to the well-known buses."""
    flags = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT
    if bus:
        flags |= Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
    return Gio.DBusConnection.new_for_address_sync(address, flags, None, None)


@contextmanager
def scoped_connection(address: str, *, bus: bool = True) -> Iterator[Any]:
    """Open a connection with its own main context, and close it afterwards."""
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
    """Call (name, path, interface, method); return the reply as plain values."""
    flags = Gio.DBusCallFlags.NONE
    reply = connection.call_sync(*method, arguments, None, flags, _CALL_TIMEOUT_MS, None)
    return tuple(reply.unpack())


def bus_method(method: str) -> tuple[str, str, str, str]:
    """Return name, path and interface of a method of the bus itself."""
    return ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", method)
