"""The system calls of Linux that containers need and Python's library lacks.

`sandbox_process` and `container_process` start without site-packages, so this imports the
standard library only.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 1, 23, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare_namespaces(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def join_namespace(path: str) -> None:
    """Join the namespace that a file of ``/proc/PID/ns`` names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, 0), f"setns {path}")
    finally:
        os.close(descriptor)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount; an error names the target."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {target}")


def bind(source: str, target: str, *, is_read_only: bool = False, flags: int = 0) -> None:
    """Bind a file or a directory with what is mounted below it."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if is_read_only or flags:
        # A bind mount ignores other flags until it is mounted again (mount(2)).
        read_only = MS_RDONLY if is_read_only else 0
        mount("none", target, flags=MS_BIND | MS_REMOUNT | read_only | flags)


def pivot_root(directory: str) -> None:
    """Make a mount point the root, and detach the old root."""
    os.chdir(directory)
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")


def set_parent_death_signal() -> None:
    """Kill this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def forbid_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl PR_SET_NO_NEW_PRIVS")


def limit_capabilities(kept: list[int]) -> None:
    """Drop all other capabilities from the bounding set, for every program from now on."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    number = 0
    while _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        if number not in kept:
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "prctl PR_CAPBSET_DROP")
        number += 1


def set_hostname(name: str) -> None:
    content = name.encode()
    _check(_libc.sethostname(content, len(content)), "sethostname")


def start_loopback() -> None:
    """Set the interface ``lo`` of this network namespace up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
