"""Parts of a log bundle that the bootstrap host has: an install directory, journals, versions.

Files of an installation may be half-written, damaged or hostile. Manifests and configs of images
are found in the storage of a registry and in OCI directories.
"""

import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from treenail import __version__, clocks, errors, log_bundle, memory, process
from treenail.api import decode, documents
from treenail.config import redact
from treenail.installer.directory import install_files
from treenail.installer.directory.install_files import InstallDirectory
from treenail.installer.log_bundle import object_secrets

PREFIX = "bootstrap/treenail"
JOURNAL_UNITS = ("treenail-bootstrap.service",)
_VERSION_COMMANDS = {
    "buildah": ("buildah", "--version"),
    "skopeo": ("skopeo", "--version"),
    "docker-registry": ("docker-registry", "--version"),
    "podman": ("podman", "--version"),
    "systemd": ("systemctl", "--version"),
}
_CONFIG_NAMES = (install_files.INSTALL_CONFIG, install_files.OWN_INSTALL_CONFIG)
_PROGRAM_TIMEOUT_S = 10.0
_JOURNAL_TIMEOUT_S = 30.0
_JOURNAL_LINES = 4000


def add_bootstrap_parts(
    bundle: log_bundle.LogBundle,
    directory: InstallDirectory,
    programs: process.ProgramRunner,
    clock: clocks.Clock,
) -> None:
    """Add all parts of the bootstrap host, the ones that explain a failure first."""
    bundle.hide_secrets(partial(read_document, path) for path in _list_secret_files(directory))
    for path in (directory.status, directory.state):
        _add_document(bundle, path, f"{PREFIX}/{path.name}")
    _add_logs(bundle, directory.logs)
    bundle.add_document(f"{PREFIX}/host.json", partial(_describe_host, directory, programs, clock))
    for unit in JOURNAL_UNITS:
        bundle.add_lines(f"{PREFIX}/journal/{unit}", partial(_read_journal, programs, unit))
    bundle.add_document(f"{PREFIX}/files.json", partial(describe_files, directory.root))
    for folder in (directory.manifests, directory.machine_pools, directory.controller_config):
        _add_objects(bundle, folder, folder.name)
    _add_objects(bundle, directory.cluster_objects, directory.cluster_objects.name)
    for folder in (directory.registry, directory.images):
        # Manifests and configs of the images in a registry's storage and in OCI directories.
        for name, path in read_image_documents(folder):
            _add_document(bundle, path, f"{PREFIX}/{folder.name}/{name}")
    _add_objects(bundle, directory.machine_configs, directory.machine_configs.name)


def _list_secret_files(directory: InstallDirectory) -> Iterator[Path]:
    """Yield logins, kubeconfigs, install configurations, and manifests of Secrets."""
    yield from (directory.root / name for name in _CONFIG_NAMES)
    for folder in (directory.registry / "secrets", directory.kubeconfig.parent):
        yield from list_files(folder)
    for path in (*list_files(directory.manifests), *list_files(directory.cluster_objects)):
        with suppress(errors.FileError):
            if re.search(rb"kind\W{1,4}Secret\b", read_document(path)):
                yield path


def _add_logs(bundle: log_bundle.LogBundle, folder: Path) -> None:
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


def _read_log(bundle: log_bundle.LogBundle, name: str, path: Path) -> bytes:
    content, omitted = read_log(path)
    if omitted:
        bundle.note_truncated(name, f"{omitted} bytes left out in the middle")
    return content


def _add_objects(bundle: log_bundle.LogBundle, folder: Path, name: str) -> None:
    """Add files with Kubernetes objects."""
    if not folder.is_dir():
        bundle.note_missing(f"{PREFIX}/{name}", f"{folder} does not exist")
    for path in list_files(folder):
        # Other files, such as keys, are in files.json with their size alone.
        if path.suffix in documents.SUFFIXES:
            part = f"{PREFIX}/{name}/{path.relative_to(folder)}"
            bundle.add_part(part, partial(_format_manifest, path))


def _format_manifest(path: Path) -> bytes:
    return object_secrets.format_objects(read_document(path), where=path.name)


def _add_document(bundle: log_bundle.LogBundle, path: Path, name: str) -> None:
    bundle.add_part(name, partial(_format_document, path))


def _format_document(path: Path) -> bytes:
    """Format one of our own documents; a half-written one as text."""
    content = read_document(path)
    try:
        return redact.format_redacted_document(
            object_secrets.withhold_document(content, where=path.name)
        )
    except errors.ConfigError:
        return redact.format_redacted_text(content.decode("utf-8", "replace"))


def _describe_host(
    directory: InstallDirectory, programs: process.ProgramRunner, clock: clocks.Clock
) -> dict[str, object]:
    system = os.uname()
    folders = (directory.root, Path(tempfile.gettempdir()))
    return {
        "treenail": __version__,
        "python": platform.python_version(),
        "kernel": system.release,
        "machine": system.machine,
        "processors": os.cpu_count(),
        "collectedAt": clocks.format_rfc3339(clock.now()),
        "disks": log_bundle.measure_disks({str(folder): folder for folder in folders}),
        "programs": {
            name: _read_version(programs, argv) for name, argv in _VERSION_COMMANDS.items()
        },
    }


def _read_version(programs: process.ProgramRunner, argv: tuple[str, ...]) -> str:
    try:
        output = programs.run_command(argv, timeout_s=_PROGRAM_TIMEOUT_S)
    except errors.TreenailError as error:
        return str(error)
    return output.decode("utf-8", "replace").partition("\n")[0]


def _read_journal(programs: process.ProgramRunner, unit: str) -> str:
    argv = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso-precise"]
    argv += ["--lines", str(_JOURNAL_LINES), "--unit", unit]
    output = programs.run_command(argv, timeout_s=_JOURNAL_TIMEOUT_S, output_limit=8 * memory.MIB)
    return output.decode("utf-8", "replace")


MAX_DOCUMENT_BYTES = 16 * memory.MIB
_HEAD_BYTES = 256 * 1024
_TAIL_BYTES = 3 * memory.MIB
_OVERLAP_BYTES = 64 * 1024
_MAX_FILES = 5000
_MAX_DEPTH = 12


def list_files(folder: Path) -> list[Path]:
    """List the regular files below a folder, at most 5000, sorted; links are not followed."""
    return sorted(path for path, status in _walk_folder(folder) if stat.S_ISREG(status.st_mode))


def describe_files(folder: Path) -> list[dict[str, object]]:
    """List names, modes, owners, sizes and times of all entries below a folder, no contents."""
    files = [
        log_bundle.describe_file(str(path.relative_to(folder)), status)
        for path, status in _walk_folder(folder)
    ]
    return sorted(files, key=lambda file: str(file["path"]))


def read_document(path: Path) -> bytes:
    """Read a file of at most 16 MiB; raise `FileError` for a longer or special one."""
    with _open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > MAX_DOCUMENT_BYTES:
            limit = MAX_DOCUMENT_BYTES // (memory.MIB)
            raise errors.FileError(f"{path} has {size} bytes, more than {limit} MiB")
        return _read_span(descriptor, 0, MAX_DOCUMENT_BYTES)


def read_log(path: Path) -> tuple[bytes, int]:
    """Return a text without secrets, and the number of bytes that a long one lacks.

    Beginning and end of a long text are kept. Raises `FileError`.
    """
    with _open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        omitted = size - _HEAD_BYTES - _TAIL_BYTES
        if omitted <= 0:
            content = _read_span(descriptor, 0, size)
            return redact.format_redacted_text(content.decode("utf-8", "replace")), 0
        overlap = min(omitted, _OVERLAP_BYTES)
        start = size - _TAIL_BYTES - overlap
        head = _read_span(descriptor, 0, _HEAD_BYTES)
        tail = _read_span(descriptor, start, _TAIL_BYTES + overlap)
        shown = redact.format_redacted_ends(head, tail, overlap=overlap, omitted=omitted - overlap)
        return shown, omitted


def _walk_folder(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the entries below a folder and their status; skip what cannot be read or vanishes."""
    waiting, count = [(folder, _MAX_DEPTH)], 0
    while waiting:
        here, depth_left = waiting.pop()
        try:
            paths = sorted(here.iterdir())
        except OSError:
            continue
        for path in paths:
            count += 1
            if count > _MAX_FILES:
                return
            with suppress(OSError):
                status = path.lstat()
                yield path, status
                if depth_left and stat.S_ISDIR(status.st_mode):
                    waiting.append((path, depth_left - 1))


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    """Open a regular file, not a link; a FIFO does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise errors.FileError(f"cannot read {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise errors.FileError(f"cannot read {path}: it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _read_span(descriptor: int, start: int, size: int) -> bytes:
    content = bytearray()
    while chunk := os.pread(descriptor, size - len(content), start + len(content)):
        content += chunk
    return bytes(content)


_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFESTS = 200
# The registry (github.com/distribution/distribution) keeps all blobs below one directory.
_STORAGE = Path("docker/registry/v2")


def read_image_documents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a name and the file of each manifest and of each config of an image below a folder."""
    for name, path, blobs in _find_manifests(folder):
        yield f"{name}.json", path
        config = _find_config(path, blobs)
        if config is not None:
            yield f"{name}-config.json", config


def _find_manifests(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield a name, the file and the directory of blobs of each manifest."""
    count = 0
    for path in list_files(folder):
        if count >= _MAX_MANIFESTS:
            return
        parent = path.parent
        if path.name == "link" and parent.parent.parent.name == "revisions":
            # …/v2/repositories/REPOSITORY/_manifests/revisions/sha256/DIGEST/link
            storage = _find_storage(path)
            if storage is None:
                continue
            repository = parent.relative_to(storage / "repositories").parts[:-4]
            blobs = storage / "blobs"
            blob = blobs / "sha256" / parent.name[:2] / parent.name / "data"
            count += 1
            yield f"manifests/{'/'.join(repository)}/{parent.name[:12]}", blob, blobs
        elif path.name == "index.json" and (parent / "oci-layout").is_file():
            yield from _find_layout_manifests(folder, parent)
            count += 1


def _find_layout_manifests(folder: Path, layout: Path) -> Iterator[tuple[str, Path, Path]]:
    name = str(layout.relative_to(folder))
    yield f"{name}/index", layout / "index.json", layout / "blobs"
    for digest in _find_digests(layout / "index.json", "manifests")[:_MAX_MANIFESTS]:
        blobs = layout / "blobs"
        yield f"{name}/{digest[:12]}", blobs / "sha256" / digest, blobs


def _find_storage(path: Path) -> Path | None:
    for parent in path.parents:
        if parent.parts[-3:] == _STORAGE.parts:
            return parent
    return None


def _find_config(manifest: Path, blobs: Path) -> Path | None:
    """Find the config of an image in blobs of a registry or of an OCI directory."""
    for digest in _find_digests(manifest, "config"):
        for path in (blobs / "sha256" / digest[:2] / digest / "data", blobs / "sha256" / digest):
            if path.is_file():
                return path
    return None


def _find_digests(path: Path, field: str) -> list[str]:
    """Return the digests of the descriptors in a field of a document; none if it is damaged."""
    try:
        document = decode.load_json(read_document(path), where=path.name)
    except errors.TreenailError:
        return []
    value = document.get(field) if isinstance(document, dict) else None
    descriptors = value if isinstance(value, list) else [value]
    digests = (
        descriptor.get("digest") for descriptor in descriptors if isinstance(descriptor, dict)
    )
    matches = (_DIGEST.fullmatch(digest) for digest in digests if isinstance(digest, str))
    return [match[1] for match in matches if match]
