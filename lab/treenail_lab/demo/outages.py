"""What there is to see of drains: which nodes are out of service, for how long, and why still."""

from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json, load_json
from treenail.clock import Clock
from treenail.controllers.drain.decide import DrainNode
from treenail.controllers.runtime.informers import Informers
from treenail.kube.client import Client
from treenail.kube.resources import NODES, PODS
from treenail.kube.watch import WatchScope


@dataclass(frozen=True, slots=True)
class _ObservedPod:
    node: str
    uid: str
    is_deleting: bool


@dataclass(slots=True)
class _Outage:
    """A node out of service."""

    began: float
    ended: float | None = None
    evicted_pods: set[str] = field(default_factory=set)


class NodeOutages:
    """Watches nodes and pods, and remembers how long each node was out of service."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[str, _Outage] = {}
        self._blockers: dict[str, str] = {}
        self._informers = Informers(client, clock)
        self._informers.add_view(WatchScope(NODES), DrainNode.from_json).add_handler(
            self._observe_node
        )
        self._informers.add_view(WatchScope(PODS), _parse_pod).add_handler(self._observe_pod)

    def start(self) -> None:
        """Watch from now on."""
        self._informers.start()

    def stop(self) -> None:
        """Watch no more."""
        self._informers.stop()

    def out_of_service_s(self, node: str) -> float:
        """Seconds from the node's last cordon to its uncordon, or until now."""
        absence = self._outages.get(node)
        if absence is None:
            return 0.0
        ended = self._clock.monotonic() if absence.ended is None else absence.ended
        return ended - absence.began

    def count_evicted(self, node: str) -> int:
        """How many pods left the node while it was out of service last."""
        absence = self._outages.get(node)
        return len(absence.evicted_pods) if absence else 0

    def find_blocker(self, node: str) -> str:
        """What keeps pods on a node that is being drained; empty when nothing does."""
        return self._blockers.get(node, "")

    def list_cordoned(self) -> frozenset[str]:
        """The nodes that are cordoned right now."""
        absences = list(self._outages.items())
        return frozenset(name for name, absence in absences if absence.ended is None)

    def _observe_node(self, name: str, before: DrainNode | None, after: DrainNode | None) -> None:
        now = self._clock.monotonic()
        was, is_out = (seen is not None and seen.unschedulable for seen in (before, after))
        if is_out and not was:
            self._outages[name] = _Outage(now)
        elif was and not is_out:
            self._outages[name].ended = now
        self._blockers[name] = _format_blockers(after.drain_blocked) if after else ""

    def _observe_pod(
        self, _name: str, before: _ObservedPod | None, after: _ObservedPod | None
    ) -> None:
        pod = before or after
        absence = self._outages.get(pod.node) if pod else None
        leaves = after is None or after.is_deleting
        if pod is not None and absence is not None and absence.ended is None and leaves:
            absence.evicted_pods.add(pod.uid)


def _parse_pod(document: Json) -> _ObservedPod:
    fields = Fields.from_json(document, "Pod")
    meta = fields.get_object("metadata")
    return _ObservedPod(
        node=fields.get_object("spec").get_text("nodeName"),
        uid=meta.get_text("uid"),
        is_deleting=meta.values.get("deletionTimestamp") is not None,
    )


def _format_blockers(text: str) -> str:
    """What the annotation of a Node says is in the way of its drain."""
    if not text:
        return ""
    named = Fields.from_json({"blocked": load_json(text, where=key.DRAIN_BLOCKED)}, "")
    return "; ".join(
        f"{each.get_text('pod')}: {each.get_text('message')}"
        for each in named.iter_objects("blocked")
    )
