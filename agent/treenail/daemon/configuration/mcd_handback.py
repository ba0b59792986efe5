"""A node made over to the Machine Config Daemon: its state files, all of them or none."""

import json
from collections.abc import Iterator

from treenail.api.machineconfig import MachineConfig
from treenail.daemon.configuration import config_cache
from treenail.daemon.configuration.inspect import RECORD
from treenail.daemon.configuration.mcd_state import CURRENT_CONFIG, CURRENT_IMAGE, FIRST_BOOT
from treenail.errors import LedgerError, TreenailError
from treenail.host.filesystem.entries import Absent, Regular
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.rollback.backups import Originals
from treenail.host.rollback.prepare import Change
from treenail.host.rollback.transaction import Undo
from treenail.host.system import state_file
from treenail.update.state.record import Target

HANDED_BACK = f"{state_file.PATH}.handed-back"


def hand_back(root: Root, config: MachineConfig, current: Target) -> tuple[str, ...]:
    """Write the daemon's files and put ours away; returns the paths that changed.

    It is done as a whole, across crashes: whoever starts treenail next undoes what is cut short.
    Raises `FileError` and `LedgerError`.
    """
    undo = Undo(root)
    try:
        paths = undo.place(list(_changes(root, config, current)))
        undo.commit()
    except TreenailError:
        if not undo.put_back():
            undo.forget()
        raise
    return paths


def _changes(root: Root, config: MachineConfig, current: Target) -> Iterator[Change]:
    files = Files(root)
    document = json.dumps(config.to_json()).encode()
    # It holds secrets; whoever reads it is root.
    yield Change(CURRENT_CONFIG, Regular(lambda: document, 0o600))
    image = current.image.encode()
    yield Change(CURRENT_IMAGE, Regular(lambda: image, 0o600) if image else Absent())
    # With it the daemon would take the node for one that boots for the first time.
    yield Change(FIRST_BOOT, Absent())
    yield from Originals(root).handing_over()
    kept = files.read(state_file.PATH)
    if kept is None:
        raise LedgerError(f"there is no {root.path(state_file.PATH)}")
    # Should the node come back to us, it is not what it is remembered to be.
    yield Change(HANDED_BACK, Regular(lambda: kept, 0o600))
    yield Change(state_file.PATH, Absent())
    yield Change(RECORD, Absent())
    for name in files.names(config_cache.DIRECTORY):
        yield Change(f"{config_cache.DIRECTORY}/{name}", Absent())
