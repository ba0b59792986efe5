"""Drift metrics, in a file for the textfile collector of node_exporter."""

import logging
import re
from collections.abc import Iterator

from treenail.clock import Clock
from treenail.errors import FileError
from treenail.host.filesystem.files import HostFiles
from treenail.update.drift.drift_policy import DriftAssessment, DriftReaction

log = logging.getLogger(__name__)

METRICS_FILE = "/run/treenail/metrics.prom"
_DRIFT_SINCE = re.compile(rb"^mcd_config_drift (\d+)$", re.MULTILINE)
_LIMIT = 64 * 1024


class DriftMetrics:
    """Since when drift degrades the Node, and the number of drifts by reaction.

    The file outlives the process, with the time in it. A restarted agent therefore neither reports
    0 before its first check nor a later time.
    """

    def __init__(self, files: HostFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def write_metrics(self, drifted: DriftAssessment) -> None:
        """Write the metrics when they differ; nothing before the first check. Never raises."""
        if not drifted.is_checked:
            return
        try:
            earlier = self._files.read_file(METRICS_FILE, limit=_LIMIT) or b""
            since = 0
            if drifted.blocking:
                found = _DRIFT_SINCE.search(earlier)
                since = (int(found[1]) if found else 0) or int(self._clock.now())
            content = "".join(f"{line}\n" for line in _format_lines(drifted, since)).encode()
            if content != earlier:
                self._files.write_file(METRICS_FILE, content, mode=0o644)
        except FileError as error:
            log.debug("cannot write metrics: %s", error)


def _format_lines(drifted: DriftAssessment, since: int) -> Iterator[str]:
    yield "# HELP mcd_config_drift Unix time since when drift degrades this node; 0 without any."
    yield "# TYPE mcd_config_drift gauge"
    yield f"mcd_config_drift {since}"
    yield "# HELP treenail_config_drifts Number of drifts from the current config, by reaction."
    yield "# TYPE treenail_config_drifts gauge"
    for reaction, found in (
        (DriftReaction.REPORT, drifted.reported),
        (DriftReaction.REPAIR, drifted.to_repair),
        (DriftReaction.BLOCK, drifted.blocking),
    ):
        yield f'treenail_config_drifts{{reaction="{reaction}"}} {len(found)}'
