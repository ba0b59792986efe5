"""Hand a node back to the Machine Config Daemon: the state that the daemon needs for its start.

The first sync of the daemon prefers the config and image on disk to the Node's annotations
(daemon.go), and compares the machine with them. Both must be those of the machine.
"""

from collections.abc import Mapping

from treenail.api import annotations
from treenail.api import annotations as key
from treenail.errors import UsageError
from treenail.update.state import ledger_record


def check_handback(record: ledger_record.LedgerRecord) -> None:
    """Raise `UsageError` for a node that cannot be handed back now."""
    if not record.current.config:
        raise UsageError("cannot hand back this node: its ledger has no current config")
    update = record.update
    if update is not None:
        raise UsageError(
            f"cannot hand back this node: an update to {update.target} is in progress "
            f"({update.phase})",
            remedy="wait until the agent finishes it, or run: treenail cancel; then hand it back",
        )


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
        key.STATE: annotations.NodeState.DONE,
        key.REASON: "",
        **dict.fromkeys((key.CURRENT_OS_IMAGE, key.CURRENT_OS_IMAGE_ALTERNATE)),
    }
    if image is not None and key.DESIRED_IMAGE not in present:
        changes[key.DESIRED_IMAGE] = image
        changes |= dict.fromkeys((key.DESIRED_OS_IMAGE, key.DESIRED_OS_IMAGE_ALTERNATE))
    return {name: value for name, value in changes.items() if present.get(name) != value}
