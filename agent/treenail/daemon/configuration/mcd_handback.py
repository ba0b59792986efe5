"""Hand a node back to the Machine Config Daemon: write all of its state files or none."""

import json
from collections.abc import Iterator

from treenail import errors
from treenail.api.machineconfig import MachineConfig
from treenail.daemon.configuration import config_cache, inspect, mcd_state
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.rollback import backups, transaction, undo_log
from treenail.host.system import state_file
from treenail.update.state.ledger_record import Target

HANDED_BACK_LEDGER = f"{state_file.LEDGER_PATH}.handed-back"


def hand_back_node(
    root: root_directory.Root, config: MachineConfig, current: Target
) -> tuple[str, ...]:
    """Write the MCD's files and remove ours, atomically; return the changed paths.

    The next start of treenail undoes an interrupted hand-back. Raises `FileError` and
    `LedgerError`.
    """
    undo = transaction.UndoTransaction(root)
    try:
        paths = undo.apply_changes(list(_compute_changes(root, config, current)))
        undo.commit_changes()
    except errors.TreenailError:
        if not undo.undo_changes():
            undo.discard_log()
        raise
    return paths


def _compute_changes(
    root: root_directory.Root, config: MachineConfig, current: Target
) -> Iterator[undo_log.PathChange]:
    files = atomic_files.HostFiles(root)
    document = json.dumps(config.to_json()).encode()
    # It contains the pull secret. The MCD writes it with mode 0644, but reads it as root.
    yield undo_log.PathChange(mcd_state.CURRENT_CONFIG, entries.FileEntry(lambda: document, 0o600))
    image = current.image.encode()
    yield undo_log.PathChange(
        mcd_state.CURRENT_IMAGE,
        entries.FileEntry(lambda: image, 0o600) if image else entries.AbsentEntry(),
    )
    # With this file the MCD would start in bootstrap mode, as on a first boot.
    yield undo_log.PathChange(mcd_state.FIRST_BOOT_ANNOTATIONS, entries.AbsentEntry())
    yield from backups.FileBackups(root).plan_handback()
    ledger = files.read_file(state_file.LEDGER_PATH)
    if ledger is None:
        raise errors.LedgerError(
            f"cannot hand back: there is no {root.resolve_path(state_file.LEDGER_PATH)}"
        )
    # Move the ledger away: when the node returns to treenail, its content is outdated.
    yield undo_log.PathChange(HANDED_BACK_LEDGER, entries.FileEntry(lambda: ledger, 0o600))
    yield undo_log.PathChange(state_file.LEDGER_PATH, entries.AbsentEntry())
    yield undo_log.PathChange(inspect.OWNERSHIP_FILE, entries.AbsentEntry())
    for name in files.list_directory(config_cache.DIRECTORY):
        yield undo_log.PathChange(f"{config_cache.DIRECTORY}/{name}", entries.AbsentEntry())
