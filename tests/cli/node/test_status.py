"""``treenail status`` of directories: what is written there, with nobody who runs."""

import json
from pathlib import Path

import pytest

from treenail.cli.main import EXIT_DEGRADED, main
from treenail.cli.node.status import format_status
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.impact.disruption import DisruptionLevel
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state.phases import Phase
from treenail.update.state.record import (
    LedgerRecord,
    PastUpdate,
    QuarantinedTarget,
    RetainedDeployment,
    Target,
    UpdateOutcome,
    UpdateRecord,
    to_json,
)

OLD, NEW = Target("rendered-a"), Target("rendered-b", "q.example/os@sha256:" + "1" * 64)
WORK = UpdateImpact(level=DisruptionLevel.REBOOT, reasons=("file /etc/a changed",))
UPDATE = UpdateRecord(
    "1" * 32, NEW, OLD, Phase.DRAINING, "boot", 1_700_000_000.0, 1_700_000_060.0, WORK
)
PAST = PastUpdate("0" * 32, OLD, Target(), 1_600_000_000.0, 1_600_000_100.0, UpdateOutcome.DONE)
LIVE = {
    "node": "worker-0",
    "pid": 1,
    "sentence": "waiting for the drain",
    "written": "2023-11-14T22:15:00Z",
}


def given(root: Path, record: LedgerRecord, live: dict[str, object] | None = None) -> None:
    Ledger(Root(root)).write_document(to_json(record))
    if live is not None:
        (root / "run/treenail").mkdir(parents=True)
        (root / "run/treenail/status.json").write_text(json.dumps(live))


def status(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """The document, without what depends on the bus of the machine that runs the tests."""
    main(["status", "--json", "--root", str(root)])
    document = json.loads(capsys.readouterr().out)
    del document["deployments"], document["problems"]
    return document


def test_update_of_an_agent_that_died_is_told_from_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, UPDATE, history=(PAST,)), LIVE)
    assert status(tmp_path, capsys) == {
        "node": "worker-0",
        "agent": {"running": False, "pid": None, "lastSeen": "2023-11-14T22:15:00Z"},
        "backend": None,
        "state": "Working",
        "sentence": "waiting for the drain",
        "current": {"config": OLD.config, "image": ""},
        "desired": {"config": NEW.config, "image": NEW.image},
        "update": {
            "id": "1" * 32,
            "phase": "draining",
            "target": {"config": NEW.config, "image": NEW.image},
            "origin": {"config": OLD.config, "image": ""},
            "began": "2023-11-14T22:13:20Z",
            "entered": "2023-11-14T22:14:20Z",
            "reasons": ["file /etc/a changed"],
        },
        "progress": None,
        "failure": None,
        "lastUpdate": {
            "id": "0" * 32,
            "target": {"config": OLD.config, "image": ""},
            "began": "2020-09-13T12:26:40Z",
            "ended": "2020-09-13T12:28:20Z",
            "outcome": "done",
        },
        "credentials": [],
        "drift": [],
        "retained": None,
        "apiServer": None,
    }


def test_agent_that_runs_is_known_by_its_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), LIVE)
    with Ledger(Root(tmp_path)).hold_lock():
        agent = status(tmp_path, capsys)["agent"]
    assert agent["running"]  # type: ignore[index]  # an object
    assert not status(tmp_path, capsys)["agent"]["running"]  # type: ignore[index]  # as above


def test_refused_target_is_an_error_with_a_remedy_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "mend it")))
    assert main(["status", "--root", str(tmp_path)]) == 4
    printed = capsys.readouterr().out
    assert "Last error   it broke\nWhat to do   mend it\n" in printed


def test_screen_says_what_why_and_what_to_do() -> None:
    document = {
        "node": "worker-0",
        "agent": {"running": False, "pid": None, "lastSeen": "2023-11-14T22:15:00Z"},
        "state": "Working",
        "sentence": "waiting for the drain",
        "current": {"config": "a", "image": ""},
        "desired": {"config": "b", "image": "q.example/os@sha256:1"},
        "update": {
            "phase": "draining",
            "entered": "2023-11-14T22:14:20Z",
            "reasons": ["one", "two", "three", "four", "five"],
        },
        "progress": {"percent": 40, "text": "Fetching"},
        "failure": None,
        "lastUpdate": {
            "target": {"config": "a"},
            "ended": "2020-09-13T12:28:20Z",
            "outcome": "done",
        },
        "credentials": [],
        "drift": [],
        "apiServer": {"reachable": False, "since": "2023-11-14T22:14:00Z", "problem": "no route"},
        "backend": {"name": "bootc", "why": "the setting backend says so"},
        "deployments": {"booted": None, "staged": None, "rollback": None},
        "retained": None,
        "problems": ["the deployments: no bus"],
    }
    assert (
        format_status(document)
        == """\
Node         worker-0
Agent        is not running; it last wrote its status 2023-11-14T22:15:00Z
State        Working, draining since 2023-11-14T22:14:20Z
Doing        nothing; the agent last said: waiting for the drain
Why          one
Why          two
Why          three
             and 2 more, see: treenail why
Current      a
Desired      b
             q.example/os@sha256:1
Managed by   bootc: the setting backend says so
Booted       none
Staged       none
Rollback     none
API server   away since 2023-11-14T22:14:00Z: no route
Last update  done 2020-09-13T12:28:20Z, to a
What to do   systemctl start treenail; if it does not stay up: journalctl -u treenail
Not known    the deployments: no bus"""
    )
    document["agent"] = {"running": True, "pid": 7, "lastSeen": None}
    assert "Doing        waiting for the drain (40 %, Fetching)\n" in format_status(document)


def test_the_deployment_that_is_kept_is_told_with_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1")))
    assert status(tmp_path, capsys)["retained"] == {"id": "os-1", "until": None}
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1", 1_700_000_000.0)))
    kept = {"id": "os-1", "until": "2023-11-15T22:13:20Z"}
    assert status(tmp_path, capsys)["retained"] == kept
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "Kept         os-1, until 2023-11-15T22:13:20Z, or the next update\n" in shown


def test_damaged_ledger_is_the_failure_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), LIVE)
    ledger = tmp_path / "var/lib/treenail/ledger.json"
    ledger.write_text("{")
    assert main(["status", "--root", str(tmp_path)]) == EXIT_DEGRADED
    shown = capsys.readouterr().out.splitlines()
    assert "State        Degraded" in shown
    at = next(index for index, line in enumerate(shown) if line.startswith("What to do"))
    assert shown[at - 1].startswith(f"Last error   the ledger {ledger} is damaged: ")
    assert shown[at].startswith(f"What to do   move {ledger} away and start the agent again; ")
    assert shown[at + 1].startswith("What to do   systemctl start treenail; ")


def test_ledger_that_can_not_be_read_here_degrades_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "var/lib/treenail/ledger.json").mkdir(parents=True)
    assert main(["status", "--root", str(tmp_path)]) == 0
    assert "Not known    what is recorded: the ledger: " in capsys.readouterr().out
