"""``treenail history`` and ``treenail why`` read the ledger; no agent and no cluster is needed."""

import json
from pathlib import Path

import pytest

from treenail.cli.node.main import main
from treenail.cli.terminal import format_duration
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.state.ledger_record import (
    FailedTry,
    LedgerRecord,
    PastUpdate,
    Phase,
    QuarantinedTarget,
    Target,
    UpdateOutcome,
    to_json,
)

REASON = "file /etc/a changed (no policy for this path), from MachineConfig 99-a"
DONE = PastUpdate(
    "2" * 32,
    Target("rendered-worker-b"),
    Target("rendered-worker-a"),
    1_700_000_000.0,
    1_700_000_252.0,
    UpdateOutcome.DONE,
    reboot_count=1,
    reasons=(REASON, "and 3 more"),
    phase_seconds={Phase.STAGING: 190.0, Phase.DRAINING: 42.0, Phase.REBOOTING: 20.0},
)
FAILED = PastUpdate(
    "1" * 32,
    Target("rendered-worker-c"),
    Target("rendered-worker-a"),
    1_600_000_000.0,
    1_600_003_700.0,
    UpdateOutcome.FAILED,
    reboot_count=3,
    failure="it broke",
    failed_tries=(FailedTry(1_600_000_060.0, "no space left on /var"),),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    record = LedgerRecord(
        DONE.target, quarantined=QuarantinedTarget(FAILED.target, "x"), history=(DONE, FAILED)
    )
    Ledger(Root(tmp_path)).write_document(to_json(record))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  1 2\nbtime 1700000240\n")
    return tmp_path


def test_history_prints_updates(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--root", str(root)]) == 0
    assert capsys.readouterr().out == (
        "2023-11-14 22:13:20 UTC  done after 4 min 12 s\n"
        "    from rendered-worker-a\n"
        "    to   rendered-worker-b\n"
        "    staging 3 min 10 s, draining 42 s, rebooting 20 s\n"
        f"    because {REASON}\n"
        "    and 3 more\n"
        f"    journalctl TREENAIL_UPDATE={'2' * 32}\n"
        "2020-09-13 12:26:40 UTC  failed after 1 h 1 min\n"
        "    from rendered-worker-a\n"
        "    to   rendered-worker-c\n"
        "    3 reboots were requested\n"
        "    failed at 2020-09-13 12:27:40 UTC: no space left on /var\n"
        "    failed: it broke\n"
        f"    journalctl TREENAIL_UPDATE={'1' * 32}\n"
    )


def test_history_json_lists_updates(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "-n", "1", "--json", "--root", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == [
        {
            "id": "2" * 32,
            "from": {"config": "rendered-worker-a", "image": ""},
            "to": {"config": "rendered-worker-b", "image": ""},
            "began": "2023-11-14T22:13:20Z",
            "ended": "2023-11-14T22:17:32Z",
            "outcome": "done",
            "phases": {"staging": 190.0, "draining": 42.0, "rebooting": 20.0},
            "reboots": 1,
            "soft": False,
            "reasons": [REASON, "and 3 more"],
            "failedTries": [],
            "failure": "",
        }
    ]


def test_why_explains_last_reboot(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "--root", str(root)]) == 0
    assert capsys.readouterr().out == (
        "last drain and reboot, started 2023-11-14 22:13:20 UTC\n"
        "    from rendered-worker-a\n"
        "    to   rendered-worker-b\n"
        f"    because {REASON}\n"
        "    and 3 more\n"
        f"    journalctl TREENAIL_UPDATE={'2' * 32}\n"
    )


def test_why_unrecorded_boot_is_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "proc/stat").write_text("btime 1800000000\n")
    assert main(["why", "--json", "--root", str(root)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["boot"] == {"at": "2027-01-15T08:00:00Z", "update": None}
    assert document["last"]["reasons"] == [REASON, "and 3 more"]
    assert main(["why", "--root", str(root)]) == 0
    assert "2027-01-15 08:00:00 UTC, for no recorded update" in capsys.readouterr().out


def test_history_without_ledger_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "--root", str(tmp_path)]) == 0
    assert main(["history", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "the ledger contains no drain or reboot by treenail\n"
        "the ledger contains no update of this node\n"
    )


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_history_number_invalid_is_rejected(number: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["history", "-n", number])
    assert ended.value.code == 64


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.6, "1 min"), (252, "4 min 12 s"), (3700, "1 h 1 min"), (187200, "2 d 4 h")],
)
def test_duration_is_formatted_in_units(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
