"""Files and steps of an installation whose process dies at a chosen point."""

import errno
from collections.abc import Mapping
from pathlib import Path

from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.install_steps import StepContext, StepLimit


class DeathError(BaseException):
    """The process ends here, as by SIGKILL: no code of the product may catch it."""


class Fuse:
    """Ends the process at the n-th point that it passes; never without a number.

    A dead process passes no further point: code that runs while the error rises has no effect.
    """

    def __init__(self, dies_at: int | None = None) -> None:
        self.passed = 0
        self.dies_at = dies_at

    def pass_point(self) -> None:
        self.passed += 1
        if self.dies_at is not None and self.passed >= self.dies_at:
            raise DeathError


class DyingFiles(InstallFiles):
    """Files whose process may die before the write of a file, in the middle of it, and after it."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def _write_new(self, path: Path, content: bytes, mode: int) -> None:
        self._fuse.pass_point()
        try:
            self._fuse.pass_point()
        except DeathError:
            path.write_bytes(content[: len(content) // 2])
            raise
        super()._write_new(path, content, mode)

    def _replace_file(self, temporary: Path, path: Path) -> None:
        self._fuse.pass_point()
        super()._replace_file(temporary, path)
        self._fuse.pass_point()

    def _sync_descriptor(self, descriptor: int) -> None:
        """Do nothing: SIGKILL loses nothing that was written."""


class FullDisk(InstallFiles):
    """Files on a disk that is full while `is_full` is true."""

    def __init__(self) -> None:
        self.is_full = False

    def _write_new(self, path: Path, content: bytes, mode: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write_new(path, content, mode)


class FillingDisk(FullDisk):
    """A disk that is full from the n-th write on; -1 for never. Counts the writes."""

    def __init__(self, full_at: int = -1) -> None:
        super().__init__()
        self.writes = 0
        self._full_at = full_at

    def _write_new(self, path: Path, content: bytes, mode: int) -> None:
        self.writes += 1
        self.is_full = self.is_full or self.writes == self._full_at
        super()._write_new(path, content, mode)


class FileStep:
    """A step that writes a file; its process may die before and after it."""

    def __init__(
        self,
        directory: InstallDirectory,
        name: str,
        inputs: Mapping[str, str],
        fuse: Fuse,
        *,
        limit: StepLimit | None = None,
    ) -> None:
        self.name = name
        self.title = f"write {name}"
        self.limit = limit
        self.inputs = dict(inputs)
        self.runs = 0
        self._path = directory.root / f"{name}.out"
        self._fuse = fuse

    def compute_inputs(self) -> Mapping[str, str]:
        return self.inputs

    def resume(self, result: Mapping[str, str]) -> bool:
        return self._path.exists() and self._path.read_text() == result["text"]

    def run(self, context: StepContext) -> Mapping[str, str]:
        self._fuse.pass_point()
        self.runs += 1
        context.report(f"writing {self.name}")
        text = " ".join(f"{name}={digest}" for name, digest in sorted(self.inputs.items()))
        self._path.write_text(text)
        self._fuse.pass_point()
        return {"text": text}
