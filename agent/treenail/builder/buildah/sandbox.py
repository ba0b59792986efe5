"""Program that runs a command in user, PID, mount and IPC namespaces of its own.

It runs as a file, in an interpreter without site-packages, and imports the standard library only::

    python -I -S sandbox.py UID_MAP GID_MAP DIRECT|NEWUIDMAP COMMAND...

A killed buildah leaves its ``RUN`` running, and its mounts. Here the kernel kills all processes of
the PID namespace when its first process ends, and removes the mounts with the mount namespace.
Three processes guard that, and each dies with its parent: the supervisor writes the ID maps, the
owner owns the namespaces, and the init reaps orphans.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

EXIT_NO_NAMESPACE = 121
MESSAGE_PREFIX = "treenail-sandbox: "
DIRECT, NEWUIDMAP = "direct", "newuidmap"

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_SET_PDEATHSIG = 1


class NamespaceError(Exception):
    """This host does not allow the namespaces."""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code, or 128 and the number of the signal."""
    uid_map, gid_map, way, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with_parent(libc)
    ready, request = os.pipe(), os.pipe()
    # A process may not write its own map of several ranges: CAP_SETUID in the parent namespace is
    # needed (user_namespaces(7)), so the supervisor stays outside.
    owner = os.fork()
    if owner == 0:
        _run_child(lambda: _own_namespaces(libc, ready, request, command))
    os.close(ready[1])
    os.close(request[0])
    if os.read(ready[0], 1):
        try:
            _write_id_maps(owner, uid_map, gid_map, way)
        except (OSError, subprocess.SubprocessError) as error:
            _report(f"cannot write the ID maps: {error}")
            os.kill(owner, signal.SIGKILL)
            os.waitpid(owner, 0)
            return EXIT_NO_NAMESPACE
        os.write(request[1], b"x")
    return _wait_for(owner)


def _own_namespaces(
    libc: ctypes.CDLL, ready: tuple[int, int], request: tuple[int, int], command: list[str]
) -> int:
    os.close(ready[0])
    os.close(request[1])
    _die_with_parent(libc)
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC
    # One call: the kernel creates the user namespace first, and it owns the others
    # (user_namespaces(7)).
    if libc.unshare(flags):
        raise NamespaceError(f"cannot create a user namespace: {_describe_errno()}")
    os.write(ready[1], b"x")
    if not os.read(request[0], 1):
        return EXIT_NO_NAMESPACE
    os.close(ready[1])
    os.close(request[0])
    # unshare(2) moves only children into the new PID namespace. The first one is its init.
    init = os.fork()
    if init == 0:
        _run_child(lambda: _run_init(libc, command))
    return _wait_for(init)


def _run_init(libc: ctypes.CDLL, command: list[str]) -> int:
    _die_with_parent(libc)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # A change of IDs clears the signal of the parent's death (prctl(2)).
    _die_with_parent(libc)
    # The copied mounts are slaves of those outside, because the user namespace is another one:
    # later mounts of the host would appear here (mount_namespaces(7)).
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None):
        raise NamespaceError(f"cannot make mounts private: {_describe_errno()}")
    # Where /proc has masked paths, as in most containers, the kernel refuses another one. The
    # container's own /proc shows these processes too, with other numbers.
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    libc.mount(b"proc", b"/proc", b"proc", flags, None)
    program = os.fork()
    if program == 0:
        _run_child(lambda: _execute(command))
    # An init must reap the orphans of its namespace (pid_namespaces(7)).
    while True:
        process, status = os.waitpid(-1, 0)
        if process == program:
            return _convert_status(status)


def _execute(command: list[str]) -> int:
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command that this program runs
    except OSError as error:
        raise NamespaceError(f"cannot run {command[0]}: {error.strerror}") from error


def _report(problem: str) -> None:
    sys.stderr.write(f"{MESSAGE_PREFIX}{problem}\n")
    sys.stderr.flush()


def _run_child(run: Callable[[], int]) -> None:
    """Run the rest of a forked process; never return."""
    code = EXIT_NO_NAMESPACE
    try:
        code = run()
    except (NamespaceError, OSError) as error:
        _report(str(error))
    finally:
        os._exit(code)


def _write_id_maps(process: int, uid_map: str, gid_map: str, way: str) -> None:
    if way == DIRECT:
        for name, content in (("uid_map", uid_map), ("gid_map", gid_map)):
            # The import of pathlib takes 10 ms.
            with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(content.replace(",", "\n") + "\n")
        return
    # These programs have CAP_SETUID or CAP_SETGID outside, and allow the ranges of /etc/subuid and
    # /etc/subgid.
    for program, content in (("newuidmap", uid_map), ("newgidmap", gid_map)):
        numbers = content.replace(",", " ").split()
        subprocess.run([program, str(process), *numbers], check=True, timeout=30)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    _die_with_parent(ctypes.CDLL(None, use_errno=True))


def _die_with_parent(libc: ctypes.CDLL) -> None:
    parent = os.getppid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before: in a new PID namespace it always has the number 0.
    if os.getppid() != parent:
        os._exit(EXIT_NO_NAMESPACE)


def _wait_for(process: int) -> int:
    return _convert_status(os.waitpid(process, 0)[1])


def _convert_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _describe_errno() -> str:
    return os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
