"""Parts of a log bundle that the bootstrap host has: an install directory, journals, versions."""

import os
import platform
import shutil
import tempfile
from functools import partial
from pathlib import Path

from treenail import __version__
from treenail.clock import Clock, format_rfc3339
from treenail.config.redacted_parts import (
    format_redacted_document,
    format_redacted_lines,
    format_redacted_text,
)
from treenail.errors import ConfigError, TreenailError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.log_bundle.archive import LogBundle
from treenail.installer.log_bundle.folder import describe_files, list_files, read_document, read_log
from treenail.installer.log_bundle.image_manifests import read_image_documents
from treenail.installer.log_bundle.withhold import format_objects, withhold_document
from treenail.process import ProgramRunner

PREFIX = "bootstrap/treenail"
JOURNAL_UNITS = ("treenail-bootstrap.service",)
_VERSION_COMMANDS = {
    "buildah": ("buildah", "--version"),
    "skopeo": ("skopeo", "--version"),
    "docker-registry": ("docker-registry", "--version"),
    "podman": ("podman", "--version"),
    "systemd": ("systemctl", "--version"),
}
_PROGRAM_TIMEOUT_S = 10.0
_JOURNAL_TIMEOUT_S = 30.0
_JOURNAL_LINES = 4000
_DOCUMENT_SUFFIXES = frozenset({".json", ".yaml", ".yml"})


def add_bootstrap_parts(
    bundle: LogBundle, directory: InstallDirectory, programs: ProgramRunner, clock: Clock
) -> None:
    """Add all parts of the bootstrap host, the ones that explain a failure first."""
    for path in (directory.status, directory.state):
        _add_document(bundle, path, f"{PREFIX}/{path.name}")
    _add_logs(bundle, directory.logs)
    bundle.add_document(f"{PREFIX}/host.json", partial(_describe_host, directory, programs, clock))
    for unit in JOURNAL_UNITS:
        read = partial(_read_journal, programs, unit)
        bundle.add_part(f"{PREFIX}/journal/{unit}", read)
    bundle.add_document(f"{PREFIX}/files.json", partial(describe_files, directory.root))
    for folder in (directory.manifests, directory.machine_pools, directory.controller_config):
        _add_objects(bundle, folder, folder.name)
    _add_objects(bundle, directory.cluster_objects, directory.cluster_objects.name)
    for folder in (directory.registry, directory.images):
        _add_images(bundle, folder)
    _add_objects(bundle, directory.machine_configs, directory.machine_configs.name)


def _add_logs(bundle: LogBundle, folder: Path) -> None:
    """Add logs of builds, registry and config server; the last attempts of builds first."""
    if not folder.is_dir():
        bundle.note_missing(f"{PREFIX}/{folder.name}", f"{folder} does not exist")
    for path in sorted(list_files(folder), key=_order_log, reverse=True):
        name = f"{PREFIX}/{folder.name}/{path.relative_to(folder)}"
        if path.suffix == ".json":
            _add_document(bundle, path, name)
        else:
            bundle.add_part(name, partial(_read_log, bundle, name, path))


def _order_log(path: Path) -> tuple[float, str]:
    try:
        return path.lstat().st_mtime, str(path)
    except OSError:
        return 0.0, str(path)


def _read_log(bundle: LogBundle, name: str, path: Path) -> bytes:
    content, omitted = read_log(path)
    if omitted:
        bundle.note_truncated(name, f"{omitted} bytes left out in the middle")
    return content


def _add_objects(bundle: LogBundle, folder: Path, name: str) -> None:
    """Add files with Kubernetes objects."""
    if not folder.is_dir():
        bundle.note_missing(f"{PREFIX}/{name}", f"{folder} does not exist")
    for path in list_files(folder):
        # Other files, such as keys, are in files.json with their size alone.
        if path.suffix in _DOCUMENT_SUFFIXES:
            part = f"{PREFIX}/{name}/{path.relative_to(folder)}"
            bundle.add_part(part, partial(_format_manifest, path))


def _format_manifest(path: Path) -> bytes:
    return format_objects(read_document(path), where=path.name)


def _add_document(bundle: LogBundle, path: Path, name: str) -> None:
    bundle.add_part(name, partial(_format_document, path))


def _format_document(path: Path) -> bytes:
    """Format one of our own documents; a half-written one as text."""
    content = read_document(path)
    try:
        return format_redacted_document(withhold_document(content, where=path.name))
    except ConfigError:
        return format_redacted_text(content.decode("utf-8", "replace"))


def _add_images(bundle: LogBundle, folder: Path) -> None:
    """Add manifests and configs of the images in a registry's storage and in OCI directories."""
    for name, path in read_image_documents(folder):
        _add_document(bundle, path, f"{PREFIX}/{folder.name}/{name}")


def _describe_host(
    directory: InstallDirectory, programs: ProgramRunner, clock: Clock
) -> dict[str, object]:
    system = os.uname()
    return {
        "treenail": __version__,
        "python": platform.python_version(),
        "kernel": system.release,
        "machine": system.machine,
        "processors": os.cpu_count(),
        "collectedAt": format_rfc3339(clock.now()),
        "disks": _measure_disks(directory.root),
        "programs": {
            name: _read_version(programs, argv) for name, argv in _VERSION_COMMANDS.items()
        },
    }


def _measure_disks(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in (root, Path(tempfile.gettempdir())):
        if path.is_dir():
            usage = shutil.disk_usage(path)
            found[str(path)] = {"bytes": usage.total, "free": usage.free}
    return found


def _read_version(programs: ProgramRunner, argv: tuple[str, ...]) -> str:
    try:
        output = programs.run_command(argv, timeout_s=_PROGRAM_TIMEOUT_S)
    except TreenailError as error:
        return str(error)
    return output.decode("utf-8", "replace").partition("\n")[0]


def _read_journal(programs: ProgramRunner, unit: str) -> bytes:
    argv = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso-precise"]
    argv += ["--lines", str(_JOURNAL_LINES), "--unit", unit]
    output = programs.run_command(argv, timeout_s=_JOURNAL_TIMEOUT_S, output_limit=8 * 1024 * 1024)
    return format_redacted_lines(output.decode("utf-8", "replace"))
