"""Nodes and pods on the lab's API server, and drain controllers that a test can kill."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.fakes.clock import FakeClock
from tests.fixtures.objects import make_object
from tests.waiting import PATIENCE, wait_until
from treenail.api import annotations as key
from treenail.clocks import Clock, SystemClock
from treenail.controllers.drain.controller import DrainController, DrainRules
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.workqueue import WorkQueue
from treenail.errors import ClusterError, NotFoundError
from treenail.kube.api_client import Client, Json
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.eviction import InlineExecutor
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    CUSTOMRESOURCEDEFINITIONS,
    EVENTS,
    MACHINECONFIGNODES,
    NAMESPACES,
    NODES,
    PODDISRUPTIONBUDGETS,
    PODS,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

Hook = Callable[[ApiRequest], ApiResponse | None]
"""Called before a request is sent; it may respond or raise instead."""


class Wire(HttpTransport):
    """A transport with hooks that records all writes."""

    def __init__(self, server: LabServer, kubeconfig: Path | None = None) -> None:
        path = kubeconfig or server.write_kubeconfig("drainer", ["system:masters"])
        super().__init__(read_kubeconfig(str(path)), SystemClock(), max_kept=4)
        self.before: Hook = lambda _: None
        self.after: Callable[[ApiRequest], None] = lambda _: None
        self.writes: list[tuple[str, str]] = []

    def send(self, request: ApiRequest) -> ApiResponse:
        reply = self.before(request)
        if reply is None:
            reply = super().send(request)
        if request.method != "GET":
            self.writes.append((request.method, request.path))
        self.after(request)
        return reply

    def written(self, word: str) -> int:
        """Count the writes to paths with this text."""
        return sum(word in path for _, path in self.writes)


class Site:
    """Objects that a test creates and reads."""

    def __init__(self, server: LabServer, *, kinds: tuple[Json, ...] = ()) -> None:
        self.server = server
        self._transport = HttpTransport(
            read_kubeconfig(str(server.admin_kubeconfig)), SystemClock(), max_kept=4
        )
        self.client = Client(self._transport)
        self.client.create(NAMESPACES, {"metadata": {"name": "shop"}})
        for kind in kinds:
            self.client.create(CUSTOMRESOURCEDEFINITIONS, kind)
        self.clock = FakeClock(SystemClock().now())

    def close(self) -> None:
        self._transport.close()

    # Arranging

    def node(
        self,
        name: str,
        notes: dict[str, str] | None = None,
        *,
        unschedulable: bool = False,
        reported: bool = False,
        pod: str = "",
        kept: bool = False,
    ) -> None:
        """Create a Node, and a pod on it that a budget keeps, as ``keep-POD`` if ``kept``.

        The drain controller writes the conditions of its MachineConfigNode if it is ``reported``.
        """
        spec = {"unschedulable": True} if unschedulable else {}
        self.client.create(NODES, make_object(NODES, name, spec, annotations=notes or {}))
        if reported:
            named = {"node": {"name": name}, "pool": {"name": "worker"}}
            named["configVersion"] = {"desired": "rendered-a"}
            self.client.create(MACHINECONFIGNODES, make_object(MACHINECONFIGNODES, name, named))
        if pod:
            self.pod(name, pod)
        if kept:
            self.budget(f"keep-{pod}", pod)

    def pod(
        self,
        node: str,
        name: str,
        *,
        app: str = "",
        stop_s: int = 0,
        grace_s: int = 30,
        **more: object,
    ) -> None:
        """A pod that runs and is ready."""
        metadata: Json = {
            "name": name,
            "labels": {"app": app or name},
            "annotations": {"lab.treenail/stop-seconds": str(stop_s)},
            **more,
        }
        spec = {"nodeName": node, "containers": [{"name": "main", "image": "i"}]}
        spec["terminationGracePeriodSeconds"] = grace_s
        self.client.create(PODS, {"metadata": metadata, "spec": spec}, namespace="shop")
        wait_until(lambda: self.phase(name) == "Running")

    def budget(self, name: str, app: str, *, keep: int = 100) -> None:
        """Create a budget and wait for its status; by default it allows no disruption."""
        spec = {"minAvailable": keep, "selector": {"matchLabels": {"app": app}}}
        body: Json = {"metadata": {"name": name}, "spec": spec}
        self.client.create(PODDISRUPTIONBUDGETS, body, namespace="shop")
        wait_until(lambda: self._counted(name))

    def drop_budget(self, name: str) -> None:
        self.client.delete(PODDISRUPTIONBUDGETS, name, namespace="shop")

    def request_drain(self, node: str, request: str | None) -> None:
        self.annotate(node, {key.DESIRED_DRAIN: request})

    def annotate(self, node: str, notes: dict[str, str | None]) -> None:
        self.client.patch(NODES, node, {"metadata": {"annotations": notes}})

    def set_cordon(self, node: str, *, cordoned: bool) -> None:
        """As kubectl does."""
        self.client.patch(NODES, node, {"spec": {"unschedulable": cordoned or None}})

    # Looking

    def notes(self, node: str) -> dict[str, str]:
        return dict(self._read(node)["metadata"].get("annotations") or {})  # type: ignore[call-overload,no-any-return]  # a dict

    def cordoned(self, node: str) -> bool:
        return bool((self._read(node).get("spec") or {}).get("unschedulable"))

    def applied(self, node: str) -> str:
        return self.notes(node).get(key.LAST_APPLIED_DRAIN, "")

    def record(self, node: str) -> Json:
        return json.loads(self.notes(node).get(key.DRAIN, "{}"))

    def blocked(self, node: str) -> list[tuple[str, str]]:
        """Pod and reason of each blocker on the Node."""
        found = json.loads(self.notes(node).get(key.DRAIN_BLOCKED, "[]"))
        return [(each["pod"], each["reason"]) for each in found]

    def phase(self, pod: str) -> object:
        found = self.client.get(PODS, pod, namespace="shop")
        return found["status"].get("phase")  # type: ignore[attr-defined]  # a dict

    def is_leaving(self, pod: str) -> bool:
        try:
            metadata = self.client.get(PODS, pod, namespace="shop")["metadata"]
        except NotFoundError:
            return True
        return "deletionTimestamp" in metadata  # type: ignore[operator]  # a dict

    def pods(self, node: str = "") -> list[str]:
        params = {"fieldSelector": f"spec.nodeName={node}"} if node else {}
        items = self.client.list(PODS, namespace="shop", params=params).items
        return sorted(str(found["metadata"]["name"]) for found in items)  # type: ignore[index]  # a dict

    def events(self, node: str) -> list[tuple[str, str]]:
        """Reason and message of the Events of a node."""
        found = self.client.list(EVENTS, namespace="default").items
        return [
            (str(each["reason"]), str(each["message"]))
            for each in found
            if each["involvedObject"]["name"] == node  # type: ignore[index]  # a dict
        ]

    def conditions(self, node: str) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition of the MachineConfigNode."""
        status = self.client.get(MACHINECONFIGNODES, node).get("status") or {}
        found = status.get("conditions") or []  # type: ignore[attr-defined]  # a dict
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    def pod_watches(self) -> int:
        """Count the open watches of pods."""
        return self.server.call_api(lambda api: api.watches.count_watches().get("pods", 0))

    def _read(self, node: str) -> dict[str, dict[str, object]]:
        return self.client.get(NODES, node)  # type: ignore[return-value]  # dicts

    def _counted(self, budget: str) -> bool:
        found = self.client.get(PODDISRUPTIONBUDGETS, budget, namespace="shop")
        return "currentHealthy" in (found.get("status") or {})  # type: ignore[operator]  # a dict


class Acting:
    """A drain controller that syncs step by step; ``kill`` ends it without cleanup."""

    def __init__(
        self,
        site: Site,
        *,
        clock: Clock | None = None,
        max_parallel: int = 50,
        rules: DrainRules | None = None,
    ) -> None:
        self._site = site
        self.wire = Wire(site.server)
        self.clock = clock or site.clock
        self.metrics = ControllerMetrics()
        client = Client(self.wire)
        self._informers = InformerSet(client, SystemClock())
        recorder = EventRecorder(client, "treenail-controller", "test", self.clock)
        self.controller = DrainController(
            client,
            recorder,
            self.clock,
            self.metrics,
            max_parallel=max_parallel,
            # In the thread of the test, so that a kill ends the controller at any write.
            executor=InlineExecutor(),
            rules=rules or DrainRules(),
        )
        self.queue = WorkQueue(self.clock, first_retry_s=0.01, max_retry_s=0.05)
        self.controller.register_watches(self._informers, self.queue.add)
        self._informers.start()
        assert self._informers.wait_until_synced(10 * PATIENCE)

    def turn(self) -> bool:
        """Sync the next due node; False if none is due."""
        item = self.queue.get(0)
        if item is None:
            return False
        name, _ = item
        try:
            again_s = self.controller.sync_key(name)
        except ClusterError:
            self.queue.add_rate_limited(name)
        else:
            self.queue.forget(name)
            if again_s is not None:
                self.queue.add_after(name, again_s)
        self.queue.done(name)
        return True

    def until(
        self, reached: Callable[[], object], *, limit_s: float = 15.0, still: bool = False
    ) -> None:
        """Sync due nodes until the condition holds.

        The clock advances a little when no node is due, unless ``still``.
        """

        def look() -> object:
            while self.turn():
                pass
            if reached():
                return True
            if isinstance(self.clock, FakeClock) and not still:
                self.clock.move(0.5)
            return False

        wait_until(look, limit_s=limit_s)

    def fulfil(self, node: str, request: str) -> None:
        """Request a drain or its end, and sync until it is acknowledged."""
        self._site.request_drain(node, request)
        self.until(lambda: self._site.applied(node) == request)

    def settle(self) -> None:
        """Sync all due nodes."""
        while self.turn():
            pass

    def kill(self) -> None:
        """End the process: it writes nothing more and its resources are released."""
        self._informers.stop()
        self.controller.close()
        self.wire.close()


def forget_pod(site: Site, name: str) -> None:
    """Remove a pod at once, including its finalizers."""
    with suppress(NotFoundError):
        site.client.patch(PODS, name, {"metadata": {"finalizers": None}}, namespace="shop")
        site.client.delete(PODS, name, namespace="shop", grace_s=0)
