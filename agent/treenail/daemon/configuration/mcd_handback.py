"""Hand a node back to the Machine Config Daemon (MCD): its state files, and the Node's annotations.

The first sync of the MCD prefers the config and image on disk to the Node's annotations
(daemon.go), and compares the machine with them. Both must be those of the machine.
"""

import json
from collections.abc import Iterator, Mapping

from treenail import errors
from treenail.api import annotations as key
from treenail.api import machineconfig
from treenail.daemon.configuration import config_cache, mcd_state
from treenail.host.filesystem import atomic_files, entries, root_directory
from treenail.host.rollback import backups, transaction, undo_log
from treenail.host.system import state_file
from treenail.update.state import ledger_record
from treenail.update.steps.inventory import OWNERSHIP_FILE

HANDED_BACK_LEDGER = f"{state_file.LEDGER_PATH}.handed-back"


def check_handback(record: ledger_record.LedgerRecord) -> None:
    """Raise `UsageError` for a node that cannot be handed back now."""
    if not record.current.config:
        raise errors.UsageError("cannot hand back this node: its ledger has no current config")
    update = record.update
    if update is not None:
        raise errors.UsageError(
            f"cannot hand back this node: an update to {update.target} is in progress "
            f"({update.phase})",
            remedy="wait until the agent finishes it, or run: treenail cancel; then hand it back",
        )


def hand_back_node(
    root: root_directory.Root, config: machineconfig.MachineConfig, current: ledger_record.Target
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
    root: root_directory.Root, config: machineconfig.MachineConfig, current: ledger_record.Target
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
    yield undo_log.PathChange(OWNERSHIP_FILE, entries.AbsentEntry())
    for name in files.list_directory(config_cache.DIRECTORY):
        yield undo_log.PathChange(f"{config_cache.DIRECTORY}/{name}", entries.AbsentEntry())


def compute_handback_annotations(
    present: Mapping[str, str], current: ledger_record.Target
) -> dict[str, str | None]:
    """Return the changes of the Node's annotations; None removes one.

    The daemon reads only one of the annotations for the image. A request in another one moves to
    it.
    """
    image = current.image or None
    changes: dict[str, str | None] = {
        key.CURRENT_CONFIG: current.config,
        key.CURRENT_IMAGE: image,
        key.STATE: key.NodeState.DONE,
        key.REASON: "",
        **dict.fromkeys((key.CURRENT_OS_IMAGE, key.CURRENT_OS_IMAGE_ALTERNATE)),
    }
    if image is not None and key.DESIRED_IMAGE not in present:
        changes[key.DESIRED_IMAGE] = image
        changes |= dict.fromkeys((key.DESIRED_OS_IMAGE, key.DESIRED_OS_IMAGE_ALTERNATE))
    return {name: value for name, value in changes.items() if present.get(name) != value}
