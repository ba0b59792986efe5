"""``treenail status`` of directories, without an agent."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from treenail.cli.node.main import main
from treenail.cli.node.status import collect_status, compute_exit_code, format_status
from treenail.cli.output import EXIT_ATTENTION, EXIT_PENDING
from treenail.cli.output_format import API_VERSION
from treenail.clocks import SystemClock, format_rfc3339
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.system.state_file import Ledger
from treenail.update.impact.impact import DisruptionLevel, UpdateImpact
from treenail.update.state.ledger_record import (
    LedgerRecord,
    PastUpdate,
    Phase,
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
    "nodeNote": "by the client certificate, not the host name h",
    "pid": 1,
    "activity": "waiting for the drain",
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
    assert (document.pop("apiVersion"), document.pop("kind")) == (API_VERSION, "NodeStatus")
    del document["deployments"], document["problems"], document["unknown"]
    return document


def test_status_after_agent_crash_shows_recorded_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, UPDATE, history=(PAST,)), LIVE)
    assert status(tmp_path, capsys) == {
        "node": "worker-0",
        "nodeNote": "by the client certificate, not the host name h",
        "agent": {
            "running": False,
            "pid": None,
            "startedAt": None,
            "memoryBytes": None,
            "lastSeen": "2023-11-14T22:15:00Z",
        },
        "backend": None,
        "state": "Working",
        "activity": "waiting for the drain",
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
        "bootstrapRegistry": None,
        "drift": [],
        "retained": None,
        "apiServer": None,
        "firstBoot": False,
    }


def test_status_running_agent_is_detected_by_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), LIVE)
    with Ledger(Root(tmp_path)).hold_lock():
        agent = status(tmp_path, capsys)["agent"]
    assert agent["running"]  # type: ignore[index]  # an object
    assert not status(tmp_path, capsys)["agent"]["running"]  # type: ignore[index]  # as above


def test_status_before_node_was_read_says_that_desired_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), {"node": "worker-0", "desired": None})
    with Ledger(Root(tmp_path)).hold_lock():
        assert main(["status", "--root", str(tmp_path)]) == EXIT_PENDING
    shown = capsys.readouterr().out
    assert "Current      rendered-a\nDesired      unknown\n" in shown
    assert "State        Working\n" in shown


def test_status_without_a_drift_check_says_that_drift_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), {"node": "worker-0", "drift": None})
    main(["status", "--root", str(tmp_path)])
    assert "Drift        unknown\n" in capsys.readouterr().out


def test_status_quarantined_target_shows_remedy_and_returns_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "fix it")))
    assert main(["status", "--root", str(tmp_path)]) == 3
    printed = capsys.readouterr().out
    assert "Last error   it broke\nRemedy       fix it\n" in printed


def test_status_prints_activity_reasons_and_remedy() -> None:
    document = {
        "node": "worker-0",
        "agent": {"running": False, "pid": None, "lastSeen": "2023-11-14T22:15:00Z"},
        "state": "Working",
        "activity": "waiting for the drain",
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
        "backend": {"name": "bootc", "reason": "selected by the setting backend"},
        "deployments": {"booted": None, "staged": None, "rollback": None},
        "retained": None,
        "problems": ["the deployments: no bus"],
    }
    assert (
        format_status(document)
        == """\
Node         worker-0
Agent        not running; last status written 2023-11-14T22:15:00Z
State        Working, draining since 2023-11-14T22:14:20Z
Activity     none; last activity: waiting for the drain
Why          one
Why          two
Why          three
             and 2 more, see: treenail why
Current      a
Desired      b
             q.example/os@sha256:1
Managed by   bootc: selected by the setting backend
Booted       none
Staged       none
Rollback     none
API server   unreachable since 2023-11-14T22:14:00Z: no route
Last update  done 2020-09-13T12:28:20Z, to a
Remedy       start the agent: systemctl start treenail; if it stops again: journalctl -u treenail
Problem      the deployments: no bus"""
    )
    document["agent"] = {
        "running": True,
        "pid": 7,
        "startedAt": "2023-11-14T22:10:00Z",
        "memoryBytes": 25 * 1024 * 1024,
        "lastSeen": None,
    }
    shown = format_status(document)
    assert "Agent        running since 2023-11-14T22:10:00Z, process 7, 25 MiB\n" in shown
    assert "Activity     waiting for the drain (40 %, Fetching)\n" in shown
    document["agent"] |= {"startedAt": None, "memoryBytes": None}
    assert "Agent        running, process 7\n" in format_status(document)


def test_status_without_bus_says_that_deployments_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    given(tmp_path, LedgerRecord(OLD), LIVE)
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    for name in ("Booted", "Staged", "Rollback"):
        assert f"{name:<12} unknown\n" in shown
    assert "Problem      the deployments: " in shown
    main(["status", "--json", "--root", str(tmp_path)])
    document = json.loads(capsys.readouterr().out)
    assert document["unknown"] == ["desired", "deployments"]
    assert document["deployments"] == {"booted": None, "staged": None, "rollback": None}


def test_status_without_ledger_shows_targets_of_last_status_or_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "var/lib/treenail/ledger.json").mkdir(parents=True)
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    for name in ("Current", "Desired", "Pinned", "Last update"):
        assert f"{name:<12} unknown\n" in shown
    target = {"config": "rendered-a", "image": ""}
    live = {**LIVE, "current": target, "desired": target}
    (tmp_path / "run/treenail").mkdir(parents=True)
    (tmp_path / "run/treenail/status.json").write_text(json.dumps(live))
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "Current      rendered-a\nDesired      rendered-a\n" in shown
    assert "Last update  unknown\n" in shown


@pytest.mark.process
def test_status_of_directory_that_was_never_booted_asks_no_bus(tmp_path: Path) -> None:
    program = (
        "import sys; from treenail.cli.node.main import main; "
        "main(['status', '--root', sys.argv[1]]); print('gi' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert "cannot read deployments: this directory was never booted" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_status_on_narrow_terminal_is_wrapped_and_keeps_labels(tmp_path: Path) -> None:
    document = collect_status(Machine(Root(tmp_path), clock=SystemClock()))
    document["failure"] = {
        "message": f"cannot pull {NEW.image}:\nState  Done, the registry has no such image",
        "remedy": None,
        "state": None,
    }
    lines = format_status(document, 60).splitlines()
    assert max(map(len, lines)) <= 60
    start = next(index for index, line in enumerate(lines) if line.startswith("Last error"))
    assert lines[start + 1].startswith(" " * 13)
    assert "111111111111…: State Done," in " ".join(map(str.strip, lines))
    assert all(line[:13] == " " * 13 or line[12] == " " for line in lines)


def test_status_during_first_boot_says_that_the_kubelet_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = {"text": "Fetching layers", "percent": 40}
    live = {**LIVE, "node": "", "firstBoot": True, "activity": "staging it", "progress": progress}
    given(tmp_path, LedgerRecord(), live)
    with Ledger(Root(tmp_path)).hold_lock():
        main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "State        Working, first boot: the kubelet does not start before it" in shown
    assert "Activity     staging it (40 %, Fetching layers)\n" in shown


def test_status_shows_pinned_deployment_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1")))
    assert status(tmp_path, capsys)["retained"] == {"id": "os-1", "until": None}
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1", 1_700_000_000.0)))
    kept = {"id": "os-1", "until": "2023-11-15T22:13:20Z"}
    assert status(tmp_path, capsys)["retained"] == kept
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "Pinned       os-1, until 2023-11-15T22:13:20Z, or the next update\n" in shown
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1", 0.0)))
    assert status(tmp_path, capsys)["retained"] is None


def test_status_config_option_selects_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD, retained=RetainedDeployment("os-1", 1_700_000_000.0)))
    settings = tmp_path / "other.toml"
    settings.write_text("[health]\nretention_s = 3600\n")
    for path, shown in (
        (settings, "until 2023-11-14T23:13:20Z, or the next update"),
        (tmp_path / "none.toml", f"Problem      the settings: cannot read {tmp_path}/none.toml: "),
    ):
        main(["status", "--root", str(tmp_path), "--config", str(path)])
        assert shown in capsys.readouterr().out


def test_status_damaged_ledger_shows_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), LIVE)
    ledger = tmp_path / "var/lib/treenail/ledger.json"
    ledger.write_text("{")
    assert main(["status", "--root", str(tmp_path)]) == EXIT_ATTENTION
    shown = capsys.readouterr().out.splitlines()
    assert "State        Degraded" in shown
    at = next(index for index, line in enumerate(shown) if line.startswith("Remedy"))
    assert shown[at - 1].startswith(
        f"Last error   cannot read the ledger {ledger}: it is damaged: "
    )
    assert shown[at].startswith(f"Remedy       move {ledger} away and start the agent again; ")
    assert shown[at + 1].startswith("Remedy       start the agent: systemctl start treenail; ")


def test_status_unreadable_ledger_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "var/lib/treenail/ledger.json").mkdir(parents=True)
    assert main(["status", "--root", str(tmp_path)]) == 1
    assert (
        f"Problem      cannot read {tmp_path}/var/lib/treenail/ledger.json: "
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("state", "is_running", "code"),
    [
        ("Done", True, 0),
        # The agent reads the desired target.
        ("Done", False, 3),
        ("Working", True, 2),
        ("Working", False, 2),
        ("Degraded", True, 3),
        ("Unreconcilable", True, 3),
        ("Unknown", True, 1),
    ],
)
def test_status_exit_code_follows_state(state: str, is_running: bool, code: int) -> None:
    document = {"state": state, "agent": {"running": is_running}}
    assert compute_exit_code(document) == code


@pytest.fixture
def shared_root() -> Iterator[Path]:
    """A root that other users can search, unlike tmp_path, with the modes of a node."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        given(root, LedgerRecord(OLD, UPDATE), {**LIVE, "pid": os.getpid(), "firstBoot": False})
        (root / "var/lib/treenail").chmod(0o700)
        yield root


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_status_without_root_shows_what_is_readable(shared_root: Path) -> None:
    def run_as_nobody(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-B", "-m", "treenail", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=False, timeout=50,
            user=65534, group=65534, extra_groups=[],
        )  # fmt: skip

    if run_as_nobody("--version").returncode:
        pytest.skip("other users cannot read these sources")
    shown = run_as_nobody("status", "--root", shared_root)
    assert shown.stderr == ""
    assert "worker-0" in shown.stdout
    assert "Permission denied; run the command as root" in shown.stdout
    assert "Last update  unknown" in shown.stdout
    (shared_root / "run/treenail").chmod(0o700)
    hidden = run_as_nobody("status", "--root", shared_root)
    assert (hidden.returncode, hidden.stderr) == (1, "")
    assert "Agent        unknown" in hidden.stdout
    assert "start the agent" not in hidden.stdout
    refused = run_as_nobody("history", "--root", shared_root)
    assert refused.returncode == 1
    assert "run the command as root, for example with sudo" in refused.stderr


@pytest.mark.parametrize(("age_s", "is_running"), [(0.0, True), (1e9, False)])
def test_status_without_access_to_lock_compares_start_of_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], age_s: float, is_running: bool
) -> None:
    # A file in place of its directory makes the lock unreadable, for root too.
    (tmp_path / "var/lib").mkdir(parents=True)
    (tmp_path / "var/lib/treenail").write_text("")
    (tmp_path / "run/treenail").mkdir(parents=True)
    written = format_rfc3339(SystemClock().now() - age_s)
    live = {"node": "worker-0", "pid": os.getpid(), "written": written}
    (tmp_path / "run/treenail/status.json").write_text(json.dumps(live))
    agent = status(tmp_path, capsys)["agent"]
    assert isinstance(agent, dict)
    assert agent["running"] is is_running
    assert agent["pid"] == (os.getpid() if is_running else None)
    assert (agent["startedAt"] is not None) is is_running


def test_status_names_the_bootstrap_registry_until_the_hand_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(tmp_path, LedgerRecord(OLD), {**LIVE, "bootstrapRegistry": "10.0.0.5:22625"})
    main(["status", "--root", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "Registry     10.0.0.5:22625 on the bootstrap host serves pulls until the hand" in shown
