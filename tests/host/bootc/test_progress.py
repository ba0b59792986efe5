"""bootc's progress, read from its FIFO all the time."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from treenail.errors import FileError
from treenail.host.bootc.progress import BootcProgress, read_progress
from treenail.host.ostree.deployments import TransactionProgress


@pytest.fixture
def fifo() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
        yield Path(folder, "run/progress")


def fetched(done: int, total: int) -> bytes:
    event = {"type": "ProgressBytes", "task": "pulling", "description": "Pulling Image: os",
             "bytes": done, "bytesTotal": total, "subtasks": []}  # fmt: skip
    return json.dumps(event).encode() + b"\n"


def deployed(step: int, total: int) -> bytes:
    event = {"type": "ProgressSteps", "task": "staging", "description": "Deploying Image",
             "steps": step, "stepsTotal": total, "subtasks": []}  # fmt: skip
    return json.dumps(event).encode() + b"\n"


def test_percentage_rises_through_all_tasks_and_ends_below_100() -> None:
    progress = BootcProgress()
    seen = []
    for line in (
        b'{"type": "Start", "version": "0.1.0"}\n', fetched(0, 200), fetched(150, 200),
        deployed(1, 4), fetched(200, 200), deployed(4, 4),
    ):  # fmt: skip
        progress.feed_chunk(line)
        seen.append((progress.last_progress.text, progress.last_progress.percent))
    assert seen == [
        ("", None),
        ("Pulling Image: os", 0),
        ("Pulling Image: os", 75),
        ("Deploying Image", 75),
        ("Pulling Image: os", 99),
        ("Deploying Image", 99),
    ]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{\n", b"[]\n", b'"x"\n', b'{"type": "ProgressBytes"}\n', b"\xff\xfe\n",
     b'{"type": "ProgressSteps", "steps": "1", "stepsTotal": 4}\n', fetched(1, 0)],
)  # fmt: skip
def test_what_is_not_understood_changes_no_percentage(line: bytes) -> None:
    progress = BootcProgress()
    progress.feed_chunk(fetched(1, 2))
    progress.feed_chunk(line)
    progress.feed_chunk(line)
    assert progress.last_progress.percent == 50


def test_line_may_come_in_pieces() -> None:
    progress = BootcProgress()
    for byte in fetched(1, 2):
        progress.feed_chunk(bytes([byte]))
    assert progress.last_progress == TransactionProgress("Pulling Image: os", 50)


def test_line_without_an_end_is_forgotten() -> None:
    progress = BootcProgress()
    for _ in range(10):
        progress.feed_chunk(b"x" * 64 * 1024)
    progress.feed_chunk(b"\n" + fetched(1, 2))
    assert progress.last_progress.percent == 50


def test_writer_never_waits_though_nobody_looks(fifo: Path) -> None:
    """Ten times what the pipe holds is taken in one blocking write."""
    with read_progress(fifo) as progress:
        writer = os.open(fifo, os.O_WRONLY)
        for _ in range(10 * 64):
            os.write(writer, fetched(1, 4) + b" " * 1024 + b"\n")
        os.write(writer, fetched(3, 4))
        os.close(writer)
        wait_until(lambda: progress.last_progress.percent == 75)


def test_writers_may_come_and_go(fifo: Path) -> None:
    with read_progress(fifo) as progress:
        for done in (1, 2, 3):
            fifo.write_bytes(fetched(done, 4))
            wait_until(lambda done=done: progress.last_progress.percent == done * 25)


def test_writer_is_told_when_the_reader_is_gone(fifo: Path) -> None:
    with read_progress(fifo):
        writer = os.open(fifo, os.O_WRONLY)
    with pytest.raises(BrokenPipeError):
        os.write(writer, fetched(1, 4))
    with read_progress(fifo) as progress:
        os.write(writer, fetched(1, 4))
        wait_until(lambda: progress.last_progress.percent == 25)
    os.close(writer)


def test_another_file_in_its_place_makes_room(fifo: Path) -> None:
    fifo.parent.mkdir()
    fifo.write_text("a file")
    with read_progress(fifo):
        assert fifo.is_fifo()
    assert fifo.stat().st_mode & 0o777 == 0o600


def test_fifo_that_cannot_be_created_is_reported(fifo: Path) -> None:
    fifo.parent.parent.joinpath("run").write_text("a file")
    with pytest.raises(FileError, match="cannot create the FIFO"), read_progress(fifo):
        pass
