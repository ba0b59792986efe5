"""Labels with which the Node of a new machine becomes a member of its token's pool.

A kubelet may not set labels such as node-role.kubernetes.io/worker on its Node (NodeRestriction),
and without them no pool selects the Node.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from treenail import clocks, errors, label_selector
from treenail.api import decode, machineconfigpool, object_meta
from treenail.api.node import Node
from treenail.controllers.pools.pool_membership import find_membership
from treenail.kube import api_client, event_recorder, resources
from treenail.provisioning.approval.request import KubeletRequest
from treenail.provisioning.tokens.certificates import IssuedCertificate

log = logging.getLogger(__name__)

MAX_AGE_S = 600.0
"""Age up to which a Node is labelled. A user may remove the labels of an older one."""
_MAX_DECIDED = 10_000
K = TypeVar("K")
T = TypeVar("T")
SKEW_S = 5.0
"""Tolerated difference between the clocks of this controller and of the API server."""


@dataclass(frozen=True, slots=True)
class RegisteredNode:
    """The parts of a Node that a decision depends on."""

    name: str
    uid: str = ""
    created_at: float = 0.0
    """Seconds since the epoch."""
    labels: tuple[tuple[str, str], ...] = ()
    is_ready: bool = False

    @classmethod
    def from_json(cls, document: decode.Json) -> "RegisteredNode":
        """Read a Node; raise `ConfigError`."""
        node = Node.from_json(document)
        meta = object_meta.read_metadata(document, "Node")
        created_at = clocks.parse_rfc3339(meta.created) or 0.0
        return cls(node.name, node.uid, created_at, tuple(meta.labels.items()), node.is_ready)


class PoolLabeler:
    """Labels each new Node once."""

    def __init__(
        self, client: api_client.Client, clock: clocks.Clock, recorder: event_recorder.EventRecorder
    ) -> None:
        self._client = client
        self._clock = clock
        self._recorder = recorder
        self._decided: dict[str, None] = {}
        """UIDs of the Nodes that were decided about, oldest first."""
        self._seen: dict[str, float] = {}
        """Monotonic time at which Nodes appeared after the first list, by UID, oldest first."""
        self._has_list = False

    def note_list(self) -> None:
        """Record that all Nodes of before this process are known."""
        self._has_list = True

    def note_node(self, node: RegisteredNode) -> None:
        """Record that the Node appeared now: the wall clocks of two hosts may differ."""
        if self._has_list:
            remember_value(self._seen, node.uid, self._clock.monotonic())

    def forget_decisions(self) -> None:
        """Decide about each Node again: a restore of etcd took labels away."""
        self._decided.clear()

    def label_node(
        self,
        request: KubeletRequest,
        node: RegisteredNode | None,
        pools: Collection[machineconfigpool.MachineConfigPool],
        list_others: Callable[[], Collection[IssuedCertificate]],
    ) -> None:
        """Label the Node of an approved request, if it is new; raise `ClusterError`.

        ``list_others`` returns the certificates that other machines may have for its name.
        """
        if node is None or not node.uid or node.uid in self._decided:
            return
        try:
            labels = choose_labels(
                node,
                request.pool,
                pools,
                requested_at=request.created_at,
                age_s=self._measure_age_s(node),
            )
            if labels:
                _check_name(node.name, labels, list_others())
                # The UID keeps the labels from another Node of this name.
                body: decode.Json = {"metadata": {"uid": node.uid, "labels": dict(labels)}}
                self._client.patch(resources.NODES, node.name, body)
                names = ", ".join(sorted(labels))
                log.info(
                    "labelled Node %s as a member of pool %s: %s", node.name, request.pool, names
                )
        except errors.ConfigError as error:
            message = "; ".join(filter(None, (str(error), error.remedy)))
            log.warning("%s", message)
            reference = event_recorder.ObjectReference(resources.NODES.kind, node.name, node.uid)
            self._recorder.record_warning(reference, "NotLabelled", message)
        except errors.NotFoundError:
            return
        # Not after another error, such as a conflict: another client changed this Node meanwhile,
        # or replaced it, which the watch shows before the next try.
        remember_value(self._decided, node.uid, None)

    def _measure_age_s(self, node: RegisteredNode) -> float:
        """Return the age of a Node; only one of before this process depends on the wall clock."""
        seen_at = self._seen.get(node.uid)
        if seen_at is not None:
            return self._clock.monotonic() - seen_at
        return self._clock.now() - node.created_at


def _check_name(
    node: str, labels: Mapping[str, str], others: Collection[IssuedCertificate]
) -> None:
    """Raise `ConfigError` if another machine can take the identity of the Node."""
    if others:
        until = clocks.format_rfc3339(max(other.expires for other in others))
        arguments = " ".join(f"{name}={value}" for name, value in labels.items())
        raise errors.ConfigError(
            f"cannot label Node {node}: another machine may have its certificate until {until}",
            remedy="make sure that the other machine is shut down, then run: "
            f"kubectl label node {node} {arguments}",
        )


def remember_value(known: dict[K, T], key: K, value: T) -> None:
    """Set a value, and forget the oldest of too many."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _MAX_DECIDED:
        del known[next(iter(known))]


def choose_labels(
    node: RegisteredNode,
    pool: str,
    pools: Collection[machineconfigpool.MachineConfigPool],
    *,
    requested_at: float,
    age_s: float,
) -> Mapping[str, str]:
    """Return the labels that a Node lacks; empty when it needs none.

    ``requested_at`` is the time of the certificate request. A Node from before it, a Node that a
    pool selects already, and a Node that is older than `MAX_AGE_S` get none. Raises `ConfigError`
    when labels cannot make it a member of the pool.
    """
    if node.created_at < requested_at - SKEW_S or age_s > MAX_AGE_S:
        return {}
    labels = dict(node.labels)
    if find_membership(node.name, labels, pools) is not None:
        return {}
    target_pool = next((candidate for candidate in pools if candidate.name == pool), None)
    if target_pool is None:
        raise errors.ConfigError(
            f"cannot label Node {node.name}: MachineConfigPool {pool} does not exist"
        )
    needed = _read_labels(target_pool)
    if not needed:
        raise errors.ConfigError(
            f"cannot label Node {node.name}: the nodeSelector of MachineConfigPool {pool} has "
            "requirements other than matchLabels",
            remedy=f"label it: kubectl label node {node.name} LABEL=VALUE",
        )
    membership = find_membership(node.name, labels | needed, pools)
    if membership is None or membership.primary != pool:
        other = membership.primary if membership else "no pool"
        raise errors.ConfigError(
            f"cannot label Node {node.name}: with the labels of MachineConfigPool {pool} it would "
            f"be a member of {other}"
        )
    return {name: value for name, value in needed.items() if labels.get(name) != value}


def _read_labels(pool: machineconfigpool.MachineConfigPool) -> dict[str, str] | None:
    """Return the labels of the pool's members; None if its selector says more than labels."""
    requirements = pool.node_selector.requirements if pool.node_selector else ()
    is_exact = all(
        requirement.operator is label_selector.SelectorOperator.IN and len(requirement.values) == 1
        for requirement in requirements
    )
    return (
        {requirement.key: requirement.values[0] for requirement in requirements}
        if is_exact
        else None
    )
