"""In which order nodes are taken when not all can go at once."""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from treenail.controllers.rollout.nodes import NodeFacts


def sort_by_zone(nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Zone after zone, those without one last; the oldest node of a zone first.

    It is the order of the Machine Config Operator: at any time one zone is disturbed.
    """
    return tuple(sorted(nodes, key=lambda node: (node.zone == "", node.zone, node.created_at)))


def spread_over_zones(
    nodes: Iterable[NodeFacts], unavailable_nodes: Iterable[NodeFacts]
) -> tuple[NodeFacts, ...]:
    """Always the zone where the fewest nodes are out of service; its oldest node first.

    ``unavailable_nodes`` are the nodes that are out of service already.
    """
    queues: dict[str, deque[NodeFacts]] = defaultdict(deque)
    for node in sort_by_zone(nodes):
        queues[node.zone].append(node)
    out = Counter(node.zone for node in unavailable_nodes)
    waiting = [(out[zone], zone == "", zone) for zone in queues]
    heapq.heapify(waiting)
    found = []
    while waiting:
        taken, unnamed, zone = heapq.heappop(waiting)
        found.append(queues[zone].popleft())
        if queues[zone]:
            heapq.heappush(waiting, (taken + 1, unnamed, zone))
    return tuple(found)
