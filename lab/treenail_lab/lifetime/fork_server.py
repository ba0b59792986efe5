"""Starts Python processes of the lab by forking one that has all modules loaded.

A start takes 5 ms of CPU time instead of the 250 ms that loading the modules takes. `LabProcess` is
a `subprocess.Popen` that asks the fork server first. It starts the command itself when the fork
server refuses: for another program, for options of Python that the server lacks, and where the
caller's namespaces, ids, limits or search path are not those of the server.

TREENAIL_LAB_FORK_SERVER=no in the environment of the caller, or in that of the process, turns the
fork server off.
"""

import atexit
import inspect
import marshal
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr

from treenail_lab.lifetime import fork_client, fork_server_process
from treenail_lab.lifetime.interpreter import PYTHON_MODULE, build_python_path, build_script
from treenail_lab.lifetime.owner import owner

SWITCH = "TREENAIL_LAB_FORK_SERVER"
"""The variable that turns the fork server off with the value ``no``."""

_END_TIMEOUT_S = 10.0


class _ForkServer:
    """The fork server of this process, which starts at the first request."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner_pid = 0
        self._socket: Path | None = None

    def start(self) -> Path | None:
        """Return the socket of the server; None where there is none."""
        with self._guard:
            if not self._owner_pid and os.environ.get(SWITCH) != "no":
                self._owner_pid = os.getpid()
                self._start_process()
            # A fork of the owner cannot wait for children of the owner.
            return self._socket if self._owner_pid == os.getpid() else None

    def request(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the id of a new child of this process; 0 when the server refuses."""
        path = self.start()
        if path is None:
            return 0
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.connect(str(path))
                socket.send_fds(connection, [marshal.dumps(request)], descriptors)
                return int(connection.recv(64) or 0)
        except OSError:
            return 0

    def _start_process(self) -> None:
        path = owner.make_directory() / "fork"
        ours, theirs = socket.socketpair()
        # The kernel sends a death signal (PR_SET_PDEATHSIG) to the children of a thread that ends.
        # All processes that the server forks are children of this thread.
        thread = threading.Thread(
            target=self._run_process, args=(path, theirs), name="fork-server", daemon=True
        )

        def end_process() -> None:
            ours.close()
            thread.join(_END_TIMEOUT_S)

        atexit.register(end_process)
        thread.start()
        if ours.recv(1):
            self._socket = path

    def _run_process(self, path: Path, theirs: socket.socket) -> None:
        environment = {
            **os.environ,
            **owner.mark_environment(),
            "PYTHONPATH": build_python_path(),
            fork_server_process.PADDING: "x" * fork_server_process.ENVIRONMENT_SIZE,
        }
        padding = "x" * fork_server_process.ARGUMENTS_SIZE
        with theirs:
            process = subprocess.Popen(
                [*PYTHON_MODULE, fork_server_process.__name__, str(path), padding],
                env=environment,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        process.wait()
        self._socket = None


_server = _ForkServer()


class LabProcess(subprocess.Popen[AnyStr]):
    """A process of the lab; ``is_forked`` says how it was started."""

    is_forked = False

    def _execute_child(self, *arguments: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*arguments).arguments
        self.pid = _fork_child(given)
        if not self.pid:
            execute(*arguments)
            return
        self.is_forked = self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


def run_process(
    command: Sequence[str | Path],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as subprocess.run does with ``check=False``."""
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with LabProcess(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def build_client_command(command: Sequence[str]) -> list[str]:
    """Return a command line that runs a Python command in a forked process.

    It is for a program that starts others by their path.
    """
    path = _server.start()
    if path is None:
        return list(command)
    return [sys.executable, "-I", "-S", str(fork_client.__file__), str(path), *command]


def build_client_script(module: str, *words: object) -> str:
    """Return a shell script that runs a module with these words and the script's arguments."""
    return build_script(build_client_command([*PYTHON_MODULE, module, *map(str, words)]))


def _fork_child(given: Mapping[str, Any]) -> int:
    """Return the id of a process with these arguments of `subprocess.Popen`, or 0."""
    arguments = given["args"]
    if isinstance(arguments, (str, bytes, os.PathLike)):
        arguments = [arguments]
    command = [os.fsdecode(word) for word in arguments]
    others = ("preexec_fn", "executable", "gid", "gids", "uid", "process_group", "umask")
    is_plain = all(given[name] in (None, -1) for name in others) and given["close_fds"]
    if command[:1] != [sys.executable] or given["shell"] or not is_plain:
        return 0
    environment = os.environ if given["env"] is None else given["env"]
    if environment.get(SWITCH) == "no":
        return 0
    sys.audit("subprocess.Popen", command[0], command, given["cwd"], given["env"])
    streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    passed = sorted(given["pass_fds"])
    request = {
        "command": command,
        "environment": {os.fsdecode(name): os.fsdecode(environment[name]) for name in environment},
        "directory": os.path.abspath(os.fsdecode(given["cwd"] or "")),
        "thread": threading.get_native_id(),
        "targets": [0, 1, 2, *passed],
        "has_session": bool(given["start_new_session"]),
    }
    ends = [end if end >= 0 else number for number, end in enumerate(streams)]
    return _server.request(request, [*ends, *passed])
