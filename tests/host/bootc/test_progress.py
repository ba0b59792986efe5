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


def test_percent_rises_through_all_tasks_to_99() -> None:
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


def imported(layers: int, done: int, total: int, *, of: int) -> bytes:
    """Return an event: so many layers are done, and so many bytes of the next one."""
    size = 1_000_000
    finished = [{"id": str(number), "bytes": size, "bytesTotal": size} for number in range(layers)]
    event = {"type": "ProgressBytes", "task": "pulling", "description": "Pulling Image: os",
             "bytes": layers * size + done, "bytesTotal": 1000, "steps": layers, "stepsTotal": of,
             "subtasks": [*finished, {"id": "next", "bytes": done, "bytesTotal": total}],
             }  # fmt: skip
    return json.dumps(event).encode() + b"\n"


def test_percent_counts_layers_where_bytes_exceed_their_total() -> None:
    progress = BootcProgress()
    seen = []
    for line in (
        imported(0, 500_000, 1_000_000, of=4), imported(1, 0, 1_000_000, of=4),
        imported(2, 3_000_000, 1_000_000, of=4), imported(3, 1, 0, of=4),
    ):  # fmt: skip
        progress.feed_chunk(line)
        seen.append(progress.last_progress.percent)
    assert seen == [12, 25, 75, 75]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{\n", b"[]\n", b'"x"\n', b'{"type": "ProgressBytes"}\n', b"\xff\xfe\n",
     b'{"type": "ProgressSteps", "steps": "1", "stepsTotal": 4}\n', fetched(1, 0)],
)  # fmt: skip
def test_unknown_events_keep_the_percent(line: bytes) -> None:
    progress = BootcProgress()
    progress.feed_chunk(fetched(1, 2))
    progress.feed_chunk(line)
    progress.feed_chunk(line)
    assert progress.last_progress.percent == 50


def test_line_in_pieces_is_parsed() -> None:
    progress = BootcProgress()
    for byte in fetched(1, 2):
        progress.feed_chunk(bytes([byte]))
    assert progress.last_progress == TransactionProgress("Pulling Image: os", 50)


def test_line_without_end_is_discarded() -> None:
    progress = BootcProgress()
    for _ in range(10):
        progress.feed_chunk(b"x" * 64 * 1024)
    progress.feed_chunk(b"\n" + fetched(1, 2))
    assert progress.last_progress.percent == 50


def test_writer_never_blocks(fifo: Path) -> None:
    """Ten times what the pipe holds is taken in one blocking write."""
    with read_progress(fifo) as progress:
        writer = os.open(fifo, os.O_WRONLY)
        for _ in range(10 * 64):
            os.write(writer, fetched(1, 4) + b" " * 1024 + b"\n")
        os.write(writer, fetched(3, 4))
        os.close(writer)
        wait_until(lambda: progress.last_progress.percent == 75)


def test_second_writer_is_read_too(fifo: Path) -> None:
    with read_progress(fifo) as progress:
        for done in (1, 2, 3):
            fifo.write_bytes(fetched(done, 4))
            wait_until(lambda done=done: progress.last_progress.percent == done * 25)


def test_writer_without_reader_gets_broken_pipe(fifo: Path) -> None:
    with read_progress(fifo):
        writer = os.open(fifo, os.O_WRONLY)
    with pytest.raises(BrokenPipeError):
        os.write(writer, fetched(1, 4))
    with read_progress(fifo) as progress:
        os.write(writer, fetched(1, 4))
        wait_until(lambda: progress.last_progress.percent == 25)
    os.close(writer)


def test_other_file_at_the_path_is_replaced(fifo: Path) -> None:
    fifo.parent.mkdir()
    fifo.write_text("a file")
    with read_progress(fifo):
        assert fifo.is_fifo()
    assert fifo.stat().st_mode & 0o777 == 0o600


def test_fifo_that_cannot_be_created_is_reported(fifo: Path) -> None:
    fifo.parent.parent.joinpath("run").write_text("a file")
    with pytest.raises(FileError, match="cannot create the FIFO"), read_progress(fifo):
        pass
