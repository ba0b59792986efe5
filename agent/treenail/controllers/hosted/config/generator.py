"""The config of a NodePool from its documents, its release and the Secrets of its cluster.

Pure. The sources are those of HyperShift's NodePool controller (nodepool/config.go).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api import decode
from treenail.api.hosted import nodepool
from treenail.controllers.hosted.config import pool_config


@dataclass(frozen=True, slots=True)
class ConfigInputs:
    """What the config of a NodePool is made from; ConfigMaps are API objects."""

    pool: nodepool.NodePool
    cluster: nodepool.HostedCluster
    config_maps: Mapping[str, decode.Json | None] = field(default_factory=dict, repr=False)
    """Those that ``spec.config`` names, from the namespace of the pool; None for a missing one."""
    core_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Those with label `annotations.CORE_CONFIG` ``true`` in the namespace of the control plane."""
    pool_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Of the Node Tuning Operator, and those with label `annotations.POOL`, of this pool."""
    release_config_maps: Sequence[decode.Json] = field(default=(), repr=False)
    """Those with label `annotations.RELEASE` in the namespace of the pool, of any version.

    The pool's ``spec.release.image`` chooses the release among them.
    """
    pull_secret: bytes | None = field(default=None, repr=False)
    """Value ``.dockerconfigjson`` of the Secret in the HostedCluster; None for a missing one."""
    trust_bundle: bytes | None = field(default=None, repr=False)
    """Value ``ca-bundle.crt`` of the ConfigMap in the HostedCluster; None for a missing one."""
    ssh_key: bytes | None = field(default=None, repr=False)
    """Value ``id_rsa.pub`` of the Secret in the HostedCluster; None without one."""
    has_hypershift: bool = False
    """HyperShift made the control plane: its core ConfigMaps come, and its drainer runs."""


def generate_config(inputs: ConfigInputs) -> pool_config.PoolConfig:
    """Render the config of a NodePool; raise `pool_config.PoolConfigError`."""
    raise NotImplementedError


def build_upgrade_payload(config: pool_config.PoolConfig) -> str:
    """Return the payload of an in-place update: base64 of a gzipped Ignition config.

    Raises `pool_config.PoolConfigError` with reason PayloadTooLarge, which names the largest files.
    """
    raise NotImplementedError
