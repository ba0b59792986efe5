"""In which order nodes are taken when not all can go at once."""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from treenail.controllers.rollout.nodes import NodeFacts


def by_zone(nodes: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Zone after zone, those without one last; the oldest node of a zone first.

    It is the order of the Machine Config Operator: at any time one zone is disturbed.
    """
    return tuple(sorted(nodes, key=lambda node: (node.zone == "", node.zone, node.created)))


def spread(nodes: Iterable[NodeFacts], busy: Iterable[NodeFacts]) -> tuple[NodeFacts, ...]:
    """Always the zone where the fewest nodes are out of service; its oldest node first.

    ``busy`` are the nodes that are out of service already.
    """
    queues: dict[str, deque[NodeFacts]] = defaultdict(deque)
    for node in by_zone(nodes):
        queues[node.zone].append(node)
    out = Counter(node.zone for node in busy)
    waiting = [(out[zone], zone == "", zone) for zone in queues]
    heapq.heapify(waiting)
    found = []
    while waiting:
        taken, unnamed, zone = heapq.heappop(waiting)
        found.append(queues[zone].popleft())
        if queues[zone]:
            heapq.heappush(waiting, (taken + 1, unnamed, zone))
    return tuple(found)
