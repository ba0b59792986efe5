"""What the rollout writes: targets of nodes, its record and the status of pools.

Every write is conditional on the version that was judged, so that it can be repeated, and so that
nothing is done to an object that became another one meanwhile.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clock import Clock, format_rfc3339
from treenail.controllers.rollout.expected import ExpectedNodes
from treenail.controllers.rollout.nodes import (
    LOCKED_BY,
    STARTED_AT,
    WAS_DEGRADED,
    NodeFacts,
    RolloutTarget,
)
from treenail.controllers.rollout.observe import ObservedPool
from treenail.controllers.rollout.progress import ROLLOUT_STATE, RolloutRecord
from treenail.controllers.rollout.status import PoolStatus
from treenail.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
)
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES, Resource

log = logging.getLogger(__name__)

ParallelMap = Callable[
    [Callable[[NodeFacts], ClusterError | None], Iterable[NodeFacts]],
    Iterable[ClusterError | None],
]
"""``map``, or the ``map`` of an executor: how many nodes are written at the same time."""


_CLEARED_PRESTAGE_ANNOTATIONS: Mapping[str, str | None] = {
    key.PRESTAGE_CONFIG: None,
    key.PRESTAGE_IMAGE: None,
}


class WriterApi(Protocol):
    """The verbs of a `Client` that a rollout needs."""

    def get(self, resource: Resource, name: str) -> Json: ...
    def patch(
        self, resource: Resource, name: str, body: Json, *, subresource: str = ""
    ) -> Json: ...


@dataclass(frozen=True, slots=True)
class AssignmentResult:
    """How the writes to some nodes went."""

    assigned: tuple[str, ...] = ()
    errors: tuple[ClusterError, ...] = ()
    """Conflicts among them: such nodes are judged anew."""


class RolloutWriter:
    """Writes for the rollout controller; raises `ClusterError`, except for single nodes."""

    def __init__(
        self,
        api: WriterApi,
        clock: Clock,
        expected: ExpectedNodes,
        *,
        parallel_map: ParallelMap = map,
        image_key: str = key.DESIRED_OS_IMAGE,
    ) -> None:
        self._api = api
        self._clock = clock
        self._expected = expected
        self._parallel_map = parallel_map
        self._image_key = image_key

    def assign_target(
        self, nodes: Sequence[NodeFacts], target: RolloutTarget, pool: str, lock_server: str = ""
    ) -> AssignmentResult:
        """Give the target to the nodes, several at a time; all are tried whatever happens to one.

        ``lock_server`` names the lock server that was asked for them.
        """
        now = self._clock.now()
        for node in nodes:
            self._expected.expect_target(node, target, now)

        def write(node: NodeFacts) -> ClusterError | None:
            return self._assign_node(
                node, target, pool, self._build_annotations(target, now, lock_server)
            )

        found = list(self._parallel_map(write, nodes))
        given = tuple(node.name for node, error in zip(nodes, found, strict=True) if error is None)
        return AssignmentResult(given, tuple(error for error in found if error is not None))

    def request_prestage(
        self, nodes: Iterable[NodeFacts], target: RolloutTarget | None
    ) -> tuple[ClusterError, ...]:
        """Ask the nodes to stage the target ahead, or not to any more; all are tried."""
        notes = dict(_CLEARED_PRESTAGE_ANNOTATIONS)
        if target is not None:
            notes = {key.PRESTAGE_CONFIG: target.config, key.PRESTAGE_IMAGE: target.image}

        def write(node: NodeFacts) -> ClusterError | None:
            body: Json = {
                "metadata": {"resourceVersion": node.resource_version, "annotations": notes}
            }
            try:
                self._api.patch(NODES, node.name, body)
            except (ConflictError, NotFoundError):
                # Judged anew as soon as the cache shows what became of it.
                log.debug("node %s changed before it could be asked to stage", node.name)
            except ClusterError as error:
                return error
            self._expected.expect_prestage(node, target)
            return None

        return tuple(error for error in self._parallel_map(write, nodes) if error is not None)

    def write_record(self, pool: MachineConfigPool, record: RolloutRecord) -> MachineConfigPool:
        """Keep the record on the pool; the pool as it is afterwards."""
        body: Json = {
            "metadata": {
                "resourceVersion": pool.metadata.resource_version,
                "annotations": {ROLLOUT_STATE: record.to_text()},
            }
        }
        return ObservedPool.from_json(self._api.patch(MACHINECONFIGPOOLS, pool.name, body)).pool

    def write_status(self, pool: MachineConfigPool, status: PoolStatus) -> MachineConfigPool:
        """Write the pool's status, and leave alone what others write there."""
        body: Json = {
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": status.to_json(),
        }
        found = self._api.patch(MACHINECONFIGPOOLS, pool.name, body, subresource="status")
        return ObservedPool.from_json(found).pool

    def clear_lock(self, node: NodeFacts) -> None:
        """Note on the node that its lock was given back."""
        body: Json = {
            "metadata": {
                "resourceVersion": node.resource_version,
                "annotations": {LOCKED_BY: None},
            }
        }
        self._api.patch(NODES, node.name, body)

    def _build_annotations(
        self, target: RolloutTarget, now: float, lock_server: str
    ) -> Mapping[str, str | None]:
        notes: dict[str, str | None] = {
            key.DESIRED_CONFIG: target.config,
            self._image_key: target.image,
            STARTED_AT: format_rfc3339(now),
        }
        if lock_server:
            notes[LOCKED_BY] = lock_server
        return notes

    def _assign_node(
        self,
        node: NodeFacts,
        target: RolloutTarget,
        pool: str,
        annotations: Mapping[str, str | None],
    ) -> ClusterError | None:
        own = dict(annotations)
        if node.prestage_target is not None:
            own |= _CLEARED_PRESTAGE_ANNOTATIONS
        if node.is_degraded or node.was_degraded:
            own[WAS_DEGRADED] = "true" if node.is_degraded else None
        body: Json = {"metadata": {"resourceVersion": node.resource_version, "annotations": own}}
        try:
            self._api.patch(NODES, node.name, body)
        except ConflictError as error:
            # Also after a lost answer, when the first try did happen: the cache will tell.
            self._expected.confirm_target(node.name)
            return error
        except (NotFoundError, ForbiddenError, InvalidError, TooManyRequestsError) as error:
            self._expected.forget_target(node.name)
            return error
        except ClusterError as error:
            log.warning("node %s may have been given %s: %s", node.name, target.config, error)
            return error
        self._expected.confirm_target(node.name)
        log.info("node %s of pool %s is given %s", node.name, pool, _format_assignment(target))
        return None


def _format_assignment(target: RolloutTarget) -> str:
    return f"{target.config} with image {target.image}" if target.image else target.config
