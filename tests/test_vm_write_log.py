"""Logs of a disk's writes, and the disks that power cuts leave."""

import random
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from vmlab.tools import ToolError
from vmlab.write_log import (
    BLOCK,
    PowerCut,
    Replay,
    choose_cuts,
    copy_sparse,
    find_flushed,
    read_log,
)

FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
SECTOR = 512
Row = tuple[int, bytes, int]
"""Disk sector, written content and flags."""


def write_log(path: Path, rows: Sequence[Row], *, sector: int = SECTOR) -> Path:
    parts = [struct.pack("<QQQL", 0x6A736677736872, 1, 0, sector)]
    for start, content, flags in rows:
        count = 8 if flags & DISCARD else len(content) // SECTOR
        parts += [struct.pack("<QQQQ", start, count, flags, 0), content]
    path.write_bytes(
        b"".join(part.ljust(-(-len(part) // sector) * sector, b"\0") for part in parts)
    )
    return path


def fill(letter: bytes, blocks: int = 1) -> bytes:
    return letter * BLOCK * blocks


def read_letters(disk: Path) -> str:
    content = disk.read_bytes()
    return "".join(chr(content[at] or ord(".")) for at in range(0, len(content), BLOCK))


def cut_all(tmp_path: Path, rows: Sequence[Row], cuts: Sequence[PowerCut]) -> list[str]:
    """Return the disk of four blocks that each power cut leaves."""
    log = write_log(tmp_path / "log", rows)
    base, target = tmp_path / "base", tmp_path / "cut"
    base.write_bytes(bytes(4 * BLOCK))
    replay = Replay(log, read_log(log), base)
    found = []
    for cut in cuts:
        replay.make_disk(cut, target)
        found.append(read_letters(target))
    return found


ROWS: list[Row] = [
    (0, fill(b"a"), 0),
    (0, b"", FLUSH),
    (8, fill(b"b", 2), 0),
    (0, fill(b"c"), 0),
    (24, fill(b"d"), FUA),
    (0, b"", FLUSH),
]


@pytest.mark.parametrize("sector", [512, 4096])
def test_log_with_each_sector_size_has_all_entries(tmp_path: Path, sector: int) -> None:
    entries = read_log(write_log(tmp_path / "log", ROWS, sector=sector))
    assert [(each.offset, each.length) for each in entries] == [
        (start * SECTOR, len(content)) for start, content, _ in ROWS
    ]
    assert [each.is_flush for each in entries] == [bool(flags & FLUSH) for *_, flags in ROWS]
    assert entries[-1].end == (tmp_path / "log").stat().st_size


def test_log_cut_off_within_an_entry_ends_before_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log", ROWS[:3])
    log.write_bytes(log.read_bytes()[:-1])
    assert len(read_log(log)) == 2


@pytest.mark.parametrize("content", [b"", b"no log of writes, but longer than its superblock"])
def test_other_file_is_no_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ToolError, match="is no log of writes"):
        read_log(tmp_path / "log")


def test_unknown_entry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="unknown entry"):
        read_log(write_log(tmp_path / "log", [(0, fill(b"a"), MARK)]))


def test_cut_keeps_what_was_flushed_and_the_chosen_writes(tmp_path: Path) -> None:
    both = ((2, 2 * BLOCK), (3, BLOCK))
    cuts = [
        PowerCut(1),
        PowerCut(1, ((0, BLOCK),)),
        PowerCut(2),
        PowerCut(4),
        PowerCut(4, both[:1]),
        PowerCut(4, both[1:]),
        PowerCut(4, both),
        PowerCut(4, ((2, BLOCK),)),
        PowerCut(5),
        PowerCut(6),
    ]
    assert cut_all(tmp_path, ROWS, cuts) == [
        "....",
        "a...",
        "a...",
        "a...",
        "abb.",
        "c...",
        "cbb.",
        "ab..",
        "a..d",
        "cbbd",
    ]


def test_later_write_to_the_same_block_wins(tmp_path: Path) -> None:
    rows: list[Row] = [(0, fill(b"a"), 0), (0, fill(b"b"), 0)]
    kept = ((0, BLOCK), (1, BLOCK))
    cuts = [PowerCut(2, kept[:1]), PowerCut(2, kept[1:]), PowerCut(2, kept)]
    assert cut_all(tmp_path, rows, cuts) == ["a...", "b...", "b..."]


def test_flush_with_data_flushes_the_writes_before_it_only(tmp_path: Path) -> None:
    rows: list[Row] = [(0, fill(b"a"), 0), (8, fill(b"b"), FLUSH), (0, b"", FLUSH)]
    assert cut_all(tmp_path, rows, [PowerCut(2), PowerCut(3)]) == ["a...", "ab.."]


def test_discard_leaves_the_content(tmp_path: Path) -> None:
    rows: list[Row] = [(0, fill(b"a"), 0), (0, b"", DISCARD), (0, b"", FLUSH)]
    assert cut_all(tmp_path, rows, [PowerCut(3)]) == ["a..."]


def test_cuts_out_of_order_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sort the power cuts"):
        cut_all(tmp_path, ROWS, [PowerCut(6), PowerCut(1)])


def test_chosen_cuts_are_different_sorted_and_possible(tmp_path: Path) -> None:
    entries = read_log(write_log(tmp_path / "log", [*ROWS, (0, fill(b"e", 4), 0)]))
    cuts = choose_cuts(entries, 2, len(entries), 12, random.Random(1))
    assert len(cuts) == len(set(cuts)) == 12
    assert [each.position for each in cuts] == sorted(each.position for each in cuts)
    assert {each.kind for each in cuts} == {
        "flushed only", "all writes", "a subset", "a torn write",
    }  # fmt: skip
    for cut in cuts:
        assert 3 <= cut.position <= len(entries)
        unflushed = range(find_flushed(entries, cut.position), cut.position)
        assert all(number in unflushed for number, _ in cut.kept)
        assert all(length <= entries[number].length for number, length in cut.kept)
    assert cuts == choose_cuts(entries, 2, len(entries), 12, random.Random(1))


def test_short_log_has_fewer_cuts(tmp_path: Path) -> None:
    entries = read_log(write_log(tmp_path / "log", ROWS[:2]))
    assert choose_cuts(entries, 1, 2, 100, random.Random(1)) == [PowerCut(2)]


def test_copy_keeps_content_and_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(1 << 24)
        file.seek(1 << 22)
        file.write(fill(b"x"))
    copy_sparse(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks <= source.stat().st_blocks


@pytest.mark.process
@pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io, of qemu-utils")
def test_log_of_qemu_is_read_and_replayed(tmp_path: Path) -> None:
    disk, log, base = (tmp_path / name for name in ("disk", "log", "base"))
    for path in (disk, base):
        path.write_bytes(bytes(4 * BLOCK))
    log.write_bytes(b"")
    orders = ("write -P 97 0 4k", "flush", "write -P 98 4k 8k", "write -P 99 0 4k")
    options = (
        "driver=blklogwrites,log-sector-size=512,file.driver=raw,file.file.driver=file,"
        f"file.file.filename={disk},log.driver=file,log.filename={log}"
    )
    words = [word for order in orders for word in ("-c", order)]
    subprocess.run(["qemu-io", *words, "--image-opts", options], check=True, capture_output=True)
    entries = read_log(log)
    assert [(each.offset, each.length, each.is_flush) for each in entries[:4]] == [
        (0, BLOCK, False),
        (0, 0, True),
        (BLOCK, 2 * BLOCK, False),
        (0, BLOCK, False),
    ]
    replay = Replay(log, entries, base)
    replay.make_disk(PowerCut(4, ((3, BLOCK),)), tmp_path / "cut")
    assert read_letters(tmp_path / "cut") == "c..."
    replay.make_disk(PowerCut(len(entries)), tmp_path / "cut")
    assert read_letters(tmp_path / "cut") == read_letters(disk) == "cbb."
