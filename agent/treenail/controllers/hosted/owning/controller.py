"""Owns the NodePools of the HostedClusters in its scope: config, Secrets, machines, conditions.

Pure functions decide, and every write can be repeated: Secrets come before the machines that boot
from them, and go after them. Nothing here needs the API server of a hosted cluster.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api import decode, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.hosted.config import generator, hashes, pool_config
from treenail.controllers.hosted.owning import conditions, machines, sources, token_secrets
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, discovery, event_recorder, resources, watch

RECHECK_S = 360.0
"""Delay until the contents of ConfigMaps and Secrets are read again, which are not watched.

That takes up to 12 requests, of which a pool may make 2 in a minute.
"""
_RETRY_S = 5.0
_KINDS = (
    resources.NODEPOOLS, resources.HOSTEDCLUSTERS, resources.HOSTEDCONTROLPLANES,
    resources.MACHINESETS, resources.MACHINEDEPLOYMENTS, resources.MACHINEHEALTHCHECKS,
)  # fmt: skip
_PLURALS = (*(kind.plural for kind in _KINDS), resources.MACHINES.plural)


@dataclass(frozen=True, slots=True)
class OwningSettings:
    """Which HostedClusters are owned, and where their machines fetch configs."""

    scope: str
    ignition_url: str
    load_authorities: Callable[[], bytes] = lambda: b""
    """Returns the CAs of the Ignition server, PEM; raises `TreenailError`."""
    generate: Callable[[generator.ConfigInputs], pool_config.PoolConfig] = generator.generate_config
    plan_secrets: Callable[
        [token_secrets.SecretFacts, Callable[[], str]], token_secrets.SecretPlan
    ] = token_secrets.plan_secrets


class OwningController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are NodePools."""

    name = "nodepools"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        events: event_recorder.EventRecorder,
        settings: OwningSettings,
    ) -> None:
        self._client = client
        self._clock = clock
        self._events = events
        self._settings = settings
        self._sources = sources.SourceReader(client)

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch NodePools and objects of Cluster API, in all namespaces."""
        self._informers = informers
        self._version = discovery.find_preferred_version(
            self._client, clusterapi.GROUP, clusterapi.VERSIONS
        )
        self._machines = informers.add_view(
            watch.WatchScope(self._serve(resources.MACHINES)),
            clusterapi.ClusterMachine.from_json,
            optional=True,
        )
        self._views = {
            kind: informers.add_view(
                watch.WatchScope(self._serve(kind)), _read_document, optional=True
            )
            for kind in _KINDS
        }

        def enqueue_related(_key: str, *documents: decode.Json | None) -> None:
            for document in filter(None, documents):
                notes = object_meta.read_metadata(document).annotations
                enqueue(notes.get(hosted_key.NODE_POOL, ""))

        def enqueue_machine(_key: str, *values: clusterapi.ClusterMachine | None) -> None:
            for machine in filter(None, values):
                enqueue(machine.node_pool)

        def enqueue_cluster(namespace: str) -> None:
            # Each sync reads Secrets and ConfigMaps: the pools of other clusters stay at rest.
            for key, document in self._views[resources.NODEPOOLS].get_all().items():
                place, name = key.partition("/")[0], resources.get_object(document, "spec")
                cluster = str(name.get("clusterName"))
                if nodepool.name_control_plane_namespace(place, cluster) == namespace:
                    enqueue(key)

        self._machines.add_handler(enqueue_machine)
        for kind, view in self._views.items():
            if kind is resources.NODEPOOLS:
                view.add_handler(lambda key, *_: enqueue(key))
            elif kind.group == clusterapi.GROUP:
                view.add_handler(enqueue_related)
            elif kind is resources.HOSTEDCLUSTERS:
                view.add_handler(
                    lambda key, *_: enqueue_cluster(
                        nodepool.name_control_plane_namespace(*key.split("/"))
                    )
                )
            else:
                view.add_handler(lambda key, *_: enqueue_cluster(key.partition("/")[0]))

    def close(self) -> None:
        """Nothing runs beside the watches."""

    def sync_key(self, key: str) -> float | None:
        """Give the objects of one NodePool what it asks for; return the delay until the next."""
        if self._informers.find_stale_reason(_PLURALS):
            return _RETRY_S
        if (owned := self._find_pool(key)) is None:
            return None
        if other := conditions.find_other_manager(owned.pool.metadata, owned.cluster.metadata):
            text = (
                f"{other} wrote its status, so that treenail writes nothing more; restrict {other} "
                f"to its own scope, then remove annotation {hosted_key.SCOPE} from HostedCluster "
                f"{owned.cluster.name}, and set it again"
            )
            self._warn(owned.pool, "ManagedElsewhere", text)
            return RECHECK_S
        try:
            if owned.pool.metadata.is_deleting:
                return self._delete_pool(owned)
            return self._sync(owned)
        except (errors.ConfigError, errors.ForbiddenError) as error:
            remedy = error.remedy or (
                "run: treenail-controller manifests --only hosted,nodepools --control-plane "
                f"{owned.namespace} --node-pools {owned.pool.namespace} | kubectl apply -f -"
            )
            self._warn(owned.pool, "CannotOwn", f"{error}; {remedy}")
            raise

    def _sync(self, owned: sources.OwnedPool) -> float:
        now, inputs, owner, problem = self._clock.now(), None, None, None
        is_paused = nodepool.is_pool_paused(owned.pool, owned.cluster, now)
        secrets = token_secrets.SecretFacts(
            owned.pool, owned.namespace, None, "", self._settings.ignition_url, {}, owned.members,
            now, owned.templates, reached=self._sources.read_reached(owned),
            authorities=self._settings.load_authorities(),
        )  # fmt: skip
        try:
            owner = machines.read_owner(owned.pool, owned.found)
            if owner is not None:
                rolled = owned.pool.read_secret_hash(owner.data_secret)
                secrets = replace(secrets, rolled_hash=rolled)
            inputs, secrets = self._generate(owned, secrets, can_roll=not is_paused)
        except pool_config.PoolConfigError as error:
            problem = error
        else:
            owned = self._patch_pool(owned, conditions.build_seed(owned.pool, inputs.config))
            inputs = replace(inputs, pool=owned.pool)
        plan = token_secrets.SecretPlan()
        try:
            plan = self._write_secrets(owned, secrets)
        except pool_config.PoolConfigError as error:
            inputs, problem = None, error
        is_reached = bool(secrets.reached) or any(each.node_name for each in owned.members)
        if inputs is not None and not is_paused:
            wanted = machines.build_owner(inputs, secrets.rolled_hash)
            owned = replace(owned, found=self._write(owned, owned.kind, owned.found, wanted))
            owner = machines.read_owner(owned.pool, owned.found)
            self._write_health_check(
                owned, replace(inputs, found=owned.found), is_reached=is_reached
            )
        for secret in plan.deletions:
            self._delete(resources.SECRETS, owned.namespace, secret)
        facts = conditions.StatusFacts(
            owned.pool, owner, owned.members, inputs.config if inputs else None, problem, is_paused,
            is_reached, owned.sets,
        )  # fmt: skip
        owned = self._patch_pool(owned, {"annotations": conditions.build_marks(facts)})
        facts = replace(facts, pool=owned.pool)
        status = resources.get_object(owned.document, "status")
        wanted = conditions.build_status(facts, owned.document, now=now)
        if changes := resources.find_changes(status, wanted):
            self._patch(owned, {"status": changes}, subresource="status")
        return min(plan.recheck_s, RECHECK_S)

    def _generate(
        self, owned: sources.OwnedPool, secrets: token_secrets.SecretFacts, *, can_roll: bool
    ) -> tuple[machines.MachineInputs, token_secrets.SecretFacts]:
        """Return what machines and Secrets are made from; raise `PoolConfigError`."""
        pool = owned.pool
        machines.check_pool(pool)
        read = self._sources.read_inputs(owned)
        config = self._settings.generate(read)
        inputs = machines.MachineInputs(
            pool, owned.namespace, owned.cluster_name, config,
            self._sources.find_template(owned), owned.found, self._version,
        )  # fmt: skip
        inputs = self._compare(owned, inputs)
        if not can_roll and machines.needs_rollout(inputs):
            # The Secrets of the present template keep the config that its machines have.
            return inputs, secrets
        return inputs, replace(
            secrets,
            config=config,
            rolled_hash=machines.find_rolled_hash(inputs, can_roll=can_roll),
            packed=pool_config.pack_config(config, is_payload=pool.allows_refresh),
            pull_secret=read.pull_secret or b"",
            trust_bundle=read.trust_bundle or b"",
        )

    def _compare(
        self, owned: sources.OwnedPool, inputs: machines.MachineInputs
    ) -> machines.MachineInputs:
        """Return the inputs with what nodes need to get from their config to this one."""
        owner, has_other = inputs.owner, machines.has_other_hash(inputs)
        if owner is None or owner.own_target == inputs.config.target_hash:
            return inputs
        try:
            before = self._sources.read_target_config(owned, owner)
        except errors.ConfigError as error:
            if has_other:
                text = "all nodes are rolled: cannot compare with the config that they have"
                self._warn(owned.pool, "ConfigUnknown", f"{text}: {error}")
            return replace(inputs, holds_target=not has_other)
        # A machine's version changes only with the machine.
        can_refresh = owner.version == inputs.config.version and not hashes.needs_rollout(
            before, inputs.config.config
        )
        return replace(
            inputs,
            is_refresh=has_other and can_refresh,
            holds_target=not (has_other or can_refresh),
        )

    def _find_pool(self, key: str) -> sources.OwnedPool | None:
        """Return a NodePool of the scope with its objects; None for any other."""
        if (document := self._views[resources.NODEPOOLS].find(key)) is None:
            return None
        pool = nodepool.NodePool.from_json(document)
        place = f"{pool.namespace}/{pool.cluster_name}"
        if (found := self._views[resources.HOSTEDCLUSTERS].find(place)) is not None:
            cluster = nodepool.HostedCluster.from_json(found)
            is_owned = cluster.scope == self._settings.scope
        else:
            # Without HyperShift nothing keeps the HostedCluster until its NodePools are gone.
            metadata = object_meta.ObjectMeta(pool.cluster_name, pool.namespace)
            cluster = nodepool.HostedCluster(metadata)
            is_owned = pool.metadata.is_deleting and conditions.was_owned(pool.metadata)
        if not is_owned:
            return None
        namespace = cluster.control_plane_namespace
        planes = self._views[resources.HOSTEDCONTROLPLANES].get_all().items()
        own = (plane for name, plane in planes if name.startswith(f"{namespace}/"))
        read = map(nodepool.HostedControlPlane.from_json, own)
        infra_id = next((plane.infra_id for plane in read), None)
        owned = sources.OwnedPool(document, pool, cluster, infra_id)
        found = self._views[owned.kind].find(f"{namespace}/{pool.name}") or {}
        documents = self._views[resources.MACHINESETS].get_all().values()
        related = (each for each in documents if sources.is_of_pool(each, pool))
        sets = tuple(map(clusterapi.MachineSet.from_json, related))
        named = {each.data_secret for each in sets if each.replicas}
        members = self._machines.get_all().values()
        return replace(
            owned,
            found=found,
            members=tuple(each for each in members if each.node_pool == pool.full_name),
            sets=sets,
            templates=frozenset(named | {machines.read_data_secret(found)}),
        )

    def _write_secrets(
        self, owned: sources.OwnedPool, facts: token_secrets.SecretFacts
    ) -> token_secrets.SecretPlan:
        """Write the Secrets; return their plan, whose deletions come later."""
        found = self._sources.read_secrets(owned, facts.rolled_hash)
        plan = self._settings.plan_secrets(replace(facts, found=found), lambda: str(uuid.uuid4()))
        for secret in plan.writes:
            name, place = str(resources.get_object(secret, "metadata")["name"]), owned.namespace
            if resources.get_object(secret, "metadata").get("resourceVersion"):
                self._client.update(resources.SECRETS, name, secret, namespace=place)
            else:
                self._client.create(resources.SECRETS, secret, namespace=place)
        return plan

    def _write_health_check(
        self, owned: sources.OwnedPool, inputs: machines.MachineInputs, *, is_reached: bool
    ) -> None:
        """Create the MachineHealthCheck once machines can boot, or delete it."""
        kind, pool = resources.MACHINEHEALTHCHECKS, owned.pool
        found = self._views[kind].find(f"{owned.namespace}/{pool.name}")
        if found is None and pool.auto_repair and is_reached:
            self._write(owned, kind, {}, machines.build_health_check(inputs))
        elif found is not None and not pool.auto_repair and sources.is_of_pool(found, pool):
            self._delete(kind, owned.namespace, found)

    def _write(
        self,
        owned: sources.OwnedPool,
        kind: resources.Resource,
        found: decode.Json,
        wanted: decode.Json,
    ) -> decode.Json:
        """Create an object with the pool's name, or change the fields that differ; return it."""
        resource, changes = self._serve(kind), resources.find_changes(found, wanted)
        name, place = owned.pool.name, owned.namespace
        metadata = resources.get_object(changes, "metadata")
        if not found:
            head: decode.Json = {"apiVersion": resource.api_version, "kind": kind.kind}
            body = head | changes | {"metadata": {**metadata, "name": name}}
            return self._client.create(resource, body, namespace=place)
        if not changes:
            return found
        version = object_meta.read_metadata(found).resource_version
        body = changes | {"metadata": {**metadata, "resourceVersion": version}}
        return self._client.patch(resource, name, body, namespace=place)

    def _patch_pool(self, owned: sources.OwnedPool, wanted: decode.Json) -> sources.OwnedPool:
        """Change metadata of the NodePool; do nothing if it has them."""
        metadata = resources.get_object(owned.document, "metadata")
        if not (changes := resources.find_changes(metadata, wanted)):
            return owned
        document = self._patch(owned, {"metadata": changes})
        return replace(owned, document=document, pool=nodepool.NodePool.from_json(document))

    def _patch(
        self, owned: sources.OwnedPool, body: decode.Json, *, subresource: str = ""
    ) -> decode.Json:
        """Patch this version of the NodePool."""
        version = owned.pool.metadata.resource_version
        metadata = {**resources.get_object(body, "metadata"), "resourceVersion": version}
        return self._client.patch(
            resources.NODEPOOLS,
            owned.pool.name,
            body | {"metadata": metadata},
            namespace=owned.pool.namespace,
            subresource=subresource,
        )

    def _delete_pool(self, owned: sources.OwnedPool) -> float | None:
        """Delete the machines, then the Secrets, and let the NodePool go."""
        finalizers = conditions.list_finalizers(owned.pool)
        if hosted_key.FINALIZER not in finalizers:
            return None
        for kind in (resources.MACHINEHEALTHCHECKS, owned.kind):
            found = self._client.find(self._serve(kind), owned.pool.name, namespace=owned.namespace)
            if found is not None and sources.is_of_pool(found, owned.pool):
                if not object_meta.read_metadata(found).is_deleting:
                    self._delete(kind, owned.namespace, found)
                if kind is owned.kind:
                    return _RETRY_S
        if owned.members or owned.sets:
            return _RETRY_S
        for secret in self._sources.read_secrets(owned, "").values():
            if sources.is_of_pool(secret, owned.pool):
                self._delete(resources.SECRETS, owned.namespace, secret)
        finalizers.remove(hosted_key.FINALIZER)
        self._patch(owned, {"metadata": {"finalizers": finalizers}})
        return None

    def _delete(self, kind: resources.Resource, namespace: str, found: decode.Json) -> None:
        """Delete this version of an object."""
        known = object_meta.read_metadata(found)
        with suppress(errors.NotFoundError):
            self._client.delete(
                self._serve(kind),
                known.name,
                namespace=namespace,
                uid=known.uid,
                resource_version=known.resource_version,
            )

    def _serve(self, kind: resources.Resource) -> resources.Resource:
        """Return the kind in the version of Cluster API that the API server has."""
        return replace(kind, version=self._version) if kind.group == clusterapi.GROUP else kind

    def _warn(self, pool: nodepool.NodePool, reason: str, text: str) -> None:
        reference = event_recorder.ObjectReference(
            "NodePool", pool.name, pool.metadata.uid, pool.namespace, nodepool.API_VERSION
        )
        self._events.record_warning(reference, reason, text)


def _read_document(document: decode.Json) -> decode.Json:
    return document
