"""Every annotation and label key on the wire, its values and its one writer.

The keys are those of the Machine Config Operator, so that this agent can live under its
controllers and these controllers can drive its daemon.
"""

from enum import StrEnum

PREFIX = "machineconfiguration.openshift.io/"
OWN_PREFIX = "treenail.io/"
"""Of what the Machine Config Operator does not know."""

# Written by the rollout controller.
DESIRED_CONFIG = PREFIX + "desiredConfig"
DESIRED_OS_IMAGE = PREFIX + "desiredOSImage"
DESIRED_OS_IMAGE_ALTERNATE = PREFIX + "desiredOSimage"
DESIRED_IMAGE = PREFIX + "desiredImage"
CONTROL_PLANE_TOPOLOGY = PREFIX + "controlPlaneTopology"
PRESTAGE_CONFIG = OWN_PREFIX + "stage-config"
PRESTAGE_IMAGE = OWN_PREFIX + "stage-image"
"""The two ask for an image to be staged ahead, while the node is at rest at what it has."""

# Written by the agent.
CURRENT_CONFIG = PREFIX + "currentConfig"
CURRENT_OS_IMAGE = PREFIX + "currentOSImage"
CURRENT_OS_IMAGE_ALTERNATE = PREFIX + "currentOSimage"
CURRENT_IMAGE = PREFIX + "currentImage"
STATE = PREFIX + "state"
REASON = PREFIX + "reason"
POST_CONFIG_ACTION = PREFIX + "post-config-action"
DESIRED_DRAIN = PREFIX + "desiredDrain"
PRESTAGED = OWN_PREFIX + "staged"
"""The image that was asked to be staged ahead, once it is."""
PRESTAGE_ERROR = OWN_PREFIX + "staging-error"
"""Why it is not: the image that was asked for, a colon, and the reason."""

# Written by the drain controller; the last two are for itself, and for people.
LAST_APPLIED_DRAIN = PREFIX + "lastAppliedDrain"
DRAIN = OWN_PREFIX + "drain"
DRAIN_BLOCKED = OWN_PREFIX + "drain-blocked"

# The three spellings of "the OS image to have", and the reply each one gets.
IMAGE_SPELLINGS: dict[str, str] = {
    DESIRED_OS_IMAGE: CURRENT_OS_IMAGE,
    DESIRED_OS_IMAGE_ALTERNATE: CURRENT_OS_IMAGE_ALTERNATE,
    DESIRED_IMAGE: CURRENT_IMAGE,
}

BAKED_CONFIG_LABEL = "machineconfig"
"""The label of an OS image that names the rendered config it was built from."""

REASON_LIMIT = 2000
"""Characters kept of a reason; the reference cuts with ``%.2000s``."""


class NodeState(StrEnum):
    """The values of the ``state`` annotation."""

    WORKING = "Working"
    DONE = "Done"
    DEGRADED = "Degraded"
    UNRECONCILABLE = "Unreconcilable"
