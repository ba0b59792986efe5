"""Commands in transient units of systemd: join or start them, wait for them, report failures."""

import logging
import signal
from collections.abc import Callable
from contextlib import suppress

from treenail import clocks, errors
from treenail.host.ostree import backend_settings, deployments
from treenail.host.systemd import transient
from treenail.host.systemd.journal import SystemdJournal

log = logging.getLogger(__name__)

# Of a killed program the last line says what it did, and not why it ended.
_KILLED = frozenset({"signal", "core-dump", "oom-kill", "watchdog"})


def _report_nothing() -> deployments.TransactionProgress:
    return deployments.TransactionProgress("", None)


class JobRunner:
    """Runs jobs for one thread. Raises `BusError`, `UnitError` and `TransactionError`."""

    def __init__(
        self,
        units: transient.TransientUnits,
        journal: SystemdJournal,
        clock: clocks.Clock,
        limits: backend_settings.TransactionLimits,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """Call ``heartbeat`` once a second while a job runs."""
        self._units = units
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._heartbeat = heartbeat

    def find_running(self, *units: str) -> transient.TransientRun | None:
        """Return the first of these units that is running."""
        runs = (self._units.find_run(unit) for unit in units)
        return next((run for run in runs if run is not None and run.is_running), None)

    def wait_for_units(self, *units: str) -> None:
        """Wait until these units, which a killed agent may have started, end; release them."""
        for unit in units:
            self._units.wait_for_unit(unit, self._heartbeat)
            self._units.release_unit(unit)

    def run_job(
        self,
        unit: str,
        program: str,
        description: str,
        argv: tuple[str, ...],
        progress: Callable[[], deployments.TransactionProgress] = _report_nothing,
    ) -> None:
        """Run a job to its end, or join it if an earlier agent started it; release its unit.

        Raises `TransactionError` when it fails, with its error from the journal, and when it
        makes no progress for ``stall_s``.
        """
        failure = f"cannot {description} with {program}"
        last, changed_at = _report_nothing(), self._clock.monotonic()

        def check_progress() -> None:
            nonlocal last, changed_at
            self._heartbeat()
            if last != progress():
                last, changed_at = progress(), self._clock.monotonic()
                log.debug("%s: %s %s%%", description, last.text, last.percent)
            elif self._clock.monotonic() - changed_at >= self._limits.stall_s:
                self._units.stop_unit(unit, self._heartbeat)
                raise errors.TransactionError(
                    f"{failure}: no progress for {self._limits.stall_s:g} s",
                    remedy=f"see: journalctl -u {unit}",
                )

        earlier = self._units.find_run(unit)
        if earlier is not None and not earlier.is_running:
            # An agent was killed before it read the outcome. The caller reads the result from the
            # deployments, so this run does not matter any longer.
            self._units.release_unit(unit)
        job = transient.TransientJob(
            unit, f"treenail: {description}", argv, self._limits.transaction_s
        )
        run = self._units.run_job(job, check_progress)
        try:
            self.check_outcome(run, failure)
        finally:
            self._units.release_unit(unit)

    def check_outcome(self, run: transient.TransientRun, failure: str) -> None:
        """Raise `TransactionError`, which begins with ``failure``, unless the run succeeded."""
        if run.is_done:
            return
        # TimeoutStartSec= applies, as the unit is of Type=oneshot (systemd.service(5)).
        if run.result == "timeout":
            raise errors.TransactionError(
                f"{failure}: it timed out", remedy="see: journalctl -u treenail-*"
            )
        text = self._journal.read_error(run.invocation)
        raise errors.TransactionError(
            f"{failure}: {describe_failure(run, text)}",
            remedy=backend_settings.find_remedy(
                text, f"see: journalctl _SYSTEMD_INVOCATION_ID={run.invocation}"
            ),
        )


def describe_failure(run: transient.TransientRun, text: str) -> str:
    """Return why a run failed; ``text`` is the error that it printed, or its last line."""
    if run.result not in _KILLED:
        return text or f"systemd reports {run.result} {run.status}"
    name = f"signal {run.status}"
    with suppress(ValueError):
        name = signal.Signals(run.status).name
    killer = "the kernel, which ran out of memory, killed it" if run.result == "oom-kill" else ""
    cause = killer or f"{name} ended it"
    return f"{cause}; its last line: {text}" if text else cause
