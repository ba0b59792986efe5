"""``treenail hosted``: the program of an upgrade pod, for hosts whose image has no treenail.

It copies the tree that it runs from to the host and starts the agent there as a unit, which
survives the pod. It ends when the unit has removed itself. Each write is atomic and each step can
be repeated: after a kill the next pod continues.
"""

import argparse
import hashlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from treenail import clocks, errors
from treenail import log as journal
from treenail.api import decode
from treenail.api.hosted import node_mode
from treenail.encoding import json_text
from treenail.host.filesystem import selinux
from treenail.host.filesystem.atomic_files import FileSpec, translate_errors
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.systemd.system_bus import SystemBus

log = logging.getLogger(__name__)

DIRECTORY, UNIT = "/var/lib/treenail/hosted", "treenail-hosted.service"
CURRENT = f"{DIRECTORY}/current"
"""The tree that the unit runs, a link; the paths in the tree begin with it."""
_UNITS = "/etc/systemd/system"
_WANTED = f"{_UNITS}/multi-user.target.wants/{UNIT}"
_HOST_UNIT = "treenail.service"
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_STATUS, _STATUS_LIMIT = "/run/treenail/status.json", 1024 * 1024
_POLL_S = 2.0
_TREE_DEPTH = 6
"""Directories between the tree and this module's directory."""


def main(arguments: argparse.Namespace) -> int:
    """Install and start the agent, then follow it until it has removed itself."""
    tree = _find_tree(arguments.root_mount)
    journal.configure_stream_logging(sys.stderr, level=logging.INFO)
    root, clock = Root(arguments.root_mount), clocks.SystemClock()
    bus = SystemBus(f"unix:path={root.resolve_path('/run/dbus/system_bus_socket')}")
    with Machine(root, clock=clock, bus=bus) as machine:
        options = f"--node-name {arguments.node_name} --kubeconfig {arguments.kubeconfig}"
        given = arguments.mode or os.environ.get(node_mode.VARIABLE)
        mode = read_mode(given, _POD_NAMESPACE)
        policy = selinux.load_host_policy(root)
        install_agent(machine, tree, mode, options, policy)
        shown = ""
        while machine.files.has_entry(node_mode.INSTALLED_PATH):
            activity = read_activity(machine.files.read_file(_STATUS, limit=_STATUS_LIMIT))
            if activity != shown:
                log.info("agent: %s", activity)
            shown = activity
            clock.sleep(_POLL_S)
    return 0


def _find_tree(root_mount: str) -> Path:
    """Return the tree that this program runs from; raise `UsageError` outside of its pod."""
    if not Path(root_mount).is_dir():
        raise errors.UsageError(
            f"cannot install the agent: expected the root of the host at {root_mount}, found none",
            remedy="mount the host's / there, or name it: --root-mount DIR",
        )
    parents = Path(__file__).parents
    if len(parents) <= _TREE_DEPTH:
        raise errors.UsageError(
            f"cannot install the agent from {parents[0]}: expected a tree with its own Python",
            remedy="run the image that make images TARGET=hosted builds",
        )
    return parents[_TREE_DEPTH]


def read_mode(text: str | None, pod_namespace: Path) -> node_mode.HostedMode:
    """Return the mode of the option; without one, that of HyperShift's upgrader by the namespace.

    The kubelet mounts the namespace of the pod's account.
    """
    if text is not None:
        return node_mode.HostedMode.from_json(decode.load_json(text, where="--mode"), "--mode")
    namespace = pod_namespace.read_text("utf-8").strip() if pod_namespace.exists() else "none"
    pool = namespace.removesuffix("-upgrade")
    if pool == namespace:
        raise errors.UsageError(
            f"cannot find the NodePool: expected a namespace POOL-upgrade, found {namespace}",
            remedy="add the option --mode",
        )
    return node_mode.HostedMode(pool, namespace)


def read_activity(content: bytes | None) -> str:
    """Return what the agent's status file says that it does; empty without a valid one."""
    try:
        status = json_text.parse_json(content or b"{}")
    except ValueError:
        return ""
    return str(status.get("activity", "")) if isinstance(status, dict) else ""


def install_agent(
    machine: Machine,
    tree: Path,
    mode: node_mode.HostedMode,
    options: str,
    policy: selinux.SelinuxPolicy | None,
) -> None:
    """Run the agent of ``tree`` on the host; a host with an agent of its own needs the mode only.

    Raises `HostError`.
    """
    files, systemd = machine.files, machine.systemd
    mode_file = FileSpec(node_mode.INSTALLED_PATH, json.dumps(mode.to_json()).encode(), 0o600)
    if any(unit.active_state == "active" for unit in systemd.list_units(_HOST_UNIT)):
        files.write_files([mode_file])
        return
    version = copy_tree(machine.root, tree, policy)
    unit = build_unit((tree / f"usr/lib/systemd/system/{_HOST_UNIT}").read_text("utf-8"), options)
    unit_file = FileSpec(f"{_UNITS}/{UNIT}", unit.encode(), 0o644)
    # Written last: without it a running agent may be one of another tree.
    started = FileSpec(f"{DIRECTORY}/started", version.encode() + unit.encode(), 0o600)
    is_running = any(found.active_state == "active" for found in systemd.list_units(UNIT))
    files.write_files([mode_file, unit_file])
    files.make_symlink(CURRENT, version)
    files.make_symlink(_WANTED, f"../{UNIT}")
    if not (is_running and files.has_file(started)):
        systemd.reload_daemon()
        systemd.restart_unit(UNIT)
        files.write_files([started])
        log.info("started %s of tree %s", UNIT, version)
    for path in machine.root.resolve_path(DIRECTORY).iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != version:
            shutil.rmtree(path, ignore_errors=True)


def build_unit(packaged: str, options: str) -> str:
    """Return the unit of the agent: it removes itself once the agent is done.

    203: the program is gone, because a power cut interrupted the removal.
    """
    done = node_mode.EXIT_DONE
    remove = f"rm -rf {DIRECTORY} {_WANTED} {_UNITS}/{UNIT} && systemctl daemon-reload"
    lines = (
        f"ExecStart={CURRENT}/usr/bin/treenail run --until-done {options}",
        f"SuccessExitStatus={done}",
        f"ExecStopPost=/bin/sh -c 'case $$EXIT_STATUS in {done}|203) {remove};; esac'",
    )
    return packaged.replace("ExecStart=/usr/bin/treenail run", "\n".join(lines))


def copy_tree(root: Root, tree: Path, policy: selinux.SelinuxPolicy | None) -> str:
    """Copy the tree to the host under the digest of its content, and return the digest.

    The copy is complete once it has its name. Its labels are those of the same paths below /.
    """
    paths = sorted(tree.rglob("*"))
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.relative_to(tree)} {len(content)}\n".encode() + content)
    version = digest.hexdigest()[:16]
    place = root.resolve_path(DIRECTORY)
    target, partial = place / version, place / f".{version}"
    if target.is_dir():
        return version
    with translate_errors("copy the agent to", target):
        shutil.rmtree(partial, ignore_errors=True)
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copytree(tree, partial, symlinks=True)
        for inside in (path.relative_to(tree) for path in paths if policy):
            copy = partial / inside
            if policy and (label := policy.find_default_label(f"/{inside}", copy.lstat().st_mode)):
                os.setxattr(copy, "security.selinux", label + b"\0", follow_symlinks=False)
        os.sync()
        partial.rename(target)
    return version
