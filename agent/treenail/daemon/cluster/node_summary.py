"""Reads what decisions need from the Node's annotations."""

from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.update.decision import desired
from treenail.update.decision.facts import DrainHandshake, ObservedNode
from treenail.update.state.boot_trial import HealthCheckMode
from treenail.update.state.record import Target


def summarize_node(node: Node) -> ObservedNode:
    """Return what decisions read of the Node."""
    annotations = node.annotations
    requested = desired.read_desired_target(annotations)
    spellings = (
        requested.image_keys
        if isinstance(requested, desired.DesiredTarget)
        else tuple(key.IMAGE_SPELLINGS)
    )
    health_mode = _read_health_mode(annotations.get(key.HEALTH_MODE))
    claimed_images = (annotations.get(key.IMAGE_SPELLINGS[each], "") for each in spellings)
    return ObservedNode(
        desired=requested,
        handshake=DrainHandshake(
            requested=annotations.get(key.DESIRED_DRAIN, ""),
            applied=annotations.get(key.LAST_APPLIED_DRAIN, ""),
            is_unschedulable=node.is_unschedulable,
        ),
        claimed=Target(
            annotations.get(key.CURRENT_CONFIG, ""), next(filter(None, claimed_images), "")
        ),
        prestage=desired.read_prestage_target(annotations),
        health_mode=health_mode,
        invalid_health_mode="" if health_mode else annotations.get(key.HEALTH_MODE, "")[:100],
        retry=annotations.get(key.RETRY, "")[: key.REASON_LIMIT],
        image_files=annotations.get(key.IMAGE_FILES, ""),
        shown_config=annotations.get(key.CURRENT_CONFIG, ""),
        shown_images=frozenset(
            image for each in key.IMAGE_SPELLINGS.values() if (image := annotations.get(each))
        ),
        removed_registry=annotations.get(key.REMOVE_BOOTSTRAP_REGISTRY, ""),
    )


def _read_health_mode(value: str | None) -> HealthCheckMode | None:
    try:
        return None if value is None else HealthCheckMode(value)
    except ValueError:
        return None
