"""The clock of a boot trial: ages of results, and time that does not count."""

from treenail.update.checks.health import CheckHistory, HealthCheckResult, record_trial_status
from treenail.update.state.boot_trial import BootTrial, TrialLimits

LIMITS = TrialLimits(deadline_s=600, settle_s=10, failing_s=120, ready_s=300, outage_s=1000)
TRIAL = BootTrial(boot_id="b", began_monotonic=100.0)
WELL = (HealthCheckResult("Kubelet", True), HealthCheckResult("ApiServer", True))
DEAD = (HealthCheckResult("Kubelet", False, "failed"), HealthCheckResult("ApiServer", True))
OUTAGE = (
    HealthCheckResult("Kubelet", True),
    HealthCheckResult("ApiServer", False, "no answer", is_external=True),
)


def test_time_of_an_outage_does_not_count() -> None:
    clock = CheckHistory(LIMITS)
    assert clock.observe(WELL, TRIAL, 110.0).elapsed_s == 10.0
    assert clock.observe(OUTAGE, TRIAL, 120.0).is_paused
    assert clock.observe(OUTAGE, TRIAL, 500.0).elapsed_s == 20.0
    back = clock.observe(WELL, TRIAL, 510.0)
    assert (back.elapsed_s, back.paused_s, back.api_for_s) == (20.0, 390.0, 0.0)
    assert clock.observe(WELL, TRIAL, 540.0).api_for_s == 30.0


def test_clock_stands_still_for_no_longer_than_its_limit() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(OUTAGE, TRIAL, 100.0)
    late = clock.observe(OUTAGE, TRIAL, 1300.0)
    assert (late.is_paused, late.paused_s, late.elapsed_s) == (False, 1000.0, 200.0)


def test_recorded_pause_survives_a_restart_of_the_agent() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(OUTAGE, TRIAL, 100.0)
    trial = record_trial_status(TRIAL, clock.observe(OUTAGE, TRIAL, 129.0))
    assert trial.paused_s == 0.0, "each write wears the disk"
    trial = record_trial_status(TRIAL, clock.observe(OUTAGE, TRIAL, 400.0))
    assert trial.paused_s == 300.0
    assert CheckHistory(LIMITS).observe(WELL, trial, 410.0).elapsed_s == 10.0
    ended = record_trial_status(trial, clock.observe(WELL, trial, 405.0))
    assert (ended.paused_s, ended.has_api_since_reboot) == (305.0, True)


def test_pass_shorter_than_settle_s_does_not_end_a_failure() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(DEAD, TRIAL, 100.0)
    passing = clock.observe(WELL, TRIAL, 150.0)
    assert (passing.checks[0].is_passing, passing.checks[0].since_s) == (True, 0.0)
    clock.observe(WELL, TRIAL, 158.0)
    assert clock.observe(DEAD, TRIAL, 161.0).checks[0].since_s == 61.0
    clock.observe(WELL, TRIAL, 170.0)
    clock.observe(WELL, TRIAL, 180.0)
    assert clock.observe(DEAD, TRIAL, 181.0).checks[0].since_s == 0.0


def test_check_without_result_loses_its_age() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(DEAD, TRIAL, 100.0)
    clock.observe(DEAD[1:], TRIAL, 200.0)
    assert clock.observe(DEAD, TRIAL, 210.0).checks[0].since_s == 0.0


def test_check_that_failed_before_does_not_delay_health() -> None:
    clock = CheckHistory(LIMITS)
    trial = BootTrial(boot_id="b", began_monotonic=100.0, failed_before=("Kubelet", "ApiServer"))
    clock.observe(DEAD, trial, 100.0)
    assert clock.observe(DEAD, trial, 111.0).healthy_for_s == 11.0
    assert clock.observe(OUTAGE, trial, 112.0).healthy_for_s == 0.0


def test_next_trial_of_the_process_starts_with_fresh_ages() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(DEAD, TRIAL, 100.0)
    other = BootTrial(boot_id="b", began_monotonic=500.0)
    found = clock.observe(DEAD, other, 501.0)
    assert (found.checks[0].since_s, found.elapsed_s) == (0.0, 1.0)


def test_long_gap_between_checks_starts_their_time_again() -> None:
    clock = CheckHistory(LIMITS)
    assert clock.observe(WELL, TRIAL, 900.0).observed_s == 0.0
    assert clock.observe(WELL, TRIAL, 1_200.0).observed_s == 300.0
    late = clock.observe(WELL, TRIAL, 1_501.0)
    assert (late.observed_s, late.healthy_for_s, late.api_for_s) == (0.0, 0.0, 0.0)


def test_failure_after_long_gap_between_checks_is_new() -> None:
    clock = CheckHistory(LIMITS)
    clock.observe(DEAD, TRIAL, 110.0)
    assert clock.observe(DEAD, TRIAL, 410.0).checks[0].since_s == 300.0
    assert clock.observe(DEAD, TRIAL, 800.0).checks[0].since_s == 0.0
