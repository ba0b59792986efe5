"""The undo log: read by this version and by others, across a boot."""

from pathlib import Path

import pytest

from treenail.errors import LedgerError
from treenail.host.filesystem.disk import Disk
from treenail.host.filesystem.entries import DirectoryEntry
from treenail.host.filesystem.root_directory import Root
from treenail.host.rollback.undo_log import (
    PENDING_PATH,
    Inverse,
    Json,
    PreviousEntry,
    UndoLog,
    UndoRecords,
)

# A complete log of each released version. Never change one: add the next one.
GOLDEN = sorted((Path(__file__).parents[2] / "data").glob("undo-*.log"))

DIRECTORY = DirectoryEntry(0o2755, 0, 999, {"user.origin": b"\x00\xff"})
INVERSES = (
    Inverse("/etc/added", 1, PreviousEntry.NOTHING),
    Inverse("/etc/changed", 2, PreviousEntry.FILE_OR_LINK),
    Inverse("/var/log/journal", 3, PreviousEntry.DIRECTORY, DIRECTORY),
    Inverse("/etc/emptied", 4, PreviousEntry.EMPTIED_DIRECTORY, DirectoryEntry(0o755, 0, 0, {})),
)
LINKS: Json = {"links": [["/etc/systemd/system/a.service", "/dev/null"]]}
MADE: Json = {"made": [[2, 4711]]}
NOTE: Json = {"note": {"pending": "0123456789abcdef0123456789abcdef"}}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "var/lib/treenail/undo").mkdir(parents=True)
    return Root(tmp_path)


def make_records(inverses: tuple[Inverse, ...]) -> tuple[Json, ...]:
    return (LINKS, {"entries": [each.to_json("/") for each in inverses]}, MADE, NOTE)


def write_log(root: Root, rows: list[object]) -> UndoLog:
    log = UndoLog(root, Disk(), PENDING_PATH)
    log.append_record({"entries": rows, "added": 1})
    log.append_record({"thaw": [1]})
    log.close_log()
    return log


def parse_records(log: UndoLog) -> list[Inverse]:
    records = log.read_records()
    return [each for record in records.records for each in log.parse_inverses(record)]


def below(root: Root, inverse: Inverse) -> Inverse:
    path = f"{root.prefix}{inverse.path}"
    return Inverse(path, inverse.number, inverse.previous, inverse.directory)


def test_golden_undo_logs_exist() -> None:
    assert GOLDEN


@pytest.mark.parametrize("path", GOLDEN, ids=lambda each: each.stem)
def test_golden_undo_log_of_released_version_is_read(path: Path, root: Root) -> None:
    root.resolve_path(PENDING_PATH).write_bytes(path.read_bytes())
    log = UndoLog(root, Disk(), PENDING_PATH)
    assert log.read_records() == UndoRecords(make_records(INVERSES), is_committed=True)
    assert parse_records(log) == [below(root, each) for each in INVERSES]


@pytest.mark.parametrize("path", GOLDEN[-1:], ids=lambda each: each.stem)
def test_written_undo_log_equals_that_of_the_newest_release(path: Path, root: Root) -> None:
    log = UndoLog(root, Disk(), PENDING_PATH)
    for record in make_records(INVERSES):
        log.append_record(record)
    log.append_commit()
    log.close_log()
    assert root.resolve_path(PENDING_PATH).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("inverse", INVERSES, ids=lambda each: each.previous)
def test_further_values_and_records_of_newer_version_are_ignored(
    inverse: Inverse, root: Root
) -> None:
    log = write_log(root, [[*inverse.to_json("/"), "added", {"x": 1}]])
    assert parse_records(log) == [below(root, inverse)]


@pytest.mark.parametrize(
    "row",
    [
        ["/etc/a", "frozen", 1],
        ["/etc/a", "directory", 1],
        ["/etc/a", "directory", 1, 0o755, 0, 0],
        ["/etc/a", "nothing", "1"],
        ["/etc/a"],
        "/etc/a",
    ],
)
def test_unknown_inverse_is_refused(row: object, root: Root) -> None:
    log = write_log(root, [row])
    with pytest.raises(LedgerError, match="cannot read the undo log"):
        parse_records(log)
