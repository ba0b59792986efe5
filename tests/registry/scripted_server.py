"""A server on loopback whose answers a test writes byte by byte."""

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class SeenRequest:
    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


Script = Callable[[SeenRequest], bytes | Iterable[bytes]]


def make_answer(status: int, content: bytes = b"", **headers: str) -> bytes:
    """Return a complete answer; underscores in the names of headers stand for hyphens."""
    fields = {"Content-Length": str(len(content))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + content


class ScriptedServer:
    """Answers each request by a function, and closes the connection after it."""

    def __init__(self, script: Script, address: str = "127.0.0.1") -> None:
        self.requests: list[SeenRequest] = []
        self._script = script
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.host = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        thread = threading.Thread(target=self._accept)
        thread.start()
        self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a connection of the scripted server hangs"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file, suppress(OSError):
            connection.settimeout(10)
            method, target, _ = file.readline().decode().split(" ", 2)
            headers = {}
            while line := file.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.strip().lower()] = value.strip()
            body = file.read(int(headers.get("content-length", 0)))
            request = SeenRequest(method, target, headers, body)
            self.requests.append(request)
            answer = self._script(request)
            for piece in (answer,) if isinstance(answer, bytes) else answer:
                connection.sendall(piece)
