"""``treenail cancel`` and ``treenail retry`` without an agent: they change the ledger."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.host_machine import make_machine
from tests.waiting import wait_until
from treenail.cli.node.cancel import request_from_agent
from treenail.cli.node.local_machine import STATUS_PATH
from treenail.cli.node.main import main
from treenail.cli.output_format import API_VERSION
from treenail.daemon.local.requests import RequestFile
from treenail.errors import HostError
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import Ledger
from treenail.update.decision.user_requests import RequestKind, UserRequest, make_cancelled_target
from treenail.update.state.ledger_record import (
    LedgerRecord,
    Phase,
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


def test_cancel_without_agent_changes_ledger(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(root, LedgerRecord(OLD, UPDATE))
    assert run("cancel", root) == 0
    assert "cancelled the update to rendered-b" in capsys.readouterr().out
    found = recorded(root)
    assert (found.update.phase, found.update.boot_id) == (Phase.CANCELLING, "this-boot")
    assert found.quarantined == make_cancelled_target(UPDATE)


def test_retry_without_agent_lifts_quarantine_in_ledger(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(root, LedgerRecord(OLD, quarantined=QuarantinedTarget(NEW, "it broke", "fix it")))
    assert run("retry", root, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": API_VERSION,
        "kind": "Retry",
        "retried": {"config": "rendered-b", "image": ""},
    }
    assert recorded(root) == LedgerRecord(OLD)


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        (Phase.REBOOTING, "the agent has already requested the reboot"),
        (Phase.UNCORDONING, "the node is already at rendered-b"),
        (Phase.CANCELLING, "the update is already being cancelled"),
    ],
)
def test_cancel_after_reboot_request_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], phase: Phase, sentence: str
) -> None:
    before = LedgerRecord(OLD, replace(UPDATE, phase=phase))
    given(root, before)
    assert run("cancel", root) == 1
    printed = capsys.readouterr().err
    assert sentence in printed
    assert recorded(root) == before


def test_cancel_and_retry_without_target_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given(root, LedgerRecord(OLD))
    assert run("cancel", root) == 1
    assert run("retry", root) == 1
    assert capsys.readouterr().err == (
        "treenail: cannot cancel: no update of this node is in progress\n"
        "  see: treenail status\n"
        "treenail: nothing to retry: no target is quarantined\n"
        "  see: treenail status\n"
    )


def test_retry_without_agent_in_rollback_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = QuarantinedTarget(NEW, "it broke", "fix it")
    before = LedgerRecord(OLD, replace(UPDATE, phase=Phase.ROLLING_BACK), broken)
    given(root, before)
    assert run("retry", root) == 1
    assert capsys.readouterr().err == (
        "treenail: cannot retry rendered-b: the node is still leaving it (rolling-back), and no "
        "agent runs\n"
        "  run: systemctl start treenail; when the update has ended, run: treenail retry\n"
    )
    assert recorded(root) == before


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"activity": "waiting for the uncordon"}, "; it shows: waiting for the uncordon"),
        ({"activity": None}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_unanswered_request_shows_what_the_agent_does(
    root: Path, status: object, shown: str
) -> None:
    machine = make_machine(Root(root), clock=FakeClock())
    if status is not None:
        machine.files.write_file(STATUS_PATH, json.dumps(status).encode())
    with machine.ledger.hold_lock(), pytest.raises(HostError) as caught:
        request_from_agent(machine, UserRequest(RequestKind.RETRY))
    text = r"cannot retry: the agent \(process \d+\) did not act on the request within \d+ s"
    assert re.fullmatch(text + re.escape(shown), str(caught.value))
    assert RequestFile(machine.files).read_request() is None


@pytest.mark.parametrize("content", ["", "{pid}"])
@pytest.mark.process
def test_request_does_not_signal_process_that_cannot_handle_it(root: Path, content: str) -> None:
    broken = QuarantinedTarget(NEW, "it broke", "fix it")
    given(root, LedgerRecord(OLD, quarantined=broken))
    ledger, requests = Ledger(Root(root)), RequestFile(HostFiles(Root(root)))
    command = [sys.executable, "-m", "treenail", "retry", "--root", str(root)]
    sleeper = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    with sleeper, ledger.hold_lock():
        # As on a full disk, or right after the start of another program that holds the lock.
        (root / "var/lib/treenail/lock").write_text(content.format(pid=sleeper.pid))
        # A signal to process 0 reaches the whole group: keep it away from this test.
        with subprocess.Popen(command, start_new_session=True) as retry:
            wait_until(lambda: requests.read_request() or retry.poll() is not None)
            requests.remove_request()
            assert retry.wait(60) == 0
        assert sleeper.poll() is None
        sleeper.stdin.close()
    assert sleeper.returncode == 0
