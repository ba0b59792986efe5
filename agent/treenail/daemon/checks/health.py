"""Health checks of a boot trial: their results, and since when each has had its result."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from treenail.api.node import Node
from treenail.clock import Clock, format_rfc3339
from treenail.daemon.interfaces import ClusterAccess
from treenail.daemon.settings.settings import HealthSettings
from treenail.errors import ClusterError, HostError
from treenail.host.container.cri import RUNTIME_SOCKETS, ContainerRuntime
from treenail.host.system.health_d import HealthCheckDirectory
from treenail.host.systemd.systemd import Systemd, SystemdUnit
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
# No boot starts units in these states.
_DISABLED_STATES = ("disabled", "masked", "masked-runtime")
_MIN_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class HealthProbes:
    """The adapters that the checks read."""

    systemd: Systemd
    runtime: ContainerRuntime
    custom_checks: HealthCheckDirectory
    cluster: ClusterAccess


class HealthChecker:
    """Runs the checks, and remembers since when each has had its result."""

    def __init__(
        self,
        probes: HealthProbes,
        settings: HealthSettings,
        clock: Clock,
        *,
        send_heartbeat: Callable[[], None],
    ) -> None:
        """``send_heartbeat`` is called between custom checks, each of which may take a while."""
        self._probes = probes
        self._settings = settings
        self._clock = clock
        self._send_heartbeat = send_heartbeat
        self._since: dict[str, tuple[bool | None, float]] = {}
        self._passed: set[str] = set()
        self._healthy_since: float | None = None
        self._problems: dict[str, str] = {}

    @property
    def interval_s(self) -> float:
        """Seconds between two runs of the checks."""
        return self._settings.interval_s

    def set_check_problem(self, name: str, problem: str) -> None:
        """Add a failed check of the agent's own; without a problem, remove it."""
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)

    def run_checks(self, boot_trial: BootTrial, boot_id: str) -> BootTrialStatus:
        """Run every check. A failing check is a result, never an exception."""
        own_problems = (
            HealthCheckResult(name, is_passing=False, problem=text)
            for name, text in self._problems.items()
        )
        results = [*own_problems, *self._check_units(), *self._check_cluster(boot_id)]
        if all(each.is_passing is not False for each in results):
            # Custom checks may need the kubelet and the runtime: run them once those pass.
            left_s = (
                boot_trial.began_monotonic + self._settings.deadline_s - self._clock.monotonic()
            )
            results += self._run_custom_checks(
                min(self._settings.check_s, max(left_s, _MIN_CHECK_S))
            )
        now = self._clock.monotonic()
        checks = tuple(self._add_age(each, now) for each in results)
        if any(each.is_passing is False for each in checks):
            self._healthy_since = None
        elif self._healthy_since is None:
            self._healthy_since = now
        return BootTrialStatus(
            elapsed_s=now - boot_trial.began_monotonic,
            deadline_s=self._settings.deadline_s,
            settle_s=self._settings.settle_s,
            checks=checks,
            is_api_reachable=any(each.name == API_SERVER and each.is_passing for each in checks),
            healthy_for_s=0.0 if self._healthy_since is None else now - self._healthy_since,
        )

    def _check_units(self) -> Iterator[HealthCheckResult]:
        names = (KUBELET_UNIT, GREENBOOT_UNIT, *RUNTIME_SOCKETS)
        try:
            units = self._probes.systemd.list_units(*names)
            loaded = {each.name: each for each in units if each.load_state != _NOT_FOUND}
            greenboot = self._check_greenboot(loaded.get(GREENBOOT_UNIT))
        except HostError as error:
            yield HealthCheckResult(
                KUBELET, is_passing=False, problem=f"cannot read units from systemd: {error}"
            )
            return
        yield _check_unit(KUBELET, loaded.get(KUBELET_UNIT))
        yield self._check_runtime(tuple(loaded[each] for each in RUNTIME_SOCKETS if each in loaded))
        yield greenboot

    def _check_runtime(self, units: tuple[SystemdUnit, ...]) -> HealthCheckResult:
        """Check the active container runtime; with several installed, the active one counts."""
        results = {each.name: _check_unit(CONTAINER_RUNTIME, each) for each in units}
        active = next((name for name, check in results.items() if check.is_passing), "")
        if not active:
            text = "; ".join(each.problem for each in results.values())
            return HealthCheckResult(
                CONTAINER_RUNTIME, is_passing=False if results else None, problem=text
            )
        problem = self._probes.runtime.find_problem(active)
        return HealthCheckResult(CONTAINER_RUNTIME, is_passing=not problem, problem=problem)

    def _check_greenboot(self, unit: SystemdUnit | None) -> HealthCheckResult:
        is_idle = unit is not None and unit.active_state == "inactive"
        # An enabled greenboot that is inactive has not started yet.
        if (
            is_idle
            and self._probes.systemd.read_unit_file_state(GREENBOOT_UNIT) in _DISABLED_STATES
        ):
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
            yield HealthCheckResult(
                NODE_READY, is_passing=False, problem="the API server has no such Node"
            )
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
        """Return whether the kubelet has written the Node's status since the boot."""
        if node.boot_id not in {boot_ids.extract_kernel_boot_id(boot_id), ""}:
            return False
        if not boot_ids.is_soft_boot(boot_id):
            return True
        try:
            # A soft reboot keeps the kernel, and with it the boot ID that the kubelet reports.
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

    def _add_age(self, result: HealthCheckResult, now: float) -> HealthCheckResult:
        state, since = self._since.get(result.name, (None, now))
        if state is not result.is_passing:
            log.info(
                "health check %s %s%s",
                result.name,
                _STATE_WORDS[result.is_passing],
                f": {result.problem}" * bool(result.problem),
            )
            since = now
        self._since[result.name] = (result.is_passing, since)
        return HealthCheckResult(result.name, result.is_passing, result.problem, now - since)


_STATE_WORDS = {True: "passed", False: "failed", None: "has no result"}


def _check_unit(name: str, unit: SystemdUnit | None) -> HealthCheckResult:
    if unit is None:
        return HealthCheckResult(name, is_passing=None)
    if unit.load_state == "masked":
        return HealthCheckResult(name, is_passing=False, problem=f"{unit.name} is masked")
    is_active = unit.active_state == "active"
    return HealthCheckResult(
        name,
        is_passing=is_active,
        problem="" if is_active else f"{unit.name} is {unit.active_state}",
    )
