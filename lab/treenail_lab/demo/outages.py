"""Observe drains: which nodes are out of service, for how long, and what blocks them."""

from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json, load_json
from treenail.clocks import Clock
from treenail.controllers.drain.decide import DrainNode
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.kube.api_client import Client
from treenail.kube.resources import NODES, PODS
from treenail.kube.watch import WatchScope


@dataclass(frozen=True, slots=True)
class _ObservedPod:
    node: str
    uid: str
    is_deleting: bool


@dataclass(slots=True)
class _Outage:
    """The time in which a node was out of service."""

    began: float
    ended: float | None = None
    evicted_pods: set[str] = field(default_factory=set)


class NodeOutages:
    """Watches nodes and pods, and records how long each node was out of service."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[str, _Outage] = {}
        self._blockers: dict[str, str] = {}
        self._informers = InformerSet(client, clock)
        self._informers.add_view(WatchScope(NODES), DrainNode.from_json).add_handler(
            self._observe_node
        )
        self._informers.add_view(WatchScope(PODS), _parse_pod).add_handler(self._observe_pod)

    def start(self) -> None:
        """Start the watches."""
        self._informers.start()

    def stop(self) -> None:
        """Stop the watches."""
        self._informers.stop()

    def out_of_service_s(self, node: str) -> float:
        """Return the seconds from the node's last cordon to its uncordon, or until now."""
        outage = self._outages.get(node)
        if outage is None:
            return 0.0
        ended = self._clock.monotonic() if outage.ended is None else outage.ended
        return ended - outage.began

    def count_evicted(self, node: str) -> int:
        """Count the pods that left the node during its last outage."""
        outage = self._outages.get(node)
        return len(outage.evicted_pods) if outage else 0

    def find_blocker(self, node: str) -> str:
        """Return what blocks the drain of the node; empty when nothing does."""
        return self._blockers.get(node, "")

    def list_cordoned(self) -> frozenset[str]:
        """Return the nodes that are cordoned now."""
        outages = list(self._outages.items())
        return frozenset(name for name, outage in outages if outage.ended is None)

    def _observe_node(self, name: str, before: DrainNode | None, after: DrainNode | None) -> None:
        now = self._clock.monotonic()
        was_cordoned, is_cordoned = (
            node is not None and node.unschedulable for node in (before, after)
        )
        if is_cordoned and not was_cordoned:
            self._outages[name] = _Outage(now)
        elif was_cordoned and not is_cordoned:
            self._outages[name].ended = now
        self._blockers[name] = _format_blockers(after.drain_blocked) if after else ""

    def _observe_pod(
        self, _name: str, before: _ObservedPod | None, after: _ObservedPod | None
    ) -> None:
        pod = before or after
        outage = self._outages.get(pod.node) if pod else None
        is_leaving = after is None or after.is_deleting
        if pod is not None and outage is not None and outage.ended is None and is_leaving:
            outage.evicted_pods.add(pod.uid)


def _parse_pod(document: Json) -> _ObservedPod:
    fields = Fields.from_json(document, "Pod")
    meta = fields.get_object("metadata")
    return _ObservedPod(
        node=fields.get_object("spec").get_text("nodeName"),
        uid=meta.get_text("uid"),
        is_deleting=meta.values.get("deletionTimestamp") is not None,
    )


def _format_blockers(text: str) -> str:
    """Format the first pod that blocks a drain, and how many others do, as the Node says."""
    if not text:
        return ""
    fields = Fields.from_json({"blocked": load_json(text, where=key.DRAIN_BLOCKED)}, "")
    pods = [
        f"pod {pod.get_text('pod')}: {pod.get_text('message')}"
        for pod in fields.iter_objects("blocked")
    ]
    return f"{pods[0]} (and {len(pods) - 1} more)" if len(pods) > 1 else "".join(pods)
