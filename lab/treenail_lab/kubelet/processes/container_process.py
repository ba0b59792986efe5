"""The process that starts a container and waits for it.

::

    python -m treenail_lab.kubelet.processes.container_process < DOCUMENT

DOCUMENT is JSON: see `treenail_lab.kubelet.runtime.build_start_document`. It comes over stdin,
because the environment of a container may hold secrets and arguments are public. The container
gets its own PID and mount namespaces, and those of its pod for network, IPC and UTS. Its root is
an overlay over ``/`` of the host. This process exits as the container does. Where the container
cannot be started, it exits with 128 and writes the cause into the file ``failure``.

The kubelet starts it without site-packages: it imports the standard library and `kernel` only.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from treenail_lab.kubelet.processes import kernel

EXIT_NOT_STARTED = 128
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}  # fmt: skip
# The paths of /proc that container runtimes hide, and those that they make read-only.
_HIDDEN = ("acpi", "kcore", "keys", "latency_stats", "timer_list", "sched_debug", "scsi")
_READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")


def main() -> int:
    """Start the container; return its exit code."""
    document = json.load(sys.stdin)
    failure = Path(document["failure"])
    try:
        if document["cgroup"]:
            Path(document["cgroup"], "cgroup.procs").write_text(str(os.getpid()), "ascii")
        for name in ("ipc", "uts", "net"):
            kernel.join_namespace(f"/proc/{document['sandbox']}/ns/{name}")
        kernel.unshare_namespaces(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
    except OSError as error:
        failure.write_text(str(error), "utf-8")
        return EXIT_NOT_STARTED
    child = os.fork()
    if child == 0:
        _become_container(document, failure)
    # The container's own processes decide what a signal does; this one only passes it on.
    signal.signal(signal.SIGTERM, lambda *_: _signal_child(child))
    while True:
        with contextlib.suppress(InterruptedError):
            _, status = os.waitpid(child, 0)
            return (
                os.waitstatus_to_exitcode(status) % 256
                if os.WIFEXITED(status)
                else (128 + os.WTERMSIG(status))
            )


def _signal_child(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)


def _become_container(document: Any, failure: Path) -> None:
    """Build the root, drop the privileges and execute the command; never return."""
    try:
        kernel.set_parent_death_signal()
        # Opened before the old root goes; closed by the execution of the command.
        report = os.open(failure, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        os._exit(EXIT_NOT_STARTED)
    try:
        _build_root(document)
        os.chdir(_make_directory(document["directory"]))
        _drop_privileges(document)
        environment = document["environment"]
        command = document["command"]
        os.execvpe(command[0], command, environment)  # noqa: S606  the point of this process
    except (OSError, ValueError) as error:
        os.write(report, str(error).encode("utf-8", "replace"))
        os._exit(EXIT_NOT_STARTED)


def _build_root(document: Any) -> None:
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    scratch = document["scratch"]
    # On a file system of its own: an upper directory below the lower one is refused.
    kernel.mount("tmpfs", scratch, "tmpfs", options="mode=700")
    for name in ("upper", "work", "root"):
        Path(scratch, name).mkdir()
    root = f"{scratch}/root"
    layers = f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work"
    Path(scratch, "upper").chmod(0o755)
    kernel.mount("overlay", root, "overlay", options=layers)
    for path in document["hidden"]:
        if Path(root + path).is_dir():
            kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                         "mode=1777" if path.endswith("tmp") else "mode=755")  # fmt: skip
    for path in document["shared"]:
        _bind_below(root, path, path, is_read_only=True)
    _mount_devices(root)
    _mount_proc(root, is_masked=not document["is_unmasked"])
    with contextlib.suppress(OSError):
        kernel.mount("sysfs", f"{root}/sys", "sysfs", kernel.MS_RDONLY | kernel.MS_NOSUID)
    for name, text in document["files"].items():
        target = Path(root + name)
        target.unlink(missing_ok=True)
        target.write_text(text, "utf-8")
    for mount in document["mounts"]:
        _bind_below(root, mount["source"], mount["target"], is_read_only=mount["is_read_only"])
        # A volume may cover a directory of Python, for example of a clone below /work.
        for path in document["shared"]:
            if path.startswith(mount["target"].rstrip("/") + "/"):
                _bind_below(root, path, path, is_read_only=True)
    if document["is_read_only"]:
        kernel.mount("none", root, flags=kernel.MS_REMOUNT | kernel.MS_RDONLY)
    kernel.pivot_root(root)


def _bind_below(root: str, source: str, target: str, *, is_read_only: bool) -> None:
    """Bind a path of the host to a path below the root, which is created if it is missing."""
    place = Path(_resolve_below(root, target))
    if Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    kernel.bind(source, str(place), is_read_only=is_read_only)


def _resolve_below(root: str, path: str) -> str:
    """Resolve links below the root, as for a program in a chroot."""
    at, parts, links = root, [name for name in reversed(path.split("/")) if name], 0
    while parts:
        part = parts.pop()
        if part == "..":
            at = at if at == root else str(Path(at).parent)
        elif Path(at, part).is_symlink() and links < 40:
            links += 1
            target = str(Path(at, part).readlink())
            at = root if target.startswith("/") else at
            parts += [name for name in reversed(target.split("/")) if name not in {"", "."}]
        elif part != ".":
            at = f"{at}/{part}"
    return at


def _mount_devices(root: str) -> None:
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "mode=755")
    for name in _DEVICES:
        Path(f"{root}/dev/{name}").touch()
        kernel.bind(f"/dev/{name}", f"{root}/dev/{name}")
    for name, target in _DEVICE_LINKS.items():
        Path(f"{root}/dev/{name}").symlink_to(target)
    for name, kind, options in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"),
        ("shm", "tmpfs", "mode=1777,size=64m"),
        ("mqueue", "mqueue", ""),
    ):
        Path(f"{root}/dev/{name}").mkdir()
        kernel.mount(kind, f"{root}/dev/{name}", kind, kernel.MS_NOSUID | kernel.MS_NOEXEC, options)


def _mount_proc(root: str, *, is_masked: bool) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("proc", f"{root}/proc", "proc", flags)
    if not is_masked:
        return
    for name in _HIDDEN:
        path = f"{root}/proc/{name}"
        if Path(path).is_dir():
            kernel.mount("tmpfs", path, "tmpfs", flags | kernel.MS_RDONLY)
        elif Path(path).exists():
            kernel.bind("/dev/null", path)
    for name in _READ_ONLY:
        if Path(f"{root}/proc/{name}").exists():
            kernel.bind(f"{root}/proc/{name}", f"{root}/proc/{name}", is_read_only=True,
                        flags=flags)  # fmt: skip


def _make_directory(path: str) -> str:
    Path(path).mkdir(parents=True, exist_ok=True)
    return path


def _drop_privileges(document: Any) -> None:
    if document["capabilities"] is not None:
        kernel.limit_capabilities(document["capabilities"])
    os.setgroups(document["groups"])
    os.setresgid(*[document["group"]] * 3)
    os.setresuid(*[document["user"]] * 3)
    # A change of the user id clears it (prctl(2)).
    kernel.set_parent_death_signal()
    os.umask(0o022)
    if document["has_no_new_privileges"]:
        kernel.forbid_new_privileges()


if __name__ == "__main__":
    sys.exit(main())
