"""Health checks of a boot trial, and since when they have their result."""

from dataclasses import dataclass, field
from datetime import datetime

import pytest

from tests.fakes.clock import FakeClock
from treenail.api.node import Node
from treenail.daemon.agent_settings import HealthSettings as Limits
from treenail.daemon.checks.health import HealthChecker, HealthProbes
from treenail.errors import (
    BusError,
    ClusterError,
    FileError,
    ForbiddenError,
    NotFoundError,
    UnnamedNodeError,
    UnreachableError,
)
from treenail.host.systemd.systemd import SystemdUnit
from treenail.update.checks.health import BootTrialStatus, HealthCheckResult, OriginCheck
from treenail.update.state.boot_trial import BootTrial

BOOT = "boot-2"
WELL = [
    HealthCheckResult("Kubelet", is_passing=True),
    HealthCheckResult("ContainerRuntime", is_passing=True),
    HealthCheckResult("Greenboot", is_passing=None),
    HealthCheckResult("Network", is_passing=True),
    HealthCheckResult("ApiServer", is_passing=True),
    HealthCheckResult("NodeReady", is_passing=True),
]


@dataclass
class Machine:
    """A healthy machine, with a cluster that answers."""

    units_there: dict[str, tuple[str, str]] = field(
        default_factory=lambda: {
            "kubelet.service": ("loaded", "active"),
            "crio.service": ("loaded", "active"),
        }
    )
    files: dict[str, str] = field(default_factory=dict)
    """The states of unit files that a test sets."""
    bus_away: bool = False
    runtime_problem: str = ""
    queried: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    ran: list[tuple[str, float]] = field(default_factory=list)
    unreadable: bool = False
    api_away: bool = False
    user_space_at: float = 0.0
    api_error: ClusterError | None = None
    default_route: bool | None = True
    waits_for_certificate: bool = False
    seen: Node | None = field(default_factory=lambda: Node("node-1", is_ready=True, boot_id=BOOT))
    clock: FakeClock = field(default_factory=FakeClock)

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        if self.bus_away:
            raise BusError("systemd does not answer")
        there = {name: self.units_there.get(name, ("not-found", "inactive")) for name in names}
        return tuple(SystemdUnit(name, *states, "", "/") for name, states in there.items())

    def read_unit_file_state(self, unit: str) -> str:
        return self.files[unit]

    def read_userspace_start(self) -> float:
        return self.user_space_at

    def find_problem(self, unit: str) -> str:
        self.queried.append(unit)
        return self.runtime_problem

    def list_checks(self) -> tuple[str, ...]:
        if self.unreadable:
            raise FileError("too many")
        return tuple(self.own)

    def run_check(self, name: str, *, timeout_s: float) -> str:
        self.ran.append((name, timeout_s))
        return self.own[name]

    def get_cached_node(self) -> Node | None:
        return self.seen

    def refresh_node(self) -> None:
        if self.api_away:
            raise UnreachableError("connection refused")
        if self.api_error is not None:
            raise self.api_error

    def has_default_route(self) -> bool | None:
        return self.default_route

    def is_waiting_for_certificate(self) -> bool:
        return self.waits_for_certificate

    def health(self) -> HealthChecker:
        probes = HealthProbes(self, self, self, self, self, self)
        limits = Limits(deadline_s=100.0, settle_s=10.0, check_s=30.0)
        return HealthChecker(probes, limits, self.clock, send_heartbeat=lambda: None)

    def probation(self) -> BootTrial:
        return BootTrial(boot_id=BOOT, began_monotonic=self.clock.monotonic())


def failing(trial: BootTrialStatus) -> list[tuple[str, str]]:
    return [(each.name, each.problem) for each in trial.checks if each.is_passing is False]


def looked(machine: Machine) -> list[tuple[str, str]]:
    return failing(machine.health().run_checks(machine.probation(), BOOT))


def test_healthy_machine_passes_every_check() -> None:
    machine = Machine()
    health, probation = machine.health(), machine.probation()
    limits = Limits(deadline_s=100.0, settle_s=10.0, check_s=30.0)
    assert health.run_checks(probation, BOOT) == BootTrialStatus(0.0, limits, tuple(WELL), True)
    machine.clock.move(7.0)
    later = health.run_checks(probation, BOOT)
    assert (later.elapsed_s, later.healthy_for_s) == (7.0, 7.0)


def test_inactive_units_are_named_with_state() -> None:
    machine = Machine()
    machine.units_there |= {
        "kubelet.service": ("masked", "inactive"),
        "crio.service": ("loaded", "failed"),
        "greenboot-healthcheck.service": ("loaded", "activating"),
    }
    assert looked(machine) == [
        ("Kubelet", "kubelet.service is masked"),
        ("ContainerRuntime", "crio.service is failed"),
        ("Greenboot", "greenboot-healthcheck.service is activating"),
    ]


@pytest.mark.parametrize("unused", [("loaded", "inactive"), ("masked", "inactive")])
@pytest.mark.parametrize("used", ["crio.service", "containerd.service"])
def test_active_runtime_among_installed_ones_is_checked(used: str, unused: tuple[str, str]) -> None:
    machine = Machine()
    machine.units_there |= {"crio.service": unused, "containerd.service": unused}
    machine.units_there[used] = ("loaded", "active")
    assert looked(machine) == []
    machine.runtime_problem = "the socket does not answer"
    assert looked(machine) == [("ContainerRuntime", "the socket does not answer")]
    assert machine.queried == [used, used]


def test_inactive_runtimes_are_all_named() -> None:
    machine = Machine()
    machine.units_there |= {
        "crio.service": ("masked", "inactive"),
        "containerd.service": ("loaded", "activating"),
    }
    assert looked(machine) == [
        ("ContainerRuntime", "crio.service is masked; containerd.service is activating")
    ]
    del machine.units_there["containerd.service"]
    assert looked(machine) == [("ContainerRuntime", "crio.service is masked")]


@pytest.mark.parametrize(
    ("states", "file", "found"),
    [
        (("loaded", "inactive"), "disabled", None),
        (("masked", "inactive"), "masked", None),
        (("loaded", "inactive"), "enabled", False),
        (("loaded", "activating"), "enabled", False),
        (("loaded", "failed"), "disabled", False),
        (("loaded", "active"), "enabled", True),
    ],
)
def test_disabled_greenboot_has_no_result(
    states: tuple[str, str], file: str, found: bool | None
) -> None:
    unit = "greenboot-healthcheck.service"
    machine = Machine(files={unit: file})
    machine.units_there[unit] = states
    check = machine.health().run_checks(machine.probation(), BOOT).checks[2]
    text = "" if found is not False else f"{unit} is {states[1]}"
    assert check == HealthCheckResult("Greenboot", found, text)


def test_runtime_without_answer_fails_though_unit_is_active() -> None:
    machine = Machine(runtime_problem="the socket does not answer")
    assert looked(machine) == [("ContainerRuntime", "the socket does not answer")]


def test_machine_without_kubernetes_units_has_no_results() -> None:
    trial = Machine(units_there={}).health().run_checks(BootTrial(), BOOT)
    assert [each.is_passing for each in trial.checks[:3]] == [None, None, None]


def test_unreachable_systemd_fails_the_kubelet_check() -> None:
    assert looked(Machine(bus_away=True)) == [
        ("Kubelet", "cannot read units from systemd: systemd does not answer")
    ]


def test_node_ready_has_no_result_without_api_server() -> None:
    trial = Machine(api_away=True).health().run_checks(BootTrial(), BOOT)
    assert failing(trial) == [("ApiServer", "connection refused")]
    assert not trial.is_api_reachable
    assert trial.checks[-1] == HealthCheckResult("NodeReady", is_passing=None)


def test_node_must_be_ready_since_the_boot() -> None:
    for node, text in (
        (None, "the API server has no such Node"),
        (Node("node-1", not_ready_message="CNI is not up"), "CNI is not up"),
        (Node("node-1"), "the Node is not Ready"),
        (
            Node("node-1", is_ready=True, boot_id="boot-1"),
            "the kubelet has not reported since the boot",
        ),
    ):
        assert looked(Machine(seen=node)) == [("NodeReady", text)]


def test_node_must_report_after_soft_reboot() -> None:
    node = Node("node-1", is_ready=True, boot_id=BOOT, last_heartbeat="2026-01-01T12:00:00Z")
    soft = f"{BOOT}+1"
    for started, expected in (
        ("12:00:00", []),
        ("12:00:01", [("NodeReady", "the kubelet has not reported since the boot")]),
    ):
        at = datetime.fromisoformat(f"2026-01-01T{started}+00:00").timestamp()
        machine = Machine(seen=node, user_space_at=at)
        assert failing(machine.health().run_checks(machine.probation(), soft)) == expected


def test_custom_checks_run_last_and_once() -> None:
    machine = Machine(own={"dns": "no answer", "disk": ""})
    health, probation = machine.health(), machine.probation()
    assert failing(health.run_checks(probation, BOOT)) == [("health.d/dns", "no answer")]
    machine.own["dns"] = ""
    assert failing(health.run_checks(probation, BOOT)) == []
    assert [name for name, _ in machine.ran] == ["dns", "disk", "dns"]
    machine.runtime_problem = "gone"
    assert len(health.run_checks(probation, BOOT).checks) == len(WELL)


def test_custom_check_is_limited_by_the_trial_deadline() -> None:
    machine = Machine(own={"slow": "no"})
    health, probation = machine.health(), machine.probation()
    for move_s in (80.0, 30.0):
        machine.clock.move(move_s)
        health.run_checks(probation, BOOT)
    assert machine.ran == [("slow", 20.0), ("slow", 1.0)]


def test_unlistable_custom_checks_fail() -> None:
    assert looked(Machine(unreadable=True)) == [("health.d/", "too many")]


def test_check_age_restarts_after_a_relapse() -> None:
    machine = Machine(runtime_problem="no answer")
    health, probation = machine.health(), machine.probation()
    health.run_checks(probation, BOOT)
    machine.clock.move(20.0)
    assert health.run_checks(probation, BOOT).checks[1].since_s == 20.0
    machine.runtime_problem = ""
    machine.clock.move(5.0)
    assert health.run_checks(probation, BOOT).healthy_for_s == 0.0
    machine.clock.move(9.0)
    assert health.run_checks(probation, BOOT).healthy_for_s == 9.0
    machine.runtime_problem = "again"
    relapsed = health.run_checks(probation, BOOT)
    assert (relapsed.healthy_for_s, relapsed.checks[1].since_s) == (0.0, 34.0)


def test_kubelet_disabled_before_the_reboot_is_no_failure() -> None:
    machine = Machine(files={"kubelet.service": "disabled"}, seen=Node("node-1"))
    machine.units_there["kubelet.service"] = ("loaded", "inactive")
    found = machine.health().run_checks(machine.probation(), BOOT)
    assert failing(found) == []
    assert found.checks[0].problem == "kubelet.service is disabled"
    trial = BootTrial(boot_id=BOOT, passed_before=("Kubelet",))
    assert failing(machine.health().run_checks(trial, BOOT))[0] == (
        "Kubelet",
        "kubelet.service is disabled since the reboot",
    )


@pytest.mark.parametrize("state", ["active", "activating"])
def test_kubelet_without_certificate_stops_the_clock(state: str) -> None:
    machine = Machine(waits_for_certificate=True, api_error=ForbiddenError("unauthorized"))
    machine.units_there["kubelet.service"] = ("loaded", state)
    found = machine.health().run_checks(machine.probation(), BOOT)
    assert failing(found) == []
    assert found.is_paused
    assert "kubectl get csr" in found.checks[0].problem
    machine.units_there["kubelet.service"] = ("loaded", "failed")
    assert looked(machine)[0] == ("Kubelet", "kubelet.service is failed")


def test_rejected_credential_is_no_outage() -> None:
    machine = Machine(api_error=ForbiddenError("unauthorized"))
    found = machine.health().run_checks(machine.probation(), BOOT)
    assert (failing(found), found.is_paused) == ([("ApiServer", "unauthorized")], False)
    machine = Machine(api_away=True)
    assert machine.health().run_checks(machine.probation(), BOOT).is_paused


def test_checks_of_the_cluster_wait_for_the_name_of_the_node() -> None:
    machine = Machine(api_error=UnnamedNodeError("waiting for the name of this Node"))
    trial = machine.health().run_checks(machine.probation(), BOOT)
    assert (failing(trial), trial.is_paused) == ([], True)
    assert [check.problem for check in trial.checks if check.is_waiting] == [
        "waiting for the name of this Node"
    ]
    # Without a route the clock runs, but nothing that the name can fail counts.
    machine.default_route = False
    trial = machine.health().run_checks(BootTrial(passed_before=("Network",)), BOOT)
    assert (failing(trial), trial.is_paused) == ([("Network", "no default route is up")], False)


def test_missing_node_is_no_outage() -> None:
    assert looked(Machine(api_error=NotFoundError("no such Node"))) == [
        ("NodeReady", "the API server has no such Node")
    ]


def test_lost_default_route_makes_an_unreachable_api_server_the_nodes_fault() -> None:
    machine = Machine(default_route=False, api_away=True)
    found = machine.health().run_checks(machine.probation(), BOOT)
    assert (failing(found), found.is_paused) == ([("ApiServer", "connection refused")], True)
    trial = BootTrial(boot_id=BOOT, passed_before=("Network",))
    found = machine.health().run_checks(trial, BOOT)
    assert failing(found)[0] == ("Network", "no default route is up")
    assert not found.is_paused


def test_baseline_names_failed_and_passed_checks() -> None:
    machine = Machine(own={"dns": "no answer", "disk": ""}, runtime_problem="no answer")
    baseline = machine.health().take_baseline(BOOT)
    assert baseline.failed_before == ("ContainerRuntime", "health.d/dns")
    assert baseline.passed_before == (
        "Kubelet",
        "Network",
        "ApiServer",
        "NodeReady",
        "health.d/disk",
    )


def test_custom_checks_run_beside_a_check_that_failed_before() -> None:
    machine = Machine(own={"dns": ""}, runtime_problem="no answer")
    trial = BootTrial(boot_id=BOOT, failed_before=("ContainerRuntime",))
    machine.health().run_checks(trial, BOOT)
    assert [name for name, _ in machine.ran] == ["dns"]


def test_origin_check_fails_after_its_minimum_time() -> None:
    machine = Machine(api_away=True)
    health = machine.health()
    assert health.check_origin("ApiServer", BOOT) is OriginCheck.UNKNOWN
    machine.clock.move(120.0)
    assert health.check_origin("ApiServer", BOOT) is OriginCheck.FAILS
    machine.api_away = False
    health.check_origin("ApiServer", BOOT)
    machine.clock.move(5.0)
    health.check_origin("ApiServer", BOOT)
    machine.clock.move(5.0)
    assert health.check_origin("ApiServer", BOOT) is OriginCheck.PASSES
