"""The process that holds the network, IPC and UTS namespaces of a pod.

::

    python -m treenail_lab.kubelet.processes.sandbox_process HOSTNAME [PORT SOCKET]...

It prints a line when the namespaces exist. Connections to a PORT of the pod's loopback then reach
its Unix socket SOCKET of the host, and the pod reaches nothing else.

The kubelet starts it without site-packages: it imports the standard library and `kernel` only.
"""

import contextlib
import socket
import sys
import threading

from treenail_lab.kubelet.processes import kernel

_CHUNK = 1 << 16


def main(hostname: str, *forwards: str) -> None:
    """Create the namespaces, report that, and forward until stdin is closed."""
    kernel.unshare_namespaces(kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    kernel.set_hostname(hostname)
    kernel.start_loopback()
    for port, path in zip(forwards[::2], forwards[1::2], strict=True):
        start_forward(int(port), path)
    print("ready", flush=True)
    sys.stdin.read()


def start_forward(port: int, path: str) -> None:
    """Forward connections to a port of this network namespace's loopback to a Unix socket."""
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    threading.Thread(target=_accept, args=(listener, path), daemon=True).start()


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_forward, args=(client, path), daemon=True).start()


def _forward(client: socket.socket, path: str) -> None:
    with client, socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError:
            return
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(*sys.argv[1:])
