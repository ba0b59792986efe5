"""A command that the fork server runs, for programs that start others by their path.

::

    python -I -S fork_client.py SOCKET PYTHON [ARGUMENT]...

The command gets the descriptors, the environment and the directory of this process. This process
forwards signals to it and ends as it ends; the command is killed when this process is killed.
Without a fork server the command replaces this process.

Modules that are written in Python take longer to load than the command runs, hence ``_socket``.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

_FORWARDED = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGABRT,
              _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGALRM)  # fmt: skip
_LOST = 255 << 8
"""The wait status of a command whose fork server has ended."""


def main(path: str, command: list[str]) -> None:
    """Run the command; return only when no fork server can run it."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    waiting: list[int] = []
    is_forked = False

    def forward(number: int, _frame: object) -> None:
        if not is_forked:
            waiting.append(number)
            return
        try:
            connection.send(b"%d" % number)
        except OSError:
            return  # the command has ended

    # Before the request: a caller may send a signal as soon as the command prints something.
    for number in _FORWARDED:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, forward)
    is_forked = _request_process(connection, path, command)
    if not is_forked:
        for number in _FORWARDED:
            if _signal.getsignal(number) is forward:
                _signal.signal(number, _signal.SIG_DFL)
    for number in waiting:
        if is_forked:
            forward(number, None)
        else:
            os.kill(os.getpid(), number)
    if is_forked:
        _end_process(int(connection.recv(64) or _LOST))


def _request_process(connection: _socket.socket, path: str, command: list[str]) -> bool:
    """Return whether the fork server has forked the command."""
    # Those that are open now were inherited; one of the names is that of the directory itself.
    places = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [int(os.path.basename(place)) for place in places if os.path.exists(place)]
    targets.remove(connection.fileno())
    try:
        request = {
            "command": command,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "thread": os.getpid(),
            "targets": targets,
            "is_attached": True,
        }
        rights = b"".join(number.to_bytes(4, sys.byteorder) for number in targets)
        connection.connect(path)
        connection.sendmsg(
            [marshal.dumps(request)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)]
        )
        return bool(connection.recv(64))
    except OSError:
        return False


def _end_process(status: int) -> None:
    """End this process with the wait status of the command."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606  # of the caller
