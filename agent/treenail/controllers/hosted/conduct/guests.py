"""Connections to the API servers of hosted clusters, while a rollout runs there.

Each cluster has its own threads: for its watch, and for the syncs of its pools. A cluster that is
down, slow or has another CA therefore delays no other one.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from treenail import clocks, errors
from treenail.api import decode
from treenail.api.hosted import nodepool
from treenail.controllers.pools import node_facts
from treenail.controllers.runtime import controller_metrics, informer_set, workers
from treenail.encoding import json_text
from treenail.kube import api_client, informer, lease, resources, watch
from treenail.kube.transport import kubeconfig, native

RELOAD_S = 30.0
"""How long a kubeconfig that does not work is not read again."""
_CALL_LIMIT_S = 10.0


def load_guest_config(
    client: api_client.Client, control_plane: nodepool.HostedControlPlane
) -> kubeconfig.ApiServerConfig:
    """Read the kubeconfig that the HostedControlPlane names, else the one of Cluster API.

    Raises `ClusterError` and `UsageError`.
    """
    namespace, named = control_plane.namespace, control_plane.kubeconfig
    name, key = f"{control_plane.infra_id}-kubeconfig", "value"
    if named is not None:
        name, key = named.name, named.key
    where = f"kubeconfig in Secret {name} in namespace {namespace}"
    secret = client.get(resources.SECRETS, name, namespace=namespace)
    encoded = decode.Fields.from_json(secret, where).get_object("data").get_text(key)
    with suppress(ValueError):  # Its text would quote a part of the Secret.
        return kubeconfig.read_kubeconfig_text(json_text.decode_base64(encoded).decode(), where)
    raise errors.UsageError(
        f"cannot use the {where}: its key {key} is not base64 of a text",
        remedy="delete the Secret: HyperShift creates it again",
    )


class GuestCluster:
    """One hosted cluster: its Nodes, a client, and a thread that syncs its pools.

    Writes are sent only while this process leads.
    """

    name = "hosted"

    def __init__(
        self,
        load_config: Callable[[], kubeconfig.ApiServerConfig],
        sync: Callable[[str, "GuestCluster"], float | None],
        is_leader: Callable[[], bool],
        clock: clocks.Clock,
    ) -> None:
        """``load_config`` may raise `TreenailError`."""
        self._load_config = load_config
        self._sync = sync
        self._is_leader = is_leader
        self._clock = clock
        self._error = "the connection has not begun"
        self._loaded_at = float("-inf")
        self._config: kubeconfig.ApiServerConfig | None = None
        self._transport: native.HttpTransport | None = None
        self._client: api_client.Client | None = None
        self._nodes: informer.Informer[node_facts.NodeFacts] | None = None
        self.pools: set[str] = set()
        """The pools that use the cluster now."""
        measured = workers.WorkerMetrics(controller_metrics.ControllerMetrics())
        self._workers = workers.WorkerPool(workers.ControllerSettings(self, 1), clock, measured)
        self._workers.start(is_leader)

    def add(self, pool: str) -> None:
        """Sync a pool on the thread of the cluster."""
        self.pools.add(pool)
        self._workers.queue.add(pool)

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch nothing: the informers of the process are of the management cluster."""

    def sync_key(self, key: str) -> float | None:
        """Connect, and sync a pool once."""
        self._connect()
        return self._sync(key, self)

    def close(self) -> None:
        """End the threads and the connections, without waiting for a request in progress."""
        self._workers.queue.close()
        self._disconnect()

    @property
    def client(self) -> api_client.Client:
        """Raises UnreachableError before the kubeconfig was read."""
        if self._client is None:
            raise errors.UnreachableError(self.stale_reason)
        return self._client

    @property
    def stale_reason(self) -> str:
        """Why the Nodes may be outdated; empty when they are current."""
        reason = self._error
        if not reason and (nodes := self._nodes) is not None:
            nodes.check_if_silent()
            reason = nodes.stale_reason
            if not reason and nodes.restored_s < informer_set.RESTORED_WAIT_S:
                reason = "the API server returned to an older state, and nodes report again"
        return f"hosted cluster: {reason}" if reason else ""

    def get_nodes(self) -> Mapping[str, node_facts.NodeFacts]:
        """Return the Nodes by name."""
        return {} if self._nodes is None else self._nodes.get_all()

    def _connect(self) -> None:
        """Start the watch, or start it again with another kubeconfig while it does not work."""
        now = self._clock.monotonic()
        if (self._nodes and not self._nodes.error) or now - self._loaded_at < RELOAD_S:
            return
        self._loaded_at = now
        try:
            config = self._load_config()
        except errors.TreenailError as error:
            self._error = f"{error}; {error.remedy}" if error.remedy else str(error)
            return
        self._error = ""
        if config == self._config:
            return
        self._disconnect()
        self._config = config
        self._transport = native.HttpTransport(config, self._clock)
        fenced = lease.LeaderTransport(self._transport, self._is_leader)
        self._client = api_client.Client(
            fenced, field_manager="treenail-hosted", limit_s=_CALL_LIMIT_S
        )
        self._nodes = informer.Informer(
            self._client,
            watch.WatchScope(resources.NODES),
            self._clock,
            partial(informer_set.project_object, node_facts.NodeFacts.from_json),
            on_lost=lambda _: self._sync_again(),
        )
        self._nodes.add_handler(lambda *_: self._sync_again())
        self._nodes.add_list_handler(self._sync_again)
        self._nodes.start()

    def _sync_again(self) -> None:
        for pool in tuple(self.pools):
            self._workers.queue.add(pool)

    def _disconnect(self) -> None:
        if self._nodes is not None:
            self._nodes.stop(limit_s=0.0)
        if self._transport is not None:
            self._transport.close()
        self._nodes = self._transport = self._client = None
