"""D-Bus services for tests: on a bus under a name, or on a private socket without one."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from gi.repository import Gio, GLib

_BUS = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")
_CLIENT = Gio.DBusConnectionFlags.AUTHENTICATION_CLIENT

Method = Callable[..., Any]


class Silence(Exception):
    """Raised by a method that never answers."""


class Refusal(Exception):
    """Raised by a method that answers a D-Bus error of this name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Loop:
    """A thread that iterates a GLib context of its own."""

    def __init__(self) -> None:
        self.context = GLib.MainContext()
        self._loop = GLib.MainLoop(self.context)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._loop.quit)
        self._thread.join(timeout=10)

    def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in the loop's thread and return its result."""
        done = threading.Event()
        outcome: list[Any] = []

        def call(*_: object) -> bool:
            outcome.append(function())
            done.set()
            return False

        source = GLib.Idle()
        source.set_callback(call)
        source.attach(self.context)
        assert done.wait(timeout=10), "the service's thread does not answer"
        return outcome[0]

    def _run(self) -> None:
        self.context.push_thread_default()
        self._loop.run()
        self.context.pop_thread_default()


class Exports:
    """Objects on a connection: methods by name, properties by name."""

    def __init__(self, xml: str, methods: Mapping[str, Method]) -> None:
        self.xml = xml
        self.methods = methods
        self.properties: dict[str, GLib.Variant] = {}

    def export(self, connection: Gio.DBusConnection, path: str) -> None:
        for interface in Gio.DBusNodeInfo.new_for_xml(self.xml).interfaces:
            connection.register_object(path, interface, self._call, None, None)

    def _call(
        self, _connection: object, sender: str, _path: str, interface: str, *call: Any
    ) -> None:
        member, parameters, invocation = call
        arguments = parameters.unpack()
        # Without getter and setter, GDBus routes Properties.* here too.
        if interface == "org.freedesktop.DBus.Properties":
            invocation.return_value(GLib.Variant("(a{sv})", (self.properties,)))
            return
        try:
            reply = self.methods[member](*arguments)
        except Silence:
            return
        except Refusal as refusal:
            invocation.return_dbus_error(refusal.name, str(refusal))
            return
        if isinstance(reply, tuple) and isinstance(reply[-1], Gio.UnixFDList):
            invocation.return_value_with_unix_fd_list(*reply)
        else:
            invocation.return_value(reply)


class BusService(Loop):
    """Owns a name on a bus and exports objects there."""

    def __init__(self, address: str, name: str, objects: Mapping[str, Exports]) -> None:
        super().__init__()
        self._address = address
        self._name = name
        self._objects = objects
        self.connection: Gio.DBusConnection | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self.run(self.appear)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.vanish)
        super().__exit__()

    def appear(self) -> None:
        """Connect, export and take the name, from one who holds it if need be. In the thread."""
        flags = _CLIENT | Gio.DBusConnectionFlags.MESSAGE_BUS_CONNECTION
        connection = Gio.DBusConnection.new_for_address_sync(self._address, flags, None, None)
        for path, exports in self._objects.items():
            exports.export(connection, path)
        allow_and_replace = GLib.Variant("(su)", (self._name, 3))
        connection.call_sync(*_BUS, "RequestName", allow_and_replace, None, 0, 5000, None)
        self.connection = connection

    def vanish(self) -> None:
        """Leave the bus; who waits for an answer gets NoReply. In the thread."""
        if self.connection is not None and not self.connection.is_closed():
            self.connection.close_sync(None)

    def restart(self) -> None:
        """Be there again without a moment of absence, as something new. In the thread."""
        old = self.connection
        self.appear()
        if old is not None:
            old.close_sync(None)

    def emit(self, path: str, interface: str, member: str, values: GLib.Variant) -> None:
        """Send a signal to all."""
        assert self.connection is not None
        self.connection.emit_signal(None, path, interface, member, values)


class PeerService(Loop):
    """Listens on a private socket and exports one object at ``/`` to every client."""

    def __init__(self, address: str, exports: Exports) -> None:
        super().__init__()
        self.address = address
        self._exports = exports
        self._listener: Gio.SocketService | None = None
        self.connections: list[Gio.DBusConnection] = []
        self.hung_up = threading.Event()

    def __enter__(self) -> Self:
        super().__enter__()
        self.run(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.vanish)
        super().__exit__()

    def vanish(self) -> None:
        """Stop listening and hang up, after what was sent. In the thread."""
        if self._listener is not None:
            self._listener.stop()
            self._listener.close()
        for connection in self.connections:
            # The peer may close it at any time.
            with suppress(GLib.Error):
                connection.flush_sync(None)
                connection.close_sync(None)

    def emit(self, interface: str, member: str, values: GLib.Variant) -> None:
        """Send a signal to everyone connected."""
        for connection in self.connections:
            connection.emit_signal(None, "/", interface, member, values)

    def _listen(self) -> None:
        # Not Gio.DBusServer: its connections belong to GLib's default context.
        self._listener = Gio.SocketService()
        self._listener.add_address(
            Gio.UnixSocketAddress.new(self.address.removeprefix("unix:path=")),
            Gio.SocketType.STREAM,
            Gio.SocketProtocol.DEFAULT,
            None,
        )
        self._listener.connect("incoming", self._accept)
        self._listener.start()

    def _accept(self, _listener: object, stream: Gio.SocketConnection, _source: object) -> bool:
        server = Gio.DBusConnectionFlags.AUTHENTICATION_SERVER
        flags = server | Gio.DBusConnectionFlags.DELAY_MESSAGE_PROCESSING
        guid = Gio.dbus_generate_guid()
        connection = Gio.DBusConnection.new_sync(stream, guid, flags, None, None)
        self._exports.export(connection, "/")
        connection.connect("closed", lambda *_: self.hung_up.set())
        self.connections.append(connection)
        connection.start_message_processing()
        return True
