"""``treenail cancel`` and ``treenail forgive`` where no agent runs: its record is changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treenail.cli.main import main
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger
from treenail.update.decision.request import make_cancelled_target
from treenail.update.state.phases import Phase
from treenail.update.state.record import (
    LedgerRecord,
    QuarantinedTarget,
    Target,
    UpdateRecord,
    from_json,
    to_json,
)

OLD, NEW = Target("rendered-a"), Target("rendered-b")
UPDATE = UpdateRecord("1" * 32, NEW, OLD, Phase.DRAINING, "boot", 1.0, 1.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    boot_id = tmp_path / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("this-boot\n")
    return tmp_path


def recorded(root: Path) -> LedgerRecord:
    return from_json(Ledger(Root(root)).read_document())


def given(root: Path, record: LedgerRecord) -> None:
    Ledger(Root(root)).write_document(to_json(record))


def run(command: str, root: Path, *options: str) -> int:
    return main([command, "--root", str(root), *options])


def test_update_is_called_off_in_the_record(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given(root, LedgerRecord(OLD, UPDATE))
    assert run("cancel", root) == 0
    assert "the update to rendered-b is called off" in capsys.readouterr().out
    found = recorded(root)
    assert found.update is not None
    assert (found.update.phase, found.update.boot_id) == (Phase.CANCELLING, "this-boot")
    assert found.quarantined == make_cancelled_target(UPDATE)


def test_target_is_forgiven_in_the_record(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given(root, LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "mend it")))
    assert run("forgive", root, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "forgiven": {"config": "rendered-b", "image": ""}
    }
    assert recorded(root) == LedgerRecord(OLD)


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        (Phase.REBOOTING, "the reboot was asked for already"),
        (Phase.UNCORDONING, "the node is at rendered-b already"),
        (Phase.CANCELLING, "it is being called off already"),
    ],
)
def test_it_is_said_when_it_is_too_late(
    root: Path, capsys: pytest.CaptureFixture[str], phase: Phase, sentence: str
) -> None:
    before = LedgerRecord(OLD, replace(UPDATE, phase=phase))
    given(root, before)
    assert run("cancel", root) == 1
    told = capsys.readouterr().err
    assert sentence in told
    assert recorded(root) == before


def test_there_has_to_be_something_to_call_off_or_to_forgive(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(root, LedgerRecord(OLD))
    assert run("cancel", root) == 1
    assert run("forgive", root) == 1
    assert capsys.readouterr().err == (
        "treenail: no update of this node is under way\ntreenail: this node refuses no target\n"
    )
