"""A root directory in which the real machine-config-daemon (MCD) applies a config once."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

from treenail_lab.lifetime.owner import owner

Json = dict[str, Any]

DIRECTORIES = ("dev", "etc/systemd/system", "home/core", "opt", "proc", "root", "run/systemd",
               "srv", "sys", "tmp", "usr/lib/systemd/system", "usr/lib/systemd/system-preset",
               "var/lib", "var/log", "var/usrlocal")  # fmt: skip
COMPARED = ("etc", "home", "opt", "root", "srv", "var")
_ACCOUNTS = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n",
    "group": "root:x:0:\ncore:x:1000:\n",
    "shadow": "root:*:19000:0:99999:7:::\ncore:!:19000:0:99999:7:::\n",
    "gshadow": "root:*::\ncore:!::\n",
    # Not CoreOS: the daemon then calls no rpm-ostree.
    "os-release": "ID=fedora\nVERSION_ID=42\nNAME=test\n",
    # The daemon makes the directory of the keys with runuser.
    "pam.d/runuser": "auth sufficient pam_permit.so\naccount sufficient pam_permit.so\n"
    "session sufficient pam_permit.so\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n",
}
# The daemon wants to make them private.
KUBECONFIGS = ("etc/kubernetes/kubeconfig", "var/lib/kubelet/kubeconfig")
_LIST_UNIT_FILES = """
<node><interface name="org.freedesktop.systemd1.Manager">
<method name="ListUnitFiles"><arg type="a(ss)" direction="out"/></method>
</interface></node>
"""
# The programs below /usr are this machine's; the units are those of the root directory.
MOUNTS = """
set -e
mount --make-rprivate /
mkdir -p "$1/run/units" "$1/run/presets"
mount --bind "$1/usr/lib/systemd/system" "$1/run/units"
mount --bind "$1/usr/lib/systemd/system-preset" "$1/run/presets"
mount --bind /usr "$1/usr"
mount -o remount,bind,ro "$1/usr"
mount --bind "$1/var/usrlocal" "$1/usr/local"
mount --move "$1/run/units" "$1/usr/lib/systemd/system"
mount --move "$1/run/presets" "$1/usr/lib/systemd/system-preset"
mount -t proc proc "$1/proc"
for each in null zero urandom; do touch "$1/dev/$each"; mount --bind /dev/$each "$1/dev/$each"; done
touch "$1/run/daemon"
mount --bind "$2" "$1/run/daemon"
export SYSTEMD_OFFLINE=1
"""
_ONCE = """
exec chroot "$1" /run/daemon start --once-from=/run/config --skip-reboot --root-mount=/ \
    --node-name=n1
"""
SPACES = ("--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
_LIMIT_S = 120
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def make_root(root: Path, units: dict[str, str], before: Json) -> None:
    """Make a root directory with accounts, vendor units and what is there before."""
    for name in DIRECTORIES:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "usr/local").symlink_to("../var/usrlocal")
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name, text in _ACCOUNTS.items():
        (root / "etc" / name).parent.mkdir(exist_ok=True)
        (root / "etc" / name).write_text(text)
        (root / "etc" / name).chmod(0o600 if "shadow" in name else 0o644)
    os.chown(root / "home/core", 1000, 1000)
    for name in KUBECONFIGS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(mode=0o600)
    for name, text in units.items():
        (root / "usr/lib/systemd/system" / name).write_text(text)
    (root / "usr/lib/systemd/system-preset/90-test.preset").write_text(before["presets"])
    for path, what in before["tree"].items():
        place = root / path[1:]
        if path.startswith("/usr/local/"):
            place = root / "var/usrlocal" / path.removeprefix("/usr/local/")
        place.parent.mkdir(parents=True, exist_ok=True)
        match what:
            case None:
                place.mkdir(exist_ok=True)
            case str():
                place.symlink_to(what)
            case (text, mode, owner_id):
                place.write_bytes(text.encode())
                place.chmod(mode)
                os.chown(place, owner_id, owner_id)


def run_daemon(program: Path, root: Path, config: str) -> subprocess.CompletedProcess[str]:
    """Apply the config in the root directory with the daemon, in namespaces of its own."""
    (root / "run/config").write_text(config, "utf-8")
    with serve_unit_files(root):
        return subprocess.run(
            ["unshare", *SPACES, "sh", "-c", MOUNTS + _ONCE, "sh", str(root), str(program)],
            env=ENVIRONMENT | owner.mark_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )


@contextmanager
def serve_unit_files(root: Path) -> Iterator[None]:
    """Answer ListUnitFiles on the private socket of systemd, which does not run there."""
    context = GLib.MainContext.new()
    loop = GLib.MainLoop.new(context, False)
    place = root / "run/systemd/private"
    context.push_thread_default()
    try:
        interface = Gio.DBusNodeInfo.new_for_xml(_LIST_UNIT_FILES).interfaces[0]
        server = Gio.DBusServer.new_sync(
            f"unix:path={place}", Gio.DBusServerFlags.NONE, Gio.dbus_generate_guid(), None, None
        )
        connections = []

        def answer(*arguments: Any) -> None:
            arguments[-1].return_value(GLib.Variant("(a(ss))", (list_unit_files(root),)))

        def accept(_server: Any, connection: Any) -> bool:
            path = "/org/freedesktop/systemd1"
            connection.register_object(path, interface, answer, None, None)
            connections.append(connection)
            return True

        server.connect("new-connection", accept)
        server.start()
    finally:
        context.pop_thread_default()

    def run() -> None:
        # The calls of an object come to the default context of the thread that registered it.
        context.push_thread_default()
        loop.run()
        context.pop_thread_default()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.quit()
        thread.join(10.0)
        server.stop()
        place.unlink(missing_ok=True)


def list_unit_files(root: Path) -> list[tuple[str, str]]:
    """Return path and state of every unit file; the daemon reads the paths only."""
    found = {}
    for folder in ("usr/lib/systemd/system", "etc/systemd/system"):
        for path in sorted((root / folder).iterdir()):
            if path.is_symlink() or path.is_file():
                found[path.name] = (f"/{folder}/{path.name}", "disabled")
    return list(found.values())


def read_tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Return kind, mode, owner and content of everything that a config can change.

    A systemd that was built with /lib instead of /usr/lib makes other links to the same units.
    """
    found: dict[str, tuple[object, ...]] = {}
    for top in COMPARED:
        for directory, folders, files in os.walk(root / top):
            for name in (*folders, *files):
                path = Path(directory, name)
                relative = str(path.relative_to(root))
                status = path.lstat()
                owners = (status.st_uid, status.st_gid)
                if path.is_symlink():
                    target = str(path.readlink()).removeprefix("/usr")
                    found[relative] = ("link", *owners, target)
                elif path.is_dir():
                    found[relative] = ("directory", oct(status.st_mode & 0o7777), *owners)
                else:
                    content = path.read_bytes()
                    found[relative] = ("file", oct(status.st_mode & 0o7777), *owners, content)
    return found


def remove_root(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
