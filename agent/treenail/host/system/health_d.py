"""Health checks of the administrator: programs in a directory, which pass with exit code 0."""

import stat

from treenail.errors import CommandError, FileError
from treenail.host.filesystem.root import Root
from treenail.process import ProgramRunner

MAX_CHECKS = 64
"""Maximum number of checks in a directory."""


class HealthCheckDirectory:
    """Health checks in a directory below the root."""

    def __init__(self, root: Root, programs: ProgramRunner, directory: str) -> None:
        self._root = root
        self._programs = programs
        self._directory = directory

    def list_checks(self) -> tuple[str, ...]:
        """Return the sorted names of the executable files, without hidden ones.

        Raises `FileError` when the directory is unreadable or contains more than `MAX_CHECKS`.
        """
        directory = self._root.resolve_path(self._directory)
        try:
            names = sorted(each.name for each in directory.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise FileError(f"cannot read {directory}: {error.strerror}") from error
        found = tuple(name for name in names if self._is_executable(name))
        if len(found) > MAX_CHECKS:
            raise FileError(
                f"cannot run the checks in {directory}: {len(found)} exceed "
                f"the limit of {MAX_CHECKS}",
                remedy="combine several checks into one program",
            )
        return found

    def run_check(self, name: str, *, timeout_s: float) -> str:
        """Run a check; return its error, empty when it passes."""
        path = self._root.resolve_path(f"{self._directory}/{name}")
        try:
            self._programs.run_command([str(path)], timeout_s=timeout_s)
        except CommandError as error:
            return str(error).replace(str(path), name)
        return ""

    def _is_executable(self, name: str) -> bool:
        try:
            mode = self._root.resolve_path(f"{self._directory}/{name}").stat().st_mode
        except (OSError, FileError):
            return False
        return stat.S_ISREG(mode) and bool(mode & 0o111) and not name.startswith(".")
