"""Real programs in place of emulated ones: built elsewhere, copied into the guest's base layer."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmlab.tools import ToolError, run

VARIABLES = {"rpm-ostree": "TREENAIL_VM_RPM_OSTREE", "bootc": "TREENAIL_VM_BOOTC"}
"""Program to the environment variable that names its directory."""


@dataclass(frozen=True, slots=True)
class Program:
    """A directory with the files of a program, its version, and the Debian packages it needs."""

    name: str
    directory: Path
    version: str
    packages: tuple[str, ...]

    @property
    def tree(self) -> Path:
        """The files, as they lie below the guest's root."""
        return self.directory / "tree"

    def fingerprint(self) -> str:
        """Return a digest of the paths, modes and contents of all files."""
        digest = hashlib.sha256()
        for path in sorted(self.tree.rglob("*")):
            mode = path.lstat().st_mode
            digest.update(f"{path.relative_to(self.tree)}\0{mode:o}\0".encode())
            if path.is_symlink():
                digest.update(str(path.readlink()).encode())
            elif path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def copy_to(self, root: Path) -> None:
        """Copy the files into a root; links to directories, such as /lib, stay links."""
        command = (
            'tar -C "$1" --owner=0 --group=0 -cf - . | tar -C "$2" --keep-directory-symlink -xf -'
        )
        run("bash", "-c", f"set -o pipefail; {command}", "bash", self.tree, root)


def read_programs(environment: Mapping[str, str]) -> tuple[Program, ...]:
    """Return the programs that the environment names; raises `ToolError` for an unusable one."""
    return tuple(
        _read(name, variable, Path(environment[variable]))
        for name, variable in VARIABLES.items()
        if environment.get(variable)
    )


def _read(name: str, variable: str, directory: Path) -> Program:
    if not (directory / "tree").is_dir():
        raise ToolError(f"{variable}: {directory} has no directory tree/ with the files of {name}")
    try:
        version = (directory / "version").read_text().strip()
        packages = tuple((directory / "packages").read_text().split())
    except OSError as error:
        raise ToolError(f"{variable}: cannot read {error.filename}: {error.strerror}") from error
    if not version or "\n" in version:
        raise ToolError(f"{variable}: {directory / 'version'} must be one line")
    return Program(name, directory, version, packages)
