"""Updates nodes in place without another operator: what surrounds the selection of nodes.

Before the first node gets a target, the owner of the Machines says that its nodes differ, and the
hosted cluster has the config. After the last one, everything in the hosted cluster is deleted and
the owner says what its nodes have. A process may end between any two writes.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool, token_secret
from treenail.controllers.hosted import rollout_store
from treenail.controllers.hosted.conduct import guests, pool_facts
from treenail.controllers.hosted.in_place import upgrade_objects, upgrade_site
from treenail.controllers.pools import node_facts, os_image, rollout_policy
from treenail.controllers.rollout import external_gates, writer
from treenail.kube import api_client, discovery, event_recorder, resources

log = logging.getLogger(__name__)

_PAYLOAD = "payload"
_REFRESH_CONDITIONS = {
    "Updating": "ConfigRefreshProgressing",
    "Updated": "ConfigRefreshComplete",
    "Degraded": "ConfigRefreshDegraded",
}
"""Conditions of a NodePool for those of the record (enhancements#2053)."""
_Verdict = os_image.GateWaiting | os_image.GateBlocked | None


@dataclass(frozen=True, slots=True)
class ConductTools:
    """Clients and caches of the management cluster that all conductors share."""

    client: api_client.Client
    clock: clocks.Clock
    gates: external_gates.Gates
    events: event_recorder.EventRecorder
    store: rollout_store.RolloutStore
    list_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy]]
    find_stale_reason: Callable[[], str]
    capi_version: str = clusterapi.VERSIONS[0]
    agent_image: str = ""
    """For nodes whose image has no treenail; empty for none."""

    def find_owner_kind(self, pool: nodepool.NodePool) -> resources.Resource:
        """Return MachineSets for InPlace, MachineDeployments for Replace."""
        kind = resources.MACHINESETS if pool.is_in_place else resources.MACHINEDEPLOYMENTS
        return replace(kind, version=self.capi_version)


class OwnUpdate:
    """The update of one pool, for one thread at a time."""

    def __init__(self, tools: ConductTools) -> None:
        self._tools = tools
        self._content: upgrade_objects.UpgradeContent | None = None
        self._guest_client: api_client.Client | None = None
        self._confirmed: tuple[str, set[str]] = ("", set())
        self._written: dict[tuple[str, str | None], float] = {}
        self.verdict: _Verdict = None
        """Why no further node may get the target, from the last `sync`."""

    def begin(self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster) -> _Verdict:
        """Prepare everything for a node that will get the target; return why it must wait.

        ``objects`` have the owner as the API server has it. Raises `ForbiddenError`.
        """
        try:
            content = self._load_content(objects)
            marks = {hosted_key.UPDATED_CONFIG: "", hosted_key.UPDATED_ROLLOUT: ""}
            if objects.is_refresh:
                marks[hosted_key.UPDATED_ROLLOUT] = objects.rolled_hash
            # First: the next process must know that the hosted cluster may have something.
            self._mark_owner(objects, marks)
            self._find_site(guest).prepare(content)
        except errors.ForbiddenError:
            raise
        except errors.ConfigError as error:
            return os_image.GateBlocked(f"{error}; {error.remedy}", "InvalidUpgrade")
        except errors.ClusterError as error:
            return os_image.GateWaiting(f"waiting: {error}")
        self._content = content
        return None

    def sync(
        self,
        objects: pool_facts.PoolObjects,
        guest: guests.GuestCluster,
        assigned: Mapping[str, int],
        assigned_now: Collection[str],
    ) -> None:
        """Correct what other accounts changed, and let agents run where nodes have none.

        ``assigned`` are the nodes that treenail gave a target, ``assigned_now`` this target.
        """
        nodes = guest.get_nodes()
        names = [each.node_name for each in objects.machines]
        members = [nodes[name] for name in names if name in nodes]
        for node in members:
            self._restore_target(objects, guest, node, assigned, assigned_now)
        self.verdict = None
        # The nodes of another target still need its config.
        has_begun = any(node.desired_config == objects.target for node in members)
        if not has_begun or self._is_complete(objects, guest):
            return
        self.verdict = self.begin(objects, guest)
        if self._content is not None and self.verdict is None:
            self.verdict = self._sync_installers(objects, guest, members, self._content)

    def finish(self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster) -> bool:
        """End the update if all nodes have the target; return whether they have."""
        if not self._is_complete(objects, guest):
            return False
        # The watch may be behind, and nothing looks at these nodes again.
        names = _list_nodes(objects) if objects.gives_nodes else []
        if not all(self._is_done_now(guest, name, objects.target) for name in names):
            return False
        self.remove(objects, guest)
        rolled = objects.rolled_hash
        marks = {hosted_key.UPDATED_CONFIG: objects.target, hosted_key.UPDATED_ROLLOUT: rolled}
        self._mark_owner(objects, marks)
        return True

    def _is_complete(self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster) -> bool:
        """Return whether the watch shows all expected Machines, with nodes at the target."""
        names = _list_nodes(objects)
        if objects.owner is None or len(names) < (objects.owner.replicas or 0):
            return False
        nodes, states, target = guest.get_nodes(), guest.get_states(), objects.target
        return not objects.gives_nodes or all(
            upgrade_objects.is_done(nodes.get(name), states.get(name), target) for name in names
        )

    def remove(self, objects: pool_facts.PoolObjects, guest: guests.GuestCluster) -> None:
        """Delete what the hosted cluster has of the update."""
        name = objects.pool.full_name
        self._find_site(guest).remove(upgrade_objects.UpgradeContent(name, objects.target, ""))
        self._content = None

    def report_refresh(self, pool: nodepool.NodePool, conditions: object) -> None:
        """Write the conditions of a refresh to the NodePool; the next change repeats a failure."""
        wanted = {
            _REFRESH_CONDITIONS[str(each["type"])]: each
            for each in discovery.iter_objects(conditions)
            if each.get("type") in _REFRESH_CONDITIONS
        }
        client, space = self._tools.client, pool.namespace
        try:
            document = client.get(resources.NODEPOOLS, pool.name, namespace=space)
            stored = discovery.iter_objects(
                resources.get_object(document, "status").get("conditions")
            )
            merged = [each for each in stored if each.get("type") not in wanted]
            merged += [{**each, "type": name} for name, each in wanted.items()]
            version = resources.get_object(document, "metadata").get("resourceVersion")
            body = {"metadata": {"resourceVersion": version}, "status": {"conditions": merged}}
            client.patch(
                resources.NODEPOOLS, pool.name, body, namespace=space, subresource="status"
            )
        except errors.ClusterError as error:
            log.warning("cannot report the refresh of NodePool %s: %s", pool.full_name, error)

    def _find_site(self, guest: guests.GuestCluster) -> upgrade_site.UpgradeSite:
        if guest.client is not self._guest_client:
            self._guest_client = guest.client
            self._site = upgrade_site.UpgradeSite(guest.client, self._tools.clock)
        return self._site

    def _load_content(self, objects: pool_facts.PoolObjects) -> upgrade_objects.UpgradeContent:
        pool, known, is_refresh = objects.pool, self._content, objects.is_refresh
        if known and (known.target, known.is_refresh) == (objects.target, is_refresh):
            return known
        name = f"{nodepool.TOKEN_PREFIX}{pool.name}-{objects.target}"
        where = f"Secret {name} in namespace {objects.namespace}"
        secret = self._tools.client.get(resources.SECRETS, name, namespace=objects.namespace)
        notes = object_meta.read_metadata(secret).annotations
        if notes.get(hosted_key.NODE_POOL) != pool.full_name:
            raise errors.ConfigError(
                f"cannot use {where}: it is not one of NodePool {pool.full_name}",
                remedy="delete it: the controller nodepools writes it again",
            )
        config = token_secret.read_text(secret, _PAYLOAD)
        if not config:
            raise errors.NotFoundError(f"{where} has no {_PAYLOAD} yet")
        return upgrade_objects.UpgradeContent(pool.full_name, objects.target, config, is_refresh)

    def _mark_owner(self, objects: pool_facts.PoolObjects, marks: Mapping[str, str]) -> None:
        """Write annotations of the MachineSet or MachineDeployment that differ."""
        owner = objects.owner
        if owner is None or marks.items() <= owner.metadata.annotations.items():
            return
        kind, version = self._tools.find_owner_kind(objects.pool), owner.metadata.resource_version
        metadata = {"resourceVersion": version, "annotations": dict(marks)}
        self._tools.client.patch(
            kind, owner.name, {"metadata": metadata}, namespace=objects.namespace
        )

    def _restore_target(
        self,
        objects: pool_facts.PoolObjects,
        guest: guests.GuestCluster,
        node: node_facts.NodeFacts,
        assigned: Mapping[str, int],
        assigned_now: Collection[str],
    ) -> None:
        """Write the target that treenail gave a node again, after another account changed it.

        An agent that works already is left alone: it cannot go back.
        """
        target, desired = objects.target, node.desired_config
        if self._confirmed[0] != target:
            self._confirmed = (target, set())
        confirmed = self._confirmed[1]
        if desired == target and (node.name in assigned_now or node.name in confirmed):
            confirmed.add(node.name)
            return
        before = node.current_config
        is_at_rest = node.state in ("", key.NodeState.DONE)
        wanted: str | None = target
        if node.name not in confirmed:
            if node.name in assigned or desired in ("", before) or not is_at_rest:
                return
            wanted = before or None
        # The watch was behind, or the node is gone.
        with suppress(errors.ConflictError, errors.NotFoundError):
            self.write_target(guest, node, {key.DESIRED_CONFIG: wanted})
            self._warn(
                objects, "TargetRestored",
                f"another account set {key.DESIRED_CONFIG} of node {node.name} to {desired!r:.40}; "
                f"it is {wanted!r} again",
            )  # fmt: skip

    def write_target(
        self,
        guest: guests.GuestCluster,
        node: node_facts.NodeFacts,
        annotations: Mapping[str, str | None],
    ) -> None:
        """Write a target; raise `ConflictError` for the same one within 10 s.

        A program that changes it each time must not keep this process busy.
        """
        place, now = (node.name, annotations[key.DESIRED_CONFIG]), self._tools.clock.monotonic()
        if now - self._written.get(place, -math.inf) < upgrade_site.RECHECK_S:
            raise errors.ConflictError(f"another program changes the target of node {node.name}")
        writer.annotate_node(guest.client, node, annotations)
        self._written[place] = now

    def _sync_installers(
        self,
        objects: pool_facts.PoolObjects,
        guest: guests.GuestCluster,
        members: Collection[node_facts.NodeFacts],
        content: upgrade_objects.UpgradeContent,
    ) -> _Verdict:
        states, site = guest.get_states(), self._find_site(guest)
        updating = [
            states[node.name]
            for node in members
            if node.name in states
            and node.desired_config == content.target
            and not upgrade_objects.is_done(node, states[node.name], content.target)
        ]
        names = [state.name for state in updating if site.is_installer_due(state)]
        image = self._tools.agent_image
        with suppress(errors.NotFoundError):  # The namespace was deleted a moment ago.
            site.sync_installers(content, names if image else (), image)
        if image or not names:
            return None
        text = (
            f"node {min(names)} and {len(names) - 1} others have no treenail in their image: "
            "restart the controller with --agent-image"
        )
        self._warn(objects, "AgentMissing", text)
        return os_image.GateBlocked(text, "AgentMissing")

    def _is_done_now(self, guest: guests.GuestCluster, name: str, target: str) -> bool:
        try:
            document = guest.client.get(resources.NODES, name)
        except errors.NotFoundError:
            return False
        node, state = node_facts.NodeFacts.from_json(document), guest.read_state(document)
        return upgrade_objects.is_done(node, state, target)

    def _warn(self, objects: pool_facts.PoolObjects, reason: str, message: str) -> None:
        self._tools.events.record_warning(pool_facts.refer_to(objects.pool), reason, message)


def _list_nodes(objects: pool_facts.PoolObjects) -> list[str]:
    """Return the nodes of the Machines that stay; an empty name for one that never joined."""
    return [each.node_name for each in objects.machines if not each.is_deleting]
