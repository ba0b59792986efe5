"""Decide about the Secrets that new machines of a NodePool fetch their config with. Pure.

A token Secret has one config and the token for it; its name has the target hash. A user-data Secret
points a machine to the Ignition server, with a token. Templates of machines name it, so that it
keeps its name while nothing must roll, and then leads to another token Secret.

A token is replaced every 5.5 h and accepted for 5.5 h more. A machine that is younger can thus
always fetch, also with the token Secret of a template that was replaced meanwhile.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api import decode
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.config import pool_config

_RECHECK_S = 600.0


@dataclass(frozen=True, slots=True)
class IgnitionEndpoint:
    """Where machines fetch their config."""

    url: str
    """``https://HOST:PORT``, without a path."""
    authorities: bytes = field(default=b"", repr=False)
    """CAs of the server's certificate, PEM; without them machines trust the CAs of their image."""
    proxy: decode.Json = field(default_factory=dict)
    """Field ``proxy`` of Ignition: httpProxy, httpsProxy, and the list noProxy."""


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """Facts about a NodePool and its Secrets, which are in the namespace of the control plane."""

    pool: nodepool.NodePool
    namespace: str
    """Namespace of the control plane."""
    config: pool_config.PoolConfig | None
    """None while it cannot be generated: tokens are renewed all the same."""
    rolled_hash: str
    """Hash in the name of the user-data Secret that the template of the pool names, or will name.

    Empty for a pool that never had a config.
    """
    endpoint: IgnitionEndpoint
    found: Mapping[str, decode.Json] = field(repr=False)
    """Secrets of the namespace by name: those with `token_secret.TOKEN_LABEL` or `USER_DATA_LABEL`,
    and for KubeVirt each ``USER-DATA-userdata``. Those of other pools and programs stay as they
    are."""
    machines: Sequence[clusterapi.ClusterMachine]
    """All machines of the pool."""
    now: float
    templates: Collection[str] = ()
    """User-data Secrets that the MachineDeployment and MachineSets with replicas name: another
    machine may boot from them."""
    payload: str = field(default="", repr=False)
    """For InPlace: gzip and base64 of the Ignition config for nodes; empty if there is none."""
    payload_reason: str = "AsExpected"
    payload_message: str = "Payload generated successfully"
    """Why there is no payload; as the condition ValidGeneratedPayload."""
    pull_secret: bytes = field(default=b"", repr=False)
    trust_bundle: bytes = field(default=b"", repr=False)
    """Contents whose digests the token Secret has."""
    reached: str = ""
    """Target hash that a machine fetched last: the value of `token_secret.REACHED_CONFIGMAP`."""


@dataclass(frozen=True, slots=True)
class SecretDeletion:
    """A Secret that goes, with the preconditions of the request."""

    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class SecretPlan:
    """Writes, in this order, and deletions after them."""

    writes: tuple[decode.Json, ...] = field(default=(), repr=False)
    """Whole Secrets. One with ``metadata.resourceVersion`` is an update, else it is created."""
    deletions: tuple[SecretDeletion, ...] = ()
    recheck_s: float = _RECHECK_S
    """Seconds until the next decision by the clock; at least 1."""
    changes: tuple[str, ...] = ()
    """What is done and why, for logs; contains nothing secret."""


def plan_secrets(facts: SecretFacts, new_token: Callable[[], str]) -> SecretPlan:
    """Return what to do with the Secrets of a pool; nothing if all is as it should be.

    ``new_token`` makes a token, such as a random UUID. Write in the order of the plan, and stop at
    the first error: a later plan goes on. Raises `ConfigError` if another program has a Secret of
    the same name.
    """
    raise NotImplementedError
