"""The rollout that ``make demo`` shows: a pool's image becomes another one, canary first.

All that the demo does itself is what a person would do with kubectl: the rest is done by the
controllers and the agents.
"""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from treenail.api import annotations as key
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clock import Clock
from treenail.errors import ClusterError, HostError
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail_lab.cluster import POOL, Lab
from treenail_lab.controllers import COMMAND, Controllers
from treenail_lab.demo import pool
from treenail_lab.demo.outages import Absences
from treenail_lab.demo.table import Json, NodeView, PoolView
from treenail_lab.images import Image
from treenail_lab.machine.node.machine import Machine
from treenail_lab.workload import Workload

Show = Callable[[list[NodeView], PoolView, float], None]
PODS_PER_NODE = 4
_LOOK_S = 0.1
_PLAN_LIMIT_S = 60.0
_TURN_LIMIT_S = 60.0
"""For what takes a controller a turn or two."""


@dataclass(frozen=True, slots=True)
class Story:
    """What the demo tells: from the lab's first image to ``image``."""

    image: Image
    pull_spec: str
    """What the pool is asked for; of ``image``, unless the story is about a wrong one."""
    document: Json
    """The MachineConfig that the pool gets with it."""
    limit_s: float = 300.0
    disrupted: int = PODS_PER_NODE
    """How many pods of the application may be away at a time; 0 blocks every drain."""


@dataclass(slots=True)
class Ending:
    """How it went: what ``--json`` prints."""

    updated: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why, by node; by pool where no node was given anything."""
    halted: str = ""
    """What the pool says of the halt."""
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
        self._controllers = Controllers(lab)
        self._absences = Absences(lab.client, clock)
        nodes = len(lab.machines)
        self._workload = Workload(
            lab.client, replicas=PODS_PER_NODE * nodes, disrupted=story.disrupted
        )
        self._ending = Ending()
        self._views: dict[str, NodeView] = {}
        self._pool = PoolView(POOL)
        self._asked: dict[str, float] = {}
        self._began = clock.monotonic()

    def prepare(self) -> None:
        """Have the pool at the first image, its application on it, and the change rendered."""
        lab = self._lab
        self._absences.start()
        self._controllers.install()
        pool.create(lab, lab.plan.images[0].pull_spec)
        self._controllers.start()
        self._wait(self._pool_is_updated)
        self._workload.start()
        before = self._seen_pool().configuration.name
        pool.pause(lab)
        pool.add_config(lab, self._story.document)
        self._wait(lambda: self._seen_pool().configuration.name != before)

    def plan(self, *arguments: str) -> str:
        """What ``treenail-controller plan`` says of the change that comes."""
        change = self._lab.directory / "change.json"
        change.write_text(json.dumps(self._change()), "utf-8")
        command = [*COMMAND, "plan", "-f", str(change), *arguments]
        kubeconfig = f"--kubeconfig={self._lab.server.admin_kubeconfig}"
        try:
            ended = subprocess.run(
                [*command, kubeconfig],
                capture_output=True,
                text=True,
                check=False,
                timeout=_PLAN_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(f"no plan after {_PLAN_LIMIT_S:g} s") from error
        return ended.stdout or ended.stderr

    def run(self) -> Ending:
        """Change the pool, and watch until it is through, or halts."""
        self._began = self._clock.monotonic()
        pool.apply(self._lab, self._change())
        while not self._is_over():
            time.sleep(_LOOK_S)
        self._ending.seconds = self._clock.monotonic() - self._began
        return self._ending

    def stop(self) -> None:
        """End what the demo started."""
        self._workload.stop()
        self._controllers.stop()
        self._absences.stop()

    def views(self) -> list[NodeView]:
        """The nodes as seen last."""
        return list(self._views.values())

    def _change(self) -> Json:
        return pool.document(self._story.pull_spec)

    def _wait(self, reached: Callable[[], bool]) -> None:
        """Until the controllers did what takes no node out of service."""
        deadline = self._clock.monotonic() + _TURN_LIMIT_S
        while not reached():
            if self._clock.monotonic() > deadline:
                log = self._controllers.log()
                raise HostError(f"the controllers do not get there, see {log}")
            time.sleep(_LOOK_S)

    def _pool_is_updated(self) -> bool:
        found = self._seen_pool()
        observed = found.status.get("observedGeneration") == found.metadata.generation
        said = {each.type: each.status for each in found.conditions}
        counted = found.status.get("machineCount") == len(self._lab.machines)
        return observed and counted and said.get("Updated") == "True"

    def _is_over(self) -> bool:
        self._look()
        ending, limit_s, now = self._ending, self._story.limit_s, self._clock.monotonic()
        for name, view in self._views.items():
            if view.updated and view.state == "Done":
                if name not in ending.updated:
                    ending.updated.append(name)
            elif now - self._asked.get(name, now) > limit_s:
                why = view.reason or "no reason given"
                ending.failed[name] = f"not done after {limit_s:g} s: {why}"
        if self._pool.stalled:
            ending.halted = self._pool.sentence
            failed = {
                name: view.reason
                for name, view in self._views.items()
                if view.state in ("Degraded", "Unreconcilable")
            }
            ending.failed = failed or {POOL: self._pool.sentence}
        return bool(ending.failed) or self._pool_is_updated()

    def _look(self) -> None:
        out = self._absences.out_of_service()
        self._ending.most_out_of_service = max(self._ending.most_out_of_service, len(out))
        self._ending.cordoned |= out
        for name, machine in self._lab.machines.items():
            self._views[name] = self._view(name, machine)
        try:
            self._pool = pool.view(self._seen_pool())
        except ClusterError:
            return
        self._show(self.views(), self._pool, self._clock.monotonic() - self._began)

    def _seen_pool(self) -> MachineConfigPool:
        return MachineConfigPool.from_json(self._lab.client.get(MACHINECONFIGPOOLS, POOL))

    def _view(self, name: str, machine: Machine) -> NodeView:
        try:
            notes = self._lab.annotations(name)
        except ClusterError:
            return self._views[name]
        if notes.get(key.DESIRED_OS_IMAGE) == self._story.pull_spec:
            self._asked.setdefault(name, self._clock.monotonic())
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
            evicted=self._absences.evicted(name),
            out_of_service_s=self._absences.out_of_service_s(name),
            reason=notes.get(key.REASON, "") or self._absences.blocked(name),
        )
        before = self._views.get(name)
        if (booted is None or not live) and before is not None:
            # While the machine is down or its agent starts, what it was at is what it is at.
            view = replace(view, phase=before.phase, percent=before.percent)
        return view
