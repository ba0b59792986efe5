"""The verdict on a boot trial, from the results of the health checks over time."""

from dataclasses import replace
from functools import partial

import pytest

from tests.update.build import B
from treenail.update.checks.health import (
    API_SERVER,
    BootTrialStatus,
    BootVerdict,
    HealthCheckResult,
    HealthyVerdict,
    OriginCheck,
    PendingVerdict,
    UnhealthyVerdict,
    decide_verdict,
    format_inconclusive,
    format_not_booted,
    format_unhealthy,
    judge_origin_check,
)
from treenail.update.state.boot_trial import BootTrial, HealthCheckMode, TrialLimits

KUBELET = HealthCheckResult("Kubelet", is_passing=True)
DEAD = HealthCheckResult(
    "Kubelet", is_passing=False, problem="kubelet.service is failed", since_s=500
)
READY = HealthCheckResult("NodeReady", is_passing=True)
UNREADY = HealthCheckResult("NodeReady", is_passing=False, problem="CNI is not up", since_s=500)
API = HealthCheckResult(API_SERVER, is_passing=True)
API_LOST = HealthCheckResult(API_SERVER, is_passing=False, problem="no answer", since_s=600)
OUTAGE = HealthCheckResult(
    API_SERVER, is_passing=False, problem="no answer", since_s=600, is_external=True
)
CERTIFICATE = HealthCheckResult(
    "Kubelet", is_passing=None, problem="waiting for the certificate", is_external=True
)
NOT_INSTALLED = HealthCheckResult("Greenboot", is_passing=None)
LIMITS = TrialLimits()


def decide(
    *checks: HealthCheckResult,
    elapsed_s: float = 60.0,
    has_api_since: bool = False,
    healthy_for_s: float = 0.0,
    api_for_s: float = 600.0,
    observed_s: float = 600.0,
    has_api_before: bool = True,
    is_api_blamed: bool = False,
    is_paused: bool = False,
    failed_before: tuple[str, ...] = (),
    mode: HealthCheckMode = HealthCheckMode.ENFORCE,
) -> BootVerdict:
    status = BootTrialStatus(
        elapsed_s,
        LIMITS,
        checks,
        healthy_for_s=healthy_for_s,
        api_for_s=api_for_s,
        observed_s=observed_s,
        is_paused=is_paused,
    )
    trial = BootTrial(
        has_api_before_reboot=has_api_before,
        has_api_since_reboot=has_api_since,
        failed_before=failed_before,
    )
    return decide_verdict(status, trial, is_api_blamed=is_api_blamed, mode=mode)


def test_verdict_after_checks_settled_is_healthy() -> None:
    assert decide(KUBELET, READY, API, healthy_for_s=9.9) == PendingVerdict(
        "all health checks pass; waiting until they have passed for settle_s"
    )
    assert decide(KUBELET, READY, API, healthy_for_s=10.0) == HealthyVerdict()


def test_verdict_with_inapplicable_check_is_healthy() -> None:
    assert decide(KUBELET, NOT_INSTALLED, API, healthy_for_s=10.0) == HealthyVerdict()


def test_verdict_before_deadline_is_pending() -> None:
    assert decide(DEAD, API, elapsed_s=599.0) == PendingVerdict(
        "waiting up to 1 s for Kubelet: kubelet.service is failed",
        problem="check Kubelet fails: kubelet.service is failed",
    )
    starting = replace(DEAD, since_s=119.0)
    assert decide(starting, API) == PendingVerdict(
        "waiting up to 540 s for Kubelet: kubelet.service is failed"
    )


def test_verdict_at_deadline_names_first_failing_check() -> None:
    late = HealthCheckResult("health.d/dns", is_passing=False, problem="exit 1", since_s=200)
    assert decide(API, DEAD, late, elapsed_s=600.0) == UnhealthyVerdict(DEAD, is_only=False)
    assert decide(API, DEAD, elapsed_s=600.0) == UnhealthyVerdict(DEAD)


def test_verdict_on_blip_at_deadline_is_pending() -> None:
    blip = HealthCheckResult("Kubelet", is_passing=False, problem="inactive", since_s=119.0)
    assert isinstance(decide(API, blip, elapsed_s=600.0), PendingVerdict)
    assert isinstance(decide(API, blip, elapsed_s=1500.0), PendingVerdict)
    assert decide(API, blip, elapsed_s=LIMITS.last_s) == HealthyVerdict((blip,))


def test_verdict_of_checks_that_began_late_waits_for_their_failures() -> None:
    failing = replace(DEAD, since_s=0.0)
    late = partial(decide, API, elapsed_s=LIMITS.last_s + 60.0)
    assert late(failing, observed_s=0.0) == PendingVerdict(
        "waiting up to 300 s for Kubelet: kubelet.service is failed"
    )
    failing = replace(DEAD, since_s=LIMITS.failing_s)
    assert late(failing, observed_s=LIMITS.failing_s) == UnhealthyVerdict(failing)
    assert isinstance(late(KUBELET, observed_s=0.0), PendingVerdict)
    assert late(KUBELET, observed_s=10.0, healthy_for_s=10.0) == HealthyVerdict()
    blip = replace(DEAD, since_s=119.0)
    assert late(blip, observed_s=300.0) == HealthyVerdict((blip,)), "the trial must end"


def test_verdict_past_deadline_needs_a_settled_pass() -> None:
    assert isinstance(decide(KUBELET, READY, API, elapsed_s=600.0), PendingVerdict)
    assert decide(KUBELET, READY, API, elapsed_s=620.0, healthy_for_s=10.0) == HealthyVerdict()
    assert decide(KUBELET, READY, API, elapsed_s=LIMITS.last_s) == HealthyVerdict()


def test_verdict_on_unready_node_after_outage_waits_for_ready_s() -> None:
    assert isinstance(
        decide(KUBELET, UNREADY, API, elapsed_s=600.0, api_for_s=299.0), PendingVerdict
    )
    assert decide(KUBELET, UNREADY, API, elapsed_s=600.0, api_for_s=300.0) == UnhealthyVerdict(
        UNREADY
    )


def test_verdict_while_clock_stands_still_is_pending_and_names_limit() -> None:
    assert decide(KUBELET, OUTAGE, elapsed_s=700.0, is_paused=True) == PendingVerdict(
        "not counting the time, for up to 10800 s more, because of ApiServer: no answer"
    )
    assert decide(CERTIFICATE, elapsed_s=700.0, is_paused=True) == PendingVerdict(
        "not counting the time, for up to 10800 s more, because of Kubelet: waiting for the "
        "certificate"
    )


def test_verdict_without_certificate_after_all_limits_is_healthy() -> None:
    assert decide(CERTIFICATE, elapsed_s=600.0) == HealthyVerdict((CERTIFICATE,))


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
    assert decide(KUBELET, API_LOST, elapsed_s=600.0, **case) == HealthyVerdict((API_LOST,))


def test_verdict_with_excused_api_server_counts_other_failing_check() -> None:
    assert decide(API_LOST, DEAD, elapsed_s=600.0, has_api_before=False) == UnhealthyVerdict(DEAD)


def test_check_that_failed_before_the_reboot_is_reported_only() -> None:
    verdict = decide(DEAD, API, healthy_for_s=10.0, failed_before=("Kubelet",))
    assert verdict == HealthyVerdict((DEAD,))
    trial = BootTrial(failed_before=("Kubelet",))
    assert format_inconclusive((DEAD,), trial) == (
        "check Kubelet failed: kubelet.service is failed (it failed before the reboot, too)"
    )


def test_unreachable_api_server_before_the_reboot_is_waited_for() -> None:
    verdict = decide(
        OUTAGE, has_api_before=False, failed_before=(API_SERVER,), is_paused=True, elapsed_s=700.0
    )
    assert isinstance(verdict, PendingVerdict)


def test_verdict_in_report_mode_names_failing_checks_and_stays() -> None:
    report = HealthCheckMode.REPORT
    assert decide(DEAD, API, elapsed_s=600.0, mode=report) == HealthyVerdict((DEAD,))


def test_origin_check_needs_a_failure_that_the_reboot_does_not_explain() -> None:
    def judge(name: str, since_s: float, *, is_passing: bool = False) -> OriginCheck:
        return judge_origin_check(HealthCheckResult(name, is_passing, "", since_s), LIMITS)

    assert judge(API_SERVER, 119.0) is OriginCheck.UNKNOWN
    assert judge(API_SERVER, 120.0) is OriginCheck.FAILS
    assert judge("NodeReady", 299.0) is OriginCheck.UNKNOWN
    assert judge("NodeReady", 300.0) is OriginCheck.FAILS
    assert judge("NodeReady", 9.0, is_passing=True) is OriginCheck.UNKNOWN
    assert judge("NodeReady", 10.0, is_passing=True) is OriginCheck.PASSES


def test_quarantine_reasons_name_target_check_and_duration() -> None:
    assert format_unhealthy(B, DEAD) == (
        f"{B} is not healthy: check Kubelet failed for 500 s: kubelet.service is failed"
    )
    assert "sha256:old" in format_not_booted(B, "sha256:old")
    assert "another deployment" in format_not_booted(B, "")
