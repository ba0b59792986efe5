"""``treenail collect``: write one file for a bug report, without secrets.

It is a compressed tar archive; every part passes the redaction.
"""

import argparse
import io
import json
import platform
import shutil
import socket
import stat
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from treenail import __version__, clocks, codec, errors, process
from treenail.api.decode import Fields
from treenail.cli import output_format, terminal
from treenail.cli.files import create_private_file
from treenail.cli.node import local_machine, own_node, plan, status
from treenail.config import redact
from treenail.daemon.agent_settings import SETTINGS_FILE
from treenail.daemon.configuration import mcd_state
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.machine import Machine
from treenail.host.system import state_file
from treenail.host.system.kernel import HostKernel
from treenail.update.steps.inventory import OWNERSHIP_FILE

STDOUT = "-"
MAX_PART_BYTES = 2 * 1024 * 1024
"""Size limit of a part; a longer part keeps its end, which has the latest records."""


class Bundle:
    """Parts in memory, at most 2 MiB each, and the causes of missing parts."""

    def __init__(self, *, name: str, now: float) -> None:
        self._name = name
        self._now = now
        self._parts: dict[str, bytes] = {}
        self._missing: dict[str, str] = {}

    @property
    def missing(self) -> dict[str, str]:
        """Cause of each missing part, by its name."""
        return dict(self._missing)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self._parts)

    def add_document(self, name: str, read: Callable[[], object]) -> None:
        """Add a JSON document."""
        self._add_part(name, lambda: redact.format_redacted_document(read()))

    def add_text(self, name: str, read: Callable[[], str]) -> None:
        """Add a text; redact also secrets that span several lines."""
        self._add_part(name, lambda: redact.format_redacted_text(read()))

    def add_lines(self, name: str, read: Callable[[], str]) -> None:
        """Add independent lines, such as journal records; redact line by line."""
        self._add_part(name, lambda: redact.format_redacted_lines(read()))

    def write_archive(self, path: str) -> None:
        """Write the archive with mode 0600; raise `FileError` if the file exists."""
        archive = self._pack_archive()
        if path == STDOUT:
            sys.stdout.buffer.write(archive)
            sys.stdout.buffer.flush()
            return
        with create_private_file(path) as file:
            file.write(archive)

    def _add_part(self, name: str, read: Callable[[], bytes]) -> None:
        try:
            content = read()
        except (errors.TreenailError, ValueError, RecursionError, OSError) as error:
            self._missing[name] = redact.redact_line(str(error) or type(error).__name__)
            return
        self._parts[name] = redact.truncate_start(content, MAX_PART_BYTES)

    def _pack_archive(self) -> bytes:
        index = {"parts": sorted(self._parts), "missing": self._missing}
        listed = {"index.json": json.dumps(index, indent=1).encode() + b"\n", **self._parts}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, content in listed.items():
                entry = tarfile.TarInfo(f"{self._name}/{name}")
                entry.size, entry.mtime, entry.mode = len(content), int(self._now), 0o600
                tar.addfile(entry, io.BytesIO(content))
        return packed.getvalue()


Json = dict[str, object]

JOURNAL_UNITS = (
    "treenail.service",
    "rpm-ostreed.service",
    "ostree-finalize-staged.service",
    "kubelet.service",
)
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
    bundle = Bundle(name=name, now=clock.now())
    collect_parts(bundle, machine, arguments.config)
    bundle.write_archive(path)
    # With -o - the archive is on the standard output.
    stream = sys.stderr if path == STDOUT else sys.stdout
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
    count = len(bundle.part_names)
    terminal.print_lines(
        [
            *(f"missing {part}: {why}" for part, why in bundle.missing.items()),
            f"{path}: {count} parts, secrets withheld; read it before you share it",
        ],
        stream,
    )
    return 0


def collect_parts(bundle: Bundle, machine: Machine, config: str | None) -> None:
    """Add every part to the bundle, which records the cause of a missing one."""
    root, files, programs, clock = machine.root, machine.files, machine.programs, machine.clock
    # Without a count of soft reboots, which would need the bus.
    kernel = HostKernel(root)
    bundle.add_document("versions.json", partial(_read_versions, kernel, clock))
    bundle.add_document("boot.json", partial(_read_boot, kernel))
    bundle.add_document("status.json", partial(status.collect_status, machine, config))
    bundle.add_document("live.json", partial(_read_document, files, local_machine.STATUS_PATH))
    bundle.add_document("ledger.json", partial(_read_document, files, state_file.LEDGER_PATH))
    bundle.add_document("managed.json", partial(_read_document, files, OWNERSHIP_FILE))
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


def _read_document(files: atomic_files.HostFiles, path: str) -> object:
    content = files.read_file(path)
    if content is None:
        raise errors.FileError(f"{path} does not exist")
    return codec.parse_json(content)


def _read_settings(root: root_directory.Root, config: str | None) -> str:
    path = Path(config) if config else root.resolve_path(SETTINGS_FILE)
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise errors.FileError(f"{path} does not exist: the agent uses the defaults") from error


def _measure_disks(root: root_directory.Root) -> Json:
    disks: Json = {}
    for name in _MOUNT_PATHS:
        path = root.resolve_path(name)
        if path.is_dir():
            usage = shutil.disk_usage(path)
            disks[name] = {"bytes": usage.total, "free": usage.free}
    return disks


def _list_files(root: root_directory.Root) -> list[Json]:
    """List files of treenail and the Machine Config Daemon: names, modes, sizes, no contents."""
    entries: list[Json] = []
    for folder in (state_file.STATE_DIRECTORY, mcd_state.DIRECTORY):
        for path in sorted(root.resolve_path(folder).rglob("*")):
            if len(entries) == _MAX_FILES_LISTED:
                return [*entries, {"path": "more files not listed"}]
            status = path.lstat()
            entries.append(
                {
                    "path": f"/{path.relative_to(root.prefix)}",
                    "mode": stat.filemode(status.st_mode),
                    "owner": f"{status.st_uid}:{status.st_gid}",
                    "bytes": status.st_size,
                    "changed": clocks.format_rfc3339(status.st_mtime),
                }
            )
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
    return codec.parse_json(
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
