"""Connections to the API servers of hosted clusters, while a rollout runs there.

Each cluster has its own threads: for its watch, and for the syncs of its pools. A cluster that is
down, slow or has another CA therefore delays no other one.
"""

from collections.abc import Callable, Mapping

from treenail import clocks, errors
from treenail.api import component_names, decode
from treenail.controllers.drain import controller as drain_controller
from treenail.controllers.drain import decide
from treenail.controllers.hosted.in_place import upgrade_objects
from treenail.controllers.pools import node_facts
from treenail.controllers.runtime import controller_metrics, informer_set, workers
from treenail.kube import api_client, event_recorder, lease, resources, watch
from treenail.kube.transport import kubeconfig, native

RELOAD_S = 30.0
"""How long a kubeconfig that does not work is not read again."""
_CALL_LIMIT_S = 10.0
_DRAIN_STOP_S = 2.0
_NODES = (resources.NODES.plural,)


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
        drains: drain_controller.DrainRules | None = None,
    ) -> None:
        """``load_config`` may raise `TreenailError`. With ``drains``, treenail drains nodes."""
        self.drains = drains
        self._load_config = load_config
        self._sync = sync
        self._is_leader = is_leader
        self._clock = clock
        self._error = "the connection has not begun"
        self._loaded_at = float("-inf")
        self._config: kubeconfig.ApiServerConfig | None = None
        self._transport: native.HttpTransport | None = None
        self._client: api_client.Client | None = None
        self._informers: informer_set.InformerSet | None = None
        self._drains: workers.WorkerPool | None = None
        self.pools: set[str] = set()
        """The pools that use the cluster now."""
        self._metrics = controller_metrics.ControllerMetrics()
        self._measured = workers.WorkerMetrics(self._metrics)
        self._workers = workers.WorkerPool(
            workers.ControllerSettings(self, 1), clock, self._measured
        )
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
        # A sync that is in progress fails with it.
        self._error = "the connection has ended"
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
        if not reason and (informers := self._informers) is not None:
            informers.check_silent()
            reason = informers.find_stale_reason(_NODES)
        return f"hosted cluster: {reason}" if reason else ""

    def get_nodes(self) -> Mapping[str, node_facts.NodeFacts]:
        """Return the Nodes by name."""
        return {} if self._informers is None else self._nodes.get_all()

    def get_states(self) -> Mapping[str, upgrade_objects.HostedNode]:
        """Return what the Nodes say about agents and drains, by name."""
        return {} if self._informers is None else self._states.get_all()

    def read_state(self, document: decode.Json) -> upgrade_objects.HostedNode:
        """Read agent and drain of a Node; raise `ConfigError`."""
        keys = self.drains.keys if self.drains else decide.USUAL_KEYS
        return upgrade_objects.HostedNode.from_json(document, keys)

    def _connect(self) -> None:
        """Start the watch, or start it again with another kubeconfig while it does not work."""
        now = self._clock.monotonic()
        informers = self._informers
        is_watched = informers is not None and _NODES[0] not in informers.degraded
        if is_watched or now - self._loaded_at < RELOAD_S:
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
        self._informers = informers = informer_set.InformerSet(self._client, self._clock)
        scope = watch.WatchScope(resources.NODES)
        self._nodes = informers.add_view(scope, node_facts.NodeFacts.from_json)
        self._nodes.add_handler(lambda *_: self._sync_again())
        self._nodes.add_list_handler(self._sync_again)
        informers.add_loss_handler(self._sync_again)
        if self.drains is not None:
            self._states = informers.add_view(scope, self.read_state)
            self._states.add_handler(lambda *_: self._sync_again())
            self._add_drains(informers, self._client, self.drains)
        informers.start()

    def _add_drains(
        self,
        informers: informer_set.InformerSet,
        client: api_client.Client,
        rules: drain_controller.DrainRules,
    ) -> None:
        """Drain the nodes whose agents request it."""
        recorder = event_recorder.EventRecorder(
            client, component_names.CONTROLLER, self.name, self._clock
        )
        drains = drain_controller.DrainController(
            client, recorder, self._clock, self._metrics, rules=rules
        )
        settings = workers.ControllerSettings(drains, workers=4, max_retry_s=15.0)
        self._drains = workers.WorkerPool(settings, self._clock, self._measured)
        self._drains.register_watches(informers)
        self._drains.start(self._is_leader)

    def _sync_again(self) -> None:
        for pool in tuple(self.pools):
            self._workers.queue.add(pool)

    def _disconnect(self) -> None:
        if self._informers is not None:
            self._informers.stop(limit_s=0.0)
        if self._transport is not None:
            self._transport.close()
        # Without the transport, a request in progress fails.
        if self._drains is not None:
            self._drains.stop(_DRAIN_STOP_S)
        self._drains = self._informers = self._transport = self._client = None
