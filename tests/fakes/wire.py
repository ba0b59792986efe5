"""One connection of a D-Bus proxy: two sockets, and threads that copy messages between them."""

import socket
import threading
from contextlib import suppress
from typing import Any

from gi.repository import Gio

_HEADER = 16
_OWN_SERIAL = 0x7FFFFFFF
"""That of messages that no side has sent."""
_BEGIN = b"BEGIN\r\n"
_CAPABILITIES = Gio.DBusCapabilityFlags.NONE


class Wire:
    """Copies messages both ways until either side closes; subclasses change them on the way."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client = client
        self._server = server
        self._lock = threading.Lock()
        self._held: list[Any] = []
        for target in (self._copy_calls, self._copy_answers):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """Close both sides."""
        for each in (self._client, self._server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def send_to_client(self, message: Any) -> None:
        if not message.get_serial():
            message.set_serial(_OWN_SERIAL)
        with self._lock, suppress(OSError):
            self._client.sendall(_encode(message))

    def send_to_server(self, message: Any) -> None:
        with suppress(OSError):
            self._server.sendall(_encode(message))

    def hold_for_next_call(self, message: Any) -> None:
        """Send the message to the client when that sends its next one."""
        with self._lock:
            self._held.append(message)

    def forward_call(self, message: Any) -> None:
        """Handle a message of the client."""
        self.send_to_server(message)

    def forward_answer(self, message: Any) -> None:
        """Handle a message of the server."""
        self.send_to_client(message)

    def _copy_calls(self) -> None:
        with suppress(OSError, EOFError):
            line = b""
            while not line.endswith(_BEGIN):
                byte = self._client.recv(1)
                if not byte:
                    raise EOFError
                line += byte
                if line.endswith((b"\n", b"\0")):
                    self._server.sendall(line)
                    line = b"" if not line.endswith(_BEGIN) else line
            while True:
                message = _read(self._client)
                with self._lock:
                    held, self._held = self._held, []
                for each in held:
                    self.send_to_client(each)
                self.forward_call(message)
        self.close()
        self._client.close()

    def _copy_answers(self) -> None:
        with suppress(OSError, EOFError):
            # Lines of the authentication are text; the first message begins with the byte order.
            while (first := _receive(self._server, 1)) not in (b"l", b"B"):
                self._client.sendall(first + self._read_line())
            message = _read(self._server, first)
            while True:
                self.forward_answer(message)
                message = _read(self._server)
        self.close()
        self._server.close()

    def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += _receive(self._server, 1)
        return line


def _encode(message: Any) -> bytes:
    return bytes(message.to_blob(_CAPABILITIES))


def _read(source: socket.socket, first: bytes = b"") -> Any:
    header = first + _receive(source, _HEADER - len(first))
    length = Gio.DBusMessage.bytes_needed(header)
    blob = header + _receive(source, length - _HEADER)
    return Gio.DBusMessage.new_from_blob(blob, _CAPABILITIES)


def _receive(source: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        chunk = source.recv(count - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)
