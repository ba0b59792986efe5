"""What the checks found, over time, to a verdict."""

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
AWAY = HealthCheckResult(API_SERVER, is_passing=False, problem="no answer", since_s=600)
NOT_INSTALLED = HealthCheckResult("Greenboot", is_passing=None)


def judged(
    *checks: HealthCheckResult,
    elapsed_s: float = 60.0,
    api_seen: bool = False,
    well_for_s: float = 0.0,
    api_before: bool = True,
    blamed_before: bool = False,
) -> BootVerdict:
    trial = BootTrialStatus(elapsed_s, 600.0, 10.0, checks, healthy_for_s=well_for_s)
    probation = BootTrial(has_api_before_reboot=api_before, has_api_since_reboot=api_seen)
    return decide_verdict(trial, probation, is_api_blamed=blamed_before)


def test_a_node_is_healthy_once_all_is_well_for_a_while() -> None:
    assert judged(KUBELET, READY, API, well_for_s=9.9) == PendingVerdict(
        "all is well; seeing whether it stays so"
    )
    assert judged(KUBELET, READY, API, well_for_s=10.0) == HealthyVerdict()


def test_what_is_not_installed_is_not_waited_for() -> None:
    assert judged(KUBELET, NOT_INSTALLED, API, well_for_s=10.0) == HealthyVerdict()


def test_until_the_deadline_nothing_is_decided() -> None:
    assert judged(DEAD, API, elapsed_s=599.0) == PendingVerdict(
        "waiting 1 s more for Kubelet: kubelet.service is failed"
    )


def test_at_the_deadline_the_first_failing_check_is_named() -> None:
    late = HealthCheckResult("health.d/dns", is_passing=False, problem="exit code 1")
    assert judged(API, DEAD, late, elapsed_s=600.0) == UnhealthyVerdict(DEAD)


def test_a_slow_node_that_is_well_by_the_deadline_stays() -> None:
    assert judged(KUBELET, READY, API, elapsed_s=480.0, well_for_s=10.0) == HealthyVerdict()
    assert judged(KUBELET, READY, API, elapsed_s=600.0, well_for_s=1.0) == HealthyVerdict()


def test_an_api_server_that_never_came_back_sends_the_node_back() -> None:
    assert judged(KUBELET, AWAY, elapsed_s=600.0) == UnhealthyVerdict(AWAY)


@pytest.mark.parametrize(
    "how",
    [
        {"api_before": False},
        {"api_seen": True},
        {"blamed_before": True},
    ],
)
def test_an_api_server_that_is_away_for_other_reasons_is_waited_for_and_forgiven(
    how: dict[str, bool],
) -> None:
    assert isinstance(judged(KUBELET, AWAY, elapsed_s=599.0, **how), PendingVerdict)
    assert judged(KUBELET, AWAY, elapsed_s=600.0, **how) == HealthyVerdict(
        inconclusive=(API_SERVER,)
    )


def test_another_failing_check_counts_beside_a_forgiven_api_server() -> None:
    assert judged(AWAY, DEAD, elapsed_s=600.0, api_before=False) == UnhealthyVerdict(DEAD)


def test_sentences_name_target_check_and_time() -> None:
    assert format_unhealthy(B, DEAD) == (
        f"{B} was booted and is not healthy: Kubelet failed for 500 s: kubelet.service is failed"
    )
    assert "sha256:old" in format_not_booted(B, "sha256:old")
    assert "another deployment" in format_not_booted(B, "")


def test_starts_and_boots_are_counted_until_there_are_too_many() -> None:
    found = BootTrial(has_api_before_reboot=True)
    for start in range(1, AGENT_STARTS_ALLOWED + 1):
        found = found.count_start("boot-1", 100.0 + start)
        assert found == BootTrial(True, False, "boot-1", 101.0, 1, start)
        assert not found.failure
    assert "started 6 times" in found.count_start("boot-1", 200.0).failure
    for boot in range(2, BOOTS_ALLOWED + 1):
        found = found.count_start(f"boot-{boot}", 300.0)
        assert (found.boot_count, found.agent_starts, found.began_monotonic) == (boot, 1, 300.0)
        assert not found.failure
    assert "booted 4 times" in found.count_start("boot-last", 1.0).failure
