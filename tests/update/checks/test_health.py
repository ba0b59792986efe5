"""The verdict on a boot trial, from the results of the health checks over time."""

import pytest

from tests.update.build import B
from treenail.update.checks.health import (
    API_SERVER,
    BootTrialStatus,
    BootVerdict,
    HealthCheckResult,
    HealthyVerdict,
    PendingVerdict,
    UnhealthyVerdict,
    decide_verdict,
    format_not_booted,
    format_unhealthy,
)
from treenail.update.state.boot_trial import AGENT_STARTS_ALLOWED, BOOTS_ALLOWED, BootTrial

KUBELET = HealthCheckResult("Kubelet", is_passing=True)
DEAD = HealthCheckResult(
    "Kubelet", is_passing=False, problem="kubelet.service is failed", since_s=500
)
READY = HealthCheckResult("NodeReady", is_passing=True)
API = HealthCheckResult(API_SERVER, is_passing=True)
API_LOST = HealthCheckResult(API_SERVER, is_passing=False, problem="no answer", since_s=600)
NOT_INSTALLED = HealthCheckResult("Greenboot", is_passing=None)


def decide(
    *checks: HealthCheckResult,
    elapsed_s: float = 60.0,
    has_api_since: bool = False,
    healthy_for_s: float = 0.0,
    has_api_before: bool = True,
    is_api_blamed: bool = False,
) -> BootVerdict:
    status = BootTrialStatus(elapsed_s, 600.0, 10.0, checks, healthy_for_s=healthy_for_s)
    trial = BootTrial(has_api_before_reboot=has_api_before, has_api_since_reboot=has_api_since)
    return decide_verdict(status, trial, is_api_blamed=is_api_blamed)


def test_verdict_after_checks_settled_is_healthy() -> None:
    assert decide(KUBELET, READY, API, healthy_for_s=9.9) == PendingVerdict(
        "all health checks pass; waiting until they have passed for settle_s"
    )
    assert decide(KUBELET, READY, API, healthy_for_s=10.0) == HealthyVerdict()


def test_verdict_with_inapplicable_check_is_healthy() -> None:
    assert decide(KUBELET, NOT_INSTALLED, API, healthy_for_s=10.0) == HealthyVerdict()


def test_verdict_before_deadline_is_pending() -> None:
    assert decide(DEAD, API, elapsed_s=599.0) == PendingVerdict(
        "waiting up to 1 s for Kubelet: kubelet.service is failed"
    )


def test_verdict_at_deadline_names_first_failing_check() -> None:
    late = HealthCheckResult("health.d/dns", is_passing=False, problem="exit code 1")
    assert decide(API, DEAD, late, elapsed_s=600.0) == UnhealthyVerdict(DEAD)


def test_verdict_on_slow_node_that_passes_by_deadline_is_healthy() -> None:
    assert decide(KUBELET, READY, API, elapsed_s=480.0, healthy_for_s=10.0) == HealthyVerdict()
    assert decide(KUBELET, READY, API, elapsed_s=600.0, healthy_for_s=1.0) == HealthyVerdict()


def test_verdict_with_api_server_lost_by_reboot_is_unhealthy() -> None:
    assert decide(KUBELET, API_LOST, elapsed_s=600.0) == UnhealthyVerdict(API_LOST)


@pytest.mark.parametrize(
    "case",
    [
        {"has_api_before": False},
        {"has_api_since": True},
        {"is_api_blamed": True},
    ],
)
def test_verdict_with_api_server_lost_otherwise_is_healthy_at_deadline(
    case: dict[str, bool],
) -> None:
    assert isinstance(decide(KUBELET, API_LOST, elapsed_s=599.0, **case), PendingVerdict)
    assert decide(KUBELET, API_LOST, elapsed_s=600.0, **case) == HealthyVerdict(
        inconclusive=(API_SERVER,)
    )


def test_verdict_with_excused_api_server_counts_other_failing_check() -> None:
    assert decide(API_LOST, DEAD, elapsed_s=600.0, has_api_before=False) == UnhealthyVerdict(DEAD)


def test_quarantine_reasons_name_target_check_and_duration() -> None:
    assert format_unhealthy(B, DEAD) == (
        f"{B} is not healthy: check Kubelet failed for 500 s: kubelet.service is failed"
    )
    assert "sha256:old" in format_not_booted(B, "sha256:old")
    assert "another deployment" in format_not_booted(B, "")


def test_boot_trial_fails_after_too_many_starts_or_boots() -> None:
    trial = BootTrial(has_api_before_reboot=True)
    for start in range(1, AGENT_STARTS_ALLOWED + 1):
        trial = trial.count_start("boot-1", 100.0 + start)
        assert trial == BootTrial(True, False, "boot-1", 101.0, 1, start)
        assert not trial.failure
    assert "started 6 times" in trial.count_start("boot-1", 200.0).failure
    for boot in range(2, BOOTS_ALLOWED + 1):
        trial = trial.count_start(f"boot-{boot}", 300.0)
        assert (trial.boot_count, trial.agent_starts, trial.began_monotonic) == (boot, 1, 300.0)
        assert not trial.failure
    assert "booted 4 times" in trial.count_start("boot-last", 1.0).failure
