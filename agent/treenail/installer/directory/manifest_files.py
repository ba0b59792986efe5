"""Manifest files of an install directory, read within limits of size, number and place."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from treenail import sizes
from treenail.api import documents
from treenail.installer.directory import install_files
from treenail.installer.directory.problems import InstallProblem

_SUFFIXES = ("", *documents.SUFFIXES)
"""The pull secret that the Machine Config Operator writes has no suffix."""
FILE_LIMIT = 16 * sizes.MIB
"""An API server accepts objects of 3 MiB at most."""
TOTAL_LIMIT = 128 * sizes.MIB
_MAX_FILES = 5000


@dataclass(slots=True)
class ManifestFiles:
    """Contents by path below the install directory, and what could not be read."""

    contents: dict[str, bytes] = field(default_factory=dict, repr=False)
    problems: list[InstallProblem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Files of other types, and directories."""


def read_manifest_files(
    directory: install_files.InstallDirectory, *, skipped: frozenset[str] = frozenset()
) -> ManifestFiles:
    """Read the files of ``manifests`` and ``openshift``, without the skipped ones.

    A missing directory has none.

    The installer copies both into one directory, so that no name may be in both.
    """
    files = ManifestFiles()
    root = directory.root.resolve()
    names = {path.rpartition("/")[2]: path for path in skipped}
    total = 0
    for folder in (directory.manifests, directory.openshift):
        for name in _list_names(root, folder, files):
            where = f"{folder.name}/{name}"
            if Path(name).suffix not in _SUFFIXES:
                files.ignored.append(where)
                continue
            if len(names) >= _MAX_FILES or total > TOTAL_LIMIT:
                text = (
                    f"it has more than {_MAX_FILES} manifests or {sizes.format_bytes(TOTAL_LIMIT)}"
                )
                problem = InstallProblem(folder.name, text, "remove those that are not needed")
                files.problems.append(problem)
                return files
            if names.get(name, where) != where:
                files.problems.append(
                    InstallProblem(
                        where,
                        f"the file name exists twice, also as {names[name]}; installers copy both "
                        "into one directory, where one would replace the other",
                        "rename one of the two",
                    )
                )
                continue
            names[name] = where
            if where in skipped:
                continue
            content = _read_file(root, folder / name, where, files)
            if content is not None:
                total += len(content)
                files.contents[where] = content
    return files


def _list_names(root: Path, folder: Path, files: ManifestFiles) -> Iterator[str]:
    """Yield the names in a directory in their order, without hidden files and backups."""
    try:
        if not _is_inside(root, folder):
            files.problems.append(_make_link_problem(folder.name))
            return
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except (OSError, ValueError, RuntimeError) as error:
        files.problems.append(_make_read_problem(folder.name, error))
        return
    for name in names:
        if not name.startswith(".") and not name.endswith("~"):
            yield name


def read_manifest(root: Path, where: str) -> bytes | None:
    """Return the content of a file below the directory; None if it cannot be read."""
    try:
        content, _ = install_files.read_regular_file(root / where, FILE_LIMIT)
    except (OSError, ValueError, install_files.NotAFileError):
        return None
    return content


def find_link_problem(root: Path, path: Path, where: str) -> InstallProblem | None:
    """Return why the path is unusable as a link; None for a link that stays in the directory."""
    try:
        if not _is_inside(root.resolve(), path):
            return _make_link_problem(where)
        if path.is_symlink() and not path.exists():
            return InstallProblem(
                where,
                "it is a link to a file that does not exist",
                "correct the link, or remove it",
            )
    except (OSError, ValueError, RuntimeError) as error:
        return _make_read_problem(where, error)
    return None


def _read_file(root: Path, path: Path, where: str, files: ManifestFiles) -> bytes | None:
    try:
        if not _is_inside(root, path):
            files.problems.append(_make_link_problem(where))
            return None
        if path.is_dir():
            files.ignored.append(where)
            return None
        content, size = install_files.read_regular_file(path, FILE_LIMIT)
    except install_files.NotAFileError:
        text = "it is a pipe, a socket or a device"
        files.problems.append(InstallProblem(where, text, f"remove it: rm '{where}'"))
        return None
    except (OSError, ValueError, RuntimeError) as error:
        files.problems.append(_make_read_problem(where, error))
        return None
    if len(content) > FILE_LIMIT:
        files.problems.append(
            InstallProblem(
                where,
                f"it has {sizes.format_bytes(size)}, more than the limit of "
                f"{sizes.format_bytes(FILE_LIMIT)}",
                "move large files into the image with COPY --from=IMAGE in the Containerfile, or "
                "split the file into one for each object",
            )
        )
        return None
    return content


def _is_inside(root: Path, path: Path) -> bool:
    """Return whether the path without its links is below the install directory."""
    return path.resolve().is_relative_to(root)


def _make_link_problem(where: str) -> InstallProblem:
    return InstallProblem(
        where,
        "it is a link that leads out of the install directory",
        f"copy the file: cp --remove-destination \"$(readlink -f '{where}')\" '{where}'",
    )


def _make_read_problem(where: str, error: Exception) -> InstallProblem:
    cause = error.strerror if isinstance(error, OSError) else "its name cannot be used"
    is_loop = isinstance(error, RuntimeError) or getattr(error, "errno", 0) == errno.ELOOP
    remedy = "remove the link" if is_loop else f"check it: ls -l '{where}'"
    return InstallProblem(where, f"cannot read it: {cause or error}", remedy)
