import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.errors import LedgerError
from treenail.host.filesystem.root_directory import Root
from treenail.host.system.state_file import CrashRecordFile, Ledger

DOCUMENT = {"version": 1, "update": {"phase": "staged", "began": 1.5}, "refused": None}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def ledger(root: Root) -> Ledger:
    return Ledger(root)


def on_disk(root: Root) -> Path:
    return root.prefix / "var/lib/treenail/ledger.json"


def test_read_without_ledger_is_none(ledger):
    assert ledger.read_document() is None


def test_written_document_is_read_by_next_agent(root, ledger):
    ledger.write_document({"update": {"phase": "staging"}})
    ledger.write_document(DOCUMENT)
    assert Ledger(root).read_document() == DOCUMENT


def test_write_adds_version(ledger):
    ledger.write_document({"update": None})
    assert ledger.read_document() == {"update": None, "version": 1}


def test_written_ledger_has_mode_0600(root, ledger):
    ledger.write_document(DOCUMENT)
    assert on_disk(root).stat().st_mode & 0o777 == 0o600
    written = json.loads(on_disk(root).read_bytes())
    assert written.pop("checksum").startswith("crc32:")
    assert written == DOCUMENT


def test_ledger_of_an_older_agent_has_no_checksum_and_is_read(root, ledger):
    ledger.write_document({})
    on_disk(root).write_text(json.dumps(DOCUMENT))
    assert ledger.read_document() == DOCUMENT


def test_changed_content_differs_from_checksum(root, ledger):
    ledger.write_document(DOCUMENT)
    changed = on_disk(root).read_bytes().replace(b"1.5", b"1.7")
    on_disk(root).write_bytes(changed)
    with pytest.raises(LedgerError, match="its content differs from its checksum"):
        ledger.read_document()


def test_every_bit_flip_of_the_ledger_is_refused_or_without_effect(root, ledger):
    ledger.write_document(DOCUMENT)
    content = on_disk(root).read_bytes()
    for index in range(len(content)):
        flipped = bytearray(content)
        flipped[index] ^= 1 << index % 8
        on_disk(root).write_bytes(flipped)
        try:
            found = ledger.read_document()
        except LedgerError:
            continue
        assert {name: found[name] for name in DOCUMENT} == DOCUMENT


def test_crash_record_is_read_without_a_ledger(root):
    record = CrashRecordFile(root)
    assert record.read_document() is None
    record.remove_document()
    record.write_document({"a": 1})
    on_disk(root).write_bytes(b"not a ledger")
    assert CrashRecordFile(root).read_document() == {"a": 1}
    path = root.prefix / "var/lib/treenail/crash-record.json"
    for damaged in (b"", b"[]", b'{"a": 2, "checksum": "crc32:0"}'):
        path.write_bytes(damaged)
        assert record.read_document() is None
    record.remove_document()
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is damaged: Expecting value: line 1 column 1 (char 0)"),
        (b'{"version": 1, "upd', "is damaged: Unterminated string"),
        (b"\x00" * 100, "is damaged: "),
        (b"\xff\xfe\xfd", "is damaged: "),
        (b"[" * 100_000, "is damaged: "),
        (b"[]", "is damaged: it is not a JSON object"),
    ],
)
def test_damaged_ledger_is_an_error_and_stays(root, ledger, content, why):
    ledger.write_document(DOCUMENT)
    on_disk(root).write_bytes(content)
    with pytest.raises(LedgerError) as refused:
        ledger.read_document()
    assert str(refused.value).startswith(f"cannot read the ledger {on_disk(root)}: it {why}")
    assert refused.value.remedy == (
        f"move {on_disk(root)} away and start the agent again; the agent then adopts the booted "
        "system as current and forgets an unfinished update"
    )
    assert on_disk(root).read_bytes() == content


@pytest.mark.parametrize("version", [2, None, "1"])
def test_ledger_of_other_version_is_an_error_and_stays(root, ledger, version):
    ledger.write_document(DOCUMENT)
    content = json.dumps({"version": version, "phase": "teleporting"}).encode()
    on_disk(root).write_bytes(content)
    with pytest.raises(LedgerError) as refused:
        ledger.read_document()
    assert str(refused.value) == (
        f"cannot read the ledger {on_disk(root)}: its version is {version!r}, this agent supports 1"
    )
    assert refused.value.remedy.startswith("install the treenail that wrote it, or move")
    assert on_disk(root).read_bytes() == content


def test_ledger_that_is_a_directory_is_an_error(root, ledger):
    on_disk(root).mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"cannot read .*/ledger.json: it is not a regular file"):
        ledger.read_document()
    with pytest.raises(LedgerError, match=r"cannot replace .*/ledger.json: Is a directory"):
        ledger.write_document(DOCUMENT)


HOLD = """
import sys
from treenail.host.system.state_file import CrashRecordFile, Ledger
from treenail.host.filesystem.root_directory import Root
with Ledger(Root(sys.argv[1])).hold_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_lock_held_by_other_agent_reports_its_pid(root, ledger):
    agent = Path(__file__).parents[3] / "agent"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root.prefix)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(agent)},
    ) as first:
        assert first.stdin
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(LedgerError) as refused, ledger.hold_lock():
            pytest.fail("two agents hold the lock")
        assert str(refused.value) == (
            f"cannot lock the ledger: another agent, PID {first.pid}, runs on {root.prefix}"
        )
        assert refused.value.remedy == (
            "wait for it to finish, or stop the service: systemctl stop treenail"
        )
        first.kill()
        first.wait(timeout=10)
    with ledger.hold_lock():
        assert (root.prefix / "var/lib/treenail").stat().st_mode & 0o777 == 0o700


def test_lock_is_free_after_release(ledger):
    with ledger.hold_lock():
        pass
    with ledger.hold_lock():
        pass


def test_lock_excludes_second_ledger_of_same_process(root, ledger):
    with (
        ledger.hold_lock(),
        pytest.raises(LedgerError, match="another agent, PID"),
        Ledger(root).hold_lock(),
    ):
        pytest.fail("two agents hold the lock")


def test_lock_without_directory_is_an_error(root, ledger):
    (root.prefix / "var").write_text("a file")
    with (
        pytest.raises(LedgerError, match=r"cannot lock the ledger: .*/var: it is not a directory"),
        ledger.hold_lock(),
    ):
        pytest.fail("there is no ledger to lock")


def test_lock_works_on_full_disk(tmp_path: Path) -> None:
    ledger = Ledger(Root(tmp_path))
    with ledger.hold_lock():
        pass
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with ledger.hold_lock():
            assert ledger.find_lock_holder() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.find_lock_holder() is None


def test_unreadable_state_directory_is_an_error_of_the_ledger(root, ledger):
    # A loop of links is unreadable for every user, also for root.
    directory = root.resolve_path("/var/lib") / "treenail"
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.symlink_to("treenail")
    for access in (ledger.read_document, ledger.find_lock_holder, ledger.hold_lock().__enter__):
        with pytest.raises(LedgerError, match="symbolic links"):
            access()
