"""What the checks found, over time, to a verdict."""

import pytest

from tests.update.build import B
from treenail.update.checks.health import (
    API_SERVER,
    Check,
    Failed,
    Healthy,
    NotYet,
    Trial,
    Verdict,
    did_not_boot,
    unhealthy,
    verdict,
)
from treenail.update.state.boot_trial import (
    BOOTS_ALLOWED,
    STARTS_ALLOWED,
    Probation,
    from_json,
    to_json,
)

KUBELET = Check("Kubelet", well=True)
DEAD = Check("Kubelet", well=False, text="kubelet.service is failed", since_s=500)
READY = Check("NodeReady", well=True)
API = Check(API_SERVER, well=True)
AWAY = Check(API_SERVER, well=False, text="no answer", since_s=600)
NOT_INSTALLED = Check("Greenboot", well=None)


def judged(
    *checks: Check,
    elapsed_s: float = 60.0,
    api_seen: bool = False,
    well_for_s: float = 0.0,
    api_before: bool = True,
    blamed_before: bool = False,
) -> Verdict:
    trial = Trial(elapsed_s, 600.0, 10.0, checks, well_for_s=well_for_s)
    probation = Probation(api_before=api_before, api_seen=api_seen)
    return verdict(trial, probation, blamed_before=blamed_before)


def test_a_node_is_healthy_once_all_is_well_for_a_while() -> None:
    assert judged(KUBELET, READY, API, well_for_s=9.9) == NotYet(
        "all is well; seeing whether it stays so"
    )
    assert judged(KUBELET, READY, API, well_for_s=10.0) == Healthy()


def test_what_is_not_installed_is_not_waited_for() -> None:
    assert judged(KUBELET, NOT_INSTALLED, API, well_for_s=10.0) == Healthy()


def test_until_the_deadline_nothing_is_decided() -> None:
    assert judged(DEAD, API, elapsed_s=599.0) == NotYet(
        "waiting 1 s more for Kubelet: kubelet.service is failed"
    )


def test_at_the_deadline_the_first_failing_check_is_named() -> None:
    late = Check("health.d/dns", well=False, text="exit code 1")
    assert judged(API, DEAD, late, elapsed_s=600.0) == Failed(DEAD)


def test_a_slow_node_that_is_well_by_the_deadline_stays() -> None:
    assert judged(KUBELET, READY, API, elapsed_s=480.0, well_for_s=10.0) == Healthy()
    assert judged(KUBELET, READY, API, elapsed_s=600.0, well_for_s=1.0) == Healthy()


def test_an_api_server_that_never_came_back_sends_the_node_back() -> None:
    assert judged(KUBELET, AWAY, elapsed_s=600.0) == Failed(AWAY)


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
    assert isinstance(judged(KUBELET, AWAY, elapsed_s=599.0, **how), NotYet)
    assert judged(KUBELET, AWAY, elapsed_s=600.0, **how) == Healthy(untold=(API_SERVER,))


def test_another_failing_check_counts_beside_a_forgiven_api_server() -> None:
    assert judged(AWAY, DEAD, elapsed_s=600.0, api_before=False) == Failed(DEAD)


def test_sentences_name_target_check_and_time() -> None:
    assert unhealthy(B, DEAD) == (
        f"{B} was booted and is not healthy: Kubelet failed for 500 s: kubelet.service is failed"
    )
    assert "sha256:old" in did_not_boot(B, "sha256:old")
    assert "another deployment" in did_not_boot(B, "")


def test_starts_and_boots_are_counted_until_there_are_too_many() -> None:
    found = Probation(api_before=True)
    for start in range(1, STARTS_ALLOWED + 1):
        found = found.started("boot-1", 100.0 + start)
        assert found == Probation(True, False, "boot-1", 101.0, 1, start)
        assert not found.crashes
    assert "started 6 times" in found.started("boot-1", 200.0).crashes
    for boot in range(2, BOOTS_ALLOWED + 1):
        found = found.started(f"boot-{boot}", 300.0)
        assert (found.boots, found.starts, found.since) == (boot, 1, 300.0)
        assert not found.crashes
    assert "booted 4 times" in found.started("boot-last", 1.0).crashes


def test_a_probation_survives_the_ledger() -> None:
    found = Probation(True, True, "boot-1", 17.5, 2, 3)
    assert from_json(to_json(found)) == found
    assert from_json(None) == Probation()
    for broken in (1, {}, {**to_json(found), "boots": "2"}):
        with pytest.raises(ValueError, match="expected a probation"):
            from_json(broken)
