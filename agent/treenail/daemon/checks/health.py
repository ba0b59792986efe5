"""Health checks of a boot trial: what each finds on this machine and in the cluster."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from treenail import clocks, errors
from treenail.api.node import Node
from treenail.daemon import agent_settings
from treenail.daemon.cluster.node_client import NodeClient
from treenail.host.system import health_probes
from treenail.host.systemd.systemd import Systemd, SystemdUnit
from treenail.update.checks import health
from treenail.update.state import ledger_record as boot_ids
from treenail.update.state.boot_trial import BootTrial

log = logging.getLogger(__name__)

KUBELET_UNIT = "kubelet.service"
GREENBOOT_UNIT = "greenboot-healthcheck.service"
_NOT_FOUND = "not-found"
# No boot starts units in these states.
_DISABLED_STATES = ("disabled", "masked", "masked-runtime")
_MIN_CHECK_S = 1.0
_WAITS_FOR_CERTIFICATE = (
    "waiting for the kubelet's client certificate; find its request with: kubectl get csr"
)


@dataclass(frozen=True, slots=True)
class HealthProbes:
    """The adapters that the checks read."""

    systemd: Systemd
    runtime: health_probes.ContainerRuntime
    custom_checks: health_probes.HealthCheckDirectory
    cluster: NodeClient
    network: health_probes.HostNetwork
    kubelet: health_probes.KubeletFiles


class HealthChecker:
    """Runs the checks, and gives their results to the clock of the trial."""

    def __init__(
        self,
        probes: HealthProbes,
        settings: agent_settings.HealthSettings,
        clock: clocks.Clock,
        *,
        send_heartbeat: Callable[[], None],
    ) -> None:
        """``send_heartbeat`` is called between custom checks, each of which may take a while."""
        self._probes = probes
        self._settings = settings
        self._clock = clock
        self._send_heartbeat = send_heartbeat
        self._trial_history = health.CheckHistory(settings)
        self._origin_history = health.CheckHistory(settings)
        self._trial: tuple[str, float] | None = None
        self._states: dict[str, bool | None] = {}
        self._passed: set[str] = set()
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

    def run_checks(self, boot_trial: BootTrial, boot_id: str) -> health.BootTrialStatus:
        """Run every check. A failing check is a result, never an exception."""
        trial = (boot_id, boot_trial.began_monotonic)
        if trial != self._trial:
            self._trial = trial
            self._passed.clear()
            self._states.clear()
        results = self._run_built_in_checks(boot_id, boot_trial.passed_before)
        if all(
            result.is_passing is not False or result.is_excused(boot_trial) for result in results
        ):
            # Custom checks may need the kubelet and the runtime: run them once those pass.
            left_s = (
                boot_trial.began_monotonic + self._settings.deadline_s - self._clock.monotonic()
            )
            results += self._run_custom_checks(
                min(self._settings.check_s, max(left_s, _MIN_CHECK_S))
            )
        self._log_changes(results)
        return self._trial_history.observe(results, boot_trial, self._clock.monotonic())

    def take_baseline(self, boot_id: str) -> BootTrial:
        """Run every check before the reboot; return a new trial with the results."""
        results = self._run_built_in_checks(boot_id, ())
        results += self._run_custom_checks(self._settings.check_s)
        self._passed.clear()
        return BootTrial(
            failed_before=tuple(result.name for result in results if result.is_passing is False),
            passed_before=tuple(result.name for result in results if result.is_passing),
        )

    def check_origin(self, name: str, boot_id: str) -> health.OriginCheck:
        """Run the cluster check that failed a target, on the deployment after the rollback."""
        results = self._origin_history.add_ages(
            self._check_cluster(boot_id), self._clock.monotonic()
        )
        check = next((result for result in results if result.name == name), None)
        limits = self._settings
        return (
            health.OriginCheck.UNKNOWN
            if check is None
            else health.judge_origin_check(check, limits)
        )

    def _run_built_in_checks(
        self, boot_id: str, passed_before: tuple[str, ...]
    ) -> list[health.HealthCheckResult]:
        own_problems = (
            health.HealthCheckResult(name, is_passing=False, problem=text)
            for name, text in self._problems.items()
        )
        network = self._check_network(passed_before)
        units = tuple(self._check_units(passed_before))
        results = [*own_problems, *units, network, *self._check_cluster(boot_id)]
        kubelet = next(check for check in units if check.name == health.KUBELET)
        if kubelet.is_passing is None and kubelet.problem:
            # Without the kubelet's certificate the agent, which uses it too, has no access.
            results = [_without_kubelet(result, kubelet) for result in results]
        if network.is_passing is False:
            # The node itself is cut off, so that this is no outage of the API server.
            results = [replace(result, is_external=False) for result in results]
        return results

    def _check_network(self, passed_before: tuple[str, ...]) -> health.HealthCheckResult:
        """Check the default route. A node that had none before the reboot needs none."""
        has_route = self._probes.network.has_default_route()
        if has_route is False and health.NETWORK not in passed_before:
            has_route = None
        text = "" if has_route is not False else "no default route is up"
        return health.HealthCheckResult(health.NETWORK, has_route, text)

    def _check_units(self, passed_before: tuple[str, ...]) -> Iterator[health.HealthCheckResult]:
        names = (KUBELET_UNIT, GREENBOOT_UNIT, *health_probes.RUNTIME_SOCKETS)
        try:
            units = self._probes.systemd.list_units(*names)
            loaded = {unit.name: unit for unit in units if unit.load_state != _NOT_FOUND}
            greenboot = self._check_greenboot(loaded.get(GREENBOOT_UNIT))
            kubelet = self._check_kubelet(loaded.get(KUBELET_UNIT), passed_before)
        except errors.HostError as error:
            yield health.HealthCheckResult(
                health.KUBELET, is_passing=False, problem=f"cannot read units from systemd: {error}"
            )
            return
        yield kubelet
        yield self._check_runtime(
            tuple(loaded[name] for name in health_probes.RUNTIME_SOCKETS if name in loaded)
        )
        yield greenboot

    def _check_kubelet(
        self, unit: SystemdUnit | None, passed_before: tuple[str, ...]
    ) -> health.HealthCheckResult:
        """Check the kubelet. One that was disabled before the reboot may stay so."""
        result = _check_unit(health.KUBELET, unit)
        if unit is None or unit.load_state == "masked":
            return result
        if unit.active_state == "inactive":
            state = self._probes.systemd.read_unit_file_state(KUBELET_UNIT)
            if state == "disabled":
                is_new = health.KUBELET in passed_before
                text = f"{KUBELET_UNIT} is disabled" + " since the reboot" * is_new
                is_passing = False if is_new else None
                return health.HealthCheckResult(health.KUBELET, is_passing, text)
        elif unit.active_state != "failed" and self._probes.kubelet.is_waiting_for_certificate():
            return health.HealthCheckResult(
                health.KUBELET, None, _WAITS_FOR_CERTIFICATE, is_external=True
            )
        return result

    def _check_runtime(self, units: tuple[SystemdUnit, ...]) -> health.HealthCheckResult:
        """Check the active container runtime; with several installed, the active one counts."""
        results = {unit.name: _check_unit(health.CONTAINER_RUNTIME, unit) for unit in units}
        active = next((name for name, check in results.items() if check.is_passing), "")
        if not active:
            text = "; ".join(result.problem for result in results.values())
            return health.HealthCheckResult(
                health.CONTAINER_RUNTIME, is_passing=False if results else None, problem=text
            )
        problem = self._probes.runtime.find_problem(active)
        return health.HealthCheckResult(
            health.CONTAINER_RUNTIME, is_passing=not problem, problem=problem
        )

    def _check_greenboot(self, unit: SystemdUnit | None) -> health.HealthCheckResult:
        is_idle = unit is not None and unit.active_state == "inactive"
        # An enabled greenboot that is inactive has not started yet.
        if (
            is_idle
            and self._probes.systemd.read_unit_file_state(GREENBOOT_UNIT) in _DISABLED_STATES
        ):
            return health.HealthCheckResult(health.GREENBOOT, is_passing=None)
        return _check_unit(health.GREENBOOT, unit)

    def _check_cluster(self, boot_id: str) -> Iterator[health.HealthCheckResult]:
        is_missing = False
        try:
            self._probes.cluster.refresh_node()
        except errors.NotFoundError:
            is_missing = True
        except errors.ClusterError as error:
            # Another program sets the name. What this node is called says nothing about its target.
            is_passing = None if isinstance(error, errors.UnnamedNodeError) else False
            # A rejected credential is no outage: the API server answers.
            is_outage = not isinstance(error, errors.ForbiddenError)
            yield health.HealthCheckResult(
                health.API_SERVER, is_passing, str(error), is_external=is_outage
            )
            yield health.HealthCheckResult(health.NODE_READY, is_passing=None)
            return
        yield health.HealthCheckResult(health.API_SERVER, is_passing=True)
        node = None if is_missing else self._probes.cluster.get_cached_node()
        if node is None:
            yield health.HealthCheckResult(
                health.NODE_READY, is_passing=False, problem="the API server has no such Node"
            )
        elif not node.is_ready:
            yield health.HealthCheckResult(
                health.NODE_READY,
                is_passing=False,
                problem=node.not_ready_message or "the Node is not Ready",
            )
        elif not self._has_kubelet_reported(node, boot_id):
            text = "the kubelet has not reported since the boot"
            yield health.HealthCheckResult(health.NODE_READY, is_passing=False, problem=text)
        else:
            yield health.HealthCheckResult(health.NODE_READY, is_passing=True)

    def _has_kubelet_reported(self, node: Node, boot_id: str) -> bool:
        """Return whether the kubelet has written the Node's status since the boot."""
        if node.boot_id not in {boot_ids.extract_kernel_boot_id(boot_id), ""}:
            return False
        if not boot_ids.is_soft_boot(boot_id):
            return True
        try:
            # A soft reboot keeps the kernel, and with it the boot ID that the kubelet reports.
            return node.last_heartbeat >= clocks.format_rfc3339(
                self._probes.systemd.read_userspace_start()
            )
        except errors.HostError:
            return False

    def _run_custom_checks(self, limit_s: float) -> Iterator[health.HealthCheckResult]:
        try:
            names = self._probes.custom_checks.list_checks()
        except errors.HostError as error:
            yield health.HealthCheckResult(
                health.OWN_CHECK_PREFIX, is_passing=False, problem=str(error)
            )
            return
        for name in names:
            problem = ""
            if name not in self._passed:
                self._send_heartbeat()
                problem = self._probes.custom_checks.run_check(name, timeout_s=limit_s)
            if not problem:
                self._passed.add(name)
            yield health.HealthCheckResult(
                health.OWN_CHECK_PREFIX + name, is_passing=not problem, problem=problem
            )

    def _log_changes(self, results: Iterable[health.HealthCheckResult]) -> None:
        for result in results:
            if self._states.get(result.name) is not result.is_passing:
                log.info(
                    "health check %s %s%s",
                    result.name,
                    _STATE_WORDS[result.is_passing],
                    f": {result.problem}" * bool(result.problem),
                )
            self._states[result.name] = result.is_passing


_STATE_WORDS = {True: "passed", False: "failed", None: "has no result"}


def _without_kubelet(
    result: health.HealthCheckResult, kubelet: health.HealthCheckResult
) -> health.HealthCheckResult:
    """Return the result of a check that cannot pass without the kubelet."""
    if result.name == health.NODE_READY and result.is_passing is False:
        return health.HealthCheckResult(health.NODE_READY, is_passing=None, problem=kubelet.problem)
    if result.name == health.API_SERVER and kubelet.is_waiting and result.is_passing is False:
        return health.HealthCheckResult(health.API_SERVER, is_passing=None, problem=kubelet.problem)
    return result


def _check_unit(name: str, unit: SystemdUnit | None) -> health.HealthCheckResult:
    if unit is None:
        return health.HealthCheckResult(name, is_passing=None)
    if unit.load_state == "masked":
        return health.HealthCheckResult(name, is_passing=False, problem=f"{unit.name} is masked")
    is_active = unit.active_state == "active"
    return health.HealthCheckResult(
        name,
        is_passing=is_active,
        problem="" if is_active else f"{unit.name} is {unit.active_state}",
    )
