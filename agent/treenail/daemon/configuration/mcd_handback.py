"""Hands a node back to the Machine Config Daemon: writes all of its state files or none."""

import json
from collections.abc import Iterator

from treenail.api.machineconfig import MachineConfig
from treenail.daemon.configuration import config_cache
from treenail.daemon.configuration.inspect import OWNERSHIP_FILE
from treenail.daemon.configuration.mcd_state import (
    CURRENT_CONFIG,
    CURRENT_IMAGE,
    FIRST_BOOT_ANNOTATIONS,
)
from treenail.errors import LedgerError, TreenailError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.entries import AbsentEntry, FileEntry
from treenail.host.filesystem.root_directory import Root
from treenail.host.rollback.backups import FileBackups
from treenail.host.rollback.transaction import UndoTransaction
from treenail.host.rollback.undo_log import PathChange
from treenail.host.system import state_file
from treenail.update.state.ledger_record import Target

HANDED_BACK_LEDGER = f"{state_file.LEDGER_PATH}.handed-back"


def hand_back_node(root: Root, config: MachineConfig, current: Target) -> tuple[str, ...]:
    """Write the MCD's files and remove ours, atomically; return the changed paths.

    The next start of treenail undoes an interrupted hand-back. Raises `FileError` and
    `LedgerError`.
    """
    undo = UndoTransaction(root)
    try:
        paths = undo.apply_changes(list(_compute_changes(root, config, current)))
        undo.commit_changes()
    except TreenailError:
        if not undo.undo_changes():
            undo.discard_log()
        raise
    return paths


def _compute_changes(root: Root, config: MachineConfig, current: Target) -> Iterator[PathChange]:
    files = HostFiles(root)
    document = json.dumps(config.to_json()).encode()
    # It contains the pull secret. The MCD writes it with mode 0644, but reads it as root.
    yield PathChange(CURRENT_CONFIG, FileEntry(lambda: document, 0o600))
    image = current.image.encode()
    yield PathChange(CURRENT_IMAGE, FileEntry(lambda: image, 0o600) if image else AbsentEntry())
    # With this file the MCD would start in bootstrap mode, as on a first boot.
    yield PathChange(FIRST_BOOT_ANNOTATIONS, AbsentEntry())
    yield from FileBackups(root).plan_handback()
    kept = files.read_file(state_file.LEDGER_PATH)
    if kept is None:
        raise LedgerError(
            f"cannot hand back: there is no {root.resolve_path(state_file.LEDGER_PATH)}"
        )
    # Move the ledger away: when the node returns to treenail, its content is outdated.
    yield PathChange(HANDED_BACK_LEDGER, FileEntry(lambda: kept, 0o600))
    yield PathChange(state_file.LEDGER_PATH, AbsentEntry())
    yield PathChange(OWNERSHIP_FILE, AbsentEntry())
    for name in files.list_directory(config_cache.DIRECTORY):
        yield PathChange(f"{config_cache.DIRECTORY}/{name}", AbsentEntry())
