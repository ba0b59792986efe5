"""Facts about one NodePool of HyperShift, with a list of what could not be read.

No fact has the content of a Secret; `PoolFacts.stale_copies` is the result of a comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api import node, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.conduct import pool_facts


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """A token Secret without its tokens; ``reason`` and ``message`` are the Ignition server's."""

    has_token: bool = False
    has_payload: bool = False
    """True for InPlace, whose payload the Ignition server stores; not for Replace."""
    reason: str = ""
    """Empty until the Ignition server rendered or failed to."""
    message: str = ""
    rotated_at: str = ""
    """When the token was made, in RFC 3339; empty if HyperShift did not say."""
    expires_at: str | None = None
    """None for a token without an end; HyperShift counts a malformed time as passed."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One NodePool with its objects; None and empty also mean what ``unread`` names."""

    pool: nodepool.NodePool
    cluster: nodepool.HostedCluster | None = None
    template: clusterapi.MachineSet | clusterapi.MachineDeployment | None = None
    """The MachineDeployment of Replace, the MachineSet of InPlace."""
    machines: tuple[clusterapi.ClusterMachine, ...] = ()
    core_configs: int | None = None
    """How many ConfigMaps have the core of the config; None if they could not be counted."""
    token_name: str = ""
    """The token Secret of new machines; empty if it was not read, so that none is no fact."""
    token: TokenFacts | None = None
    """That Secret; None if it does not exist."""
    stale_copies: tuple[str, ...] = ()
    """Secrets whose token ended: copies of user data that a new machine uses.

    The KubeVirt provider writes a copy once (cluster-api-provider-kubevirt#169).
    """
    conducted: tuple[object_meta.Condition, ...] | None = ()
    """What treenail says of the rollout that it conducts; None if it could not be read."""
    nodes: Mapping[str, node.Node] | None = None
    """Nodes in the hosted cluster, for InPlace; None if they were not read."""
    unread: tuple[str, ...] = ()
    """What was not looked at, and why."""

    @property
    def wanted_hash(self) -> str:
        """Hash that the owner works towards; empty before it made its first template."""
        if isinstance(self.template, clusterapi.MachineSet):
            return self.template.own_target or self.template.target_hash
        return self.pool.read_secret_hash(self.template.data_secret) if self.template else ""

    @property
    def current_hash(self) -> str:
        """Hash that all nodes have; empty before the first nodes exist."""
        if isinstance(self.template, clusterapi.MachineSet):
            updated = self.template.updated_config
            return self.template.current_hash if updated is None else updated
        return self.pool.current_hash

    @property
    def is_refreshing(self) -> bool:
        """Whether nodes get a config that needs neither drain nor reboot, and not all have it."""
        if self.cluster is None:
            return False
        return pool_facts.PoolObjects(
            self.pool, self.cluster, self.template, machines=self.machines,
            is_owned=self.owner == "treenail",
        ).is_refresh  # fmt: skip

    @property
    def owner(self) -> str:
        """The program that owns the NodePool: HyperShift, or treenail's controller."""
        notes = self.template.metadata.annotations if self.template else {}
        is_scoped = self.cluster is not None and self.cluster.scope == hosted_key.OWN_SCOPE
        return "treenail" if is_scoped or hosted_key.ROLLOUT_CONFIG in notes else "HyperShift"

    @property
    def wanted_version(self) -> str:
        return self.template.version if self.template else ""

    @property
    def control_plane(self) -> str:
        """The namespace of the control plane; empty without a HostedCluster."""
        return self.cluster.control_plane_namespace if self.cluster else ""


@dataclass(frozen=True, slots=True)
class UnreadPool:
    """A NodePool that cannot be read, such as that of a newer HyperShift."""

    namespace: str
    name: str
    problem: str

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"
