"""Drift metrics for Prometheus."""

from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from treenail.config.drift import Drift, DriftAttribute
from treenail.daemon.local.metrics import METRICS_FILE, DriftMetrics
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.update.drift.drift_policy import DriftAssessment

DRIFT = Drift("/etc/app", DriftAttribute.MODE, "0600", "0644")
DRIFTED = DriftAssessment(reported=(DRIFT, DRIFT), blocking=(DRIFT,))


class Machine:
    def __init__(self, top: Path) -> None:
        self.place = top / METRICS_FILE[1:]
        self.clock = FakeClock()
        self._files = HostFiles(Root(top))
        self.start()

    def start(self) -> None:
        self.gauge = DriftMetrics(self._files, self.clock)

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
