"""The phases of an update, and the transitions between them."""

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """The phase of an update. The agent writes a new phase to the ledger before it acts on it."""

    STAGING = "staging"
    """The agent reads the configs and deploys what the OS needs, locked; the node is in service."""
    DRAINING = "draining"
    """The agent requested the drain; the staged deployment is still locked."""
    APPLYING = "applying"
    """The agent writes files, units and users; all of that can be undone."""
    REBOOTING = "rebooting"
    """The agent unlocks the staged deployment and requests the reboot: the point of no return."""
    VERIFYING = "verifying"
    """The node booted the target; its health checks decide whether it stays."""
    ROLLING_BACK = "rolling-back"
    """The target is unhealthy: the previous deployment becomes the default and is booted."""
    UNCORDONING = "uncordoning"
    """The node reached the target and verified it; the agent requests the uncordon."""
    CANCELLING = "cancelling"
    """The agent drops what it staged, restores files and requests the uncordon."""


TRANSITIONS: Mapping[Phase | None, Mapping[Phase | None, str]] = {
    None: {
        Phase.STAGING: "the node requests another target, or the force file exists",
    },
    Phase.STAGING: {
        Phase.DRAINING: "everything is staged and the update needs a drain",
        Phase.APPLYING: "everything is staged and the node needs no drain, or is drained",
        Phase.REBOOTING: "everything is staged, nothing must be written and the node needs no "
        "drain, or is drained",
        Phase.CANCELLING: "the request changed, a user cancelled, or the image cannot be used",
    },
    Phase.DRAINING: {
        Phase.STAGING: "the staged deployment is gone, after a power cut for example",
        Phase.APPLYING: "the drain controller drained the node",
        Phase.REBOOTING: "the drain controller drained the node and nothing must be written",
        Phase.CANCELLING: "the request changed, a user cancelled, or the deployment was unlocked",
    },
    Phase.APPLYING: {
        Phase.STAGING: "the staged deployment is gone, or the update now needs more than planned",
        Phase.DRAINING: "another client uncordoned the node before any file was changed",
        Phase.REBOOTING: "everything is written and the update needs a reboot",
        Phase.VERIFYING: "everything is written and the kubelet or the container runtime was "
        "restarted, or the machine rebooted by another cause and the target is booted",
        Phase.ROLLING_BACK: "the machine rebooted by another cause, and the agent crashed at each "
        "start since then",
        Phase.UNCORDONING: "everything is written and the update needs no reboot",
        Phase.CANCELLING: "a step failed, the request changed, a user cancelled, another client "
        "uncordoned the node, or the agent crashed at each start",
    },
    Phase.REBOOTING: {
        Phase.STAGING: "the staged deployment is gone",
        Phase.DRAINING: "another client uncordoned the node before the deployment was unlocked",
        Phase.VERIFYING: "the target is booted",
        Phase.ROLLING_BACK: "the agent crashed at each start since the boot",
        Phase.CANCELLING: "the request changed before the reboot, the agent crashed at each start "
        "before the reboot, or the boot loader chose the previous deployment",
    },
    Phase.VERIFYING: {
        Phase.UNCORDONING: "the node is healthy",
        Phase.ROLLING_BACK: "a health check failed at the deadline, the agent crashed at each "
        "start, or the request changed",
        Phase.CANCELLING: "the previous deployment was booted, or the node is unhealthy after an "
        "update without a reboot",
    },
    Phase.ROLLING_BACK: {
        Phase.CANCELLING: "the previous deployment is booted, or the previous files are restored",
    },
    Phase.UNCORDONING: {
        None: "the node is uncordoned, or was never cordoned",
    },
    Phase.CANCELLING: {
        Phase.ROLLING_BACK: "a reboot came before the staged deployment was dropped",
        None: "everything is undone, and the node is uncordoned or was never cordoned",
    },
}
"""The phases that may follow each phase, and when; None is a node without an update.

A phase may also be entered again: in another boot, with another drain token, or with a new plan.
"""
