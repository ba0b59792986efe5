"""Metrics of this node, in a file for the textfile collector of node_exporter."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from treenail import clocks, errors
from treenail.config.wanted_state import list_unsupported_packages
from treenail.host.filesystem.atomic_files import HostFiles
from treenail.update.drift import drift_policy
from treenail.update.state import ledger_record

log = logging.getLogger(__name__)

METRICS_FILE = "/run/treenail/metrics.prom"
_SAMPLE = re.compile(r"([a-z_]+)(\{[^{}]*\})? (\d+)")
_LIMIT = 64 * 1024

_DRIFT, _DRIFTS = "mcd_config_drift", "treenail_config_drifts"
_STATE, _PACKAGES = "mcd_state", "mcd_local_unsupported_packages"
_UPDATES, _ROLLBACKS = "treenail_recorded_updates", "treenail_recorded_rollbacks"
_ENDED, _PHASE = "treenail_last_update_end", "treenail_last_update_phase_seconds"
# The names that begin with mcd_ are those of the Machine Config Daemon (metrics.go).
_HELP: Mapping[str, str] = {
    _DRIFT: "Unix time since when drift degrades this node; 0 without any.",
    _DRIFTS: "Number of drifts from the current config, by reaction.",
    _STATE: "Unix time since when this node has the state.",
    _PACKAGES: "Number of layered packages that belong to no extension and no kernel type.",
    _UPDATES: "Updates in the history of this node, by outcome.",
    _ROLLBACKS: "Updates in the history of this node that were rolled back.",
    _ENDED: "Unix time of the end of the last update, by outcome.",
    _PHASE: "Duration of each phase of the last update, in seconds.",
}


class NodeMetrics:
    """State, drift and layered packages of this node.

    The file outlives the process, with the times in it. A restarted agent therefore neither reports
    0 before its first check nor a later time. No method raises.
    """

    def __init__(self, files: HostFiles, clock: clocks.Clock) -> None:
        self._files = files
        self._clock = clock
        self._samples: dict[str, Sequence[str]] | None = None
        """The samples in the file; None until it is read, and after a failed write."""

    def write_metrics(self, drifted: drift_policy.DriftAssessment) -> None:
        """Write since when drift degrades the Node, and how much there is; only after a check."""
        if not drifted.is_checked:
            return
        since = 0
        if drifted.blocking:
            known = self._read_samples().get(_DRIFT, ())
            since = _find_value(known, _DRIFT) or int(self._clock.now())
        by_reaction = (
            (drift_policy.DriftReaction.REPORT, drifted.reported),
            (drift_policy.DriftReaction.REPAIR, drifted.to_repair),
            (drift_policy.DriftReaction.BLOCK, drifted.blocking),
        )
        counts = [f'{_DRIFTS}{{reaction="{name}"}} {len(drifts)}' for name, drifts in by_reaction]
        self._write_samples({_DRIFT: [f"{_DRIFT} {since}"], _DRIFTS: counts})

    def write_state(self, state: str) -> None:
        """Write the state of the Node."""
        series = f'{_STATE}{{state="{state}",reason=""}}'
        known = self._read_samples().get(_STATE, ())
        since = _find_value(known, series) or int(self._clock.now())
        self._write_samples({_STATE: [f"{series} {since}"]})

    def write_packages(self, node: str, layered: Collection[str]) -> None:
        """Write how many of the layered packages no MachineConfig can have requested."""
        count = len(list_unsupported_packages(layered))
        self._write_samples({_PACKAGES: [f'{_PACKAGES}{{node="{node}"}} {count}']})

    def write_history(self, history: Sequence[ledger_record.PastUpdate]) -> None:
        """Write outcomes, rollbacks and durations of the recorded updates, newest first."""
        outcomes = Counter(past.outcome for past in history)
        rollbacks = sum(ledger_record.Phase.ROLLING_BACK in past.phase_seconds for past in history)
        changed: dict[str, Sequence[str]] = {
            _UPDATES: [
                f'{_UPDATES}{{outcome="{outcome}"}} {outcomes[outcome]}'
                for outcome in ledger_record.UpdateOutcome
            ],
            _ROLLBACKS: [f"{_ROLLBACKS} {rollbacks}"],
        }
        if history:
            last = history[0]
            changed[_ENDED] = [f'{_ENDED}{{outcome="{last.outcome}"}} {int(last.ended)}']
            changed[_PHASE] = [
                f'{_PHASE}{{phase="{phase}"}} {round(seconds)}'
                for phase, seconds in last.phase_seconds.items()
            ]
        self._write_samples(changed)

    def _read_samples(self) -> dict[str, Sequence[str]]:
        if self._samples is None:
            self._samples = self._read_file()
        return self._samples

    def _read_file(self) -> dict[str, Sequence[str]]:
        try:
            content = self._files.read_file(METRICS_FILE, limit=_LIMIT) or b""
        except errors.FileError as error:
            log.debug("cannot read metrics: %s", error)
            return {}
        samples: dict[str, Sequence[str]] = {}
        for line in content.decode("utf-8", "replace").splitlines():
            match = _SAMPLE.fullmatch(line)
            if match and match[1] in _HELP:
                samples[match[1]] = (*samples.get(match[1], ()), line)
        return samples

    def _write_samples(self, changed: Mapping[str, Sequence[str]]) -> None:
        """Replace the samples of these metrics in the file, if any differs."""
        known = self._read_samples()
        if all(tuple(known.get(name, ())) == tuple(lines) for name, lines in changed.items()):
            return
        samples, self._samples = {**known, **changed}, None
        content = "".join(f"{line}\n" for line in _format_lines(samples))
        try:
            self._files.write_file(METRICS_FILE, content.encode(), mode=0o644)
            self._samples = samples
        except errors.FileError as error:
            log.debug("cannot write metrics: %s", error)


def _find_value(lines: Sequence[str], series: str) -> int:
    values = (line.rpartition(" ") for line in lines)
    return next((int(value) for name, _, value in values if name == series), 0)


def _format_lines(samples: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, text in _HELP.items():
        if name in samples:
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} gauge"
            yield from samples[name]
