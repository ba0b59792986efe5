"""Relay connections between two sockets: ``relay.py LISTEN CONNECT``, each a port or a path.

It carries the API server's port into a network namespace. It runs as a script without packages.
"""

import socket
import sys
import threading


def open_socket(place: str) -> tuple[socket.socket, object]:
    """Return a socket for the place, and its address."""
    if place.isdecimal():
        return socket.socket(socket.AF_INET), ("127.0.0.1", int(place))
    return socket.socket(socket.AF_UNIX), place


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    finally:
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def serve(connection: socket.socket, place: str) -> None:
    with connection:
        found, address = open_socket(place)
        with found:
            try:
                found.connect(address)
            except OSError:
                return
            back = threading.Thread(target=copy, args=(found, connection), daemon=True)
            back.start()
            copy(connection, found)
            back.join()


def main(listen: str, connect: str) -> None:
    server, address = open_socket(listen)
    if isinstance(address, tuple):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(address)
    server.listen(64)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=serve, args=(connection, connect), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
