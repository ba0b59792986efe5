"""State of the stage ``bootstrap``: which steps began, with which inputs, and how each ended.

The locks of an install directory are here too, and the reset after which the next start begins
again.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from treenail import clocks, errors, memory, oci_content
from treenail.encoding import codec, json_text
from treenail.installer.directory import install_files

STATE_VERSION = 1
_CHECKSUM = "checksum"
_REASON_LIMIT = 2000
_LIMIT = 16 * memory.MIB
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05


class InstallStateError(errors.HostError):
    """The state of an installation cannot be read, or another process uses it."""


class InstallLockedError(InstallStateError):
    """Another process uses the install directory."""


class StepState(StrEnum):
    """State of a step."""

    RUNNING = "running"
    """It began. A step of a killed process stays in this state and runs again."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an installation."""

    name: str
    state: StepState
    inputs: Mapping[str, str]
    """Digest of each input by its name, such as ``MachineConfig 00-master (file.yaml:3)``."""
    began: str
    """Time of the last attempt in RFC 3339."""
    ended: str = ""
    """Empty while the step runs."""
    attempts: int = 1
    result: Mapping[str, str] = field(default_factory=dict)
    """Facts for later steps and for the next process; contains nothing secret."""
    reason: str = ""
    """Why the step failed."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class InstallRecord:
    """The document of the state."""

    id: str
    """ID of the installation, which is in each line of its journal."""
    began: str
    """Time of the first start in RFC 3339."""
    steps: tuple[StepRecord, ...] = ()

    def find_step(self, name: str) -> StepRecord | None:
        """Return the record of a step that has begun."""
        return next((step for step in self.steps if step.name == name), None)

    def replace_step(self, step: StepRecord) -> "InstallRecord":
        """Return the record with this step, and without the steps that came after it."""
        names = [other.name for other in self.steps]
        kept = self.steps[: names.index(step.name)] if step.name in names else self.steps
        return replace(self, steps=(*kept, step))


def find_changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the inputs that differ, in order: ``NAME changed``, ``NAME added``, ``NAME removed``.

    Pure.
    """
    changes = []
    for name in sorted({*before, *now}):
        if name not in before:
            changes.append(f"{name} added")
        elif name not in now:
            changes.append(f"{name} removed")
        elif before[name] != now[name]:
            changes.append(f"{name} changed")
    return tuple(changes)


class InstallState:
    """The steps of an installation, each written durably before it begins.

    Hold the lock of the directory while you use it: see `hold_install_lock`.
    """

    def __init__(
        self,
        directory: install_files.InstallDirectory,
        files: install_files.InstallFiles,
        clock: clocks.Clock,
    ) -> None:
        """Read the state, or begin a new one; raise `InstallStateError` or `FileError`."""
        self._path = directory.state
        self._files = files
        self._clock = clock
        content = files.read(self._path, limit=_LIMIT)
        if content is None:
            self._record = InstallRecord(uuid.uuid4().hex[:12], self._read_time())
            self._write_record()
        else:
            self._record = parse_install_record(content, directory)
            # A power cut must not undo steps that this process does not repeat.
            files.sync_file(self._path)

    @property
    def id(self) -> str:
        """ID of the installation."""
        return self._record.id

    @property
    def record(self) -> InstallRecord:
        """All steps that began."""
        return self._record

    def find_step(self, name: str) -> StepRecord | None:
        """Return the record of a step that has begun."""
        return self._record.find_step(name)

    def begin_step(self, name: str, inputs: Mapping[str, str]) -> None:
        """Record that a step begins; forget it and the steps after it. Raises `FileError`."""
        earlier = self.find_step(name)
        attempts = 1 if earlier is None else earlier.attempts + 1
        step = StepRecord(
            name, StepState.RUNNING, dict(inputs), self._read_time(), attempts=attempts
        )
        self._record = self._record.replace_step(step)
        self._write_record()

    def finish_step(self, name: str, result: Mapping[str, str]) -> None:
        """Record that the running step is done. Raises `FileError`."""
        self._end_step(name, StepState.DONE, result=dict(result))

    def fail_step(self, name: str, error: errors.TreenailError) -> None:
        """Record that the running step failed. Raises `FileError`."""
        reason = str(error)[:_REASON_LIMIT]
        self._end_step(name, StepState.FAILED, reason=reason, remedy=error.remedy[:_REASON_LIMIT])

    def _end_step(
        self,
        name: str,
        state: StepState,
        *,
        result: Mapping[str, str] | None = None,
        reason: str = "",
        remedy: str = "",
    ) -> None:
        record = self.find_step(name)
        if record is None:
            raise KeyError(name)
        step = replace(
            record,
            state=state,
            ended=self._read_time(),
            result=result or {},
            reason=reason,
            remedy=remedy,
        )
        self._record = self._record.replace_step(step)
        self._write_record()

    def _read_time(self) -> str:
        return clocks.format_rfc3339(self._clock.now())

    def _write_record(self) -> None:
        document = codec.encode(self._record, version=STATE_VERSION)
        complete = {**document, _CHECKSUM: compute_checksum(document)}
        self._files.write(self._path, json.dumps(complete, indent=1).encode() + b"\n")


def parse_install_record(
    content: bytes, directory: install_files.InstallDirectory
) -> InstallRecord:
    """Return the state that a file contains; raise `InstallStateError` with the remedy. Pure."""
    reset = f"treenail-controller install reset --dir {directory.root}"

    def make_error(cause: str, remedy: str = "") -> InstallStateError:
        return InstallStateError(
            f"cannot read {directory.state}: {cause}",
            remedy=remedy or f"begin again; built images are kept: {reset}",
        )

    try:
        document = json_text.parse_json(content)
    except ValueError as error:
        raise make_error(f"it is damaged: {error}") from error
    if not isinstance(document, dict):
        raise make_error("it is damaged: it is not a JSON object")
    version = document.get("version")
    if isinstance(version, int) and version > STATE_VERSION:
        raise make_error(
            f"its version is {version}, and this treenail supports {STATE_VERSION}",
            f"install the treenail that wrote it, or begin again: {reset}",
        )
    checksum = document.pop(_CHECKSUM, None)
    if checksum != compute_checksum(document):
        raise make_error("it is damaged: its content differs from its checksum")
    try:
        record = codec.decode(InstallRecord, document, version=STATE_VERSION)
    except codec.CodecError as error:
        raise make_error(f"it is damaged: {error}") from error
    if unknown := _find_unknown_key(document, codec.encode(record, version=STATE_VERSION)):
        raise make_error(
            f"this treenail does not know the field {unknown}",
            f"install the treenail that wrote it, or begin again: {reset}",
        )
    return record


def check_install_state(
    directory: install_files.InstallDirectory, files: install_files.InstallFiles
) -> None:
    """Raise `InstallStateError` when the next start would refuse the state; accept no state.

    Raises `FileError`.
    """
    content = files.read(directory.state, limit=_LIMIT)
    if content is not None:
        parse_install_record(content, directory)


@contextmanager
def hold_install_lock(
    directory: install_files.InstallDirectory,
    files: install_files.InstallFiles,
    clock: clocks.Clock | None = None,
) -> Iterator[None]:
    """Hold the exclusive lock of an install directory; raise `InstallLockedError` with its holder.

    The kernel releases the lock when the process ends, also after SIGKILL.
    """
    files.make_directory(directory.private)
    path = directory.private / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.FileError(f"cannot open {path}: {error.strerror}") from error
    try:
        try:
            _take_lock(descriptor, clock or clocks.SystemClock())
        except BlockingIOError as error:
            holder = _read_holder(descriptor)
            raise InstallLockedError(
                f"cannot lock {directory.root}: another process"
                f"{f', PID {holder},' if holder else ''} installs from this directory",
                remedy="follow it: treenail-controller install wait-for bootstrap-complete "
                f"--dir {directory.root}",
            ) from error
        # The PID is for messages only: a full disk must not prevent the start.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, clock: clocks.Clock) -> None:
    """Take the lock; raise `BlockingIOError` when another process keeps it."""
    for _ in range(_LOCK_TRIES - 1):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        # `find_lock_holder` of a waiting command holds a shared lock for a moment.
        clock.sleep(_LOCK_PAUSE_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def find_lock_holder(directory: install_files.InstallDirectory) -> int | None:
    """Return the PID of the lock's holder, 0 if unknown, None if the lock is free."""
    try:
        descriptor = os.open(directory.private / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _read_holder(descriptor: int) -> int:
    text = os.pread(descriptor, 20, 0).strip()
    return int(text) if text.isdigit() else 0


def compute_checksum(document: object) -> str:
    """Return the digest of a JSON value; the order of keys does not matter."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return oci_content.compute_digest(canonical.encode())


def _find_unknown_key(document: object, known: object, path: str = "") -> str:
    """Return the first key of the document that its codec ignored; empty without one."""
    if isinstance(document, dict) and isinstance(known, dict):
        for name, value in document.items():
            inner = f"{path}.{name}" if path else str(name)
            if name not in known:
                return inner
            if unknown_key := _find_unknown_key(value, known[name], inner):
                return unknown_key
    elif isinstance(document, list) and isinstance(known, list):
        for index, (value, other) in enumerate(zip(document, known, strict=True)):
            if unknown_key := _find_unknown_key(value, other, f"{path}[{index}]"):
                return unknown_key
    return ""


def reset_installation(
    directory: install_files.InstallDirectory,
    files: install_files.InstallFiles,
    *,
    with_images: bool,
) -> list[Path]:
    """Remove the state, and with ``with_images`` everything below ``.treenail``; return the paths.

    The caller holds the lock. The state goes first: rendered files without a state are written
    again. Manifests stay. Raises `FileError`.
    """
    removed = []
    for path in _list_paths(directory, with_images=with_images):
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        elif not files.remove(path):
            continue
        removed.append(path)
    return removed


def _list_paths(directory: install_files.InstallDirectory, *, with_images: bool) -> Iterator[Path]:
    yield directory.state
    yield directory.status
    yield directory.cluster_objects
    yield directory.registry_address
    yield from (directory.machine_pools, directory.machine_configs, directory.controller_config)
    if with_images:
        for path in sorted(directory.private.iterdir()):
            if path.name != "lock":
                yield path


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise errors.FileError(
            f"cannot remove {error.filename or path}: {error.strerror}",
            remedy=f"remove it: rm -rf {path}",
        ) from error


@contextmanager
def hold_prepare_lock(root: Path) -> Iterator[None]:
    """Hold the exclusive lock of the directory; raise `HostError` if another process has it.

    The lock is on the directory itself: a run that finds problems leaves no file behind. The kernel
    releases it when the process ends. Raises `FileError` for a directory that cannot be opened.
    """
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise errors.FileError(
            f"cannot open {root}: {error.strerror}", remedy=f"check it: ls -ld '{root}'"
        ) from error
    try:
        # NFS locks no directory that is open for reading (flock(2)): no lock is better than no run.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise errors.HostError(
                    f"cannot prepare {root}: another process prepares it",
                    remedy="wait until it has ended, and run the command again",
                ) from error
        yield
    finally:
        os.close(descriptor)
