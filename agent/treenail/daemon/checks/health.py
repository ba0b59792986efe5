"""A boot on trial: the checks that are made, what each found, and since when."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from treenail.api.node import Node
from treenail.clock import Clock, format_rfc3339
from treenail.daemon.settings.settings import HealthSettings as Limits
from treenail.errors import ClusterError, HostError
from treenail.host.container.cri import RUNTIME_SOCKETS
from treenail.host.systemd.systemd import SystemdUnit
from treenail.update.checks.health import (
    API_SERVER,
    CONTAINER_RUNTIME,
    GREENBOOT,
    KUBELET,
    NODE_READY,
    OWN_CHECK_PREFIX,
    BootTrialStatus,
    HealthCheckResult,
)
from treenail.update.state import boot_id as boot_ids
from treenail.update.state.boot_trial import BootTrial

log = logging.getLogger(__name__)

KUBELET_UNIT = "kubelet.service"
GREENBOOT_UNIT = "greenboot-healthcheck.service"
_NOT_FOUND = "not-found"
# What no boot starts by itself.
_DISABLED_STATES = ("disabled", "masked", "masked-runtime")
_MIN_CHECK_S = 1.0


class UnitStatusSource(Protocol):
    """What systemd knows of units."""

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]: ...
    def read_unit_file_state(self, unit: str) -> str: ...
    def read_userspace_start(self) -> float: ...


class ContainerRuntimeProbe(Protocol):
    """Whether the container runtime answers."""

    def find_problem(self, unit: str) -> str: ...


class CustomHealthChecks(Protocol):
    """The owner's checks."""

    def list_checks(self) -> tuple[str, ...]: ...
    def run_check(self, name: str, *, timeout_s: float) -> str: ...


class NodeSource(Protocol):
    """The API server as this node sees it."""

    def get_cached_node(self) -> Node | None: ...
    def refresh_node(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HealthProbes:
    """Whom a trial asks."""

    systemd: UnitStatusSource
    runtime: ContainerRuntimeProbe
    custom_checks: CustomHealthChecks
    cluster: NodeSource


class HealthChecker:
    """Makes the checks; remembers since when each has been as it is."""

    def __init__(
        self,
        probes: HealthProbes,
        limits: Limits,
        clock: Clock,
        *,
        send_heartbeat: Callable[[], None],
    ) -> None:
        """``send_heartbeat`` is called between checks, each of which takes a while."""
        self._probes = probes
        self._limits = limits
        self._clock = clock
        self._send_heartbeat = send_heartbeat
        self._since: dict[str, tuple[bool | None, float]] = {}
        self._passed: set[str] = set()
        self._healthy_since: float | None = None
        self._problems: dict[str, str] = {}

    @property
    def interval_s(self) -> float:
        """How long to wait between two looks."""
        return self._limits.interval_s

    def set_check_problem(self, name: str, problem: str) -> None:
        """Count it as a check that failed from now on; without a problem, no longer."""
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)

    def run_checks(self, probation: BootTrial, boot_id: str) -> BootTrialStatus:
        """Every check, made now; never raises for what it finds."""
        marked = (
            HealthCheckResult(name, is_passing=False, problem=text)
            for name, text in self._problems.items()
        )
        found = [*marked, *self._check_units(), *self._check_cluster(boot_id)]
        if all(each.is_passing is not False for each in found):
            # The owner's checks may well need what the others look at.
            left_s = probation.began_monotonic + self._limits.deadline_s - self._clock.monotonic()
            found += self._run_custom_checks(min(self._limits.check_s, max(left_s, _MIN_CHECK_S)))
        now = self._clock.monotonic()
        checks = tuple(self._add_age(each, now) for each in found)
        if any(each.is_passing is False for each in checks):
            self._healthy_since = None
        elif self._healthy_since is None:
            self._healthy_since = now
        return BootTrialStatus(
            elapsed_s=now - probation.began_monotonic,
            deadline_s=self._limits.deadline_s,
            settle_s=self._limits.settle_s,
            checks=checks,
            is_api_reachable=any(each.name == API_SERVER and each.is_passing for each in checks),
            healthy_for_s=0.0 if self._healthy_since is None else now - self._healthy_since,
        )

    def _check_units(self) -> Iterator[HealthCheckResult]:
        names = (KUBELET_UNIT, GREENBOOT_UNIT, *RUNTIME_SOCKETS)
        try:
            units = self._probes.systemd.list_units(*names)
            there = {each.name: each for each in units if each.load_state != _NOT_FOUND}
            greenboot = self._check_greenboot(there.get(GREENBOOT_UNIT))
        except HostError as error:
            yield HealthCheckResult(
                KUBELET, is_passing=False, problem=f"systemd can't be asked: {error}"
            )
            return
        yield _check_unit(KUBELET, there.get(KUBELET_UNIT))
        yield self._check_runtime(tuple(there[each] for each in RUNTIME_SOCKETS if each in there))
        yield greenboot

    def _check_runtime(self, units: tuple[SystemdUnit, ...]) -> HealthCheckResult:
        """Of the runtimes that are installed the one that is active is the node's."""
        found = {each.name: _check_unit(CONTAINER_RUNTIME, each) for each in units}
        active = next((name for name, check in found.items() if check.is_passing), "")
        if not active:
            text = "; ".join(each.problem for each in found.values())
            return HealthCheckResult(
                CONTAINER_RUNTIME, is_passing=False if found else None, problem=text
            )
        problem = self._probes.runtime.find_problem(active)
        return HealthCheckResult(CONTAINER_RUNTIME, is_passing=not problem, problem=problem)

    def _check_greenboot(self, unit: SystemdUnit | None) -> HealthCheckResult:
        idle = unit is not None and unit.active_state == "inactive"
        # One that is enabled has yet to begin.
        if idle and self._probes.systemd.read_unit_file_state(GREENBOOT_UNIT) in _DISABLED_STATES:
            return HealthCheckResult(GREENBOOT, is_passing=None)
        return _check_unit(GREENBOOT, unit)

    def _check_cluster(self, boot_id: str) -> Iterator[HealthCheckResult]:
        try:
            self._probes.cluster.refresh_node()
        except ClusterError as error:
            yield HealthCheckResult(API_SERVER, is_passing=False, problem=str(error))
            yield HealthCheckResult(NODE_READY, is_passing=None)
            return
        yield HealthCheckResult(API_SERVER, is_passing=True)
        node = self._probes.cluster.get_cached_node()
        if node is None:
            yield HealthCheckResult(NODE_READY, is_passing=False, problem="there is no such Node")
        elif not node.is_ready:
            yield HealthCheckResult(
                NODE_READY,
                is_passing=False,
                problem=node.not_ready_message or "the Node is not Ready",
            )
        elif not self._has_kubelet_reported(node, boot_id):
            text = "the kubelet has not reported since the boot"
            yield HealthCheckResult(NODE_READY, is_passing=False, problem=text)
        else:
            yield HealthCheckResult(NODE_READY, is_passing=True)

    def _has_kubelet_reported(self, node: Node, boot_id: str) -> bool:
        """Whether the kubelet has, since the boot."""
        if node.boot_id not in {boot_ids.extract_kernel_boot_id(boot_id), ""}:
            return False
        if not boot_ids.is_soft_boot(boot_id):
            return True
        try:
            # A soft reboot keeps the boot id that the kubelet reports.
            return node.last_heartbeat >= format_rfc3339(
                self._probes.systemd.read_userspace_start()
            )
        except HostError:
            return False

    def _run_custom_checks(self, limit_s: float) -> Iterator[HealthCheckResult]:
        try:
            names = self._probes.custom_checks.list_checks()
        except HostError as error:
            yield HealthCheckResult(OWN_CHECK_PREFIX, is_passing=False, problem=str(error))
            return
        for name in names:
            problem = ""
            if name not in self._passed:
                self._send_heartbeat()
                problem = self._probes.custom_checks.run_check(name, timeout_s=limit_s)
            if not problem:
                self._passed.add(name)
            yield HealthCheckResult(
                OWN_CHECK_PREFIX + name, is_passing=not problem, problem=problem
            )

    def _add_age(self, found: HealthCheckResult, now: float) -> HealthCheckResult:
        well, since = self._since.get(found.name, (None, now))
        if well is not found.is_passing:
            log.info(
                "%s is %s%s",
                found.name,
                _STATE_WORDS[found.is_passing],
                f": {found.problem}" * bool(found.problem),
            )
            since = now
        self._since[found.name] = (found.is_passing, since)
        return HealthCheckResult(found.name, found.is_passing, found.problem, now - since)


_STATE_WORDS = {True: "well", False: "not well", None: "unknown"}


def _check_unit(name: str, unit: SystemdUnit | None) -> HealthCheckResult:
    if unit is None:
        return HealthCheckResult(name, is_passing=None)
    if unit.load_state == "masked":
        return HealthCheckResult(name, is_passing=False, problem=f"{unit.name} is masked")
    well = unit.active_state == "active"
    return HealthCheckResult(
        name, is_passing=well, problem="" if well else f"{unit.name} is {unit.active_state}"
    )
