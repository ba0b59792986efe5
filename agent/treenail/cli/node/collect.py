"""``treenail collect``: what a bug report needs, in one file and without secrets."""

import argparse
import json
import os
import platform
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from treenail import __version__
from treenail.api.decode import Fields
from treenail.cli.node import plan, status
from treenail.cli.node.collect_bundle import STDOUT, Bundle
from treenail.cli.node.own_node import own_node
from treenail.cli.node.plan_node import node_plan
from treenail.clock import Clock, SystemClock, rfc3339
from treenail.daemon.configuration import mcd_state
from treenail.daemon.configuration.inspect import RECORD
from treenail.daemon.settings.settings import FILE
from treenail.errors import CommandError, FileError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import Kernel
from treenail.host.system.process import Programs
from treenail.host.system.state_file import DIRECTORY, PATH

Json = dict[str, object]

UNITS = (
    "treenail.service",
    "rpm-ostreed.service",
    "ostree-finalize-staged.service",
    "kubelet.service",
)
_DISKS = ("/", "/boot", "/sysroot", "/var")
_OURS = ("machineconfiguration.openshift.io/", "treenail.io/")
_LINES = (4000, 1000, 250)
_SINCE = "-7d"
_LIMIT_S = 20.0
_LISTED = 500


def main(arguments: argparse.Namespace) -> int:
    """Write the bundle and say where it is and what it lacks."""
    clock = SystemClock()
    moment = rfc3339(clock.now()).replace(":", "")
    name = f"treenail-{socket.gethostname()}-{moment}"
    path = arguments.output or f"{name}.tar.gz"
    bundle = Bundle(name=name, now=clock.now())
    collect(bundle, Root(arguments.root or "/"), arguments.config, os.environ, clock)
    bundle.write(path)
    told = sys.stderr if path == STDOUT else sys.stdout
    if arguments.json:
        document = {"file": path, "parts": list(bundle.names), "missing": bundle.missing}
        print(json.dumps(document, indent=1), file=told)
        return 0
    for part, why in bundle.missing.items():
        print(f"without {part}: {why}", file=told)
    print(f"{path}: {len(bundle.names)} parts, secrets withheld; look before you share", file=told)
    return 0


def collect(
    bundle: Bundle, root: Root, config: str | None, environ: Mapping[str, str], clock: Clock
) -> None:
    """Put everything there is into the bundle, which notes what can't be got, and why."""
    files, kernel = Files(root), Kernel(root)
    programs = Programs(clock, environ)
    bundle.document("versions.json", partial(_versions, kernel, clock))
    bundle.document("boot.json", partial(_boot, kernel))
    bundle.document("status.json", partial(status.gather, root, clock))
    bundle.document("live.json", partial(_document, files, status.LIVE))
    bundle.document("ledger.json", partial(_document, files, PATH))
    bundle.document("managed.json", partial(_document, files, RECORD))
    bundle.text("settings.toml", partial(_settings_text, root, config))
    bundle.records("kernel-arguments", lambda: "\n".join(kernel.command_line()))
    bundle.document("disks.json", partial(_disks, root))
    bundle.document("files.json", partial(_listing, root))
    bundle.document("deployments.json", partial(_deployments, root, clock))
    bundle.document("bootc.json", partial(_bootc, programs))
    bundle.document("plan.json", partial(_plan, root, config, clock))
    bundle.document("drift.json", partial(_drift, root, config, clock))
    bundle.document("node.json", partial(_node, root, config, clock))
    bundle.records("failed-units", partial(_failed, programs))
    for unit in UNITS:
        bundle.records(f"journal/{unit}", partial(_journal, programs, root, unit))


def _versions(kernel: Kernel, clock: Clock) -> Json:
    return {
        "treenail": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "osRelease": kernel.os_release(),
        "ostree": kernel.is_ostree(),
        "collectedAt": rfc3339(clock.now()),
    }


def _boot(kernel: Kernel) -> Json:
    booted_at = kernel.booted_at()
    return {
        "id": kernel.boot_id(),
        "at": None if booted_at is None else rfc3339(booted_at),
        "fips": kernel.fips_enabled(),
    }


def _document(files: Files, path: str) -> object:
    content = files.read(path)
    if content is None:
        raise FileError(f"there is no {path}")
    return json.loads(content)


def _settings_text(root: Root, config: str | None) -> str:
    path = Path(config) if config else root.path(FILE)
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise FileError(f"there is no {path}: the defaults hold") from error


def _disks(root: Root) -> Json:
    found: Json = {}
    for name in _DISKS:
        path = root.path(name)
        if path.is_dir():
            usage = shutil.disk_usage(path)
            found[name] = {"bytes": usage.total, "free": usage.free}
    return found


def _listing(root: Root) -> list[Json]:
    """Names, modes and sizes of what treenail and the Machine Config Daemon keep; no contents."""
    entries: list[Json] = []
    for folder in (DIRECTORY, mcd_state.DIRECTORY):
        for path in sorted(root.path(folder).rglob("*")):
            if len(entries) == _LISTED:
                return [*entries, {"path": "and more"}]
            status = path.lstat()
            entries.append(
                {
                    "path": f"/{path.relative_to(root.prefix)}",
                    "mode": stat.filemode(status.st_mode),
                    "owner": f"{status.st_uid}:{status.st_gid}",
                    "bytes": status.st_size,
                    "changed": rfc3339(status.st_mtime),
                }
            )
    return entries


def _deployments(root: Root, clock: Clock) -> Json:
    # Without a bus and its services, all other parts are there all the same.
    from treenail.cli.node.choose_backend import deployments

    return asdict(deployments(root, clock))


def _plan(root: Root, config: str | None, clock: Clock) -> Json:
    found, notes = node_plan(root, config, None, clock)
    return {**plan.document(found), "notes": list(notes)}


def _drift(root: Root, config: str | None, clock: Clock) -> object:
    from treenail.cli.node.drift import documents

    return documents(root, config, clock)


def _bootc(programs: Programs) -> object:
    return json.loads(programs.run(["bootc", "status", "--json"], limit_s=_LIMIT_S))


def _node(root: Root, config: str | None, clock: Clock) -> Json:
    """Of the Node only what concerns treenail."""
    with own_node(root, config, clock) as node:
        fields = Fields.of(node.read(), "Node")
    metadata, spec = fields.nested("metadata"), fields.nested("spec")
    annotations = metadata.nested("annotations").values
    return {
        "name": node.name,
        "resourceVersion": metadata.text("resourceVersion"),
        "labels": metadata.nested("labels").values,
        "annotations": {k: v for k, v in annotations.items() if k.startswith(_OURS)},
        "unschedulable": spec.flag("unschedulable"),
        "taints": spec.list_of("taints"),
        "conditions": fields.nested("status").list_of("conditions"),
        "nodeInfo": fields.nested("status").nested("nodeInfo").values,
    }


def _failed(programs: Programs) -> str:
    argv = ["systemctl", "list-units", "--failed", "--plain", "--no-legend", "--no-pager"]
    return programs.run(argv, limit_s=_LIMIT_S).decode("utf-8", "replace")


def _journal(programs: Programs, root: Root, unit: str) -> str:
    """The last records of a unit, as many as fit."""
    argv = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso-precise"]
    argv += ["--since", _SINCE, "--unit", unit]
    if root.prefix != Path("/"):
        argv += ["--root", str(root.prefix)]
    for lines in _LINES[:-1]:
        try:
            return _records(programs, argv, lines)
        except CommandError:
            continue
    return _records(programs, argv, _LINES[-1])


def _records(programs: Programs, argv: list[str], lines: int) -> str:
    output = programs.run([*argv, "--lines", str(lines)], limit_s=_LIMIT_S)
    return output.decode("utf-8", "replace")
