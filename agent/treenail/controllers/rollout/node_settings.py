"""Settings of a pool and its policy that the controller copies to the annotations of nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.pools.nodes import NodeFacts, NodeSettings, RolloutTarget
from treenail.controllers.pools.policy import RolloutPolicy


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Annotations to write to a node; None removes one."""

    node: NodeFacts
    annotations: Mapping[str, str | None]


def build_settings(pool: MachineConfigPool, policy: RolloutPolicy) -> NodeSettings:
    """Build the settings that nodes of the pool should have."""
    return NodeSettings(
        image_files="" if pool.image_files is None else pool.image_files.lower(),
        health_mode="" if policy.health_mode is None else policy.health_mode.lower(),
        pool_retry=pool.metadata.annotations.get(key.RETRY, ""),
    )


def build_target_annotations(node: NodeFacts, wanted: NodeSettings) -> dict[str, str | None]:
    """Build the annotations to write together with a target."""
    found = node.settings
    changes: dict[str, str | None] = {}
    for name, before, after in (
        (key.IMAGE_FILES, found.image_files, wanted.image_files),
        (key.HEALTH_MODE, found.health_mode, wanted.health_mode),
    ):
        if before != after:
            changes[name] = after or None
    return changes


def find_settings_changes(
    nodes: Iterable[NodeFacts],
    wanted: NodeSettings,
    target: RolloutTarget,
    assigned: Sequence[str] = (),
) -> list[SettingsChange]:
    """Find the annotations that nodes lack.

    Nodes without the target get the other settings together with it, because these belong to it.
    ``assigned`` nodes have just got both. Each value of the pool's retry is copied once, so that a
    later value on the Node stays.
    """
    changes = []
    for node in nodes:
        if node.name in assigned:
            continue
        found = build_target_annotations(node, wanted) if node.is_assigned(target) else {}
        if wanted.pool_retry and node.settings.pool_retry != wanted.pool_retry:
            found |= {key.RETRY: wanted.pool_retry, key.POOL_RETRY: wanted.pool_retry}
        if found:
            changes.append(SettingsChange(node, found))
    return changes
