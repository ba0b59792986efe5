"""Events of the Ignition server about pools."""

from collections.abc import Callable, Iterable

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.escape import escape_line
from treenail.kube.events import EventRecorder, ObjectReference
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.provisioning.tokens.tokens import TokenRecord

COMPONENT_NAME = "treenail-ignition"
"""Source of the Events."""
OVERUSED = "TokenOverused"
"""Reason of the Event about a token that too many machines used."""
_MAX_ADDRESSES = 3


class PoolEvents:
    """Records Events of pools. Never raises. Thread-safe."""

    def __init__(
        self, recorder: EventRecorder, get_pools: Callable[[], Iterable[MachineConfigPool]]
    ) -> None:
        self._recorder = recorder
        self._get_pools = get_pools

    def report_overuse(self, record: TokenRecord) -> None:
        """Record that more machines used a token than it permits, unless the pool is gone."""
        for pool in self._get_pools():
            if pool.name == record.pool:
                reference = ObjectReference(
                    MACHINECONFIGPOOLS.kind,
                    pool.name,
                    pool.metadata.uid,
                    api_version=MACHINECONFIGPOOLS.api_version,
                )
                self._recorder.record_warning(reference, OVERUSED, describe_overuse(record))

    def flush_pending(self) -> None:
        """Write Events that wait for the API server."""
        self._recorder.flush_pending()


def describe_overuse(record: TokenRecord) -> str:
    """Return what happened and what to do, with a few addresses of the machines."""
    addresses = [use.address for use in record.used]
    named = ", ".join(addresses[:_MAX_ADDRESSES])
    more = f" and {len(addresses) - _MAX_ADDRESSES} more" if addresses[_MAX_ADDRESSES:] else ""
    return escape_line(
        f"token {record.name} permits {record.uses} machines, and {len(addresses)} used it while "
        f"the API server was unreachable: {named}{more}; remove the machines that are not yours, "
        f"and rotate the secrets of pool {record.pool}"
    )
