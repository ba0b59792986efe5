"""Simulated agents: one watch for all nodes, and the annotations that each node's agent writes."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fixtures.objects import make_node, make_ready_condition
from treenail.api import annotations as key
from treenail.clocks import SystemClock
from treenail.errors import ClusterError, ConflictError
from treenail.kube.api_client import Client
from treenail.kube.informer import Informer
from treenail.kube.resources import (
    NODES,
)
from treenail.kube.watch import WatchScope

Json = dict[str, Any]
THREADS = 8


def add_nodes(client: Client, names: list[str], config: str) -> None:
    """Create nodes in service with the config, by several threads."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def make() -> None:
        while not waiting.empty():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            client.create(NODES, make_node(name, config))
            status = {"conditions": [make_ready_condition()]}
            client.patch(NODES, name, {"status": status}, subresource="status")

    threads = [threading.Thread(target=make) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """Desired target of a node, and its last report."""

    config: str
    image: str | None
    state: str
    at: tuple[str, str | None]
    drain: str = ""
    drained: str = ""

    @classmethod
    def from_json(cls, document: Any) -> "ObservedNode":
        notes = document["metadata"].get("annotations", {})
        return cls(
            notes.get(key.DESIRED_CONFIG, ""),
            notes.get(key.DESIRED_OS_IMAGE),
            notes.get(key.STATE, ""),
            (notes.get(key.CURRENT_CONFIG, ""), notes.get(key.CURRENT_OS_IMAGE)),
            notes.get(key.DESIRED_DRAIN, ""),
            notes.get(key.LAST_APPLIED_DRAIN, ""),
        )


@dataclass
class Agents:
    """Agents of the nodes of a cluster; each update takes them two writes.

    They cordon their nodes themselves, unless they request ``drains``.
    """

    client: Client
    is_bad: Callable[[ObservedNode], bool] = lambda node: False
    drains: bool = False
    selector: str = ""
    """Of the nodes' labels; empty for all."""
    touched: set[str] = field(default_factory=set)
    """Nodes whose desired target ever differed from the current one."""

    def __post_init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[str, ObservedNode] | None] = queue.SimpleQueue()
        scope = WatchScope(NODES, label_selector=self.selector)
        self._nodes = Informer(self.client, scope, SystemClock(), ObservedNode.from_json)
        self._nodes.add_handler(self._note)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]

    def __enter__(self) -> "Agents":
        self._nodes.start()
        assert self._nodes.wait_until_synced(300.0)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.stop()
        for _thread in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(10.0)

    def _note(self, name: str, before: ObservedNode | None, after: ObservedNode | None) -> None:
        if after is not None and (after.config, after.image) != after.at:
            self.touched.add(name)
            # As the real agent does, a degraded one continues when it gets another target.
            is_retargeted = before is not None and before.config != after.config
            if after.state != "Degraded" or is_retargeted:
                self._work.put((name, after))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            name, node = item
            try:
                self._report(name, node)
            except (ConflictError, ClusterError):
                self._work.put(item)

    def _report(self, name: str, node: ObservedNode) -> None:
        if self.drains:
            self._request_drain_and_report(name, node)
        elif node.state == "Done":
            self._write(name, {key.STATE: "Working"}, unschedulable=True)
        elif self.is_bad(node):
            degraded = {key.STATE: "Degraded", key.REASON: "the image does not boot"}
            self._write(name, degraded, unschedulable=True)
        else:
            notes: Json = {
                key.STATE: "Done",
                key.CURRENT_CONFIG: node.config,
                key.CURRENT_OS_IMAGE: node.image,
            }
            self._write(name, notes, unschedulable=None)

    def _request_drain_and_report(self, name: str, node: ObservedNode) -> None:
        request = f"drain-{node.config}"
        if node.drain != request:
            self._note_on(name, {key.STATE: "Working", key.DESIRED_DRAIN: request})
        elif node.drained != request:
            return
        elif self.is_bad(node):
            self._note_on(name, {key.STATE: "Degraded", key.REASON: "the image does not boot"})
        else:
            notes: Json = {
                key.STATE: "Done",
                key.CURRENT_CONFIG: node.config,
                key.CURRENT_OS_IMAGE: node.image,
                key.DESIRED_DRAIN: f"uncordon-{node.config}",
            }
            self._note_on(name, notes)

    def _note_on(self, name: str, notes: Json) -> None:
        self.client.patch(NODES, name, {"metadata": {"annotations": notes}})

    def _write(self, name: str, notes: Json, *, unschedulable: bool | None) -> None:
        body: Json = {
            "metadata": {"annotations": notes},
            "spec": {"unschedulable": unschedulable},
        }
        self.client.patch(NODES, name, body)
