"""The rollout that ``make demo`` shows: a pool of nodes moves to a new image, one by one.

Sets the nodes' annotations itself, as long as no rollout controller runs; the nodes are drained by
the drain controller.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from treenail.api import annotations as key
from treenail.clock import Clock
from treenail.errors import ClusterError
from treenail.lab.cluster import Lab, rendered
from treenail.lab.drains import Drains
from treenail.lab.images import Image
from treenail.lab.machine.machine import Machine
from treenail.lab.view import Json, NodeView
from treenail.lab.workload import Workload

Show = Callable[[list[NodeView], float], None]
PODS_PER_NODE = 4
_LOOK_S = 0.1
_FAILURE_SHOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Story:
    """What the demo tells: from the lab's first image to ``image``."""

    image: Image
    pull_spec: str
    """What the nodes are asked for; of ``image``, unless the story is about a wrong one."""
    document: Json
    """The rendered MachineConfig to move to."""
    limit_s: float = 300.0
    disrupted: int = PODS_PER_NODE
    """How many pods of the application may be away at a time; 0 blocks every drain."""


@dataclass(slots=True)
class Ending:
    """How it went: what ``--json`` prints."""

    updated: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    most_out_of_service: int = 0
    cordoned: set[str] = field(default_factory=set)
    seconds: float = 0.0


class Demo:
    """One rollout on a lab that runs."""

    def __init__(self, lab: Lab, story: Story, clock: Clock, show: Show) -> None:
        self._lab = lab
        self._story = story
        self._clock = clock
        self._show = show
        self._drains = Drains(lab.client, clock)
        nodes = len(lab.machines)
        self._workload = Workload(
            lab.client, replicas=PODS_PER_NODE * nodes, disrupted=story.disrupted
        )
        self._ending = Ending()
        self._views: dict[str, NodeView] = {}
        self._began = clock.monotonic()

    def run(self) -> Ending:
        """Roll out; stops at the first node that can't be updated."""
        lab, story = self._lab, self._story
        first = lab.plan.images[0]
        before = lab.add_config(rendered("rendered-worker-a"))
        wanted = lab.add_config(story.document)
        for node in lab.machines:
            lab.ask(node, before, first.pull_spec)
        self._drains.start()
        try:
            self._until(lambda: all(self._is_at(node, before) for node in lab.machines))
            self._workload.start()
            self._began = self._clock.monotonic()
            for node in lab.machines:
                lab.ask(node, wanted, story.pull_spec)
                if not self._until(lambda node=node: self._settled(node, wanted)):  # type: ignore[misc]
                    why = self._views[node].reason or "no reason given"
                    self._ending.failed[node] = f"not done after {story.limit_s:g} s: {why}"
                if node in self._ending.failed:
                    break
                self._ending.updated.append(node)
        finally:
            self._look()
            self._workload.stop()
            self._drains.stop()
        self._ending.seconds = self._clock.monotonic() - self._began
        return self._ending

    def views(self) -> list[NodeView]:
        """The nodes as seen last."""
        return list(self._views.values())

    def _until(self, reached: Callable[[], bool]) -> bool:
        deadline = self._clock.monotonic() + self._story.limit_s
        while self._clock.monotonic() < deadline:
            self._look()
            if reached():
                return True
            time.sleep(_LOOK_S)
        return False

    def _is_at(self, node: str, config: str) -> bool:
        notes = self._lab.annotations(node)
        return notes.get(key.STATE) == "Done" and notes.get(key.CURRENT_CONFIG) == config

    def _settled(self, node: str, config: str) -> bool:
        """Whether the node is done, or has said for a while that it can't."""
        view = self._views[node]
        if view.state in ("Degraded", "Unreconcilable"):
            self._ending.failed[node] = view.reason
            deadline = self._clock.monotonic() + _FAILURE_SHOWN_S
            while self._clock.monotonic() < deadline:
                self._look()
                time.sleep(_LOOK_S)
            return True
        return self._is_at(node, config)

    def _look(self) -> None:
        out = self._drains.out_of_service()
        self._ending.most_out_of_service = max(self._ending.most_out_of_service, len(out))
        self._ending.cordoned |= out
        for name, machine in self._lab.machines.items():
            self._views[name] = self._view(name, machine)
        self._show(self.views(), self._clock.monotonic() - self._began)

    def _view(self, name: str, machine: Machine) -> NodeView:
        try:
            notes = self._lab.annotations(name)
        except ClusterError:
            return self._views[name]
        live = self._lab.live(name)
        update, progress = live.get("update"), live.get("progress")
        booted = machine.booted if machine.on else None
        view = NodeView(
            name=name,
            state=notes.get(key.STATE, "-"),
            phase=str(update["phase"]) if isinstance(update, dict) else "",
            percent=progress.get("percent") if isinstance(progress, dict) else None,
            version=booted.version if booted else "",
            updated=booted is not None and booted.digest == self._story.image.digest,
            evicted=self._drains.evicted(name),
            out_of_service_s=self._drains.out_of_service_s(name),
            reason=notes.get(key.REASON, "") or self._drains.blocked(name),
        )
        before = self._views.get(name)
        if (booted is None or not live) and before is not None:
            # While the machine is down or its agent starts, what it was at is what it is at.
            view = replace(view, phase=before.phase, percent=before.percent)
        return view
