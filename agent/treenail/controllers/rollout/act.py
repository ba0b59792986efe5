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
from treenail.clock import Clock, rfc3339
from treenail.controllers.rollout.expected import ExpectedNodes
from treenail.controllers.rollout.nodes import (
    LOCKED_BY,
    STARTED_AT,
    WAS_DEGRADED,
    NodeFacts,
    Target,
)
from treenail.controllers.rollout.observe import SeenPool
from treenail.controllers.rollout.progress import STATE, Record
from treenail.controllers.rollout.status import PoolStatus
from treenail.errors import ClusterError, Conflict, Forbidden, Invalid, NotFound, TooManyRequests
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES, Resource

log = logging.getLogger(__name__)

Each = Callable[
    [Callable[[NodeFacts], ClusterError | None], Iterable[NodeFacts]],
    Iterable[ClusterError | None],
]
"""``map``, or the ``map`` of an executor: how many nodes are written at the same time."""


_UNSTAGED: Mapping[str, str | None] = {key.STAGE_CONFIG: None, key.STAGE_IMAGE: None}


class Api(Protocol):
    """The verbs of a `Client` that a rollout needs."""

    def get(self, resource: Resource, name: str) -> Json: ...
    def patch(
        self, resource: Resource, name: str, body: Json, *, subresource: str = ""
    ) -> Json: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the writes to some nodes went."""

    given: tuple[str, ...] = ()
    errors: tuple[ClusterError, ...] = ()
    """Conflicts among them: such nodes are judged anew."""


class Writer:
    """Writes for the rollout controller; raises `ClusterError`, except for single nodes."""

    def __init__(
        self,
        api: Api,
        clock: Clock,
        expected: ExpectedNodes,
        *,
        each: Each = map,
        image_key: str = key.DESIRED_OS_IMAGE,
    ) -> None:
        self._api = api
        self._clock = clock
        self._expected = expected
        self._each = each
        self._image_key = image_key

    def give(
        self, nodes: Sequence[NodeFacts], target: Target, pool: str, lock: str = ""
    ) -> Outcome:
        """Give the target to the nodes, several at a time; all are tried whatever happens to one.

        ``lock`` names the lock server that was asked for them.
        """
        now = self._clock.now()
        for node in nodes:
            self._expected.expect(node, target, now)

        def write(node: NodeFacts) -> ClusterError | None:
            return self._give(node, target, pool, self._notes(target, now, lock))

        found = list(self._each(write, nodes))
        given = tuple(node.name for node, error in zip(nodes, found, strict=True) if error is None)
        return Outcome(given, tuple(error for error in found if error is not None))

    def stage(self, nodes: Iterable[NodeFacts], target: Target | None) -> tuple[ClusterError, ...]:
        """Ask the nodes to stage the target ahead, or not to any more; all are tried."""
        notes = dict(_UNSTAGED)
        if target is not None:
            notes = {key.STAGE_CONFIG: target.config, key.STAGE_IMAGE: target.image}

        def write(node: NodeFacts) -> ClusterError | None:
            body: Json = {
                "metadata": {"resourceVersion": node.resource_version, "annotations": notes}
            }
            try:
                self._api.patch(NODES, node.name, body)
            except (Conflict, NotFound):
                # Judged anew as soon as the cache shows what became of it.
                log.debug("node %s changed before it could be asked to stage", node.name)
            except ClusterError as error:
                return error
            self._expected.stages(node, target)
            return None

        return tuple(error for error in self._each(write, nodes) if error is not None)

    def record(self, pool: MachineConfigPool, record: Record) -> MachineConfigPool:
        """Keep the record on the pool; the pool as it is afterwards."""
        body: Json = {
            "metadata": {
                "resourceVersion": pool.metadata.resource_version,
                "annotations": {STATE: record.to_text()},
            }
        }
        return SeenPool.from_json(self._api.patch(MACHINECONFIGPOOLS, pool.name, body)).pool

    def status(self, pool: MachineConfigPool, status: PoolStatus) -> MachineConfigPool:
        """Write the pool's status, and leave alone what others write there."""
        body: Json = {
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": status.to_json(),
        }
        found = self._api.patch(MACHINECONFIGPOOLS, pool.name, body, subresource="status")
        return SeenPool.from_json(found).pool

    def unlocked(self, node: NodeFacts) -> None:
        """Note on the node that its lock was given back."""
        body: Json = {
            "metadata": {
                "resourceVersion": node.resource_version,
                "annotations": {LOCKED_BY: None},
            }
        }
        self._api.patch(NODES, node.name, body)

    def _notes(self, target: Target, now: float, lock: str) -> Mapping[str, str | None]:
        notes: dict[str, str | None] = {
            key.DESIRED_CONFIG: target.config,
            self._image_key: target.image,
            STARTED_AT: rfc3339(now),
        }
        if lock:
            notes[LOCKED_BY] = lock
        return notes

    def _give(
        self, node: NodeFacts, target: Target, pool: str, notes: Mapping[str, str | None]
    ) -> ClusterError | None:
        own = dict(notes)
        if node.stage is not None:
            own |= _UNSTAGED
        if node.degraded or node.was_degraded:
            own[WAS_DEGRADED] = "true" if node.degraded else None
        body: Json = {"metadata": {"resourceVersion": node.resource_version, "annotations": own}}
        try:
            self._api.patch(NODES, node.name, body)
        except Conflict as error:
            # Also after a lost answer, when the first try did happen: the cache will tell.
            self._expected.confirm(node.name)
            return error
        except (NotFound, Forbidden, Invalid, TooManyRequests) as error:
            self._expected.forget(node.name)
            return error
        except ClusterError as error:
            log.warning("node %s may have been given %s: %s", node.name, target.config, error)
            return error
        self._expected.confirm(node.name)
        log.info("node %s of pool %s is given %s", node.name, pool, _words(target))
        return None


def _words(target: Target) -> str:
    return f"{target.config} with image {target.image}" if target.image else target.config
