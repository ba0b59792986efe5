"""``treenail collect``: write one file for a bug report, without secrets.

It is a compressed tar archive; every part passes the redaction.
"""

import argparse
import platform
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from treenail import __version__, clocks, errors, log_bundle, process
from treenail.api.decode import Fields
from treenail.cli import files, output_format, terminal
from treenail.cli.node import local_machine, own_node, plan, status
from treenail.config import node_paths
from treenail.daemon.agent_settings import SETTINGS_FILE
from treenail.daemon.cluster.pull_secrets import AUTH_FILE, LOGIN_HISTORY
from treenail.daemon.configuration import mcd_state
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.machine import Machine
from treenail.host.system import state_file
from treenail.host.system.kernel import HostKernel
from treenail.update.steps.inventory import OWNERSHIP_FILE

MAX_PART_BYTES = 2 * 1024 * 1024
"""Size limit of a part; a longer part keeps its end, which has the latest records."""


Json = dict[str, object]

JOURNAL_UNITS = (
    "treenail.service",
    "rpm-ostreed.service",
    "ostree-finalize-staged.service",
    "kubelet.service",
)
_SECRET_FILES = (
    AUTH_FILE, LOGIN_HISTORY, node_paths.REGISTRY_PULL_SECRET, node_paths.KUBECONFIG,
    "/var/lib/kubelet/config.json", "/var/lib/kubelet/kubeconfig", "/etc/ostree/auth.json",
    "/etc/mco/proxy.env",
)  # fmt: skip
_MOUNT_PATHS = ("/", "/boot", "/sysroot", "/var")
_ANNOTATION_PREFIXES = ("machineconfiguration.openshift.io/", "treenail.io/")
_JOURNAL_LINE_LIMITS = (4000, 1000, 250)
_JOURNAL_SINCE = "-7d"
_PROGRAM_TIMEOUT_S = 20.0
_MAX_FILES_LISTED = 500


def main(arguments: argparse.Namespace) -> int:
    """Write the bundle, and print its path and its missing parts."""
    machine = local_machine.open_machine(arguments.root)
    clock = machine.clock
    moment = clocks.format_rfc3339(clock.now()).replace(":", "")
    name = f"treenail-{socket.gethostname()}-{moment}"
    path = arguments.output or f"{name}.tar.gz"
    with files.open_private_output(path) as archive:
        bundle = log_bundle.LogBundle(
            archive, name=name, now=clock.now(), max_part_bytes=MAX_PART_BYTES
        )
        collect_parts(bundle, machine, arguments.config)
        bundle.close()
    # With -o - the archive is on the standard output.
    stream = sys.stderr if path == files.STDOUT else sys.stdout
    if arguments.json:
        document = output_format.build_document(
            "Collection",
            {"file": path, "parts": list(bundle.part_names), "missing": bundle.missing},
        )
        print(
            output_format.format_document(output_format.OutputFormat.JSON, document),
            end="",
            file=stream,
        )
        return 0
    terminal.print_lines(list(bundle.format_report(path)), stream)
    return 0


def collect_parts(bundle: log_bundle.LogBundle, machine: Machine, config: str | None) -> None:
    """Add every part to the bundle, which records the cause of a missing one."""
    root, host_files, programs, clock = machine.root, machine.files, machine.programs, machine.clock
    bundle.hide_secrets(partial(host_files.read_file, path) for path in _SECRET_FILES)
    # Without a count of soft reboots, which would need the bus.
    kernel = HostKernel(root)
    bundle.add_document("versions.json", partial(_read_versions, kernel, clock))
    bundle.add_document("boot.json", partial(_read_boot, kernel))
    bundle.add_document("status.json", partial(status.collect_status, machine, config))
    bundle.add_document("live.json", partial(_read_document, host_files, local_machine.STATUS_PATH))
    bundle.add_document("ledger.json", partial(_read_document, host_files, state_file.LEDGER_PATH))
    bundle.add_document("managed.json", partial(_read_document, host_files, OWNERSHIP_FILE))
    bundle.add_text("settings.toml", partial(_read_settings, root, config))
    bundle.add_lines("kernel-arguments", lambda: "\n".join(kernel.read_command_line()))
    bundle.add_document("disks.json", partial(_measure_disks, root))
    bundle.add_document("files.json", partial(_list_files, root))
    bundle.add_document("deployments.json", partial(_read_deployments, machine))
    bundle.add_document("bootc.json", partial(_read_bootc_status, programs))
    bundle.add_document("plan.json", partial(_plan_this_node, machine, config))
    bundle.add_document("drift.json", partial(_find_drift, machine, config))
    bundle.add_document("node.json", partial(_read_own_node, machine, config))
    bundle.add_lines("failed-units", partial(_list_failed_units, programs))
    for unit in JOURNAL_UNITS:
        bundle.add_lines(f"journal/{unit}", partial(_read_journal, programs, root, unit))


def _read_versions(kernel: HostKernel, clock: clocks.Clock) -> Json:
    return {
        "treenail": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "osRelease": kernel.read_os_release(),
        "ostree": kernel.is_ostree_booted(),
        "collectedAt": clocks.format_rfc3339(clock.now()),
    }


def _read_boot(kernel: HostKernel) -> Json:
    booted_at = kernel.read_boot_time()
    return {
        "id": kernel.read_boot_id(),
        "at": None if booted_at is None else clocks.format_rfc3339(booted_at),
        "fips": kernel.is_fips_enabled(),
    }


def _read_document(host_files: atomic_files.HostFiles, path: str) -> object:
    content = host_files.read_file(path)
    if content is None:
        raise errors.FileError(f"{path} does not exist")
    return json_text.parse_json(content)


def _read_settings(root: root_directory.Root, config: str | None) -> str:
    path = Path(config) if config else root.resolve_path(SETTINGS_FILE)
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise errors.FileError(f"{path} does not exist: the agent uses the defaults") from error


def _measure_disks(root: root_directory.Root) -> Json:
    return log_bundle.measure_disks({name: root.resolve_path(name) for name in _MOUNT_PATHS})


def _list_files(root: root_directory.Root) -> list[Json]:
    """List files of treenail and the Machine Config Daemon: names, modes, sizes, no contents."""
    entries: list[Json] = []
    for folder in (state_file.STATE_DIRECTORY, mcd_state.DIRECTORY):
        for path in sorted(root.resolve_path(folder).rglob("*")):
            if len(entries) == _MAX_FILES_LISTED:
                return [*entries, {"path": "more files not listed"}]
            name = f"/{path.relative_to(root.prefix)}"
            entries.append(log_bundle.describe_file(name, path.lstat()))
    return entries


def _read_deployments(machine: Machine) -> Json:
    # Imported late: all other parts can be read without a bus.
    from treenail.cli.node.backend import read_deployments

    return asdict(read_deployments(machine))


def _plan_this_node(machine: Machine, config: str | None) -> Json:
    update, notes = own_node.plan_node(machine, config, None)
    return {**plan.build_plan_document(update), "notes": list(notes)}


def _find_drift(machine: Machine, config: str | None) -> object:
    from treenail.cli.node.drift import build_drift_documents

    return build_drift_documents(machine, config)


def _read_bootc_status(programs: process.ProgramRunner) -> object:
    return json_text.parse_json(
        programs.run_command(["bootc", "status", "--json"], timeout_s=_PROGRAM_TIMEOUT_S)
    )


def _read_own_node(machine: Machine, config: str | None) -> Json:
    """Read the parts of the Node that concern treenail."""
    with own_node.connect_own_node(machine, config) as node:
        fields = Fields.from_json(node.read_node(), "Node")
    metadata, spec = fields.get_object("metadata"), fields.get_object("spec")
    annotations = metadata.get_object("annotations").values
    return {
        "name": node.name,
        "resourceVersion": metadata.get_text("resourceVersion"),
        "labels": metadata.get_object("labels").values,
        "annotations": {k: v for k, v in annotations.items() if k.startswith(_ANNOTATION_PREFIXES)},
        "unschedulable": spec.get_bool("unschedulable"),
        "taints": spec.get_list("taints"),
        "conditions": fields.get_object("status").get_list("conditions"),
        "nodeInfo": fields.get_object("status").get_object("nodeInfo").values,
    }


def _list_failed_units(programs: process.ProgramRunner) -> str:
    argv = ["systemctl", "list-units", "--failed", "--plain", "--no-legend", "--no-pager"]
    return programs.run_command(argv, timeout_s=_PROGRAM_TIMEOUT_S).decode("utf-8", "replace")


def _read_journal(programs: process.ProgramRunner, root: root_directory.Root, unit: str) -> str:
    """Read the last journal records of a unit, as many as fit."""
    argv = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso-precise"]
    argv += ["--since", _JOURNAL_SINCE, "--unit", unit]
    if root.prefix != Path("/"):
        argv += ["--root", str(root.prefix)]
    for lines in _JOURNAL_LINE_LIMITS[:-1]:
        try:
            return _read_journal_lines(programs, argv, lines)
        except errors.CommandError:
            continue
    return _read_journal_lines(programs, argv, _JOURNAL_LINE_LIMITS[-1])


def _read_journal_lines(programs: process.ProgramRunner, argv: list[str], lines: int) -> str:
    output = programs.run_command([*argv, "--lines", str(lines)], timeout_s=_PROGRAM_TIMEOUT_S)
    return output.decode("utf-8", "replace")
