"""Builder on this host: the phases of a build as processes, in directories of their own."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from treenail.builder.build_spec import BuildDirectories, BuildSpec
from treenail.builder.buildah.namespaces import IdMaps
from treenail.builder.buildah.process import SandboxedProgram, make_environment
from treenail.clock import Clock
from treenail.errors import FileError, HostError
from treenail.image.build_result import BuildPhase, BuildResult

_PREFIX = "build-"
_REMOVE_TIMEOUT_S = 300.0
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

    The user's text runs in namespaces, but with this user's access to files, as with
    ``buildah bud --isolation chroot``.
    """

    def __init__(
        self,
        settings: LocalSettings,
        environ: Mapping[str, str],
        clock: Clock,
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
        self, text: str, spec: BuildSpec, files: BuildFiles, *, timeout_s: float | None = None
    ) -> Iterator["LocalBuild"]:
        """Prepare the directories of a build, and remove them afterwards.

        Removes the directories of builds that were killed, too. Raises `FileError`.
        """
        self.remove_abandoned_builds()
        root = self._settings.directory
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileError(f"cannot create {error.filename}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            settings = self._settings
            if timeout_s is not None:
                settings = replace(settings, timeout_s=timeout_s)
            yield self._prepare_build(path, text, spec, files, settings)
        finally:
            self._remove_tree(path)
            os.close(lock)

    def remove_abandoned_builds(self) -> int:
        """Remove the directories of builds whose process is gone; return their number."""
        count = 0
        for path in sorted(self._settings.directory.glob(f"{_PREFIX}*")):
            try:
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
        self, path: Path, text: str, spec: BuildSpec, files: BuildFiles, settings: LocalSettings
    ) -> "LocalBuild":
        inputs, work = path / "inputs", path / "work"
        mounts, ca = [*settings.mounts], settings.ca
        try:
            inputs.mkdir()
            work.mkdir()
            (inputs / "Containerfile").write_text(text)
            (inputs / "build.json").write_text(spec.to_json())
            _write_files(inputs / "context", files.context)
            for name, (target, contents) in files.mounts.items():
                _write_files(path / "mounts" / name, contents)
                mounts.append(f"{path}/mounts/{name}:{target}")
            if files.ca_pem:
                ca = inputs / "ca.pem"
                ca.write_text(files.ca_pem)
        except OSError as error:
            raise FileError(f"cannot write {error.filename}: {error.strerror}") from error
        return LocalBuild(
            BuildDirectories(inputs, work),
            replace(settings, mounts=tuple(mounts), ca=ca),
            self._environ,
            self._show_line,
        )

    def _remove_tree(self, path: Path) -> None:
        """Remove a build's files, also those of subordinate IDs."""
        with suppress(OSError):
            shutil.rmtree(path)
            return
        environ = make_environment(self._environ, path)
        program = SandboxedProgram(self._clock, self._id_maps, environ)
        program.run_program(
            ["rm", "-rf", str(path)], timeout_s=_REMOVE_TIMEOUT_S, add_line=self._show_line
        )


class LocalBuild:
    """One build on this host, between its phases."""

    def __init__(
        self,
        directories: BuildDirectories,
        settings: LocalSettings,
        environ: Mapping[str, str],
        show_line: Callable[[str], None],
    ) -> None:
        self.directories = directories
        self._settings = settings
        self._environ = dict(environ)
        self._show_line = show_line

    def run_phase(self, phase: BuildPhase) -> BuildResult:
        """Run one phase to its end; return its result.

        Raises `HostError` when the phase ends without a result.
        """
        result_path = self.directories.work.parent / f"{phase}.json"
        argv = [
            sys.executable, "-m", "treenail.builder", phase.value, "--die-with-parent",
            f"--inputs={self.directories.inputs}", f"--work={self.directories.work}",
            f"--result={result_path}", *self._list_options(phase),
        ]  # fmt: skip
        environ = self._environ
        if phase is BuildPhase.BUILD:
            environ = make_environment(environ, self.directories.work)
        environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
        ) as process:
            try:
                for line in iter(lambda: _read_line(process), b""):
                    self._show_line(line.decode("utf-8", "replace").rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        try:
            return BuildResult.from_json(result_path.read_bytes())
        except OSError as error:
            raise HostError(
                f"phase {phase} of the build ended with exit code {process.returncode}, and "
                "without a result"
            ) from error

    def _list_options(self, phase: BuildPhase) -> Sequence[str]:
        settings = self._settings
        if phase is BuildPhase.BUILD:
            mounts = [f"--mount={mount}" for mount in settings.mounts]
            return [f"--timeout={settings.timeout_s}", f"--driver={settings.driver}", *mounts]
        is_push = phase is BuildPhase.PUSH
        secret = settings.push_secret if is_push else settings.pull_secret
        options = [f"--{'push' if is_push else 'pull'}-secret={secret}"] if secret else []
        return [*options, f"--ca={settings.ca}"] if settings.ca else options


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    directory.mkdir(parents=True)
    for name, content in files.items():
        if name in {"", ".", ".."} or "/" in name:
            raise FileError(f"cannot write {name!r:.80}: it is not the name of a file")
        descriptor = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def _read_line(process: "subprocess.Popen[bytes]") -> bytes:
    return process.stdout.readline(_LINE_LIMIT) if process.stdout else b""
