"""Selection and order of the nodes that get the target next.

`find_candidates` decides as the Machine Config Operator does (getAllCandidateMachines in
node_controller.go), with two deliberate differences: a failing node that is out of service uses
capacity once, and an invalid limit is refused for the pool arbiter, too. `find_redirectable` goes
beyond it: a node that is out of service on its way to another target gets the new one without any
further loss of capacity.
"""

import heapq
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treenail.api.machineconfigpool import ARBITER
from treenail.controllers.pools import node_facts, rollout_policy
from treenail.errors import ConfigError

CONTROL_PLANE_LABELS = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
ETCD_LABELS = (*CONTROL_PLANE_LABELS, "node-role.kubernetes.io/arbiter")
"""A node with one of these counts as a member of etcd."""
SMALLEST_QUORUM = 3
"""With fewer members etcd stops while one is down."""

_RESERVED_LABEL = re.compile(r"([^/]+\.)?(kubernetes|k8s)\.io/.+")
# The exceptions of NodeRestriction (well_known_labels.go of the kubelet).
_KUBELET_LABEL = re.compile(
    r"([^/]+\.)?(kubelet|node)\.kubernetes\.io/.+"
    r"|kubernetes\.io/hostname|beta\.kubernetes\.io/instance-type|(beta\.)?kubernetes\.io/(arch|os)"
    r"|(topology|failure-domain\.beta)\.kubernetes\.io/(region|zone)"
)

# kube-apiserver accepts a percentage with any number of digits.
PERCENTAGE = re.compile(r"\+?([0-9]{1,9})%")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may get the target, in the given order, and how many of them now."""

    nodes: tuple[node_facts.NodeFacts, ...] = ()
    capacity: int = 0


def find_candidates(
    nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget, max_unavailable: int
) -> Candidates:
    """Find nodes in service without this target, and the capacity left of ``max_unavailable``.

    Unavailable nodes use capacity, and so do nodes in service that fail on this target.
    """
    pool_nodes = tuple(nodes)
    capacity = max_unavailable - sum(node.is_unavailable for node in pool_nodes)
    candidates = []
    for node in pool_nodes:
        if node.is_assigned(target):
            capacity -= node.is_failing and node.is_in_service
        elif node.is_in_service:
            candidates.append(node)
    if capacity <= 0:
        return Candidates()
    return Candidates(tuple(candidates), capacity)


def find_redirectable(
    nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget
) -> tuple[node_facts.NodeFacts, ...]:
    """Find nodes that already count as unavailable because they are updating to another target.

    They include nodes that failed on it and stayed cordoned. Otherwise these would hold the
    capacity that a better target needs.
    """
    return tuple(
        node
        for node in nodes
        if node.is_unavailable
        and not node.is_done
        and (node.is_managed or node.is_degraded)
        and not node.is_assigned(target)
    )


def compute_max_unavailable(pool: str, spec: int | str | None, nodes: int) -> int:
    """Compute how many of ``nodes`` may be unavailable at the same time, at least 1.

    ``spec`` is a count or a percentage, which is rounded down (default: 1). The arbiter pool always
    gets 1. Raises `ConfigError` for any other value.
    """
    match spec:
        case None:
            limit = 1
        case int() if spec >= 0:
            limit = spec
        case str() if match := PERCENTAGE.fullmatch(spec):
            limit = nodes * int(match[1]) // 100
        case _:
            raise ConfigError(
                f"spec.maxUnavailable of pool {pool} is {spec!r:.40}, which is neither a count nor "
                "a percentage",
                remedy="set it to a number such as 2, or to a percentage such as 10%",
            )
    return 1 if pool == ARBITER else max(limit, 1)


def describe_zero_limit(spec: int | str | None) -> str:
    """Return that a ``maxUnavailable`` of zero stops no rollout; empty for another value."""
    if str(spec) not in {"0", "0%"}:
        return ""
    return f"maxUnavailable ({spec}) acts as 1, pause the pool to stop its rollout; "


def is_etcd_member(labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels counts as a member of etcd."""
    return not labels.keys().isdisjoint(ETCD_LABELS)


def limit_to_quorum(
    limit: int,
    nodes: Iterable[node_facts.NodeFacts],
    cluster_members: Iterable[node_facts.NodeFacts] = (),
) -> int:
    """Limit how many nodes of a pool may be unavailable, so that etcd keeps its quorum.

    ``cluster_members`` are the members of etcd in the whole cluster: in other pools, and in none.
    Without an unavailable one among them the limit is at least 1, because a cluster of one or two
    members could never update otherwise.
    """
    own = {node.name for node in nodes if is_etcd_member(node.labels)}
    if not own:
        return limit
    others = [node for node in cluster_members if node.name not in own]
    tolerated = max(1, (len(own) + len(others) - 1) // 2)
    return max(0, min(limit, tolerated - sum(node.is_unavailable for node in others)))


def can_node_set_label(label: str) -> bool:
    """Return whether NodeRestriction lets a node set the label on its own Node."""
    return not _RESERVED_LABEL.fullmatch(label) or _KUBELET_LABEL.fullmatch(label) is not None


def find_open_labels(policy: rollout_policy.RolloutPolicy) -> tuple[str, ...]:
    """Find labels in the selectors of waves with which a node can make itself a member."""
    selectors = [wave.selector for wave in policy.waves if wave.selector is not None]
    labels = {requirement.key for selector in selectors for requirement in selector.requirements}
    return tuple(sorted(filter(can_node_set_label, labels)))


def sort_nodes(
    order: rollout_policy.NodeOrder,
    nodes: Iterable[node_facts.NodeFacts],
    unavailable_nodes: Iterable[node_facts.NodeFacts] = (),
) -> tuple[node_facts.NodeFacts, ...]:
    """Sort nodes as the policy says; ``unavailable_nodes`` are already out of service."""
    match order:
        case rollout_policy.NodeOrder.ZONES:
            return sort_by_zone(nodes)
        case rollout_policy.NodeOrder.SPREAD:
            return spread_over_zones(nodes, unavailable_nodes)


def sort_by_zone(nodes: Iterable[node_facts.NodeFacts]) -> tuple[node_facts.NodeFacts, ...]:
    """Sort by zone, nodes without a zone last, and within a zone by age, the oldest first.

    The Machine Config Operator uses this order (sortNodeList in node_controller.go).
    """
    return tuple(sorted(nodes, key=lambda node: (node.zone == "", node.zone, node.created_at)))


def spread_over_zones(
    nodes: Iterable[node_facts.NodeFacts], unavailable_nodes: Iterable[node_facts.NodeFacts]
) -> tuple[node_facts.NodeFacts, ...]:
    """Take always the oldest node of the zone with the fewest unavailable nodes.

    ``unavailable_nodes`` are already out of service.
    """
    queues: dict[str, deque[node_facts.NodeFacts]] = defaultdict(deque)
    for node in sort_by_zone(nodes):
        queues[node.zone].append(node)
    unavailable = Counter(node.zone for node in unavailable_nodes)
    zones = [(unavailable[zone], zone == "", zone) for zone in queues]
    heapq.heapify(zones)
    ordered = []
    while zones:
        count, is_unnamed, zone = heapq.heappop(zones)
        ordered.append(queues[zone].popleft())
        if queues[zone]:
            heapq.heappush(zones, (count + 1, is_unnamed, zone))
    return tuple(ordered)
