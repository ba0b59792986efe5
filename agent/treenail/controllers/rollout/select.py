"""Who is next, and how many at once.

`candidates` decides as the Machine Config Operator does. `redirected` goes beyond it: a node that
is out of service on its way to another target can turn at no cost to anybody.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api.machineconfigpool import ARBITER
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.errors import ConfigError

_PERCENTAGE = re.compile(r"\+?([0-9]{1,9})%")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may be given the target, in the order they came, and how many of them now."""

    nodes: tuple[NodeFacts, ...] = ()
    capacity: int = 0


def candidates(nodes: Iterable[NodeFacts], target: Target, max_unavailable: int) -> Candidates:
    """Nodes in service that are not asked for the target yet.

    What is left of ``max_unavailable`` is less by the nodes out of service, and by those in
    service that fail on this very target.
    """
    seen = tuple(nodes)
    capacity = max_unavailable - sum(node.unavailable for node in seen)
    found = []
    for node in seen:
        if node.asked_for(target):
            capacity -= node.failing and node.in_service
        elif node.in_service:
            found.append(node)
    if capacity <= 0:
        return Candidates()
    return Candidates(tuple(found), capacity)


def redirected(nodes: Iterable[NodeFacts], target: Target) -> tuple[NodeFacts, ...]:
    """Nodes that already count as unavailable because they are on their way to another target.

    They include those that failed there and were left cordoned, be it on their very first target;
    without this they would hold the capacity that giving them a better target needs.
    """
    return tuple(
        node
        for node in nodes
        if node.unavailable
        and not node.done
        and (node.managed or node.degraded)
        and not node.asked_for(target)
    )


def max_unavailable(pool: str, spec: int | str | None, nodes: int) -> int:
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
