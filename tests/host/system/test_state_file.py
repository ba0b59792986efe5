import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from treenail.errors import LedgerError
from treenail.host.filesystem.root import Root
from treenail.host.system.state_file import Ledger

DOCUMENT = {"version": 1, "update": {"phase": "staged", "began": 1.5}, "refused": None}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def ledger(root: Root) -> Ledger:
    return Ledger(root)


def on_disk(root: Root) -> Path:
    return root.prefix / "var/lib/treenail/ledger.json"


def test_there_is_nothing_at_first(ledger):
    assert ledger.read_document() is None


def test_what_was_written_is_read_by_the_next_agent(root, ledger):
    ledger.write_document({"update": {"phase": "staging"}})
    ledger.write_document(DOCUMENT)
    assert Ledger(root).read_document() == DOCUMENT


def test_the_version_is_the_ledgers_business(ledger):
    ledger.write_document({"update": None})
    assert ledger.read_document() == {"update": None, "version": 1}


def test_only_the_agent_can_read_it(root, ledger):
    ledger.write_document(DOCUMENT)
    assert on_disk(root).stat().st_mode & 0o777 == 0o600
    assert json.loads(on_disk(root).read_bytes()) == DOCUMENT


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is damaged: Expecting value: line 1 column 1 (char 0)"),
        (b'{"version": 1, "upd', "is damaged: Unterminated string"),
        (b"\x00" * 100, "is damaged: "),
        (b"\xff\xfe\xfd", "is damaged: "),
        (b"[" * 100_000, "is damaged: "),
        (b"[]", "is damaged: it holds no JSON object"),
    ],
)
def test_a_damaged_ledger_is_refused_and_stays_where_it_is(root, ledger, content, why):
    ledger.write_document(DOCUMENT)
    on_disk(root).write_bytes(content)
    with pytest.raises(LedgerError) as refused:
        ledger.read_document()
    assert str(refused.value).startswith(f"the ledger {on_disk(root)} {why}")
    assert refused.value.remedy == (
        f"move {on_disk(root)} away and start the agent again; the agent then takes the booted "
        "system for the current one and forgets an update half-way"
    )
    assert on_disk(root).read_bytes() == content


@pytest.mark.parametrize("version", [2, None, "1"])
def test_another_version_is_refused_and_stays_where_it_is(root, ledger, version):
    ledger.write_document(DOCUMENT)
    content = json.dumps({"version": version, "phase": "teleporting"}).encode()
    on_disk(root).write_bytes(content)
    with pytest.raises(LedgerError) as refused:
        ledger.read_document()
    assert str(refused.value) == (
        f"the ledger {on_disk(root)} is of version {version!r}, and this agent reads 1"
    )
    assert refused.value.remedy.startswith("install the treenail that wrote it, or move")
    assert on_disk(root).read_bytes() == content


def test_a_ledger_that_is_no_file_is_an_error_of_ours(root, ledger):
    on_disk(root).mkdir(parents=True)
    with pytest.raises(LedgerError, match=r"the ledger: .*ledger.json is not a regular file"):
        ledger.read_document()
    with pytest.raises(LedgerError, match=r"the ledger: can't replace .*Is a directory"):
        ledger.write_document(DOCUMENT)


HOLD = """
import sys
from treenail.host.system.state_file import Ledger
from treenail.host.filesystem.root import Root
with Ledger(Root(sys.argv[1])).hold_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_a_second_agent_is_told_which_process_is_the_first(root, ledger):
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
        assert str(refused.value) == f"another agent, process {first.pid}, works on {root.prefix}"
        assert refused.value.remedy == (
            "let it finish; if it is the service, stop that: systemctl stop treenail"
        )
        first.kill()
        first.wait(timeout=10)
    with ledger.hold_lock():
        assert (root.prefix / "var/lib/treenail").stat().st_mode & 0o777 == 0o700


def test_the_lock_is_free_again_when_its_holder_is_done(ledger):
    with ledger.hold_lock():
        pass
    with ledger.hold_lock():
        pass


def test_two_ledgers_of_one_process_exclude_each_other_too(root, ledger):
    with (
        ledger.hold_lock(),
        pytest.raises(LedgerError, match="another agent, process"),
        Ledger(root).hold_lock(),
    ):
        pytest.fail("two agents hold the lock")


def test_a_ledger_that_can_not_be_locked_says_so(root, ledger):
    (root.prefix / "var").write_text("a file")
    with (
        pytest.raises(LedgerError, match=r"can't lock the ledger: .*/var is not a directory"),
        ledger.hold_lock(),
    ):
        pytest.fail("there is no ledger to lock")


def test_an_agent_locks_the_ledger_on_a_disk_that_takes_nothing(tmp_path: Path) -> None:
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
