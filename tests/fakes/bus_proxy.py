"""A proxy between an agent and its system bus that breaks calls on the wire.

It forwards the messages of D-Bus, also those of the peers on private sockets, whose addresses it
replaces in answers. A fault strikes one method from one of its calls on, until it is lifted.
"""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

from tests.fakes.wire import Wire

_ERROR = "org.freedesktop.DBus.Error"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_HELLO = "org.freedesktop.DBus Hello"
_PEER = re.compile(r"'unix:path=([^']+)'")
_PREFIX = "unix:path="

PEER = "peer"
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\u202eAuthorization: Bearer abcdefghijklmnop\r\n"
    + "pull failed " * 2_000
)


class FaultKind(StrEnum):
    """The kind of a fault of one method."""

    ABSENT = "service absent"
    INACTIVE = "activation fails"
    HANGING = "no answer"
    LATE = "answer after the time limit"
    MISTYPED = "answer of another type"
    SHORT = "answer without values"
    HOSTILE = "hostile error"
    DISCONNECTED = "disconnected in the call"
    RESTARTED = "service killed in the call"


_ERRORS = {
    FaultKind.ABSENT: (
        f"{_ERROR}.ServiceUnknown",
        "The name {name} was not provided by any .service files",
    ),
    FaultKind.INACTIVE: (
        f"{_ERROR}.Spawn.ChildExited",
        "Process {name} exited with status 1",
    ),
    FaultKind.HOSTILE: ("org.projectatomic.rpmostreed.Error.Failed", HOSTILE),
}


@dataclass(frozen=True, slots=True)
class BusCall:
    """A method of a service; properties have the name of their interface."""

    service: str
    """`PEER` for a private socket."""
    member: str

    def __str__(self) -> str:
        return f"{self.service} {self.member}"


class BusProxy:
    """Runs until it is closed. ``on_call`` is called with each call before it is forwarded.

    It returns the fault of the call, or None.
    """

    def __init__(
        self,
        folder: Path,
        bus_address: str,
        on_call: Callable[[BusCall], FaultKind | None],
        *,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._on_call = on_call
        self._on_restart = on_restart
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._addresses: dict[str, str] = {}
        self._wires: list[Wire] = []
        self.address = self._listen(bus_address.removeprefix(_PREFIX), is_peer=False)

    def close(self) -> None:
        """Close all sockets."""
        with self._lock:
            for listener in self._listeners.values():
                # Only a shutdown ends accept(2) in the other thread.
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
        for wire in tuple(self._wires):
            wire.close()

    def _listen(self, target: str, *, is_peer: bool) -> str:
        """Return the address at which connections to this socket are accepted."""
        with self._lock:
            if target not in self._addresses:
                path = self._folder / f"proxy{len(self._addresses)}-{id(self)}"
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(path))
                listener.listen()
                self._listeners[target] = listener
                self._addresses[target] = f"{_PREFIX}{path}"
                threading.Thread(
                    target=self._accept, args=(listener, target, is_peer), daemon=True
                ).start()
            return self._addresses[target]

    def _accept(self, listener: socket.socket, target: str, is_peer: bool) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(target)
                except OSError:
                    client.close()
                    continue
                self._wires.append(_ProxiedWire(self, client, server, is_peer=is_peer))

    def choose_fault(self, call: BusCall) -> FaultKind | None:
        return self._on_call(call)

    def restart_service(self) -> None:
        self._on_restart()

    def replace_addresses(self, message: Any) -> None:
        """Replace the addresses of private sockets in the body by those of this proxy."""
        body = message.get_body()
        text = body.print_(True) if body is not None else ""
        if _PREFIX not in text:
            return

        def replace(match: re.Match[str]) -> str:
            return f"'{self._listen(match[1], is_peer=True)}'"

        message.set_body(GLib.Variant.parse(body.get_type(), _PEER.sub(replace, text), None, None))


class _ProxiedWire(Wire):
    """A connection whose calls and answers the proxy may change."""

    def __init__(
        self, proxy: BusProxy, client: socket.socket, server: socket.socket, *, is_peer: bool
    ) -> None:
        self._proxy = proxy
        self._is_peer = is_peer
        self._faults: dict[int, FaultKind] = {}
        """The faults of the answers that are still to come, by the serial of their calls."""
        super().__init__(client, server)

    def forward_call(self, message: Any) -> None:
        if message.get_message_type() != Gio.DBusMessageType.METHOD_CALL:
            self.send_to_server(message)
            return
        call = self._describe_call(message)
        fault = None if str(call) == _HELLO else self._proxy.choose_fault(call)
        match fault:
            case None:
                self.send_to_server(message)
            case FaultKind.HANGING:
                return
            case FaultKind.DISCONNECTED:
                self.close()
            case FaultKind.ABSENT | FaultKind.INACTIVE | FaultKind.HOSTILE:
                name, text = _ERRORS[fault]
                error = Gio.DBusMessage.new_method_error_literal(
                    message, name, text.format(name=call.service)
                )
                error.set_sender(message.get_destination())
                self.send_to_client(error)
            case FaultKind.RESTARTED:
                self.send_to_server(message)
                self._proxy.restart_service()
            case FaultKind.LATE | FaultKind.MISTYPED | FaultKind.SHORT:
                self._faults[message.get_serial()] = fault
                self.send_to_server(message)

    def forward_answer(self, message: Any) -> None:
        fault = self._faults.pop(message.get_reply_serial(), None)
        if message.get_message_type() == Gio.DBusMessageType.METHOD_RETURN:
            match fault:
                case FaultKind.LATE:
                    # The caller gives up long before, and the answer comes as the first thing
                    # after that: at the next call.
                    self.hold_for_next_call(message)
                    return
                case FaultKind.MISTYPED:
                    message.set_body(GLib.Variant("(aa{sv}u)", ([{"x": GLib.Variant("i", 7)}], 7)))
                case FaultKind.SHORT:
                    message.set_body(GLib.Variant("()", ()))
                case _:
                    self._proxy.replace_addresses(message)
        else:
            self._proxy.replace_addresses(message)
        self.send_to_client(message)

    def _describe_call(self, message: Any) -> BusCall:
        service = PEER if self._is_peer else str(message.get_destination())
        member = str(message.get_member())
        if message.get_interface() == _PROPERTIES:
            member = f"properties of {message.get_arg0().rpartition('.')[2]}"
        return BusCall(service, member)
