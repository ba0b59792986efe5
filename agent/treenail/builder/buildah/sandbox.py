"""Program that runs a command in namespaces, and in a root directory, of its own.

It runs as a file, in an interpreter without site-packages, and imports the standard library only::

    python -I -S sandbox.py UID_MAP GID_MAP DIRECT|NEWUIDMAP [ro|rw SOURCE TARGET]... -- COMMAND...

SOURCE is below the working directory. The command sees it at TARGET, beside the system's programs,
the files of /etc that these need, /proc, /sys and a few devices: nothing else of the host. It
begins in the first TARGET.

A killed buildah leaves its ``RUN`` running, and its mounts. Here the kernel kills all processes of
the PID namespace when its first process ends, and removes the mounts with the mount namespace.
Three processes guard that, and each dies with its parent: the supervisor writes the ID maps, the
owner owns the namespaces, and the init reaps orphans.
"""

import ctypes
import os
import resource
import signal
import stat
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
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_MS_RELATIME, _ST_RELATIME = 1 << 21, 4096
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PROCESS_LIMIT = 4096
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/sys")
# Of /etc what libc, the clients of TLS, and buildah for the files of a RUN read: no key, no login.
_ETC = (
    "alternatives", "ca-certificates", "crypto-policies", "group", "host.conf", "hosts",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf", "passwd",
    "pki/ca-trust/extracted", "pki/tls/cert.pem", "pki/tls/certs", "pki/tls/openssl.cnf",
    "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf",
)  # fmt: skip
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_Mount = tuple[bool, str, str]  # whether the command may write, source, target


class NamespaceError(Exception):
    """This host does not allow the namespaces."""


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code, or 128 and the number of the signal."""
    uid_map, gid_map, way, *rest = arguments
    end = rest.index("--")
    command = rest[end + 1 :]
    mounts = [
        (mode == "rw", source, target)
        for mode, source, target in zip(rest[:end:3], rest[1:end:3], rest[2:end:3], strict=True)
    ]
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with_parent(libc)
    ready, request = os.pipe(), os.pipe()
    # A process may not write its own map of several ranges: CAP_SETUID in the parent namespace is
    # needed (user_namespaces(7)), so the supervisor stays outside.
    owner = os.fork()
    if owner == 0:
        _run_child(lambda: _own_namespaces(libc, ready, request, mounts, command))
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
    libc: ctypes.CDLL,
    ready: tuple[int, int],
    request: tuple[int, int],
    mounts: list[_Mount],
    command: list[str],
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
    # Where /proc of the container shows this process, its working directory would lead to the root
    # outside: ptrace(2) allows it to root of the same user namespace.
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # unshare(2) moves only children into the new PID namespace. The first one is its init.
    init = os.fork()
    if init == 0:
        _run_child(lambda: _run_init(libc, mounts, command))
    return _wait_for(init)


def _run_init(libc: ctypes.CDLL, mounts: list[_Mount], command: list[str]) -> int:
    _die_with_parent(libc)
    # As the user outside, who may search the directories above, and relative to the working
    # directory, which unshare(2) moved to the new mount namespace.
    sources = [(w, os.open(source, os.O_PATH), target) for w, source, target in mounts]
    # The groups of the user outside may read what the IDs of the command may not.
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # A change of IDs clears the signal of the parent's death (prctl(2)).
    _die_with_parent(libc)
    resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESS_LIMIT, _PROCESS_LIMIT))
    _enter_root(libc, sources)
    os.chdir(sources[0][2] if sources else "/")
    program = os.fork()
    if program == 0:
        _run_child(lambda: _execute(command))
    # An init must reap the orphans of its namespace (pid_namespaces(7)).
    while True:
        process, status = os.waitpid(-1, 0)
        if process == program:
            return _convert_status(status)


def _enter_root(libc: ctypes.CDLL, sources: list[tuple[bool, int, str]]) -> None:
    """Make a root directory of what the command may see, and leave that of the host."""
    # The copied mounts are slaves of those outside, because the user namespace is another one:
    # later mounts of the host would appear here (mount_namespaces(7)).
    _mount(libc, "none", "/", _MS_REC | _MS_PRIVATE)
    wanted = [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *(f"/dev/{name}" for name in _DEVICES)]
    shown = [(path, os.open(path, os.O_PATH)) for path in wanted if os.path.exists(path)]
    # No directory that is shown, or in one: its copies would have this mount too. pivot_root(2)
    # uncovers it again.
    root = "/etc"
    _mount(libc, "none", root, _MS_NOSUID | _MS_NODEV, "tmpfs", "mode=0755,size=64m")
    for path, source in shown:
        if path in _SYSTEM and os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
            os.close(source)
            continue
        _bind(libc, source, root + path, is_writable=path.startswith(("/dev", "/sys")))
    for path in ("/dev/pts", "/dev/shm", "/proc", "/run", "/tmp", "/var/tmp"):
        os.makedirs(root + path, 0o755, exist_ok=True)
    for path in ("/dev/shm", "/run", "/tmp", "/var/tmp"):
        _mount(libc, "none", root + path, _MS_NOSUID | _MS_NODEV, "tmpfs", "mode=1777,size=64m")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    _mount(libc, "none", f"{root}/dev/pts", _MS_NOSUID | _MS_NOEXEC, "devpts", "ptmxmode=0666")
    for is_writable, source, target in sources:
        _bind(libc, source, root + target, is_writable=is_writable)
    try:
        _mount(libc, "none", f"{root}/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "proc")
    except NamespaceError:
        # Where /proc has masked paths, as in most containers, the kernel refuses another one. The
        # container's own /proc shows these processes too, with other numbers. Environment, memory
        # and files of those outside stay closed: ptrace(2) needs their user namespace.
        _bind(libc, os.open("/proc", os.O_PATH), f"{root}/proc", is_writable=True)
    # An instruction that left its directory could otherwise write /etc/ld.so.preload, which the
    # next process of buildah loads with all capabilities.
    _mount(libc, "none", root, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(root)
    # Stacks the old root on the new one, at the same place (pivot_root(2)).
    if libc.pivot_root(b".", b".") or libc.umount2(b".", _MNT_DETACH):
        raise NamespaceError(f"cannot leave the root directory of the host: {_describe_errno()}")
    os.chdir("/")


def _bind(libc: ctypes.CDLL, source: int, target: str, *, is_writable: bool) -> None:
    """Show an open file or directory, with all mounts below it, at the target; close it."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    _mount(libc, f"/proc/self/fd/{source}", target, _MS_BIND | _MS_REC)
    os.close(source)
    if not is_writable:
        # The kernel refuses to clear the flags that a mount of the host has.
        kept = os.statvfs(target).f_flag
        flags = kept & ~(_ST_RELATIME | _MS_REMOUNT) | (_MS_RELATIME if kept & _ST_RELATIME else 0)
        _mount(libc, "none", target, flags | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _mount(
    libc: ctypes.CDLL, source: str, target: str, flags: int, kind: str = "none", options: str = ""
) -> None:
    words = (source.encode(), target.encode(), kind.encode())
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode()):
        raise NamespaceError(f"cannot mount {target}: {_describe_errno()}")


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
            with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
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
