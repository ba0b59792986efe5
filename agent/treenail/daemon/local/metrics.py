"""Drift as a metric, in a file that node exporter's textfile collector reads."""

import logging
import re
from collections.abc import Iterator

from treenail.clock import Clock
from treenail.errors import FileError
from treenail.host.filesystem.files import Files
from treenail.update.drift.drift_policy import Drifted, Reaction

log = logging.getLogger(__name__)

PATH = "/run/treenail/metrics.prom"
_SINCE = re.compile(rb"^mcd_config_drift (\d+)$", re.MULTILINE)
_LIMIT = 64 * 1024


class DriftGauge:
    """Since when the node is Degraded because it drifted, and how much of it leads to what.

    The file outlives the process, and so does the moment in it: an agent that starts again tells
    neither that nothing drifts, before it has looked, nor that it has only just begun.
    """

    def __init__(self, files: Files, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def show(self, drifted: Drifted) -> None:
        """Have the file say so; nothing where nobody knows. Never raises."""
        if not drifted.looked:
            return
        try:
            earlier = self._files.read(PATH, limit=_LIMIT) or b""
            since = 0
            if drifted.blocking:
                found = _SINCE.search(earlier)
                since = (int(found[1]) if found else 0) or int(self._clock.now())
            content = "".join(f"{line}\n" for line in _lines(drifted, since)).encode()
            if content != earlier:
                self._files.write(PATH, content, mode=0o644)
        except FileError as error:
            log.debug("can't write metrics: %s", error)


def _lines(drifted: Drifted, since: int) -> Iterator[str]:
    yield "# HELP mcd_config_drift Unix time since when drift degrades this node; 0 without any."
    yield "# TYPE mcd_config_drift gauge"
    yield f"mcd_config_drift {since}"
    yield "# HELP treenail_config_drifts What is not as the current config says, by reaction."
    yield "# TYPE treenail_config_drifts gauge"
    for reaction, found in (
        (Reaction.REPORT, drifted.reported),
        (Reaction.HEAL, drifted.healed),
        (Reaction.BLOCK, drifted.blocking),
    ):
        yield f'treenail_config_drifts{{reaction="{reaction}"}} {len(found)}'
