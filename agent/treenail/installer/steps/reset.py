"""Removes the state of an installation, so that the next start begins again."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from treenail.errors import FileError
from treenail.installer.inputs.install_directory import InstallDirectory
from treenail.installer.inputs.install_files import InstallFiles


def reset_installation(
    directory: InstallDirectory, files: InstallFiles, *, with_images: bool
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


def _list_paths(directory: InstallDirectory, *, with_images: bool) -> Iterator[Path]:
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
        raise FileError(
            f"cannot remove {error.filename or path}: {error.strerror}",
            remedy=f"remove it: rm -rf {path}",
        ) from error
