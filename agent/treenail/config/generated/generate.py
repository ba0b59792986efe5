"""Generate the MachineConfigs of all pools from the objects that describe them.

Pure: the controller ``generate`` and the commands that read files share `generate_configs`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from treenail.api import machineconfig, machineconfigpool
from treenail.config.generated import sources


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated MachineConfigs by name, and one result for each object."""

    configs: dict[str, machineconfig.MachineConfig]
    results: dict[tuple[str, str, str], sources.ObjectResult]


def generate_configs(
    objects: sources.Sources,
    pools: Iterable[machineconfigpool.MachineConfigPool],
    configs: Iterable[machineconfig.MachineConfig],
    facts: sources.ClusterFacts = sources.EMPTY_FACTS,
) -> Generation:
    """Return the MachineConfigs that the objects require; ``configs`` are all of the cluster.

    An object with a problem changes nothing: its present generated config, if ``configs`` has
    one, is in the result unchanged.
    """
    raise NotImplementedError
