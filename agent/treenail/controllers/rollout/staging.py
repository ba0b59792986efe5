"""Which nodes stage the image ahead, while they serve: opt-in, before the first one is drained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treenail.controllers.rollout.nodes import NodeFacts, RolloutTarget
from treenail.controllers.rollout.policy import RolloutPolicy


@dataclass(frozen=True, slots=True)
class PrestageRequests:
    """What to ask of nodes now, by name."""

    nodes_to_request: tuple[str, ...] = ()
    """To stage the target."""
    nodes_to_withdraw: tuple[str, ...] = ()
    """Not to stage anything any more."""
    waiting_reason: str = ""
    """Why no node may be drained yet; empty when one may."""


def decide_prestage_requests(
    policy: RolloutPolicy, nodes: Sequence[NodeFacts], target: RolloutTarget, *, is_stopped: bool
) -> PrestageRequests:
    """What to ask of the nodes, when nothing is ``is_stopped``; else what was asked is taken back."""
    at_once = None if is_stopped else policy.prestage_max_parallel
    if at_once is None or not target.image:
        return PrestageRequests(
            nodes_to_withdraw=_get_names(node for node in nodes if node.prestage_target is not None)
        )
    todo = [node for node in nodes if not is_prestage_done(node, target)]
    serving = [node for node in todo if node.is_healthy]
    # What is pulled already costs the registry nothing.
    again = [
        node for node in serving if node.prestage_target != target and _is_pulling(node, target)
    ]
    fresh = [node for node in serving if not _is_pulling(node, target)]
    under_way = [node for node in serving if _is_pulling(node, target) and not node.prestage_error]
    ask = [*again, *fresh[: max(at_once - len(under_way), 0)]]
    stale = [
        node
        for node in nodes
        if node.prestage_target is not None
        and (node.is_assigned(target) or not _is_pulling(node, target))
    ]
    begun = any(node.is_assigned(target) for node in nodes)
    left = [node for node in serving if not node.prestage_error or node.prestage_target != target]
    waiting = ""
    if left and not begun:
        waiting = f"{len(nodes) - len(todo)} of {len(nodes)} nodes have staged the image"
    chosen = _get_names(ask)
    return PrestageRequests(
        chosen, tuple(name for name in _get_names(stale) if name not in chosen), waiting
    )


def is_prestage_done(node: NodeFacts, target: RolloutTarget) -> bool:
    """The node need not stage the target ahead, because it has, or because it can't.

    A node that is not at rest at what it was asked for has nothing to stage ahead of.
    """
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
