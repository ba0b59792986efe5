"""The rollout that ``make demo`` shows: a pool moves to another image, canary first.

The demo itself does what a user does with kubectl. The controllers and agents do the rest. Its
texts beside the table fit into 24 lines of 80 columns together with the table.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.clocks import Clock
from treenail.errors import ClusterError, HostError
from treenail.kube.resources import MACHINECONFIGPOOLS
from treenail.sanitize import escape_line
from treenail_lab.cluster import POOL, Lab
from treenail_lab.controllers import (
    ALL_CONTROLLERS,
    CONTROLLER_COMMAND,
    ControllerReplicas,
    StatusWatch,
)
from treenail_lab.demo import pool
from treenail_lab.demo.outages import NodeOutages
from treenail_lab.demo.pool import DemoBuild
from treenail_lab.images import Image
from treenail_lab.lifetime.fork_server import run_process
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.workload import Workload, format_budget_command

PODS_PER_NODE = 4
_POLL_S = 0.1
_PLAN_TIMEOUT_S = 60.0
_CONTROLLER_TIMEOUT_S = 180.0
"""Limit for a step that takes the controllers one or two rounds."""


@dataclass(frozen=True, slots=True)
class DemoScenario:
    """An update of the lab's pool from its first image to ``image``."""

    image: Image
    pull_spec: str
    """The pull spec that the pool requests; it names ``image`` unless a wrong one is the point."""
    document: Json
    """The MachineConfig that is added to the pool."""
    node_timeout_s: float = 300.0
    max_unavailable_pods: int = PODS_PER_NODE
    """``maxUnavailable`` of the application's PodDisruptionBudget; 0 blocks every drain."""
    containerfile: str = ""
    """Text from which the cluster builds the image; empty if ``image`` is in a registry."""
    failing_phase: str = ""
    """The phase that fails on purpose: ``stage``, ``drain`` or ``reboot``; empty for none."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """One node as last observed."""

    name: str
    state: str
    version: str
    """Of the booted image; empty while the machine is down."""
    is_updated: bool
    evicted_pods: int
    out_of_service_s: float
    reason: str = ""

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "state": self.state,
            "version": self.version,
            "updated": self.is_updated,
            "evictedPods": self.evicted_pods,
            "outOfServiceSeconds": round(self.out_of_service_s, 3),
            "reason": self.reason,
        }


@dataclass(slots=True)
class DemoResult:
    """The result of the demo, which ``--json`` prints."""

    updated_nodes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Reason by node, or by pool when no node was assigned a target."""
    halt_message: str = ""
    """The message of the pool's condition when the rollout halted."""
    resume_command: str = ""
    """The command after which the rollout continues; empty if it needs none or another change."""
    drain_blockers: dict[str, str] = field(default_factory=dict)
    """What blocks the drain of a node at the end, by node."""
    max_out_of_service: int = 0
    cordoned_nodes: set[str] = field(default_factory=set)
    seconds: float = 0.0


class RolloutDemo:
    """One rollout on a running lab."""

    def __init__(self, lab: Lab, scenario: DemoScenario, clock: Clock, stream: TextIO) -> None:
        self._lab = lab
        self._scenario = scenario
        self._clock = clock
        self._watch = StatusWatch(lab.server.admin_kubeconfig, stream)
        self._build = _create_build(lab, scenario)
        enabled = (*ALL_CONTROLLERS, *(["build"] if self._build is not None else []))
        self._controllers = ControllerReplicas(lab, enable=enabled)
        self._image = scenario.pull_spec
        self._outages = NodeOutages(lab.client, clock)
        nodes = len(lab.machines)
        self._workload = Workload(
            lab.client,
            replicas=PODS_PER_NODE * nodes,
            max_unavailable=scenario.max_unavailable_pods,
        )
        self._result = DemoResult()
        self._nodes: dict[str, NodeResult] = {}
        self._halt_message = ""
        self._assigned_at: dict[str, float] = {}
        self._began = clock.monotonic()

    def prepare_pool(self) -> None:
        """Bring the pool to the first image, start the application and render the change."""
        lab = self._lab
        self._outages.start()
        self._controllers.create_manifests()
        if self._build is None:
            pool.create_pool(lab, lab.plan.images[0].pull_spec)
        else:
            pool.create_pool_without_image(lab, lab.installed_image.pull_spec)
            self._build.create_inputs()
        self._controllers.start_replica()
        self._wait_until(self._is_pool_updated)
        self._workload.start()
        if self._build is not None:
            return
        before = self._fetch_pool().configuration.name
        pool.pause_pool(lab)
        pool.add_config(lab, self._scenario.document)
        self._wait_until(lambda: self._fetch_pool().configuration.name != before)

    def run_plan(self, *arguments: str) -> str:
        """Return the output of ``treenail-controller plan`` for the change."""
        change = self._lab.directory / "change.json"
        change.write_text(json.dumps(self._build_change()), "utf-8")
        command = [*CONTROLLER_COMMAND, "plan", "-f", str(change), *arguments]
        kubeconfig = f"--kubeconfig={self._lab.server.admin_kubeconfig}"
        try:
            completed = run_process(
                [*command, kubeconfig],
                env={**os.environ, **owner.mark_environment()},
                capture_output=True,
                text=True,
                timeout=_PLAN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise HostError(
                f"cannot plan the change: no answer within {_PLAN_TIMEOUT_S:g} s",
                remedy=f"see {self._controllers.find_log()}",
            ) from error
        return str(completed.stdout or completed.stderr)

    def run_rollout(self) -> DemoResult:
        """Change the pool, show the rollout and wait until it is complete or halted."""
        self._began = self._clock.monotonic()
        self._watch.start()
        if self._build is None:
            pool.apply_pool(self._lab, self._build_change())
        else:
            self._build.request_build()
        while not self._is_over():
            time.sleep(_POLL_S)
        self._result.seconds = self._clock.monotonic() - self._began
        self._watch.finish()
        return self._result

    def stop(self) -> None:
        """Stop the table, the workload, the controllers and the watches."""
        self._watch.stop()
        self._workload.stop()
        self._controllers.stop()
        self._outages.stop()

    @property
    def image(self) -> str:
        """Return the pull spec that the pool moves to; empty before a build has pushed it."""
        return self._image

    def list_nodes(self) -> list[NodeResult]:
        """Return the nodes as last observed."""
        return list(self._nodes.values())

    def _build_change(self) -> Json:
        return pool.build_pool(self._scenario.pull_spec)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for the controllers; no node goes out of service meanwhile."""
        deadline = self._clock.monotonic() + _CONTROLLER_TIMEOUT_S
        while not reached():
            code = self._controllers.find_exit_code()
            if code is not None:
                raise HostError(
                    f"cannot prepare the pool: the controllers ended with exit code {code}: "
                    f"{self._controllers.read_last_line()}"
                )
            if self._clock.monotonic() > deadline:
                raise HostError(
                    f"cannot prepare the pool: no progress within {_CONTROLLER_TIMEOUT_S:g} s",
                    remedy=f"see {self._controllers.find_log()}",
                )
            time.sleep(_POLL_S)

    def _is_pool_updated(self) -> bool:
        pool = self._fetch_pool()
        is_observed = pool.status.get("observedGeneration") == pool.metadata.generation
        statuses = {condition.type: condition.status for condition in pool.conditions}
        has_all_nodes = pool.status.get("machineCount") == len(self._lab.machines)
        return is_observed and has_all_nodes and statuses.get("Updated") == "True"

    def _is_over(self) -> bool:
        if (failure := self._find_build_failure()) is not None:
            self._result.failures = {POOL: failure}
            return True
        # First the pool: it is updated after its last node.
        is_updated = bool(self._image) and self._is_pool_updated()
        self._observe()
        result, timeout_s, now = (
            self._result,
            self._scenario.node_timeout_s,
            self._clock.monotonic(),
        )
        for name, node in self._nodes.items():
            if node.is_updated and node.state == "Done":
                if name not in result.updated_nodes:
                    result.updated_nodes.append(name)
            elif now - self._assigned_at.get(name, now) > timeout_s:
                reason = node.reason or "no reason reported"
                result.failures[name] = f"not done after {timeout_s:g} s: {reason}"
        if self._halt_message:
            result.halt_message = self._halt_message
            failed = {
                name: node.reason
                for name, node in self._nodes.items()
                if node.state in ("Degraded", "Unreconcilable")
            }
            result.failures = failed or {POOL: self._halt_message}
            _, result.resume_command = pool.split_halt_message(self._halt_message)
        elif result.failures:
            blockers = {name: self._outages.find_blocker(name) for name in self._nodes}
            result.drain_blockers = {name: text for name, text in blockers.items() if text}
            if self._scenario.failing_phase == "drain":
                result.resume_command = format_budget_command(PODS_PER_NODE)
        return bool(result.failures) or is_updated

    def _find_build_failure(self) -> str | None:
        """Read the state of a build, if there is one; return why it failed."""
        if self._build is None or self._image:
            return None
        with suppress(ClusterError):
            build_state = self._build.read_state()
            self._image = build_state.pull_spec
            return build_state.failure or None
        return None

    def _observe(self) -> None:
        cordoned = self._outages.list_cordoned()
        self._result.max_out_of_service = max(self._result.max_out_of_service, len(cordoned))
        self._result.cordoned_nodes |= cordoned
        for name, machine in self._lab.machines.items():
            self._nodes[name] = self._observe_node(name, machine)
        with suppress(ClusterError):
            self._halt_message = pool.find_halt_message(self._fetch_pool())

    def _fetch_pool(self) -> MachineConfigPool:
        return MachineConfigPool.from_json(self._lab.client.get(MACHINECONFIGPOOLS, POOL))

    def _find_wanted_digest(self) -> str:
        if self._build is None:
            return self._scenario.image.digest
        return self._image.rpartition("@")[2] or "not built"

    def _observe_node(self, name: str, machine: LabMachine) -> NodeResult:
        try:
            annotations = self._lab.read_annotations(name)
        except ClusterError:
            return self._nodes[name]
        if self._image and annotations.get(key.DESIRED_OS_IMAGE) == self._image:
            self._assigned_at.setdefault(name, self._clock.monotonic())
        booted = machine.booted_deployment if machine.is_on else None
        return NodeResult(
            name=name,
            state=annotations.get(key.STATE, "-"),
            version=booted.version if booted else "",
            is_updated=booted is not None and booted.digest == self._find_wanted_digest(),
            evicted_pods=self._outages.count_evicted(name),
            out_of_service_s=self._outages.out_of_service_s(name),
            reason=annotations.get(key.REASON, "") or self._outages.find_blocker(name),
        )


def _create_build(lab: Lab, scenario: DemoScenario) -> DemoBuild | None:
    if not scenario.containerfile or lab.registry is None:
        return None
    return DemoBuild(lab, lab.registry, scenario.containerfile)


def has_shown_scenario(scenario: DemoScenario, result: DemoResult) -> bool:
    """Return whether the demo showed what its user requested, a failure on purpose included."""
    if not scenario.failing_phase:
        return not result.failures
    if scenario.failing_phase == "drain":
        return bool(result.drain_blockers)
    return result.halt_message.startswith("Halted: ")


_PLAN_WORDS = ("drain", "because", "takes")
_FIRST_NEXT = "Try next: make demo ARGS='--fail stage'   a rollout that halts, and says why"
_FIRST_NEXT_AFTER_HALT = (
    "Try next: make demo                       the same rollout without the failure"
)
_NEXT = (
    "          .venv/bin/treenail-lab up       a cluster for kubectl, until Ctrl-C",
    "          docs/install.md                 the same in your own cluster",
)


def print_plan(plan: str, stream: TextIO) -> None:
    """Print the lines of the plan that say what it costs, as the command prints them."""
    print(
        f"$ treenail-controller plan -f change.yaml | grep -E '{'|'.join(_PLAN_WORDS)}'",
        file=stream,
    )
    lines = [line for line in plan.splitlines() if any(word in line for word in _PLAN_WORDS)]
    for line in lines or plan.splitlines():
        print("\n".join(wrap_line(line, stream)), file=stream)
    stream.flush()


def print_containerfile(text: str, stream: TextIO) -> None:
    """Print the text from which the cluster builds the image."""
    print("$ cat Containerfile   # in the MachineOSConfig of the pool", file=stream)
    for line in text.splitlines():
        print("\n".join(wrap_line(escape_line(line), stream)), file=stream)
    stream.flush()


def print_result(result: DemoResult, journal: list[str]) -> None:
    """Print how the rollout ended, the journal if there is one, and what to try next.

    A rollout that did not complete ends with what halted, and the command that resumes it.
    """
    print(
        f"\n{len(result.updated_nodes)} nodes updated in {result.seconds:.0f} s, "
        f"at most {result.max_out_of_service} out of service at once"
    )
    for line in _describe_halt(result):
        print("\n".join(wrap_line(line, sys.stdout)))
    if result.resume_command:
        # A wrapped command could not be copied.
        print(f"resume with: {result.resume_command}")
    if journal:
        print("\njournalctl TREENAIL_UPDATE=… of one node:")
        for line in journal:
            print(f"  {line}")
    print("\n".join([_FIRST_NEXT_AFTER_HALT if result.resume_command else _FIRST_NEXT, *_NEXT]))


def _describe_halt(result: DemoResult) -> list[str]:
    """Return a line for what halted the rollout, or for each node that blocks it or failed."""
    if result.halt_message:
        cause, _ = pool.split_halt_message(result.halt_message)
        return [f"pool {POOL} is halted: {cause}"]
    if result.drain_blockers:
        return [f"{node} is not drained: {text}" for node, text in result.drain_blockers.items()]
    return [f"{node} failed: {reason}" for node, reason in result.failures.items()]


def collect_journal(lab: Lab, result: DemoResult) -> list[str]:
    """Return the journal of the first failed or the last updated node, across its reboot."""
    node = next(iter(result.failures), None) or next(reversed(result.updated_nodes), None)
    if node not in lab.machines:
        return []
    entries = lab.machines[node].read_journal({"SYSLOG_IDENTIFIER": "treenail"})
    updates = [str(entry["TREENAIL_UPDATE"]) for entry in entries if entry.get("TREENAIL_UPDATE")]
    if not updates:
        return [str(entry.get("MESSAGE")) for entry in entries]
    return [
        f"{node} {entry.get('TREENAIL_PHASE', ''):<10} {entry.get('MESSAGE')}"
        for entry in entries
        if entry.get("TREENAIL_UPDATE") == updates[-1]
    ]


def wrap_line(line: str, stream: TextIO) -> list[str]:
    """Wrap a line on a terminal, below its own indent."""
    if not stream.isatty():
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.wrap(line, width, subsequent_indent=indent) or [""]
