"""Connections to a bus or a peer, and objects on them: an interface description and functions.

Gio passes every call on a registered object to one closure, including calls of the ``Properties``
interface when there are no getters. This module dispatches the calls, packs the replies by the
signatures of the interface and stores the property values.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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


_PROPERTIES = "org.freedesktop.DBus.Properties"
_IO_ERROR = "org.gtk.GDBus.UnmappedGError.Quark._g_2dio_2derror_2dquark.Code"

NOT_FOUND = f"{_IO_ERROR}1"
FAILED = f"{_IO_ERROR}0"
BUSY = f"{_IO_ERROR}26"
ACCESS_DENIED = "org.freedesktop.DBus.Error.AccessDenied"
INVALID_ARGS = "org.freedesktop.DBus.Error.InvalidArgs"
UNKNOWN_METHOD = "org.freedesktop.DBus.Error.UnknownMethod"
UNKNOWN_PROPERTY = "org.freedesktop.DBus.Error.UnknownProperty"
READ_ONLY = "org.freedesktop.DBus.Error.PropertyReadOnly"

ReplyValues = tuple[object, ...]


class MethodError(Exception):
    """The D-Bus error ``name`` as the reply to a method call."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method call, which can be answered later."""

    connection: Any
    sender: str
    path: str
    interface: str
    method: str
    parameters: Any
    invocation: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments as plain Python values, with variants unpacked."""
        return tuple(self.parameters.unpack())

    def read_argument(self, index: int) -> Any:
        """Return the argument as a `GLib.Variant`, with its type."""
        return self.parameters.get_child_value(index)

    def send_reply(self, *values: object, fds: Any = None) -> None:
        """Send the reply, for a method that returns None; ``fds`` is a `Gio.UnixFDList`."""
        reply = GLib.Variant(_build_signature(self.invocation.get_method_info().out_args), values)
        if fds is None:
            self.invocation.return_value(reply)
        else:
            self.invocation.return_value_with_unix_fd_list(reply, fds)

    def send_error(self, refusal: MethodError) -> None:
        """Reply with an error."""
        self.invocation.return_dbus_error(refusal.name, str(refusal))


MethodCallback = Callable[[MethodCall], ReplyValues | None]
"""Returns the values of the reply; None when it replies through the call, now or later."""


def load_interfaces(file_name: str) -> dict[str, Any]:
    """Load the interfaces of an XML file, by name."""
    text = (Path(__file__).parent / "interfaces" / file_name).read_text(encoding="utf-8")
    node = Gio.DBusNodeInfo.new_for_xml(text)
    return {interface.name: interface for interface in node.interfaces}


class ExportedObject:
    """One interface at one object path of a connection."""

    def __init__(
        self, connection: Any, path: str, interface: Any, methods: Mapping[str, MethodCallback]
    ) -> None:
        self.path = path
        self.interface: str = interface.name
        self._connection = connection
        self._methods = methods
        self._signatures = {entry.name: entry.signature for entry in interface.properties}
        self._values: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._registration: int = connection.register_object(
            path, interface, self._handle_call, None, None
        )

    def set_properties(self, **values: object) -> None:
        """Set properties; an idle emits PropertiesChanged for those that changed."""
        for name, value in values.items():
            variant = GLib.Variant(self._signatures[name], value)
            old = self._values.get(name)
            if old is not None and old.equal(variant):
                continue
            self._values[name] = variant
            if old is not None:
                if not self._changed:
                    GLib.idle_add(self._emit_changes)
                self._changed.add(name)

    def read_properties(self) -> dict[str, Any]:
        """Return every property as a `GLib.Variant`."""
        return dict(self._values)

    def emit_signal(self, name: str, signature: str = "()", *values: object) -> None:
        """Emit a signal of this interface to all clients."""
        variant = GLib.Variant(signature, values) if values else None
        self._connection.emit_signal(None, self.path, self.interface, name, variant)

    def unregister(self) -> None:
        """Remove the object from the connection."""
        self._connection.unregister_object(self._registration)

    def _emit_changes(self) -> bool:
        changed = {name: self._values[name] for name in sorted(self._changed)}
        self._changed.clear()
        body = GLib.Variant("(sa{sv}as)", (self.interface, changed, []))
        self._connection.emit_signal(None, self.path, _PROPERTIES, "PropertiesChanged", body)
        return False

    def _handle_call(self, *arguments: Any) -> None:
        call = MethodCall(*arguments)
        try:
            if call.interface == _PROPERTIES:
                self._handle_properties(call)
                return
            values = self._methods.get(call.method, _reject_unknown)(call)
            if values is not None:
                call.send_reply(*values)
        except MethodError as refusal:
            call.send_error(refusal)

    def _handle_properties(self, call: MethodCall) -> None:
        if call.method == "GetAll":
            call.invocation.return_value(GLib.Variant("(a{sv})", (self._values,)))
            return
        name = call.arguments[1]
        if name not in self._values:
            raise MethodError(UNKNOWN_PROPERTY, f"no such property {name}")
        if call.method == "Set":
            raise MethodError(READ_ONLY, f"property {name} is read-only")
        call.invocation.return_value(GLib.Variant("(v)", (self._values[name],)))


def read_option(dictionary: Any, key: str, signature: str) -> Any:
    """Return the value at ``key`` of an ``a{sv}``, None if it has another type."""
    value = dictionary.lookup_value(key, GLib.VariantType.new(signature))
    return None if value is None else value.unpack()


def query_credential(connection: Any, method: str, sender: str) -> int:
    """Query the bus for a caller: GetConnectionUnixUser or GetConnectionUnixProcessID."""
    (answer,) = call_method(connection, bus_method(method), GLib.Variant("(s)", (sender,)))
    return int(answer)


def _reject_unknown(call: MethodCall) -> ReplyValues:
    raise MethodError(UNKNOWN_METHOD, f"no such method {call.method}")


def _build_signature(arguments: Any) -> str:
    return "(" + "".join(argument.signature for argument in arguments) + ")"
