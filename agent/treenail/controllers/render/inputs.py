"""Hash of what the rendered config of a pool is made from.

The render controller writes the hash of the objects that it has observed to the pool. A client that
computes another hash knows that the controller has not observed a change yet.
"""

import hashlib
from collections.abc import Iterable

from treenail.api import machineconfigpool
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.meta import ObjectMeta

RENDER_INPUTS = "renderInputs"
"""Field of a pool's status with the hash. Only the render controller writes it."""


def hash_render_inputs(
    pool: MachineConfigPool, configs: Iterable[ObjectMeta], controller_configs: Iterable[ObjectMeta]
) -> str:
    """Hash the MachineConfigs that the pool selects, and all ControllerConfigs.

    ``configs`` are all MachineConfigs of the cluster. The API server changes the generation of an
    object with each change of its spec.
    """
    observed = [*select_sources(pool, configs), *controller_configs]
    lines = sorted(f"{each.name} {each.uid} {each.generation}\n" for each in observed)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def select_sources(pool: MachineConfigPool, configs: Iterable[ObjectMeta]) -> list[ObjectMeta]:
    """Return the MachineConfigs that the pool selects, without rendered ones."""
    selector = pool.machine_config_selector
    if selector is None or selector.is_empty:
        return []
    return [
        each for each in configs if selector.matches(each.labels) and not is_owned_by_pool(each)
    ]


def is_owned_by_pool(config: ObjectMeta) -> bool:
    """Return True for a rendered config: a pool is its controller."""
    owners = config.owner_references
    return any(owner.kind == machineconfigpool.KIND and owner.controller for owner in owners)
