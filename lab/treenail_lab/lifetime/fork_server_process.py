"""The process that has the packages loaded and forks a process for each start.

::

    python -S -P -m treenail_lab.lifetime.fork_server_process SOCKET PADDING

It has one thread and no open files but its sockets. A connection to SOCKET is one request. It ends
when the other end of its standard input is closed, as the kernel does when the owner ends. PADDING,
and the variable of that name, reserve memory: a forked process writes there what /proc shows as its
command line and its environment.

A process for the owner is made with CLONE_PARENT: it is a child of the owner, which can wait for
it. A process for `fork_client` is a child of this one, which passes signals and the end on.
"""

import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import pkgutil
import selectors
import signal
import socket
import struct
import sys
from functools import partial

from treenail_lab.lifetime import forked_program
from treenail_lab.lifetime.forked_program import CallerContext, ForkRequest

PADDING = "TREENAIL_LAB_PADDING"
ARGUMENTS_SIZE, ENVIRONMENT_SIZE = 16 << 10, 64 << 10

_PRELOADED = ("treenail", "treenail_lab.machine", "treenail_lab.kubelet")
_MODULES_OF_FUNCTIONS = ("psutil", "pydbus", "encodings.idna", "rich.console", "rich.table")
"""Modules that functions import when they first need them."""
_LEFT_OUT = ("treenail.kube.transport.official",)
"""The Kubernetes client takes 0.3 s to load, and few tests use it. It reads KUBECONFIG then."""
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP)
"""Signals that a terminal sends to the whole process group; standard input says when to end."""
_REQUEST_LIMIT, _MOST_DESCRIPTORS = 1 << 20, 250  # SCM_MAX_FD of Linux is 253
_RECEIVE_TIMEOUT_S = 10.0

# From linux/sched.h, linux/prctl.h and asm-generic/unistd.h.
_SYS_CLONE3 = 435
_CLONE_PARENT, _CLONE_CHILD_SETTID, _CLONE_CHILD_CLEARTID = 0x8000, 0x1000000, 0x200000
_PR_GET_TID_ADDRESS = 40


class _RequestServer:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._context = CallerContext(os.getpid(), os.getpid())
        self._events = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve until the owner has ended."""
        self._events.register(self._listener, selectors.EVENT_READ, self._accept)
        self._events.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._events.select():
                if key.fd == 0:
                    return
                key.data()

    def _accept(self) -> None:
        """Fork the process of a request, or close the connection: the caller starts it itself."""
        connection, _ = self._listener.accept()
        connection.settimeout(_RECEIVE_TIMEOUT_S)
        descriptors: list[int] = []
        is_attached = False
        try:
            content, descriptors, _, _ = socket.recv_fds(
                connection, _REQUEST_LIMIT, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            request = ForkRequest(**marshal.loads(content))  # noqa: S302  # the socket is private
            is_attached = self._fork(request, connection, descriptors) and request.is_attached
        except (OSError, EOFError, ValueError, TypeError):
            pass
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if not is_attached:
                connection.close()

    def _fork(
        self, request: ForkRequest, connection: socket.socket, descriptors: list[int]
    ) -> bool:
        """Fork the process, which answers itself; return False where a fork is no substitute."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        caller = CallerContext(struct.unpack("3i", credentials)[0], request.thread)
        program = forked_program.parse_command(request.command)
        if (
            program is None
            or caller.properties != self._context.properties
            or not {0, 1, 2}.issubset(request.targets)
            or not os.path.isdir(request.directory)
            or not forked_program.has_same_modules(request.environment, request.directory)
        ):
            return False
        pid = os.fork() if request.is_attached else _fork_sibling()
        if pid == 0:
            program.become_process(request, caller, descriptors, connection.fileno())
        if request.is_attached:
            connection.settimeout(None)
            process = os.pidfd_open(pid)
            for file, react in ((process, self._finish), (connection, self._forward)):
                action = partial(react, pid, process, connection)
                self._events.register(file, selectors.EVENT_READ, action)
        return True

    def _forward(self, _pid: int, process: int, connection: socket.socket) -> None:
        """Pass a signal on; a client that was killed takes its process with it."""
        if connection.fileno() < 0:
            return  # `_finish` closed it a moment ago
        try:
            content = connection.recv(64)
        except OSError:
            content = b""
        if not content:
            self._close(connection)
        signal.pidfd_send_signal(process, int(content or signal.SIGKILL))

    def _finish(self, pid: int, process: int, connection: socket.socket) -> None:
        """Pass the end of a process on."""
        self._events.unregister(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        if connection.fileno() >= 0:
            with contextlib.suppress(OSError):
                connection.send(str(status).encode())
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._events.unregister(connection)
        connection.close()


def _fork_sibling() -> int:
    """Fork as os.fork does, but a child of this process's parent.

    The kernel stores the thread id where glibc expects it, as glibc's fork does.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    address = ctypes.c_ulong(0)
    libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    arguments = struct.pack("=8Q", flags, 0, address.value, 0, 0, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(libc.syscall(_SYS_CLONE3, arguments, ctypes.c_size_t(len(arguments))))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def _load_packages() -> None:
    """Load the modules of the packages; what needs a missing library stays unloaded."""
    for package in _PRELOADED:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            if module.name not in _LEFT_OUT and not module.name.endswith(".__main__"):
                _load_module(module.name)
    for name in _MODULES_OF_FUNCTIONS:
        _load_module(name)


def _load_module(name: str) -> None:
    with contextlib.suppress(ImportError, ValueError):
        importlib.import_module(name)


def main(path: str) -> int:
    """Load the packages and serve."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # What is loaded is never freed: no process needs to write to its pages.
    gc.disable()
    _load_packages()
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) != 1:
        return 1  # a fork would lack the other threads
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        forked_program.show_command(sys.orig_argv[:-1])
        os.write(0, b"r")
        _RequestServer(listener).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
