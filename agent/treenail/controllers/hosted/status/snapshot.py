"""Read the facts of NodePools from a management cluster of HyperShift; write nothing.

Only reading the NodePools must succeed. Everything else that may not be read, does not exist or
has an unexpected shape becomes a sentence in `PoolFacts.unread`.
"""

import dataclasses
import hmac
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from treenail import clocks, errors, sanitize
from treenail.api import component_names, machineconfigpool, node, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool, token_secret
from treenail.controllers.hosted import guest_kubeconfig, rollout_store
from treenail.controllers.hosted.status import facts
from treenail.kube import api_client, discovery, resources
from treenail.kube.transport import native

T = TypeVar("T")
_NO_PARAMS: Mapping[str, str] = {}
_CORE_CONFIGS = {"labelSelector": f"{hosted_key.CORE_CONFIG}=true"}
_GUESTS_LIMIT_S = 20.0
"""Limit until the last request to a hosted cluster begins."""
_GUEST_THREADS = 16
_CapiObject = clusterapi.ClusterMachine | clusterapi.MachineSet | clusterapi.MachineDeployment
_CAPI_KINDS: tuple[tuple[resources.Resource, Callable[[object], _CapiObject]], ...] = (
    (resources.MACHINES, clusterapi.ClusterMachine.from_json),
    (resources.MACHINESETS, clusterapi.MachineSet.from_json),
    (resources.MACHINEDEPLOYMENTS, clusterapi.MachineDeployment.from_json),
)


def read_pools(
    client: api_client.Client,
    clock: clocks.Clock,
    namespace: str = "",
    names: Sequence[str] = (),
    *,
    guest_limit_s: float = 5.0,
) -> list[facts.PoolFacts | facts.UnreadPool]:
    """Read NodePools, by default all of all namespaces.

    A name is that of a NodePool, or ``NAMESPACE/NAME``. Raises `ClusterError` when the NodePools
    cannot be read, and `UsageError` for a name that none of them has. ``guest_limit_s`` limits each
    request to a hosted cluster.
    """
    try:
        documents = client.list(resources.NODEPOOLS, namespace=namespace).items
    except errors.NotFoundError as error:
        raise errors.ClusterError(
            "the cluster has no NodePools",
            remedy="connect to the management cluster of HyperShift with --kubeconfig",
        ) from error
    pools = [*map(_read_pool, documents)]
    chosen = [pool for pool in pools if not names or {pool.name, pool.full_name} & {*names}]
    known = {name for pool in chosen for name in (pool.name, pool.full_name)}
    if missing := [name for name in names if name not in known]:
        listed = ", ".join(sorted(pool.full_name for pool in pools)[:20]) or "none"
        raise errors.UsageError(
            f"cannot find NodePool {missing[0]}: the cluster has {listed}",
            remedy="name one of these",
        )
    readable = [pool for pool in chosen if isinstance(pool, nodepool.NodePool)]
    is_limited = bool(namespace or names)
    found = _SnapshotReader(client, clock, guest_limit_s).read_facts(
        readable, is_limited=is_limited
    )
    return [*found, *(pool for pool in chosen if isinstance(pool, facts.UnreadPool))]


def _read_pool(document: api_client.Json) -> nodepool.NodePool | facts.UnreadPool:
    try:
        return nodepool.NodePool.from_json(document)
    except errors.ConfigError as error:
        metadata = resources.get_object(document, "metadata")
        namespace, name = str(metadata.get("namespace")), str(metadata.get("name"))
        return facts.UnreadPool(namespace, name, sanitize.sanitize_text(str(error), limit=300))


class _SnapshotReader:
    """Reads the objects of some pools, and notes what it could not read."""

    def __init__(
        self, client: api_client.Client, clock: clocks.Clock, guest_limit_s: float
    ) -> None:
        self._client = client
        self._clock = clock
        self._guest_limit_s = guest_limit_s
        self._records = rollout_store.RolloutStore(client)
        self._unread: dict[str, list[str]] = defaultdict(list)
        """Sentences by namespace of a control plane or full name of a pool; "" is all pools."""

    def read_facts(
        self, pools: Sequence[nodepool.NodePool], *, is_limited: bool
    ) -> list[facts.PoolFacts]:
        places = sorted({pool.namespace for pool in pools}) if is_limited else [""]
        read_cluster = nodepool.HostedCluster.from_json
        listed = self._list(resources.HOSTEDCLUSTERS, places, read_cluster) or []
        clusters = {(cluster.namespace, cluster.name): cluster for cluster in listed}
        owners = [clusters.get((pool.namespace, pool.cluster_name)) for pool in pools]
        if is_limited:
            places = sorted({owner.control_plane_namespace for owner in owners if owner})
        objects = self._read_capi_objects(places)
        read_metadata = object_meta.read_metadata
        core = self._list(resources.CONFIGMAPS, places, read_metadata, _CORE_CONFIGS)
        counts = Counter(metadata.namespace for metadata in core or [])
        found = []
        for pool, owner in zip(pools, owners, strict=True):
            kind = clusterapi.MachineSet if pool.is_in_place else clusterapi.MachineDeployment
            own = objects[pool.full_name]
            templates = (each for each in own if isinstance(each, kind))
            pool_facts = facts.PoolFacts(
                pool,
                owner,
                next((each for each in templates if each.get_controller() is None), None),
                tuple(each for each in own if isinstance(each, clusterapi.ClusterMachine)),
                counts[owner.control_plane_namespace] if owner and core is not None else None,
            )
            found.append(self._add_secrets(self._add_record(pool_facts)))
        nodes = self._read_guests(found)
        return [
            dataclasses.replace(
                pool_facts,
                nodes=nodes.get(pool_facts.control_plane) if _needs_nodes(pool_facts) else None,
                unread=self._list_unread(pool_facts),
            )
            for pool_facts in found
        ]

    def _list_unread(self, pool_facts: facts.PoolFacts) -> tuple[str, ...]:
        pool = pool_facts.pool
        keys = ("", pool.namespace, pool_facts.control_plane, pool.full_name)
        return tuple(dict.fromkeys(text for name in keys for text in self._unread[name]))

    def _note(self, key: str, what: str, error: Exception, *, is_guest: bool = False) -> None:
        """Note an error; raise that of a management cluster which no longer answers."""
        if isinstance(error, errors.UnreachableError) and not is_guest:
            raise error
        self._unread[key].append(sanitize.sanitize_text(f"{what}: {error}", limit=300))

    def _list(
        self,
        resource: resources.Resource,
        places: Sequence[str],
        read: Callable[[object], T],
        params: Mapping[str, str] = _NO_PARAMS,
    ) -> list[T] | None:
        """Return what can be read; None if the kind cannot.

        Other objects are noted with their NodePool, if they name one.
        """
        found = []
        try:
            for document in itertools.chain.from_iterable(
                self._client.list(resource, namespace=place, params=params).items
                for place in places
            ):
                try:
                    found.append(read(document))
                except errors.ConfigError as error:
                    metadata = resources.get_object(document, "metadata")
                    owner = resources.get_object(metadata, "annotations").get(hosted_key.NODE_POOL)
                    what = f"{resource.kind} {metadata.get('namespace')}/{metadata.get('name')}"
                    self._note(str(owner or metadata.get("namespace")), what, error)
        except errors.ClusterError as error:
            self._note("", f"{resource.kind}s", error)
            return None
        return found

    def _read_capi_objects(self, places: Sequence[str]) -> dict[str, list[_CapiObject]]:
        """Return the objects of Cluster API by the full name of their NodePool."""
        objects: dict[str, list[_CapiObject]] = defaultdict(list)
        group, versions = clusterapi.GROUP, clusterapi.VERSIONS
        try:
            version = discovery.find_served_version(self._client, group, versions)
        except errors.ClusterError as error:
            self._note("", "Machines", error)
            return objects
        for resource, read in _CAPI_KINDS:
            served = dataclasses.replace(resource, version=version)
            for value in self._list(served, places, read) or []:
                objects[value.node_pool].append(value)
        return objects

    def _add_record(self, pool_facts: facts.PoolFacts) -> facts.PoolFacts:
        """Return the facts with the conditions of the rollout that treenail conducts."""
        pool, namespace = pool_facts.pool, pool_facts.control_plane
        is_recorded = pool.rollout_policy or (pool_facts.owner == "treenail" and pool.is_in_place)
        if not is_recorded or not namespace:
            return pool_facts
        where = f"key {pool.name} of ConfigMap {namespace}/{component_names.HOSTED_ROLLOUTS}"
        conditions = None
        try:
            status = self._records.read(namespace, pool.name)
            record = {"metadata": {"name": pool.name}, "status": status}
            conditions = machineconfigpool.MachineConfigPool.from_json(record).conditions
        except (errors.ClusterError, errors.ConfigError) as error:
            self._note(pool.full_name, where, error)
        return dataclasses.replace(pool_facts, conducted=conditions)

    def _add_secrets(self, pool_facts: facts.PoolFacts) -> facts.PoolFacts:
        """Return the facts with those of the Secrets, whose contents do not leave this method."""
        pool, namespace = pool_facts.pool, pool_facts.control_plane
        if not namespace or not pool_facts.wanted_hash:
            return pool_facts
        name, stale = f"{nodepool.TOKEN_PREFIX}{pool.name}-{pool_facts.wanted_hash}", list[str]()
        try:
            if pool_facts.owner == "treenail" and pool_facts.template:
                name = self._name_token(pool_facts.template.data_secret, pool_facts)
            token = self._find_secret(name, namespace)
            for base in _list_boot_secrets(pool_facts):
                copy = self._find_secret(base + token_secret.COPY_SUFFIX, namespace)
                owner = self._find_secret(self._name_token(base, pool_facts), namespace)
                if copy is not None and not has_valid_token(copy, owner):
                    stale.append(base + token_secret.COPY_SUFFIX)
        except (errors.ClusterError, errors.ConfigError) as error:
            self._note(namespace, f"Secrets of namespace {namespace}", error)
            return pool_facts
        return dataclasses.replace(
            pool_facts,
            token_name=name,
            token=_read_token(token) if token is not None else None,
            stale_copies=tuple(stale),
        )

    def _name_token(self, user_data: str, pool_facts: facts.PoolFacts) -> str:
        """Return the token Secret of user data, which a refresh of treenail leads to another."""
        secret = self._find_secret(user_data, pool_facts.control_plane) or {}
        notes = object_meta.read_metadata(secret).annotations if secret else {}
        wanted = pool_facts.pool.read_secret_hash(user_data)
        wanted = notes.get(hosted_key.TARGET_CONFIG, wanted)
        return f"{nodepool.TOKEN_PREFIX}{pool_facts.pool.name}-{wanted}"

    def _find_secret(self, name: str, namespace: str) -> api_client.Json | None:
        return self._client.find(resources.SECRETS, name, namespace=namespace)

    def _read_guests(self, found: Sequence[facts.PoolFacts]) -> dict[str, dict[str, node.Node]]:
        """Read the nodes of hosted clusters whose pools update in place, all at the same time."""
        changing = [each for each in found if _needs_nodes(each) and each.control_plane]
        pools = {each.pool.full_name: each.control_plane for each in changing}
        clusters = {each.control_plane: each.template for each in changing}
        end = self._clock.monotonic() + _GUESTS_LIMIT_S
        nodes = {}
        with ThreadPoolExecutor(_GUEST_THREADS) as executor:
            results = {
                plane: executor.submit(
                    self._read_guest, plane, template.cluster_name if template else "", end
                )
                for plane, template in clusters.items()
            }
            for pool, plane in pools.items():
                try:
                    nodes[plane] = results[plane].result()
                except (errors.ClusterError, errors.ConfigError, errors.UsageError) as error:
                    self._note(pool, "nodes of the hosted cluster", error, is_guest=True)
        return nodes

    def _read_guest(self, plane: str, cluster: str, end: float) -> dict[str, node.Node]:
        if self._clock.monotonic() > end:
            raise errors.ClusterError(f"other hosted clusters took {_GUESTS_LIMIT_S:g} s")
        planes: list[nodepool.HostedControlPlane] = []
        with suppress(errors.NotFoundError):  # Without HyperShift the kind may not exist.
            documents = self._client.list(resources.HOSTEDCONTROLPLANES, namespace=plane).items
            planes += map(nodepool.HostedControlPlane.from_json, documents)
        config = guest_kubeconfig.load_guest_config(
            self._client, plane, next(iter(planes), None), cluster
        )
        transport = native.HttpTransport(config, self._clock, connect_s=self._guest_limit_s)
        nodes: dict[str, node.Node] = {}
        try:
            guest = api_client.Client(transport, limit_s=self._guest_limit_s)
            for page in guest.list_pages(resources.NODES):
                nodes |= {each.name: each for each in map(node.Node.from_json, page.items)}
                if self._clock.monotonic() > end:
                    raise errors.ClusterError(f"it did not answer within {_GUESTS_LIMIT_S:g} s")
        finally:
            transport.close()
        return nodes


def has_valid_token(copy: api_client.Json, token: api_client.Json | None) -> bool:
    """Return whether a copy of the pointer config has a token of the token Secret.

    Without a token in the copy no machine gets a config.
    """
    tokens = resources.get_object(token or {}, "data")
    bearer = token_secret.read_bearer(copy, "userdata")
    values = filter(None, (tokens.get("token"), tokens.get("old_token")))
    return any(hmac.compare_digest(str(value).encode(), bearer) for value in values)


def _list_boot_secrets(pool_facts: facts.PoolFacts) -> list[str]:
    """Return the Secrets whose copies new machines boot from; none unless KubeVirt copies them."""
    if pool_facts.pool.platform != nodepool.KUBEVIRT or pool_facts.template is None:
        return []
    starting = {machine.data_secret for machine in pool_facts.machines if not machine.node_name}
    return sorted({pool_facts.template.data_secret, *starting} - {""})[:10]


def _needs_nodes(pool_facts: facts.PoolFacts) -> bool:
    is_changing = pool_facts.wanted_hash != pool_facts.current_hash
    return pool_facts.pool.is_in_place and bool(pool_facts.wanted_hash) and is_changing


def _read_token(secret: api_client.Json) -> facts.TokenFacts:
    metadata, data = object_meta.read_metadata(secret), resources.get_object(secret, "data")
    return facts.TokenFacts(
        has_token=bool(data.get("token")),
        has_payload=bool(data.get("payload")),
        reason=token_secret.read_text(secret, "reason"),
        message=token_secret.read_text(secret, "message"),
        rotated_at=metadata.annotations.get(hosted_key.TOKEN_TIME, ""),
        expires_at=metadata.annotations.get(hosted_key.TOKEN_EXPIRATION),
    )
