"""Objects on a D-Bus connection, made from an interface description and plain functions.

Gio gives every call on a registered object to one closure, the standard ``Properties`` interface
included when no getters are given; this module sorts them out, packs the answers by the
interface's own signatures and keeps the property values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

from treenail_lab.machine.bus.connections import bus_method, call_method

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
    """What a method raises to answer with the D-Bus error ``name``."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One method call: who asks, what, and the way to answer it later."""

    connection: Any
    sender: str
    path: str
    interface: str
    method: str
    parameters: Any
    invocation: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments as plain Python values, variants unwrapped."""
        return tuple(self.parameters.unpack())

    def read_argument(self, index: int) -> Any:
        """The argument as a `GLib.Variant`, types and all."""
        return self.parameters.get_child_value(index)

    def send_reply(self, *values: object, fds: Any = None) -> None:
        """Answer now, for a method that returned None; ``fds`` is a `Gio.UnixFDList`."""
        reply = GLib.Variant(_build_signature(self.invocation.get_method_info().out_args), values)
        if fds is None:
            self.invocation.return_value(reply)
        else:
            self.invocation.return_value_with_unix_fd_list(reply, fds)

    def send_error(self, refusal: MethodError) -> None:
        """Answer with an error."""
        self.invocation.return_dbus_error(refusal.name, str(refusal))


MethodCallback = Callable[[MethodCall], ReplyValues | None]
"""Returns the answer's values; None says that it answers, or has answered, through the call."""


def load_interfaces(file_name: str) -> dict[str, Any]:
    """The interfaces described in an XML file beside this module, by name."""
    text = (Path(__file__).parent / "interfaces" / file_name).read_text(encoding="utf-8")
    node = Gio.DBusNodeInfo.new_for_xml(text)
    return {interface.name: interface for interface in node.interfaces}


class ExportedObject:
    """One interface at one path of a connection."""

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
        """Give properties their values; who listens hears of those that changed, from an idle."""
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
        """Every property as a `GLib.Variant`."""
        return dict(self._values)

    def emit_signal(self, name: str, signature: str = "()", *values: object) -> None:
        """Emit a signal of this interface to everybody."""
        variant = GLib.Variant(signature, values) if values else None
        self._connection.emit_signal(None, self.path, self.interface, name, variant)

    def unregister(self) -> None:
        """Take the object off the connection."""
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
    """The value at ``key`` of an ``a{sv}`` if it has that type, else None: as GVariantDict does."""
    value = dictionary.lookup_value(key, GLib.VariantType.new(signature))
    return None if value is None else value.unpack()


def query_credential(connection: Any, method: str, sender: str) -> int:
    """What the bus knows of a caller: ask GetConnectionUnixUser or GetConnectionUnixProcessID."""
    (answer,) = call_method(connection, bus_method(method), GLib.Variant("(s)", (sender,)))
    return int(answer)


def _reject_unknown(call: MethodCall) -> ReplyValues:
    raise MethodError(UNKNOWN_METHOD, f"no such method {call.method}")


def _build_signature(arguments: Any) -> str:
    return "(" + "".join(argument.signature for argument in arguments) + ")"
