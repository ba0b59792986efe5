"""Jobs of systemd that are run to their end, whoever began them, and told about when they fail."""

import logging
from collections.abc import Callable

from treenail.clock import Clock
from treenail.errors import TransactionError
from treenail.host.ostree.deployments import TransactionProgress
from treenail.host.ostree.remedies import find_remedy
from treenail.host.ostree.watch import TransactionLimits
from treenail.host.systemd.journal import SystemdJournal
from treenail.host.systemd.transient import TransientJob, TransientRun, TransientUnits

log = logging.getLogger(__name__)


def _report_nothing() -> TransactionProgress:
    return TransactionProgress("", None)


class JobRunner:
    """Raises `BusError`, `UnitError` and `TransactionError`; to be used by one thread."""

    def __init__(
        self,
        units: TransientUnits,
        journal: SystemdJournal,
        clock: Clock,
        limits: TransactionLimits,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """``heartbeat`` is called once a second while a job runs."""
        self._units = units
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._heartbeat = heartbeat

    def find_running(self, *units: str) -> TransientRun | None:
        """The first of these that runs."""
        runs = (self._units.find_run(unit) for unit in units)
        return next((run for run in runs if run is not None and run.is_running), None)

    def wait_for_units(self, *units: str) -> None:
        """Return once these, which an agent that died may have begun, have ended."""
        for unit in units:
            self._units.wait_for_unit(unit, self._heartbeat)
            self._units.release_unit(unit)

    def run_job(
        self,
        unit: str,
        program: str,
        description: str,
        argv: tuple[str, ...],
        progress: Callable[[], TransactionProgress] = _report_nothing,
    ) -> None:
        """Run it to its end, whoever began it; the next one of its name is another run.

        Raises `TransactionError` with what it told the journal when it fails, and when it has
        made no progress for as long as the limits allow.
        """
        told, heard = _report_nothing(), self._clock.monotonic()

        def each() -> None:
            nonlocal told, heard
            self._heartbeat()
            if told != progress():
                told, heard = progress(), self._clock.monotonic()
                log.debug("%s: %s %s%%", description, told.text, told.percent)
            elif self._clock.monotonic() - heard >= self._limits.stall_s:
                self._units.stop_unit(unit, self._heartbeat)
                silent = f"it has said nothing for {self._limits.stall_s:g} s"
                raise TransactionError(
                    f"{program} could not {description}: {silent}",
                    remedy=f"see: journalctl -u {unit}",
                )

        found = self._units.find_run(unit)
        if found is not None and not found.is_running:
            # Of an agent that died before it had read the outcome: what became of it is seen.
            self._units.release_unit(unit)
        job = TransientJob(unit, f"treenail: {description}", argv, self._limits.transaction_s)
        run = self._units.run_job(job, each)
        try:
            self.check_outcome(run, f"{program} could not {description}")
        finally:
            self._units.release_unit(unit)

    def check_outcome(self, run: TransientRun, failure: str) -> None:
        """Raise `TransactionError`, which begins with ``failure``, unless the run ended well."""
        if run.is_done:
            return
        if run.result == "timeout":
            raise TransactionError(
                f"{failure}: it was not done in time", remedy="see: journalctl -u treenail-*"
            )
        text = self._journal.read_error(run.invocation)
        raise TransactionError(
            f"{failure}: {text or f'it ended with {run.result} {run.status}'}",
            remedy=find_remedy(text, f"see: journalctl _SYSTEMD_INVOCATION_ID={run.invocation}"),
        )
