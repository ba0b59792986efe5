"""What there is to see of drains: which nodes are out of service, for how long, and why still."""

from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json, load_json
from treenail.clock import Clock
from treenail.controllers.drain.decide import NodeSeen
from treenail.controllers.runtime.informers import Informers
from treenail.kube.client import Client
from treenail.kube.resources import NODES, PODS
from treenail.kube.watch import Scope


@dataclass(frozen=True, slots=True)
class _Pod:
    node: str
    uid: str
    leaving: bool


@dataclass(slots=True)
class _Absence:
    """A node out of service."""

    began: float
    ended: float | None = None
    evicted: set[str] = field(default_factory=set)


class Absences:
    """Watches nodes and pods, and remembers how long each node was out of service."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._clock = clock
        self._absences: dict[str, _Absence] = {}
        self._blocked: dict[str, str] = {}
        self._informers = Informers(client, clock)
        self._informers.view(Scope(NODES), NodeSeen.from_json).tell(self._node_moved)
        self._informers.view(Scope(PODS), _pod).tell(self._pod_moved)

    def start(self) -> None:
        """Watch from now on."""
        self._informers.start()

    def stop(self) -> None:
        """Watch no more."""
        self._informers.stop()

    def out_of_service_s(self, node: str) -> float:
        """Seconds from the node's last cordon to its uncordon, or until now."""
        absence = self._absences.get(node)
        if absence is None:
            return 0.0
        ended = self._clock.monotonic() if absence.ended is None else absence.ended
        return ended - absence.began

    def evicted(self, node: str) -> int:
        """How many pods left the node while it was out of service last."""
        absence = self._absences.get(node)
        return len(absence.evicted) if absence else 0

    def blocked(self, node: str) -> str:
        """What keeps pods on a node that is being drained; empty when nothing does."""
        return self._blocked.get(node, "")

    def out_of_service(self) -> frozenset[str]:
        """The nodes that are cordoned right now."""
        absences = list(self._absences.items())
        return frozenset(name for name, absence in absences if absence.ended is None)

    def _node_moved(self, name: str, before: NodeSeen | None, after: NodeSeen | None) -> None:
        now = self._clock.monotonic()
        was, is_out = (seen is not None and seen.unschedulable for seen in (before, after))
        if is_out and not was:
            self._absences[name] = _Absence(now)
        elif was and not is_out:
            self._absences[name].ended = now
        self._blocked[name] = _sentence(after.blocked) if after else ""

    def _pod_moved(self, _name: str, before: _Pod | None, after: _Pod | None) -> None:
        pod = before or after
        absence = self._absences.get(pod.node) if pod else None
        leaves = after is None or after.leaving
        if pod is not None and absence is not None and absence.ended is None and leaves:
            absence.evicted.add(pod.uid)


def _pod(document: Json) -> _Pod:
    fields = Fields.of(document, "Pod")
    meta = fields.nested("metadata")
    return _Pod(
        node=fields.nested("spec").text("nodeName"),
        uid=meta.text("uid"),
        leaving=meta.values.get("deletionTimestamp") is not None,
    )


def _sentence(text: str) -> str:
    """What the annotation of a Node says is in the way of its drain."""
    if not text:
        return ""
    named = Fields.of({"blocked": load_json(text, where=key.DRAIN_BLOCKED)}, "")
    return "; ".join(
        f"{each.text('pod')}: {each.text('message')}" for each in named.objects("blocked")
    )
