"""Who is next, and how many at once.

`find_candidates` decides as the Machine Config Operator does. `find_redirectable` goes beyond it: a node that
is out of service on its way to another target can turn at no cost to anybody.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api.machineconfigpool import ARBITER
from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.errors import ConfigError

_PERCENTAGE = re.compile(r"\+?([0-9]{1,9})%")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may be given the target, in the order they came, and how many of them now."""

    nodes: tuple[NodeFacts, ...] = ()
    capacity: int = 0


def find_candidates(
    nodes: Iterable[NodeFacts], target: RolloutTarget, max_unavailable: int
) -> Candidates:
    """Nodes in service that are not asked for the target yet.

    What is left of ``max_unavailable`` is less by the nodes out of service, and by those in
    service that fail on this very target.
    """
    seen = tuple(nodes)
    capacity = max_unavailable - sum(node.is_unavailable for node in seen)
    found = []
    for node in seen:
        if node.is_assigned(target):
            capacity -= node.is_failing and node.is_in_service
        elif node.is_in_service:
            found.append(node)
    if capacity <= 0:
        return Candidates()
    return Candidates(tuple(found), capacity)


def find_redirectable(nodes: Iterable[NodeFacts], target: RolloutTarget) -> tuple[NodeFacts, ...]:
    """Nodes that already count as unavailable because they are on their way to another target.

    They include those that failed there and were left cordoned, be it on their very first target;
    without this they would hold the capacity that giving them a better target needs.
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
    """How many of ``nodes`` may be unavailable at once, at least 1.

    ``spec`` is a count, or a percentage that is rounded down; 1 by default, and always for the
    arbiter pool. Raises `ConfigError` for anything else.
    """
    match spec:
        case None:
            wanted = 1
        case int() if spec >= 0:
            wanted = spec
        case str() if found := _PERCENTAGE.fullmatch(spec):
            wanted = nodes * int(found[1]) // 100
        case _:
            raise ConfigError(
                f"spec.maxUnavailable of pool {pool} is {spec!r:.40}, which is neither a count nor "
                "a percentage",
                remedy="set it to a number such as 2, or to a percentage such as 10%",
            )
    return 1 if pool == ARBITER else max(wanted, 1)
