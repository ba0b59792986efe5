"""Whether the stage ``prepare`` has completed an install directory."""

from contextlib import suppress

from treenail.errors import ConfigError, UsageError
from treenail.installer.checks.prepared_manifests import GENERATED_FILE
from treenail.installer.inputs.image_mode_field import FIELD
from treenail.installer.inputs.install_config import parse_install_config
from treenail.installer.inputs.install_directory import (
    INSTALL_CONFIG,
    OWN_INSTALL_CONFIG,
    InstallDirectory,
)
from treenail.installer.inputs.install_files import InstallFiles
from treenail.installer.inputs.install_manifests import collect_install_manifests
from treenail.installer.prepare.prepared_logins import read_file


def require_prepared(directory: InstallDirectory) -> None:
    """Raise `UsageError` for a directory from which no installation can begin; write nothing.

    A directory with invalid manifests, and one whose installation began, pass: the stage
    ``bootstrap`` reports what is wrong with them where programs wait for it. Raises `FileError`.
    """
    if InstallFiles().read(directory.state) is not None:
        return
    cause = _find_unprepared_field(directory)
    if not cause:
        found, problems = collect_install_manifests(directory.root)
        if not found.pools and not problems:
            cause = "its manifests have no MachineConfigPool"
    if cause:
        raise UsageError(
            f"cannot install from {directory.root}: {cause}",
            remedy="complete the directory: treenail-controller install prepare --dir "
            f"{directory.root}",
        )


def _find_unprepared_field(directory: InstallDirectory) -> str:
    # Without this file the stage would install stock images, and ignore the field.
    if read_file(directory.root / GENERATED_FILE) is not None:
        return ""
    for name in (OWN_INSTALL_CONFIG, INSTALL_CONFIG):
        content = read_file(directory.root / name)
        if content is None:
            continue
        with suppress(ConfigError):
            settings = parse_install_config(content, name).mode.settings
            if settings is not None and settings.is_enabled:
                return f"{name} has the field {FIELD}, and there is no {GENERATED_FILE}"
    return ""
