"""Metrics of the node for Prometheus."""

from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.config.drift_comparison import Drift, DriftAttribute
from treenail.daemon.local.metrics import METRICS_FILE, NodeMetrics
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.update.drift.drift_policy import DriftAssessment
from treenail.update.state.ledger_record import PastUpdate, Phase, Target, UpdateOutcome

DRIFT = Drift("/etc/app", DriftAttribute.MODE, "0600", "0644")
DRIFTED = DriftAssessment(reported=(DRIFT, DRIFT), blocking=(DRIFT,))


class Machine:
    def __init__(self, top: Path) -> None:
        self.place = top / METRICS_FILE[1:]
        self.clock = FakeClock()
        self._files = HostFiles(Root(top))
        self.start()

    def start(self) -> None:
        self.gauge = NodeMetrics(self._files, self.clock)

    def shows(self, drifted: DriftAssessment) -> dict[str, str]:
        self.gauge.write_metrics(drifted)
        lines = self.place.read_text().splitlines() if self.place.exists() else []
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_drift_time_stays_until_drift_no_longer_blocks(machine):
    began = str(int(machine.clock.now()))
    assert machine.shows(DRIFTED) == {
        "mcd_config_drift": began,
        'treenail_config_drifts{reaction="report"}': "2",
        'treenail_config_drifts{reaction="repair"}': "0",
        'treenail_config_drifts{reaction="block"}': "1",
    }
    machine.clock.move(60.0)
    assert machine.shows(DRIFTED)["mcd_config_drift"] == began
    assert machine.shows(DriftAssessment(reported=(DRIFT,)))["mcd_config_drift"] == "0"
    assert machine.shows(DRIFTED)["mcd_config_drift"] == str(int(machine.clock.now()))
    assert machine.place.stat().st_mode & 0o777 == 0o644


def test_restarted_agent_keeps_the_drift_time(machine):
    before = machine.shows(DRIFTED)
    machine.clock.move(60.0)
    machine.start()
    assert machine.shows(DriftAssessment(is_checked=False)) == before
    assert machine.shows(DRIFTED) == before


def test_metrics_are_not_written_before_the_first_check(machine):
    assert machine.shows(DriftAssessment(is_checked=False)) == {}


def test_unchanged_config_is_not_cached_again(machine):
    machine.shows(DRIFTED)
    inode = machine.place.stat().st_ino
    machine.shows(DRIFTED)
    assert machine.place.stat().st_ino == inode


@pytest.mark.parametrize("content", [b"", b"mcd_config_drift x", b"\xff\x00"])
def test_damaged_metrics_file_is_replaced(machine, content):
    machine.place.parent.mkdir(parents=True)
    machine.place.write_bytes(content)
    assert machine.shows(DRIFTED)["mcd_config_drift"] == str(int(machine.clock.now()))


def test_unwritable_metrics_file_raises_nothing(machine):
    machine.place.mkdir(parents=True)
    machine.gauge.write_metrics(DRIFTED)


def test_state_and_packages_stay_beside_drift(machine):
    machine.shows(DRIFTED)
    began = str(int(machine.clock.now()))
    machine.gauge.write_state("Degraded")
    machine.gauge.write_packages("worker-0", ["usbguard", "kernel-rt-core", "strace", "htop"])
    machine.clock.move(60.0)
    machine.start()
    machine.gauge.write_state("Degraded")
    shown = machine.shows(DRIFTED)
    assert shown['mcd_state{state="Degraded",reason=""}'] == began
    assert shown['mcd_local_unsupported_packages{node="worker-0"}'] == "2"
    assert shown["mcd_config_drift"] == began
    machine.gauge.write_state("Done")
    states = [name for name in machine.shows(DRIFTED) if name.startswith("mcd_state")]
    assert states == ['mcd_state{state="Done",reason=""}']


def test_history_is_counted_by_outcome_with_phases_of_the_last_update(machine):
    def past(outcome, phases):
        return PastUpdate(
            "0" * 32, Target("b"), Target("a"), 1.0, 61.0, outcome, phase_seconds=phases
        )

    rolled_back = {Phase.STAGING: 12.4, Phase.ROLLING_BACK: 30.0}
    machine.gauge.write_history(
        [past(UpdateOutcome.FAILED, rolled_back), past(UpdateOutcome.DONE, {Phase.STAGING: 5.0})]
    )
    shown = machine.shows(DRIFTED)
    assert shown['treenail_recorded_updates{outcome="done"}'] == "1"
    assert shown['treenail_recorded_updates{outcome="failed"}'] == "1"
    assert shown['treenail_recorded_updates{outcome="cancelled"}'] == "0"
    assert shown["treenail_recorded_rollbacks"] == "1"
    assert shown['treenail_last_update_end{outcome="failed"}'] == "61"
    assert shown['treenail_last_update_phase_seconds{phase="staging"}'] == "12"
    assert shown['treenail_last_update_phase_seconds{phase="rolling-back"}'] == "30"
    assert "mcd_config_drift" in shown
