"""Checks that the rendered config of a pool exists before a node is assigned it."""

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout.gates.os_image import GateBlocked
from treenail.errors import ClusterError, NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import MACHINECONFIGS


class ConfigChecker:
    """Remembers the config of each pool that exists. Thread-safe for different pools."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._existing: dict[str, str] = {}

    def check_config(self, pool: MachineConfigPool) -> GateBlocked | None:
        """Block the rollout of a rendered config that does not exist."""
        config = pool.configuration.name
        if self._existing.get(pool.name) == config:
            return None
        try:
            self._client.get(MACHINECONFIGS, config)
        except NotFoundError:
            return GateBlocked(
                f"cannot assign MachineConfig {config}: it does not exist; create it, or correct "
                f"spec.configuration of pool {pool.name}",
                "MissingMachineConfig",
            )
        except ClusterError as error:
            return GateBlocked(f"cannot read MachineConfig {config}: {error}", "ClusterError")
        self._existing[pool.name] = config
        return None

    def forget_pool(self, name: str) -> None:
        """Forget a deleted pool."""
        self._existing.pop(name, None)
