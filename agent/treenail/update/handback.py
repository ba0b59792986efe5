"""What the Machine Config Daemon has to find in order to start as if it had never been away.

Its first sync believes what it finds on disk before the Node's annotations, and compares the
machine with it: a config and an image that are those of the machine are all it takes.
"""

from collections.abc import Mapping

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.errors import UsageError
from treenail.update.state.record import LedgerRecord, Target


def check_handback(record: LedgerRecord) -> None:
    """Raise `UsageError` for a node that can't be handed back as it is."""
    if not record.current.config:
        raise UsageError("there is nothing to hand back: no config of this node is recorded")
    update = record.update
    if update is not None:
        raise UsageError(
            f"an update to {update.target} is under way ({update.phase})",
            remedy="let the agent finish it, or call it off with 'treenail cancel', and hand the "
            "node back then",
        )


def compute_handback_annotations(
    found: Mapping[str, str], current: Target
) -> dict[str, str | None]:
    """What has to change on the Node; None is to be absent.

    The daemon knows one spelling of the image. Where another was used, what was asked for in it is
    asked for in the daemon's, as its controllers would do.
    """
    image = current.image or None
    wanted: dict[str, str | None] = {
        key.CURRENT_CONFIG: current.config,
        key.CURRENT_IMAGE: image,
        key.STATE: NodeState.DONE,
        key.REASON: "",
        **dict.fromkeys((key.CURRENT_OS_IMAGE, key.CURRENT_OS_IMAGE_ALTERNATE)),
    }
    if image is not None and key.DESIRED_IMAGE not in found:
        wanted[key.DESIRED_IMAGE] = image
        wanted |= dict.fromkeys((key.DESIRED_OS_IMAGE, key.DESIRED_OS_IMAGE_ALTERNATE))
    return {name: value for name, value in wanted.items() if found.get(name) != value}
