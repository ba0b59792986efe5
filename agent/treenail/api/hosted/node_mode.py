"""The file that switches the agent of a node to hosted mode, and the names that follow from it.

The generator of a NodePool's config writes the file, the agent reads it.
"""

import hashlib
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api import disruptionpolicy
from treenail.api.hosted import annotations as hosted_key
from treenail.encoding import codec

PATH = "/etc/treenail/hosted.json"
INSTALLED_PATH = "/var/lib/treenail/hosted/mode.json"
"""The same for an agent that an upgrade pod installed; it has precedence."""
CONFIG_KEY, HASH_KEY = "config", "hash"
"""Keys of the ConfigMap: gzip and base64 of an Ignition config, and the hash that names it."""
MODE_KEY, REFRESH = "mode", "refresh"
"""A third key, and its value where the agent may neither drain nor reboot; else it is missing."""
NAMESPACE_PREFIX = "treenail-upgrade-"
VARIABLE = "TREENAIL_HOSTED_MODE"
"""Variable of an upgrade pod with the same content: a Machine Config Daemon ignores it."""
EXIT_DONE = 6
"""Exit code of an agent that an upgrade pod installed, and that has nothing left to do."""
_NAMESPACE_LIMIT = 63
_NONE = (disruptionpolicy.NonePolicyAction(),)
# The agent reads the file again when it changes.
_OWN_FILES = (disruptionpolicy.FileDisruptionPolicy(PATH, _NONE),)
DISRUPTION_POLICY = disruptionpolicy.DEFAULT_POLICY.override_with(
    disruptionpolicy.DisruptionPolicy(_OWN_FILES)
)
"""Decides about drains and reboots: the hosted cluster's own policy must not."""


@dataclass(frozen=True, slots=True)
class HostedMode(codec.JsonObject, is_strict=True):
    """The settings of the agent of a hosted node. An unknown field is an error."""

    node_pool: codec.NonEmptyText
    """Name of the NodePool."""
    upgrade_namespace: codec.NonEmptyText
    """Namespace of the ConfigMap in the hosted cluster."""
    drain_annotation: str = key.DESIRED_DRAIN
    """Annotation of the Node in which the agent asks for a drain."""

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap with the config, in ``upgrade_namespace``."""
        return f"{self.node_pool}-upgrade"

    @property
    def applied_drain_annotation(self) -> str:
        """Annotation of the Node in which the drainer repeats what it has done.

        HyperShift's drainer acts whenever its own two annotations differ.
        """
        is_shared = self.drain_annotation == key.DESIRED_DRAIN
        return key.LAST_APPLIED_DRAIN if is_shared else hosted_key.HOSTED_APPLIED_DRAIN


def name_upgrade_namespace(node_pool: str) -> str:
    """Return the namespace that treenail makes in a hosted cluster; at most 63 characters.

    HyperShift's own is ``NODE_POOL-upgrade``.
    """
    name = f"{NAMESPACE_PREFIX}{node_pool.replace('.', '-')}"
    if len(name) <= _NAMESPACE_LIMIT and "." not in node_pool:
        return name
    digest = hashlib.sha256(node_pool.encode()).hexdigest()[:8]
    return f"{name[: _NAMESPACE_LIMIT - 9].rstrip('-')}-{digest}"
