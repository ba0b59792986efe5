"""The socket through which another process acts on the machines of a running lab."""

import contextlib
import json
import os
import socket
import socketserver
from collections.abc import Callable
from pathlib import Path

from treenail.controllers.runtime.http_server import ServerThread
from treenail.errors import HostError, UsageError

CONTROL_SOCKET = "control.sock"
_TIMEOUT_S = 60.0
_MAX_BYTES = 65536

LabCommands = dict[str, Callable[[list[str]], str]]


class ControlSocketServer(ServerThread):
    """Accepts commands, each a name and its words, and answers each with a line."""

    def __init__(self, directory: Path, commands: LabCommands) -> None:
        self._path = directory / CONTROL_SOCKET
        self._path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            server = _ThreadingServer(str(self._path), _build_request_class(commands))
        finally:
            os.umask(before)
        super().__init__(server, "lab-control")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._path.unlink(missing_ok=True)


def send_command(directory: Path, words: list[str]) -> str:
    """Send a command to a running lab; return its answer."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(directory / CONTROL_SOCKET))
            connection.sendall(json.dumps(words).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(_MAX_BYTES))
        except (OSError, ValueError) as error:
            raise HostError(
                f"cannot reach a lab in {directory}: {error}",
                remedy="run: treenail-lab up, or name its --directory",
            ) from error
    if "error" in answer:
        raise UsageError(str(answer["error"]))
    return str(answer["result"])


class _ThreadingServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def _build_request_class(commands: LabCommands) -> type[socketserver.StreamRequestHandler]:
    class CommandRequest(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                name, *words = json.loads(self.rfile.readline(_MAX_BYTES))
                answer = {"result": commands[name](words)}
            except (KeyError, ValueError, TypeError, UsageError, HostError) as error:
                answer = {"error": str(error)}
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    return CommandRequest
