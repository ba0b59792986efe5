"""Annotation and label keys of the API, their values, and the component that writes each.

The keys are those of the Machine Config Operator: the agent can run under its controllers, and
treenail's controllers can drive its daemon.
"""

from enum import StrEnum

PREFIX = "machineconfiguration.openshift.io/"
OWN_PREFIX = "treenail.io/"
"""Prefix of keys that the Machine Config Operator does not have."""

# Written by the rollout controller.
DESIRED_CONFIG = PREFIX + "desiredConfig"
DESIRED_OS_IMAGE = PREFIX + "desiredOSImage"
DESIRED_OS_IMAGE_ALTERNATE = PREFIX + "desiredOSimage"
DESIRED_IMAGE = PREFIX + "desiredImage"
CONTROL_PLANE_TOPOLOGY = PREFIX + "controlPlaneTopology"
SINGLE_REPLICA = "SingleReplica"
"""Its value in a cluster of one node, whose agent updates without a drain."""
PRESTAGE_CONFIG = OWN_PREFIX + "prestage-config"
PRESTAGE_IMAGE = OWN_PREFIX + "prestage-image"
"""Request to pre-stage an image while the node is idle."""
PINNED_IMAGE_SETS = OWN_PREFIX + "pinned-image-sets"
"""``NAME@GENERATION`` of each PinnedImageSet of the node, sorted, with commas between them."""

# Written by the install controller.
REMOVE_BOOTSTRAP_REGISTRY = OWN_PREFIX + "remove-bootstrap-registry"
"""``HOST:PORT`` of the registry on the bootstrap host that the node must no longer use."""

# Written by the agent.
CURRENT_CONFIG = PREFIX + "currentConfig"
CURRENT_OS_IMAGE = PREFIX + "currentOSImage"
CURRENT_OS_IMAGE_ALTERNATE = PREFIX + "currentOSimage"
CURRENT_IMAGE = PREFIX + "currentImage"
FIRST_PIVOT_CONFIG = PREFIX + "firstPivotConfig"
"""The config of the machine's first boot."""
STATE = PREFIX + "state"
REASON = PREFIX + "reason"
POST_CONFIG_ACTION = PREFIX + "post-config-action"
DESIRED_DRAIN = PREFIX + "desiredDrain"
IMAGE_FILES = OWN_PREFIX + "image-files"
"""Written by the rollout controller: ``baked`` or ``write``; absent means the agent's settings."""
HEALTH_MODE = OWN_PREFIX + "health-mode"
"""Likewise: ``enforce``, ``report`` or ``off``."""
RETRY = OWN_PREFIX + "retry"
"""A new value ends the quarantine of a target. The rollout controller copies that of the pool."""
POOL_RETRY = OWN_PREFIX + "pool-retry"
"""The last value that the rollout controller copied from the pool."""
BOOTED_DIGEST = OWN_PREFIX + "booted-digest"
"""The digest of the booted manifest, where the current image names a manifest list."""
PROGRESS = OWN_PREFIX + "progress"
"""Percentage of the running transaction of the operating system, such as ``40%``; for tables."""
BOOTSTRAP_REGISTRY = OWN_PREFIX + "bootstrap-registry"
"""``HOST:PORT`` of the registry on the bootstrap host while the node uses it."""
PRESTAGED = OWN_PREFIX + "prestaged"
"""The pre-staged image."""
PRESTAGE_ERROR = OWN_PREFIX + "prestage-error"
"""The requested image, a colon, and the reason why it is not pre-staged."""

# Written by the drain controller. The MCO knows only the first one.
LAST_APPLIED_DRAIN = PREFIX + "lastAppliedDrain"
DRAIN = OWN_PREFIX + "drain"
DRAIN_BLOCKED = OWN_PREFIX + "drain-blocked"
LAST_OUTAGE = OWN_PREFIX + "last-outage"
"""Begin and end of the last drain, as two RFC 3339 times with a slash between; for tables."""

# Of a MachineConfig that the generate controller writes, and of the object that it comes from.
GENERATED_FROM = OWN_PREFIX + "generated-from"
"""Kind and name of each source object, separated by commas."""
CONFIG_NAME_SUFFIX = PREFIX + "mc-name-suffix"
"""Of a KubeletConfig or ContainerRuntimeConfig: the end of the names of its MachineConfigs."""
BUILT_IN_POOL = PREFIX + "mco-built-in"
"""Label of the pools that get the registries and policies of the cluster."""

# Of a rendered MachineConfig, written by the render controller.
RELEASE_VERSION = PREFIX + "release-image-version"

# Of a MachineOSConfig. The build controller writes the first one, users the second.
CURRENT_BUILD = PREFIX + "current-machine-os-build"
REBUILD = PREFIX + "rebuild"

# Of a MachineOSConfig, written by users.
PRE_BUILT_IMAGE = PREFIX + "pre-built-image"
"""Image by digest that machines of the pool get from their first boot on."""
BUILD_SEES_CONFIG = OWN_PREFIX + "build-sees-config"
"""``true``: the files of the rendered config lie below the user's Containerfile too."""
BUILD_CONTEXT = OWN_PREFIX + "context"
"""Name of a ConfigMap with files for COPY."""
BUILD_DEADLINE = OWN_PREFIX + "build-deadline"
"""Seconds until a Job is ended."""
BASE_IMAGE = OWN_PREFIX + "base-image"
"""Pull spec of the base image in place of that of the rendered config; may be a tag."""
REBUILD_SCHEDULE = OWN_PREFIX + "rebuild-schedule"
"""Windows to resolve the tag of the base image again: JSON in the format of a RolloutPolicy."""

# Of a MachineOSConfig, written by the build controller.
RESOLVED_BASE = OWN_PREFIX + "resolved-base"
"""JSON: the image that the tag in the annotation for the base image stands for, and since when."""

# Of a MachineOSBuild, written by the build controller.
JOB_UID = PREFIX + "job-uid"
CONTENT_KEY = OWN_PREFIX + "content-key"
"""16 hex digits over everything that the image is built from, without the config's files."""
BUILD_REPORT = OWN_PREFIX + "build-report"
"""JSON of at most 8 KiB: last output, attempts, seconds per phase."""

SYSTEM_IMAGE = OWN_PREFIX + "system-image"
"""Pull spec of the image without the config's files, which builds of the same key use again."""
PUSHED_IMAGES = OWN_PREFIX + "pushed-images"
"""Images of builds, which may be deleted from the registry when nothing refers to them."""
SYSTEMS = OWN_PREFIX + "systems"
"""JSON: keys, Job and image of each architecture's system part, if a build has several ones."""
BUILD_ARCHITECTURES = OWN_PREFIX + "architectures"
"""Architectures of an image, with commas between them."""
REBUILD_OF = OWN_PREFIX + "rebuild-of"
"""UID of the build that a rebuild replaces; on the MachineOSConfig until the rebuild exists."""
PREVIOUS_FAILURE = OWN_PREFIX + "previous-failure"
"""Why the build failed that a rebuild replaced."""

# Of a Secret, written by the install controller.
ADOPTED_DATA = OWN_PREFIX + "adopted-data"
"""SHA-256 of the data that an installation brought; different data are those of another writer."""

# Of the ConfigMap and the Secrets that the Job of a build mounts, written by the build controller.
WRITTEN_BY = OWN_PREFIX + "written-by"
"""The process that wrote the object: the write of another one differs, and changes its version."""

# Labels of a MachineOSBuild and of the objects of its Job.
TARGET_POOL = PREFIX + "target-machine-config-pool"
RENDERED_CONFIG = PREFIX + "rendered-machine-config"
IMAGE_CONFIG = PREFIX + "machine-os-config"
IMAGE_BUILD = PREFIX + "machine-os-build"
EPHEMERAL_BUILD_OBJECT = PREFIX + "ephemeral-build-object"
BUILD_KEY = OWN_PREFIX + "build-key"
"""Builds with the same value share a Job: content key, push repository and push Secret."""
BUILD_ATTEMPT = OWN_PREFIX + "build-attempt"
BUILD_ARCHITECTURE = OWN_PREFIX + "build-architecture"
"""Of a Job, if its build has several."""

# The three spellings of the desired OS image, and the annotation that reports the current one.
IMAGE_SPELLINGS: dict[str, str] = {
    DESIRED_OS_IMAGE: CURRENT_OS_IMAGE,
    DESIRED_OS_IMAGE_ALTERNATE: CURRENT_OS_IMAGE_ALTERNATE,
    DESIRED_IMAGE: CURRENT_IMAGE,
}

REASON_LIMIT = 2000
"""Maximum length of a reason; the MCD truncates with ``%.2000s``."""


class NodeState(StrEnum):
    """Values of the ``state`` annotation."""

    WORKING = "Working"
    DONE = "Done"
    DEGRADED = "Degraded"
    UNRECONCILABLE = "Unreconcilable"
