"""The drain handshake, answered: stands in for the drain controller until one runs.

Watches the Nodes; what a node's agent asks for by ``desiredDrain`` is done through the API (cordon
and evictions, or uncordon) and then acknowledged by ``lastAppliedDrain``.
"""

import logging
import threading

from treenail.api import annotations as key
from treenail.api.node import Node
from treenail.clock import Clock
from treenail.errors import ClusterError
from treenail.kube.client import Client, Json
from treenail.kube.eviction import Drain, cordon
from treenail.kube.resources import NODES
from treenail.kube.watch import Scope, Watch

log = logging.getLogger(__name__)

_RETRY_S = 0.2


class Changed(ClusterError):
    """What was asked for is not asked for any more."""


class Handshake:
    """Drains and uncordons as asked, and remembers how long each node was out of service."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self._cordoned: dict[str, float] = {}
        self._out_s: dict[str, float] = {}
        self._evicted: dict[str, int] = {}
        self._blocked: dict[str, str] = {}
        self._applied: dict[str, str] = {}
        self._rung = threading.Event()
        self._stop = threading.Event()
        self._watch = Watch(client, Scope(NODES), clock, on_change=self._changed)
        self._thread = threading.Thread(target=self._run, name="lab-drain", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._watch.start()
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._stop.set()
        self._rung.set()
        self._watch.stop()
        self._thread.join(10.0)

    def out_of_service_s(self, node: str) -> float:
        """Seconds from the cordon of the node's last drain to its uncordon, or until now."""
        began = self._cordoned.get(node)
        return self._clock.monotonic() - began if began else self._out_s.get(node, 0.0)

    def evicted(self, node: str) -> int:
        """How many pods the node's last drain evicted."""
        return self._evicted.get(node, 0)

    def blocked(self, node: str) -> str:
        """What keeps a pod on a node that is being drained; empty when nothing does."""
        return self._blocked.get(node, "")

    def out_of_service(self) -> frozenset[str]:
        """The nodes that are cordoned right now."""
        return frozenset(self._cordoned)

    def _changed(self, name: str, document: Json | None) -> None:
        if document is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = Node.from_json(document)
        self._rung.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._rung.wait()
            self._rung.clear()
            for node in tuple(self._nodes.values()):
                asked = node.annotations.get(key.DESIRED_DRAIN, "")
                applied = node.annotations.get(key.LAST_APPLIED_DRAIN)
                # The watch may not have told yet of what was just applied.
                if not asked or asked in (applied, self._applied.get(node.name)):
                    continue
                try:
                    self._answer(node.name, asked)
                except ClusterError as error:
                    log.info("%s for %s waits: %s", asked, node.name, error)
                    self._stop.wait(_RETRY_S)
                    self._rung.set()

    def _answer(self, node: str, asked: str) -> None:
        drain = asked.startswith("drain-")
        cordon(self._client, node, cordoned=drain)
        if drain:
            self._cordoned.setdefault(node, self._clock.monotonic())
            self._evicted[node] = 0
            self._blocked[node] = ""
            self._empty(node)
        elif node in self._cordoned:
            self._out_s[node] = self._clock.monotonic() - self._cordoned.pop(node)
        self._client.patch(
            NODES, node, {"metadata": {"annotations": {key.LAST_APPLIED_DRAIN: asked}}}
        )
        self._applied[node] = asked
        log.info("%s applied on %s", asked, node)

    def _empty(self, node: str) -> None:
        """Evict until the node is empty, or until the agent asks for something else."""
        bell = threading.Event()
        with Drain(self._client, node, self._clock, ring=bell.set, grace_s=0) as drain:
            progress = drain.turn()
            self._evicted[node] = len(progress.remaining)
            while not progress.empty and not self._stop.is_set():
                bell.wait(_RETRY_S)
                bell.clear()
                progress = drain.turn()
                self._blocked[node] = "; ".join(each.sentence for each in progress.blockers)
                if not self._nodes[node].annotations[key.DESIRED_DRAIN].startswith("drain-"):
                    raise Changed(f"{node} is to be drained no more")
