"""Progress of bootc, which writes JSON lines to a FIFO, up to 5 a second.

https://bootc.dev/bootc/experimental-progress-fd.html
"""

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treenail import errors, sanitize
from treenail.encoding import json_text
from treenail.host.ostree.deployments import TransactionProgress

_CHUNK = 64 * 1024
_LINE_LIMIT = 256 * 1024
_TEXT_LIMIT = 200
# bootc still deploys the image after the last byte: only success is 100 %.
_MAX_UNFINISHED_PERCENT = 99
# Division of larger numbers raises OverflowError.
_COUNT_LIMIT = 2**63


class BootcProgress:
    """The last progress; ``percent`` never falls."""

    def __init__(self) -> None:
        self.last_progress = TransactionProgress("", None)
        self._rest = b""

    def feed_chunk(self, chunk: bytes) -> None:
        """Parse the next bytes of the FIFO."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        del chunk
        if len(self._rest) > _LINE_LIMIT:
            self._rest = b""
        for line in lines:
            self._parse_line(line)

    def _parse_line(self, line: bytes) -> None:
        try:
            # The interface is experimental: lines and types that are not known here are no error.
            event = json_text.parse_json(line)
        except ValueError:
            return
        if not isinstance(event, dict):
            return
        match event:
            # In podman's storage layers are uncompressed, and the total counts the compressed
            # ones: the layers are counted in place of the bytes (deploy.rs).
            case {"type": "ProgressBytes", "steps": int(done), "stepsTotal": int(total)}:
                layers = done if done >= total else done + _compute_fraction(event, done)
                self._set_progress(event, layers, total)
            case {"type": "ProgressBytes", "bytes": int(done), "bytesTotal": int(total)}:
                self._set_progress(event, done, total)
            case {"type": "ProgressSteps", "steps": int(done), "stepsTotal": int(total)}:
                self._set_progress(event, done, total)
            case _:
                pass

    def _set_progress(self, event: dict[str, object], done: float, total: int) -> None:
        text = str(event.get("description") or event.get("task") or "")
        percent = self.last_progress.percent
        if 0 < total < _COUNT_LIMIT and 0 <= done < _COUNT_LIMIT:
            percent = max(percent or 0, min(int(done * 100 / total), _MAX_UNFINISHED_PERCENT))
        self.last_progress = TransactionProgress(
            sanitize.sanitize_text(text, limit=_TEXT_LIMIT), percent
        )


def _compute_fraction(event: dict[str, object], done_layers: int) -> float:
    """Return how much of the current layer is fetched, from 0 to 1."""
    match event.get("subtasks"):
        case [*done, {"bytes": int(fetched), "bytesTotal": int(total)}]:
            is_current = len(done) == done_layers and total > 0
            return min(max(fetched, 0), total) / total if is_current else 0.0
        case _:
            return 0.0


@contextmanager
def read_progress(fifo: Path) -> Iterator[BootcProgress]:
    """Yield the progress that bootc writes to the FIFO, which is made if it is missing.

    A thread reads everything at once, because bootc blocks when the FIFO is full. If this process
    dies, bootc continues without progress, and the next process here reads from it again. The FIFO
    is opened for writing too, so that writers can come and go.
    """
    try:
        fifo.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not fifo.is_fifo():
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo, 0o600)
        # Linux opens a FIFO for reading and writing without waiting for a writer (fifo(7)).
        source = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise errors.FileError(f"cannot create the FIFO {fifo}: {error.strerror}") from error
    progress = BootcProgress()
    # Closing the write end makes the read end readable, which ends the thread.
    over, end = os.pipe2(os.O_CLOEXEC)
    reader = threading.Thread(
        target=_read_fifo, args=(source, over, progress), name="bootc progress", daemon=True
    )
    reader.start()
    try:
        yield progress
    finally:
        os.close(end)
        reader.join()
        os.close(over)
        os.close(source)


def _read_fifo(source: int, stop: int, progress: BootcProgress) -> None:
    while True:
        ready, _, _ = select.select([source, stop], [], [])
        if stop in ready:
            return
        progress.feed_chunk(os.read(source, _CHUNK))
