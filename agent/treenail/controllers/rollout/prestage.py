"""Prestaging: serving nodes pull the image before the first node is drained (opt-in)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treenail.controllers.pools.nodes import NodeFacts, RolloutTarget
from treenail.controllers.pools.policy import RolloutPolicy


@dataclass(frozen=True, slots=True)
class PrestageRequests:
    """Prestage requests to write now, by node name."""

    nodes_to_request: tuple[str, ...] = ()
    """Nodes to prestage the target."""
    nodes_to_withdraw: tuple[str, ...] = ()
    """Nodes whose request is obsolete."""
    waiting_reason: str = ""
    """Why no node may be drained yet, or empty."""


def decide_prestage_requests(
    policy: RolloutPolicy, nodes: Sequence[NodeFacts], target: RolloutTarget, *, is_stopped: bool
) -> PrestageRequests:
    """Decide which nodes prestage the target; withdraw all requests when ``is_stopped``."""
    max_parallel = None if is_stopped else policy.prestage_max_parallel
    if max_parallel is None or not target.image:
        return PrestageRequests(
            nodes_to_withdraw=_get_names(node for node in nodes if node.prestage_target is not None)
        )
    unstaged = [node for node in nodes if not is_prestage_done(node, target)]
    serving = [node for node in unstaged if node.is_healthy]
    # A node that already pulls this image for another config costs the registry nothing more.
    retargeted = [
        node for node in serving if node.prestage_target != target and _is_pulling(node, target)
    ]
    idle = [node for node in serving if not _is_pulling(node, target)]
    pulling = [node for node in serving if _is_pulling(node, target) and not node.prestage_error]
    chosen = [*retargeted, *idle[: max(max_parallel - len(pulling), 0)]]
    stale = [
        node
        for node in nodes
        if node.prestage_target is not None
        and (node.is_assigned(target) or not _is_pulling(node, target))
    ]
    has_begun = any(node.is_assigned(target) for node in nodes)
    pending = [
        node for node in serving if not node.prestage_error or node.prestage_target != target
    ]
    waiting = ""
    if pending and not has_begun:
        staged = len(nodes) - len(unstaged)
        waiting = f"waiting: {staged} of {len(nodes)} nodes have prestaged the image"
    names = _get_names(chosen)
    return PrestageRequests(
        names, tuple(name for name in _get_names(stale) if name not in names), waiting
    )


def is_prestage_done(node: NodeFacts, target: RolloutTarget) -> bool:
    """True when the node need not prestage: it has the image, or an update is in progress."""
    return (
        (node.prestage_target == target and node.prestaged_image == target.image)
        or node.current_image == target.image
        or node.is_assigned(target)
        or not node.is_done
    )


def _is_pulling(node: NodeFacts, target: RolloutTarget) -> bool:
    return node.prestage_target is not None and node.prestage_target.image == target.image


def _get_names(nodes: Iterable[NodeFacts]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
