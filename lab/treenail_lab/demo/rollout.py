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
from treenail_lab.controllers import CONTROLLER_COMMAND, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.demo.outages import NodeOutages
from treenail_lab.demo.table import Json, NodeView, PoolView
from treenail_lab.images import Image
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.workload import Workload

ShowRollout = Callable[[list[NodeView], PoolView, float], None]
PODS_PER_NODE = 4
_POLL_S = 0.1
_PLAN_TIMEOUT_S = 60.0
_CONTROLLER_TIMEOUT_S = 60.0
"""For what takes a controller a turn or two."""


@dataclass(frozen=True, slots=True)
class DemoScenario:
    """What the demo tells: from the lab's first image to ``image``."""

    image: Image
    pull_spec: str
    """What the pool is asked for; of ``image``, unless the story is about a wrong one."""
    document: Json
    """The MachineConfig that the pool gets with it."""
    node_timeout_s: float = 300.0
    max_unavailable_pods: int = PODS_PER_NODE
    """How many pods of the application may be away at a time; 0 blocks every drain."""


@dataclass(slots=True)
class DemoResult:
    """How it went: what ``--json`` prints."""

    updated_nodes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why, by node; by pool where no node was given anything."""
    halt_message: str = ""
    """What the pool says of the halt."""
    max_out_of_service: int = 0
    cordoned_nodes: set[str] = field(default_factory=set)
    seconds: float = 0.0


class RolloutDemo:
    """One rollout on a lab that runs."""

    def __init__(self, lab: Lab, story: DemoScenario, clock: Clock, show: ShowRollout) -> None:
        self._lab = lab
        self._scenario = story
        self._clock = clock
        self._show = show
        self._controllers = ControllerReplicas(lab)
        self._outages = NodeOutages(lab.client, clock)
        nodes = len(lab.machines)
        self._workload = Workload(
            lab.client, replicas=PODS_PER_NODE * nodes, max_unavailable=story.max_unavailable_pods
        )
        self._result = DemoResult()
        self._views: dict[str, NodeView] = {}
        self._pool = PoolView(POOL)
        self._assigned_at: dict[str, float] = {}
        self._began = clock.monotonic()

    def prepare_pool(self) -> None:
        """Have the pool at the first image, its application on it, and the change rendered."""
        lab = self._lab
        self._outages.start()
        self._controllers.create_manifests()
        pool.create_pool(lab, lab.plan.images[0].pull_spec)
        self._controllers.start_replica()
        self._wait_until(self._is_pool_updated)
        self._workload.start()
        before = self._fetch_pool().configuration.name
        pool.pause_pool(lab)
        pool.add_config(lab, self._scenario.document)
        self._wait_until(lambda: self._fetch_pool().configuration.name != before)

    def run_plan(self, *arguments: str) -> str:
        """What ``treenail-controller plan`` says of the change that comes."""
        change = self._lab.directory / "change.json"
        change.write_text(json.dumps(self._build_change()), "utf-8")
        command = [*CONTROLLER_COMMAND, "plan", "-f", str(change), *arguments]
        kubeconfig = f"--kubeconfig={self._lab.server.admin_kubeconfig}"
        try:
            ended = subprocess.run(
                [*command, kubeconfig],
                capture_output=True,
                text=True,
                check=False,
                timeout=_PLAN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(f"no plan after {_PLAN_TIMEOUT_S:g} s") from error
        return ended.stdout or ended.stderr

    def run_rollout(self) -> DemoResult:
        """Change the pool, and watch until it is through, or halts."""
        self._began = self._clock.monotonic()
        pool.apply_pool(self._lab, self._build_change())
        while not self._is_over():
            time.sleep(_POLL_S)
        self._result.seconds = self._clock.monotonic() - self._began
        return self._result

    def stop(self) -> None:
        """End what the demo started."""
        self._workload.stop()
        self._controllers.stop()
        self._outages.stop()

    def list_views(self) -> list[NodeView]:
        """The nodes as seen last."""
        return list(self._views.values())

    def _build_change(self) -> Json:
        return pool.build_pool(self._scenario.pull_spec)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Until the controllers did what takes no node out of service."""
        deadline = self._clock.monotonic() + _CONTROLLER_TIMEOUT_S
        while not reached():
            if self._clock.monotonic() > deadline:
                log = self._controllers.find_log()
                raise HostError(f"the controllers do not get there, see {log}")
            time.sleep(_POLL_S)

    def _is_pool_updated(self) -> bool:
        found = self._fetch_pool()
        observed = found.status.get("observedGeneration") == found.metadata.generation
        said = {each.type: each.status for each in found.conditions}
        counted = found.status.get("machineCount") == len(self._lab.machines)
        return observed and counted and said.get("Updated") == "True"

    def _is_over(self) -> bool:
        self._refresh_views()
        ending, limit_s, now = self._result, self._scenario.node_timeout_s, self._clock.monotonic()
        for name, view in self._views.items():
            if view.is_updated and view.state == "Done":
                if name not in ending.updated_nodes:
                    ending.updated_nodes.append(name)
            elif now - self._assigned_at.get(name, now) > limit_s:
                why = view.reason or "no reason given"
                ending.failures[name] = f"not done after {limit_s:g} s: {why}"
        if self._pool.is_stalled:
            ending.halt_message = self._pool.summary
            failed = {
                name: view.reason
                for name, view in self._views.items()
                if view.state in ("Degraded", "Unreconcilable")
            }
            ending.failures = failed or {POOL: self._pool.summary}
        return bool(ending.failures) or self._is_pool_updated()

    def _refresh_views(self) -> None:
        out = self._outages.list_cordoned()
        self._result.max_out_of_service = max(self._result.max_out_of_service, len(out))
        self._result.cordoned_nodes |= out
        for name, machine in self._lab.machines.items():
            self._views[name] = self._observe_node(name, machine)
        try:
            self._pool = pool.summarize_pool(self._fetch_pool())
        except ClusterError:
            return
        self._show(self.list_views(), self._pool, self._clock.monotonic() - self._began)

    def _fetch_pool(self) -> MachineConfigPool:
        return MachineConfigPool.from_json(self._lab.client.get(MACHINECONFIGPOOLS, POOL))

    def _observe_node(self, name: str, machine: LabMachine) -> NodeView:
        try:
            notes = self._lab.read_annotations(name)
        except ClusterError:
            return self._views[name]
        if notes.get(key.DESIRED_OS_IMAGE) == self._scenario.pull_spec:
            self._assigned_at.setdefault(name, self._clock.monotonic())
        live = self._lab.read_live_status(name)
        update, progress = live.get("update"), live.get("progress")
        booted = machine.booted_deployment if machine.is_on else None
        view = NodeView(
            name=name,
            state=notes.get(key.STATE, "-"),
            phase=str(update["phase"]) if isinstance(update, dict) else "",
            percent=progress.get("percent") if isinstance(progress, dict) else None,
            version=booted.version if booted else "",
            is_updated=booted is not None and booted.digest == self._scenario.image.digest,
            evicted_pods=self._outages.count_evicted(name),
            out_of_service_s=self._outages.out_of_service_s(name),
            reason=notes.get(key.REASON, "") or self._outages.find_blocker(name),
        )
        before = self._views.get(name)
        if (booted is None or not live) and before is not None:
            # While the machine is down or its agent starts, what it was at is what it is at.
            view = replace(view, phase=before.phase, percent=before.percent)
        return view
