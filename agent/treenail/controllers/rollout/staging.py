"""Which nodes stage the image ahead, while they serve: opt-in, before the first one is drained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.policy import Policy


@dataclass(frozen=True, slots=True)
class Staging:
    """What to ask of nodes now, by name."""

    ask: tuple[str, ...] = ()
    """To stage the target."""
    take_back: tuple[str, ...] = ()
    """Not to stage anything any more."""
    waiting: str = ""
    """Why no node may be drained yet; empty when one may."""


def staging(
    policy: Policy, nodes: Sequence[NodeFacts], target: Target, *, stopped: bool
) -> Staging:
    """What to ask of the nodes, when nothing is ``stopped``; else what was asked is taken back."""
    at_once = None if stopped else policy.staged_at_once
    if at_once is None or not target.image:
        return Staging(take_back=_names(node for node in nodes if node.stage is not None))
    todo = [node for node in nodes if not ready(node, target)]
    serving = [node for node in todo if node.healthy]
    # What is pulled already costs the registry nothing.
    again = [node for node in serving if node.stage != target and _pulls(node, target)]
    fresh = [node for node in serving if not _pulls(node, target)]
    under_way = [node for node in serving if _pulls(node, target) and not node.staging_error]
    ask = [*again, *fresh[: max(at_once - len(under_way), 0)]]
    stale = [
        node
        for node in nodes
        if node.stage is not None and (node.asked_for(target) or not _pulls(node, target))
    ]
    begun = any(node.asked_for(target) for node in nodes)
    left = [node for node in serving if not node.staging_error or node.stage != target]
    waiting = ""
    if left and not begun:
        waiting = f"{len(nodes) - len(todo)} of {len(nodes)} nodes have staged the image"
    chosen = _names(ask)
    return Staging(chosen, tuple(name for name in _names(stale) if name not in chosen), waiting)


def ready(node: NodeFacts, target: Target) -> bool:
    """The node need not stage the target ahead, because it has, or because it can't.

    A node that is not at rest at what it was asked for has nothing to stage ahead of.
    """
    return (
        (node.stage == target and node.staged == target.image)
        or node.current_image == target.image
        or node.asked_for(target)
        or not node.done
    )


def _pulls(node: NodeFacts, target: Target) -> bool:
    return node.stage is not None and node.stage.image == target.image


def _names(nodes: Iterable[NodeFacts]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
