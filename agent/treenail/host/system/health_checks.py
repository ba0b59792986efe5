"""The machine owner's health checks: programs in a directory, each well when it exits with 0."""

import stat

from treenail.errors import CommandError, FileError
from treenail.host.filesystem.root import Root
from treenail.host.system.command import CommandRunner

MAX_CHECKS = 64
"""The most checks that a directory may hold."""


class HealthCheckDirectory:
    """The programs of a directory below the root."""

    def __init__(self, root: Root, programs: CommandRunner, directory: str) -> None:
        self._root = root
        self._programs = programs
        self._directory = directory

    def list_checks(self) -> tuple[str, ...]:
        """The names of the checks, in order; what is no executable file is none.

        Raises `FileError` when the directory can't be read or holds more than `MAX_CHECKS`.
        """
        directory = self._root.resolve_path(self._directory)
        try:
            names = sorted(each.name for each in directory.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise FileError(f"can't read {directory}: {error.strerror}") from error
        found = tuple(name for name in names if self._is_executable(name))
        if len(found) > MAX_CHECKS:
            raise FileError(
                f"{directory} holds {len(found)} checks, and at most {MAX_CHECKS} are made",
                remedy="put several into one",
            )
        return found

    def run_check(self, name: str, *, timeout_s: float) -> str:
        """What is wrong, in the check's own words; empty when it is well."""
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
