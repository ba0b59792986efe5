"""Builder on this host: the phases of a build as processes, in directories of their own."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from treenail import clocks, errors
from treenail.builder import build_layout, build_spec
from treenail.builder.buildah.program import (
    BindMount,
    IdMaps,
    SandboxedProgram,
    make_environment,
)
from treenail.image import build_result

_PREFIX, _NAMED_PREFIX = "build-", "named-"
_KEPT = frozenset({"layout", "fetched.json"})
"""Entries of a work directory that another attempt uses again."""
_REMOVE_TIMEOUT_S = 300.0
_SANDBOX_TIMEOUT_S = 30.0
_LINE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Options of local builds."""

    directory: Path
    """Where builds keep their files while they run; needs space for the base, unpacked."""
    pull_secret: Path | None = None
    push_secret: Path | None = None
    ca: Path | None = None
    mounts: tuple[str, ...] = ()
    """Directories for instructions, as ``SOURCE:TARGET``."""
    timeout_s: float = 3600.0
    driver: str = "overlay"


@dataclass(frozen=True, slots=True)
class BuildFiles:
    """Files of a build beside its Containerfile."""

    context: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files for COPY by name."""
    mounts: Mapping[str, tuple[str, Mapping[str, bytes]]] = field(default_factory=dict, repr=False)
    """Entitlements by name: where instructions see them, and their files."""
    ca_pem: str = field(default="", repr=False)
    """CAs of registries beside those of the system; empty for those of the settings."""


class LocalBuilder:
    """Runs builds on this host.

    The user's text runs in namespaces and in a root directory of its own, with subordinate IDs.
    """

    def __init__(
        self,
        settings: LocalSettings,
        environ: Mapping[str, str],
        clock: clocks.Clock,
        id_maps: IdMaps,
        show_line: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._clock = clock
        self._id_maps = id_maps
        self._show_line = show_line

    @contextmanager
    def open_build(
        self,
        text: str,
        spec: build_spec.BuildSpec,
        files: BuildFiles,
        *,
        timeout_s: float | None = None,
    ) -> Iterator["LocalBuild"]:
        """Prepare the directories of a build, and remove them afterwards.

        Removes the directories of builds that were killed, too. Raises `FileError`, and
        `CommandError` where instructions cannot have a root directory of their own.
        """
        self.remove_abandoned_builds()
        root = self._settings.directory
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            raise errors.FileError(f"cannot create {error.filename}: {error.strerror}") from error
        with _lock_build(path / "lock"):
            try:
                with closing(self._prepare_build(path, text, spec, files, timeout_s)) as build:
                    yield build
            finally:
                self._remove_tree(path)

    @contextmanager
    def continue_build(
        self,
        name: str,
        key: str,
        text: str,
        spec: build_spec.BuildSpec,
        files: BuildFiles,
        *,
        timeout_s: float,
    ) -> Iterator["LocalBuild"]:
        """Prepare the directories of a build with a name, and keep its images afterwards.

        A build with this name that failed or was killed has left the layers that it pulled, and
        with an equal ``key`` of its inputs also the image that it built. `discard_build` removes
        them. Raises `FileError`, also while another process builds.
        """
        path = self._get_named_path(name)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise errors.FileError(f"cannot create {error.filename}: {error.strerror}") from error
        with _lock_build(path / "lock"):
            self._remove_leftovers(path)
            _keep_results(path, key)
            try:
                with closing(self._prepare_build(path, text, spec, files, timeout_s)) as build:
                    yield build
            finally:
                self._remove_leftovers(path)

    def discard_build(self, name: str) -> None:
        """Remove what a build with this name left."""
        path = self._get_named_path(name)
        if path.exists():
            self._remove_tree(path)

    def _get_named_path(self, name: str) -> Path:
        return self._settings.directory / f"{_NAMED_PREFIX}{name}"

    def _remove_leftovers(self, path: Path) -> None:
        """Remove the inputs, which may be secret, and what no other attempt can use."""
        kept = {path / "work" / name for name in _KEPT}
        for leftover in (path / "inputs", path / "mounts", *_list_entries(path / "work")):
            if leftover.exists() and leftover not in kept:
                self._remove_tree(leftover)
        for blob in _list_entries(path / "work/layout/blobs/sha256"):
            # Partial transfers, and placeholders of `ImageLayout.write_placeholder`.
            with suppress(OSError):
                if blob.name.startswith(".") or not blob.stat().st_size:
                    blob.unlink()

    def remove_abandoned_builds(self) -> int:
        """Remove the directories of builds whose process is gone; return their number."""
        count = 0
        for path in sorted(self._settings.directory.glob(f"{_PREFIX}*")):
            try:
                # The kernel drops a flock when the last descriptor closes, also for a killed
                # process (flock(2)): a lock that is free means that the build is gone.
                lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove_tree(path)
                count += 1
            except BlockingIOError:
                continue
            finally:
                os.close(lock)
        return count

    def _prepare_build(
        self,
        path: Path,
        text: str,
        spec: build_spec.BuildSpec,
        files: BuildFiles,
        timeout_s: float | None,
    ) -> "LocalBuild":
        # Before anything is pulled.
        environ = make_environment(self._environ, path)
        SandboxedProgram(self._clock, self._id_maps, environ).run_program(
            ["true"], timeout_s=_SANDBOX_TIMEOUT_S, add_line=self._show_line
        )
        settings = self._settings
        if timeout_s is not None:
            settings = replace(settings, timeout_s=timeout_s)
        inputs, work = path / "inputs", path / "work"
        mounts, ca = [*settings.mounts], settings.ca
        try:
            inputs.mkdir()
            work.mkdir(exist_ok=True)
            (inputs / "Containerfile").write_text(text)
            (inputs / "build.json").write_text(json.dumps(spec.to_json()))
            _write_files(inputs / "context", files.context)
            for name, (target, contents) in files.mounts.items():
                _write_files(path / "mounts" / name, contents)
                mounts.append(f"{path}/mounts/{name}:{target}")
            if files.ca_pem:
                ca = inputs / "ca.pem"
                ca.write_text(files.ca_pem)
        except OSError as error:
            raise errors.FileError(f"cannot write {error.filename}: {error.strerror}") from error
        return LocalBuild(
            build_spec.BuildDirectories(inputs, work),
            replace(settings, mounts=tuple(mounts), ca=ca),
            self._environ,
            self._show_line,
        )

    def _remove_tree(self, path: Path) -> None:
        """Remove a build's files, also those of subordinate IDs."""
        with suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            return
        # Files that a RUN wrote belong to subordinate IDs: a user other than root can remove them
        # only in a user namespace with the same map (user_namespaces(7)).
        environ = make_environment(self._environ, path)
        parent = path.parent
        program = SandboxedProgram(self._clock, self._id_maps, environ, directory=parent)
        program.run_program(
            ["rm", "-rf", str(path)],
            timeout_s=_REMOVE_TIMEOUT_S,
            add_line=self._show_line,
            mounts=[BindMount(parent, str(parent), is_writable=True)],
        )


class LocalBuild:
    """One build on this host, between its phases."""

    def __init__(
        self,
        directories: build_spec.BuildDirectories,
        settings: LocalSettings,
        environ: Mapping[str, str],
        show_line: Callable[[str], None],
    ) -> None:
        self.directories = directories
        self._settings = settings
        self._environ = dict(environ)
        self._show_line = show_line
        self._waiting: dict[build_result.BuildPhase, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        """End the phases that were started and do not run."""
        for process in self._waiting.values():
            process.kill()
            process.communicate()
        self._waiting.clear()

    @property
    def has_layers(self) -> bool:
        """Return whether an earlier attempt left layers."""
        return self.directories.layout.exists()

    @property
    def has_image(self) -> bool:
        """Return whether an earlier attempt with these inputs built the image."""
        try:
            result = build_result.BuildResult.from_text(
                self._get_result_path(build_result.BuildPhase.BUILD).read_bytes()
            )
            layout = build_layout.ImageLayout(self.directories.layout)
            return result.has_succeeded and layout.read_named(build_spec.BUILT_IMAGE) is not None
        except (OSError, errors.TreenailError):
            return False

    def forget_images(self) -> None:
        """Remove what earlier attempts pulled and built."""
        shutil.rmtree(self.directories.layout, ignore_errors=True)
        self._get_result_path(build_result.BuildPhase.BUILD).unlink(missing_ok=True)

    def run_phase(
        self, phase: build_result.BuildPhase, *, timeout_s: float | None = None
    ) -> build_result.BuildResult:
        """Run one phase to its end, or to its time limit; return its result.

        Raises `HostError` when the phase ends without a result.
        """
        result_path = self._get_result_path(phase)
        result_path.unlink(missing_ok=True)
        self.start_phase(phase)
        with self._waiting.pop(phase) as process:
            limit = _PhaseLimit(process, timeout_s)
            try:
                _start_phase_run(process)
                for line in iter(lambda: _read_line(process), b""):
                    self._show_line(line.decode("utf-8", "replace").rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
            finally:
                limit.cancel()
        if limit.has_passed:
            return build_result.BuildResult(
                phase,
                reason=build_result.BuildReason.DEADLINE_EXCEEDED,
                message=f"phase {phase} of the build took longer than {timeout_s:g} s",
            )
        try:
            return build_result.BuildResult.from_text(result_path.read_bytes())
        except OSError as error:
            raise errors.HostError(
                f"phase {phase} of the build ended with exit code {process.returncode}, and "
                "without a result"
            ) from error

    def start_phase(self, phase: build_result.BuildPhase) -> None:
        """Start the process of a phase, which loads its modules and waits for `run_phase`."""
        if phase in self._waiting:
            return
        argv = [
            sys.executable, "-m", "treenail.builder", phase.value, "--die-with-parent", "--wait",
            f"--inputs={self.directories.inputs}", f"--work={self.directories.work}",
            f"--result={self._get_result_path(phase)}", *self._list_options(phase),
        ]  # fmt: skip
        environ = self._environ
        if phase is build_result.BuildPhase.BUILD:
            environ = make_environment(environ, self.directories.work)
        environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._waiting[phase] = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
        )

    def _get_result_path(self, phase: build_result.BuildPhase) -> Path:
        return self.directories.work.parent / f"{phase}.json"

    def _list_options(self, phase: build_result.BuildPhase) -> Sequence[str]:
        settings = self._settings
        if phase is build_result.BuildPhase.BUILD:
            mounts = [f"--mount={mount}" for mount in settings.mounts]
            return [f"--timeout={settings.timeout_s}", f"--driver={settings.driver}", *mounts]
        is_push = phase is build_result.BuildPhase.PUSH
        secret = settings.push_secret if is_push else settings.pull_secret
        options = [f"--{'push' if is_push else 'pull'}-secret={secret}"] if secret else []
        return [*options, f"--ca={settings.ca}"] if settings.ca else options


class _PhaseLimit:
    """Terminates a phase after a time; `cancel` must be called."""

    def __init__(self, process: "subprocess.Popen[bytes]", timeout_s: float | None) -> None:
        self._process = process
        self._timer = None if timeout_s is None else threading.Timer(timeout_s, self._end_phase)
        self.has_passed = False
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_phase(self) -> None:
        if self._process.poll() is None:
            self.has_passed = True
            self._process.terminate()


@contextmanager
def _lock_build(path: Path) -> Iterator[None]:
    """Hold the lock of a build; raise `FileError` while another process holds it."""
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise errors.FileError(f"cannot create {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise errors.FileError(
                f"cannot lock {path}: another process runs this build"
            ) from error
        yield
    finally:
        os.close(lock)


def _keep_results(path: Path, key: str) -> None:
    """Remove the results of phases unless they are of inputs with this key."""
    file = path / "key"
    try:
        if file.is_file() and file.read_text() == key:
            return
        for phase in build_result.BuildPhase:
            (path / f"{phase}.json").unlink(missing_ok=True)
        file.write_text(key)
    except OSError as error:
        raise errors.FileError(f"cannot write {file}: {error.strerror}") from error


def _list_entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True)
    for name, content in files.items():
        if name in {"", ".", ".."} or "/" in name:
            raise errors.FileError(f"cannot write {name!r:.80}: it is not the name of a file")
        descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _start_phase_run(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin:
        # The process may have died: it has no result then.
        with suppress(BrokenPipeError), process.stdin as stream:
            stream.write(build_spec.GO)


def _read_line(process: "subprocess.Popen[bytes]") -> bytes:
    return process.stdout.readline(_LINE_LIMIT) if process.stdout else b""
