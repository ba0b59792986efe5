"""bootc's progress, as it writes it to a FIFO: JSON lines, a few a second.

https://bootc.dev/bootc/experimental-progress-fd.html
"""

import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treenail.errors import FileError
from treenail.host.ostree.deployments import TransactionProgress
from treenail.host.system.sanitize import sanitize_text

_CHUNK = 64 * 1024
_LINE_LIMIT = 256 * 1024
_TEXT_LIMIT = 200
# Fetching is not all there is to it: 100 is for success alone.
_MAX_UNFINISHED_PERCENT = 99


class BootcProgress:
    """The last that was said; ``percent`` never falls."""

    def __init__(self) -> None:
        self.last_progress = TransactionProgress("", None)
        self._rest = b""

    def feed_chunk(self, chunk: bytes) -> None:
        """Take in what came next."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        del chunk
        if len(self._rest) > _LINE_LIMIT:
            self._rest = b""
        for line in lines:
            self._parse_line(line)

    def _parse_line(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        match event:
            case {"type": "ProgressBytes", "bytes": int(done), "bytesTotal": int(total)}:
                self._set_progress(event, done, total)
            case {"type": "ProgressSteps", "steps": int(done), "stepsTotal": int(total)}:
                self._set_progress(event, done, total)
            case _:
                pass

    def _set_progress(self, event: dict[str, object], done: int, total: int) -> None:
        text = str(event.get("description") or event.get("task") or "")
        percent = self.last_progress.percent
        if total > 0:
            percent = max(percent or 0, min(done * 100 // total, _MAX_UNFINISHED_PERCENT))
        self.last_progress = TransactionProgress(sanitize_text(text, limit=_TEXT_LIMIT), percent)


@contextmanager
def read_progress(fifo: Path) -> Iterator[BootcProgress]:
    """What is written to the FIFO while within; made if it is not there.

    A thread reads all of it at once, for bootc stands still when the FIFO is full. If this
    process dies, bootc notices that nobody reads and goes on in silence; the next process to
    come here is heard again. Opened for writing too, so that writers may come and go.
    """
    try:
        fifo.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not fifo.is_fifo():
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo, 0o600)
        source = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"can't make the FIFO {fifo}: {error.strerror}") from error
    progress = BootcProgress()
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
