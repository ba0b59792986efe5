"""Annotation and label keys of HyperShift and of Cluster API, and who writes each."""

from treenail.api import annotations

PREFIX = "hypershift.openshift.io/"
CAPI_PREFIX = "cluster.x-k8s.io/"

NODE_POOL = PREFIX + "nodePool"
"""``NAMESPACE/NAME`` of the NodePool; of MachineDeployments, MachineSets, Machines and Secrets.

The label of the same key has the name alone.
"""
SCOPE = PREFIX + "scope"
"""Of a HostedCluster: the operator that manages it."""
OWN_SCOPE = "treenail"
"""The scope of the controller ``nodepools`` unless a user chooses another one."""

# Of a NodePool, written by HyperShift's NodePool controller.
CURRENT_CONFIG = PREFIX + "nodePoolCurrentConfig"
"""Hash of the config without the version that all nodes have."""
CURRENT_CONFIG_VERSION = PREFIX + "nodePoolCurrentConfigVersion"
"""Hash of config and version; of a NodePool, and of a MachineSet by the in-place upgrader."""
CURRENT_ROLLOUT_CONFIG = PREFIX + "nodePoolCurrentRolloutConfig"
"""Hash of what rolls nodes (hypershift#8698)."""
PLATFORM_TEMPLATE = PREFIX + "nodePoolPlatformMachineTemplate"
"""Name of the infrastructure template that all machines have."""
FINALIZER = PREFIX + "finalizer"
"""Of a NodePool: the finalizer of its owner, HyperShift or treenail."""

# Of a MachineSet. The NodePool controller writes the target and the limit.
TARGET_CONFIG_VERSION = PREFIX + "nodePoolTargetConfigVersion"
MAX_UNAVAILABLE = PREFIX + "nodePoolMaxUnavailable"
UPGRADE_RUNNING = PREFIX + "nodePoolUpgradeInProgressTrue"
UPGRADE_STOPPED = PREFIX + "nodePoolUpgradeInProgressFalse"
"""Why the in-place upgrader stopped. Both values are messages."""

# Of a token Secret.
TOKEN_TIME = PREFIX + "last-token-generation-time"
TOKEN_EXPIRATION = PREFIX + "ignition-token-expiration-timestamp"

CORE_CONFIG = PREFIX + "core-ignition-config"
"""Label of ConfigMaps with parts of the config, in the namespace of the control plane."""

# Label of Machines, written by Cluster API.
CLUSTER_NAME = CAPI_PREFIX + "cluster-name"

# Written by users, read by treenail.
ROLLOUT_POLICY = annotations.OWN_PREFIX + "rollout-policy"
"""Of a NodePool: the RolloutPolicy that conducts its rollouts."""

# Of a NodePool that treenail owns, written by users.
MACHINE_TEMPLATE = annotations.OWN_PREFIX + "machine-template"
"""``KIND/NAME`` of the user's infrastructure template, in the namespace of the control plane."""
CAPACITY = annotations.OWN_PREFIX + "capacity"
"""Resources of a machine for the autoscaler, such as ``cpu=4,memory=16Gi``."""
REFRESH = annotations.OWN_PREFIX + "refresh"
"""``InPlace``: changes that need neither drain nor reboot go to the nodes of a Replace pool too.

Of an agent's copy of a config: the agent may neither drain nor reboot for it.
"""

# Of a MachineSet that treenail owns, written by treenail.
TARGET_CONFIG = annotations.OWN_PREFIX + "target-config"
"""``targetHash`` that the nodes of the set should have."""
UPDATED_CONFIG = annotations.OWN_PREFIX + "updated-config"
"""``targetHash`` that all nodes of the set have; empty from an update's first node to its last."""
UPDATED_ROLLOUT = annotations.OWN_PREFIX + "updated-rollout"
"""The hash in the name of the user data that belongs to the config of all nodes; else empty."""
ROLLOUT_CONFIG = annotations.OWN_PREFIX + "rollout-config"
"""Also of a MachineDeployment: the ``rolloutHash`` that its template was made for."""

# Labels of ConfigMaps that users write.
RELEASE = annotations.OWN_PREFIX + "release"
"""Version of the release whose base MachineConfigs the ConfigMap has."""
POOL = annotations.OWN_PREFIX + "node-pool"
"""Name of the NodePool in the same namespace whose nodes get the MachineConfigs too."""

# Of a Node of a hosted cluster.
SERVICE_BOOT = annotations.OWN_PREFIX + "service-boot"
"""Written by the agent of the image: the boot in which it runs, as ``status.nodeInfo.bootID``."""
HOSTED_DRAIN = annotations.OWN_PREFIX + "desired-drain"
"""Like ``desiredDrain``, where HyperShift's drainer runs too and must not see it."""
HOSTED_APPLIED_DRAIN = annotations.OWN_PREFIX + "last-applied-drain"
"""Like ``lastAppliedDrain``, for `HOSTED_DRAIN`: HyperShift's drainer would undo our drain."""
GLOBAL_PULL_SECRET = PREFIX + "nodepool-globalps-enabled"
"""Label: HyperShift's global pull secret writes the kubelet's pull secret on the node."""
