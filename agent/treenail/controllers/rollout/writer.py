"""Writes of the rollout: targets and settings of nodes, the rollout record, the status of pools.

Every write carries the resourceVersion that the decision was based on. So a write can be repeated,
and the API server rejects it when the object changed meanwhile. The controller copies settings of a
pool and its policy to the annotations of nodes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfigpool
from treenail.controllers.pools import (
    expected_writes,
    image_tags,
    node_facts,
    pool_membership,
    pool_status,
    rollout_policy,
    rollout_record,
)
from treenail.controllers.rollout.locks import LOCKS_STATUS, NodeLock
from treenail.kube import api_client, event_recorder, resources

log = logging.getLogger(__name__)

ParallelMap = Callable[
    [Callable[[node_facts.NodeFacts], errors.ClusterError | None], Iterable[node_facts.NodeFacts]],
    Iterable[errors.ClusterError | None],
]
"""``map``, or the ``map`` of an executor, which writes several nodes in parallel."""
_NOT_WRITTEN = (
    errors.NotFoundError,
    errors.ForbiddenError,
    errors.InvalidError,
    errors.TooManyRequestsError,
    errors.NotLeaderError,
)
_CLEARED_PRESTAGE_ANNOTATIONS: Mapping[str, str | None] = {
    key.PRESTAGE_CONFIG: None,
    key.PRESTAGE_IMAGE: None,
}
_NO_SETTINGS = node_facts.NodeSettings()


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Annotations to write to a node; None removes one."""

    node: node_facts.NodeFacts
    annotations: Mapping[str, str | None]


class PoolWriter(Protocol):
    """Sends the writes of a rollout to one kind of pools and their nodes. Raises `ClusterError`.

    A node that changed since it was observed gets no write.
    """

    def refer_to(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> event_recorder.ObjectReference: ...
    def write_status(
        self, pool: machineconfigpool.MachineConfigPool, status: decode.Json
    ) -> machineconfigpool.MachineConfigPool: ...
    def assign_target(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None: ...
    def annotate_node(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None: ...


def annotate_node(
    client: api_client.Client, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
) -> None:
    """Write annotations of a Node; raise `ConflictError` if it changed since it was observed."""
    metadata = {"resourceVersion": node.resource_version, "annotations": dict(annotations)}
    client.patch(resources.NODES, node.name, {"metadata": metadata})


class MachineConfigPoolWriter:
    """Writes MachineConfigPools and the Nodes of the same cluster."""

    def __init__(self, client: api_client.Client) -> None:
        self._client = client

    def refer_to(self, pool: machineconfigpool.MachineConfigPool) -> event_recorder.ObjectReference:
        """Return the MachineConfigPool."""
        return event_recorder.ObjectReference(
            machineconfigpool.KIND,
            pool.name,
            uid=pool.metadata.uid,
            api_version=machineconfigpool.API_VERSION,
        )

    def write_status(
        self, pool: machineconfigpool.MachineConfigPool, status: decode.Json
    ) -> machineconfigpool.MachineConfigPool:
        """Write by a merge patch, which keeps the status fields of other controllers."""
        body: decode.Json = {
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": status,
        }
        response = self._client.patch(
            resources.MACHINECONFIGPOOLS, pool.name, body, subresource="status"
        )
        return pool_membership.ObservedPool.from_json(response).pool

    def annotate_node(
        self, node: node_facts.NodeFacts, annotations: Mapping[str, str | None]
    ) -> None:
        """Write the annotations of the Node."""
        annotate_node(self._client, node, annotations)

    assign_target = annotate_node
    """The agent acts on the annotations."""


def build_settings(
    pool: machineconfigpool.MachineConfigPool,
    policy: rollout_policy.RolloutPolicy,
    *,
    is_single_node: bool = False,
) -> node_facts.NodeSettings:
    """Build the settings that nodes of the pool should have.

    The pods of the only node of a cluster have nowhere to go. One of them would be the controller
    that uncordons the node, so the agent updates without a drain.
    """
    return node_facts.NodeSettings(
        image_files="" if pool.image_files is None else pool.image_files.lower(),
        health_mode="" if policy.health_mode is None else policy.health_mode.lower(),
        pool_retry=pool.metadata.annotations.get(key.RETRY, ""),
        is_single=is_single_node,
    )


def build_target_annotations(
    node: node_facts.NodeFacts, wanted: node_facts.NodeSettings
) -> dict[str, str | None]:
    """Build the annotations to write together with a target."""
    settings = node.settings
    changes: dict[str, str | None] = {}
    for name, before, after in (
        (key.IMAGE_FILES, settings.image_files, wanted.image_files),
        (key.HEALTH_MODE, settings.health_mode, wanted.health_mode),
        (
            key.CONTROL_PLANE_TOPOLOGY,
            key.SINGLE_REPLICA * settings.is_single,
            key.SINGLE_REPLICA * wanted.is_single,
        ),
    ):
        if before != after:
            changes[name] = after or None
    return changes


def find_settings_changes(
    nodes: Iterable[node_facts.NodeFacts],
    wanted: node_facts.NodeSettings,
    target: node_facts.RolloutTarget,
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
        annotations = build_target_annotations(node, wanted) if node.is_assigned(target) else {}
        if wanted.pool_retry and node.settings.pool_retry != wanted.pool_retry:
            annotations |= {key.RETRY: wanted.pool_retry, key.POOL_RETRY: wanted.pool_retry}
        if annotations:
            changes.append(SettingsChange(node, annotations))
    return changes


class RolloutWriter:
    """Decides what a write contains and remembers it; ``pools`` sends it.

    Raises `ClusterError`, except in the methods that return errors.
    """

    def __init__(
        self,
        client: api_client.Client,
        pools: PoolWriter,
        clock: clocks.Clock,
        expected: expected_writes.ExpectedNodes,
        *,
        parallel_map: ParallelMap = map,
        image_key: str = key.DESIRED_OS_IMAGE,
    ) -> None:
        self._client = client
        self._pools = pools
        self._clock = clock
        self._expected = expected
        self._parallel_map = parallel_map
        self._image_key = image_key

    def assign_target(
        self,
        nodes: Sequence[node_facts.NodeFacts],
        target: node_facts.RolloutTarget,
        pool: str,
        *,
        lock_server: str = "",
        settings: node_facts.NodeSettings = _NO_SETTINGS,
    ) -> tuple[errors.ClusterError, ...]:
        """Assign the target to the nodes, several in parallel, and return the errors.

        An error of one node does not stop the others. The next reconciliation decides again about
        nodes with a conflict. ``lock_server`` names the server that granted their locks.
        ``settings`` are written together with the target.
        """
        now = self._clock.now()
        for node in nodes:
            self._expected.expect_target(node, target, now)

        def write(node: node_facts.NodeFacts) -> errors.ClusterError | None:
            return self._assign_node(
                node,
                target,
                pool,
                {
                    **self._build_annotations(target, now, lock_server),
                    **build_target_annotations(node, settings),
                },
            )

        return tuple(error for error in self._parallel_map(write, nodes) if error is not None)

    def request_prestage(
        self, nodes: Iterable[node_facts.NodeFacts], target: node_facts.RolloutTarget | None
    ) -> tuple[errors.ClusterError, ...]:
        """Request prestaging of the target, or withdraw the request (None); return the errors."""
        annotations = dict(_CLEARED_PRESTAGE_ANNOTATIONS)
        if target is not None:
            annotations = {key.PRESTAGE_CONFIG: target.config, key.PRESTAGE_IMAGE: target.image}

        return self.copy_settings(
            [SettingsChange(node, annotations) for node in nodes],
            lambda node: self._expected.expect_prestage(node, target),
        )

    def copy_settings(
        self,
        changes: Iterable[SettingsChange],
        note_written: Callable[[node_facts.NodeFacts], None] = lambda _: None,
    ) -> tuple[errors.ClusterError, ...]:
        """Write the annotations, several in parallel; return the errors."""
        by_name = {change.node.name: change for change in changes}

        def write(node: node_facts.NodeFacts) -> errors.ClusterError | None:
            try:
                self._pools.annotate_node(node, by_name[node.name].annotations)
            except (errors.ConflictError, errors.NotFoundError):
                # The next reconciliation decides again, once the cache shows the change.
                log.debug("node %s changed before its annotations were written", node.name)
            except errors.ClusterError as error:
                return error
            note_written(node)
            return None

        nodes = [change.node for change in by_name.values()]
        return tuple(error for error in self._parallel_map(write, nodes) if error is not None)

    def write_policy_status(
        self, observed: rollout_policy.ObservedPolicy, entries: list[decode.Json], summary: str
    ) -> None:
        """Replace the entries of the pools in the policy's status, and their summary."""
        body: decode.Json = {
            "metadata": {"resourceVersion": observed.resource_version},
            "status": {"pools": entries, "summary": summary},
        }
        self._client.patch(resources.ROLLOUTPOLICIES, observed.name, body, subresource="status")

    def write_record(
        self, pool: machineconfigpool.MachineConfigPool, record: rollout_record.RolloutRecord
    ) -> machineconfigpool.MachineConfigPool:
        """Write the record to the pool's status and return the pool from the response."""
        stored = pool.status.get(rollout_record.ROLLOUT_STATUS)
        patch = _build_replacement(stored, record.to_json())
        return self._pools.write_status(pool, {rollout_record.ROLLOUT_STATUS: patch})

    def write_image_tag(
        self, pool: machineconfigpool.MachineConfigPool, status: decode.Json
    ) -> machineconfigpool.MachineConfigPool:
        """Replace how the tag was resolved, or remove it if empty; return the pool as above."""
        patch = _build_replacement(pool.status.get(image_tags.TAG_STATUS), status)
        return self._pools.write_status(pool, {image_tags.TAG_STATUS: patch if status else None})

    def write_locks(
        self, pool: machineconfigpool.MachineConfigPool, locks: Iterable[NodeLock]
    ) -> machineconfigpool.MachineConfigPool:
        """Write the locks that nodes may hold and return the pool from the response."""
        return self._pools.write_status(pool, {LOCKS_STATUS: [lock.to_json() for lock in locks]})

    def write_status(
        self, pool: machineconfigpool.MachineConfigPool, status: pool_status.PoolStatus
    ) -> machineconfigpool.MachineConfigPool:
        """Write the pool's status fields and return the pool from the response."""
        return self._pools.write_status(pool, status.to_json())

    def clear_lock(self, node: node_facts.NodeFacts) -> None:
        """Remove the lock annotation after the lock server released the lock."""
        self._pools.annotate_node(node, {node_facts.LOCKED_BY: None})

    def _build_annotations(
        self, target: node_facts.RolloutTarget, now: float, lock_server: str
    ) -> Mapping[str, str | None]:
        annotations: dict[str, str | None] = {
            key.DESIRED_CONFIG: target.config,
            self._image_key: target.image,
            node_facts.STARTED_AT: clocks.format_rfc3339(now),
        }
        if lock_server:
            annotations[node_facts.LOCKED_BY] = lock_server
        return annotations

    def _assign_node(
        self,
        node: node_facts.NodeFacts,
        target: node_facts.RolloutTarget,
        pool: str,
        annotations: Mapping[str, str | None],
    ) -> errors.ClusterError | None:
        own = dict(annotations)
        if node.prestage_target is not None:
            own |= _CLEARED_PRESTAGE_ANNOTATIONS
        try:
            self._pools.assign_target(node, own)
        except errors.ConflictError as error:
            if not self._expected.note_conflict(node.name):
                return error
            # Not a conflict for the caller, who would repeat it twice a second.
            return errors.ClusterError(
                f"cannot assign {target.config} to node {node.name}: {error}", remedy=error.remedy
            )
        except _NOT_WRITTEN as error:
            self._expected.forget_target(node.name)
            return error
        except errors.ClusterError as error:
            log.warning(
                "cannot tell whether node %s was assigned %s, reading it again: %s",
                node.name,
                target.config,
                error,
            )
            return error
        self._expected.confirm_target(node.name)
        log.info("assigned %s to node %s of pool %s", target, node.name, pool)
        return None


def _build_replacement(stored: object, wanted: decode.Json) -> decode.Json:
    """Build the patch: a merge patch keeps the fields and the keys that it does not name."""
    known = stored if isinstance(stored, dict) else {}
    changed = {
        name: _build_replacement(known.get(name), value) if isinstance(value, dict) else value
        for name, value in wanted.items()
    }
    return {**dict.fromkeys(known), **changed}
