"""Jobs of systemd that are run to their end, whoever began them, and told about when they fail."""

import logging
from collections.abc import Callable

from treenail.clock import Clock
from treenail.errors import TransactionError
from treenail.host.ostree.deployments import Progress
from treenail.host.ostree.remedies import remedy_for
from treenail.host.ostree.watch import Limits
from treenail.host.systemd.journal import Journal
from treenail.host.systemd.transient import Job, Run, TransientUnits

log = logging.getLogger(__name__)


def _silent() -> Progress:
    return Progress("", None)


class Jobs:
    """Raises `BusError`, `UnitError` and `TransactionError`; to be used by one thread."""

    def __init__(
        self,
        units: TransientUnits,
        journal: Journal,
        clock: Clock,
        limits: Limits,
        *,
        alive: Callable[[], None],
        who: str = "bootc",
    ) -> None:
        """``alive`` is called once a second while something runs; ``who`` it is, for people."""
        self._who = who
        self._units = units
        self._journal = journal
        self._clock = clock
        self._limits = limits
        self._alive = alive

    def running(self, *units: str) -> Run | None:
        """The first of these that runs."""
        runs = (self._units.find(unit) for unit in units)
        return next((run for run in runs if run is not None and run.running), None)

    def wait(self, *units: str) -> None:
        """Return once these, which an agent that died may have begun, have ended."""
        for unit in units:
            self._units.wait(unit, self._alive)
            self._units.release(unit)

    def carry_out(
        self,
        unit: str,
        what: str,
        argv: tuple[str, ...],
        progress: Callable[[], Progress] = _silent,
    ) -> None:
        """Run it to its end, whoever began it; the next one of its name is another run.

        Raises `TransactionError` with what it told the journal when it fails, and when it has
        made no progress for as long as the limits allow.
        """
        told, heard = _silent(), self._clock.monotonic()

        def each() -> None:
            nonlocal told, heard
            self._alive()
            if told != progress():
                told, heard = progress(), self._clock.monotonic()
                log.debug("%s: %s %s%%", what, told.text, told.percent)
            elif self._clock.monotonic() - heard >= self._limits.stall_s:
                self._units.stop(unit, self._alive)
                silent = f"it has said nothing for {self._limits.stall_s:g} s"
                raise TransactionError(
                    f"{self._who} could not {what}: {silent}",
                    remedy=f"see: journalctl -u {unit}",
                )

        found = self._units.find(unit)
        if found is not None and not found.running:
            # Of an agent that died before it had read the outcome: what became of it is seen.
            self._units.release(unit)
        job = Job(unit, f"treenail: {what}", argv, self._limits.transaction_s)
        run = self._units.run(job, each)
        try:
            self.check(run, f"{self._who} could not {what}")
        finally:
            self._units.release(unit)

    def check(self, run: Run, failed: str) -> None:
        """Raise `TransactionError`, which begins with ``failed``, unless the run ended well."""
        if run.done:
            return
        if run.result == "timeout":
            raise TransactionError(
                f"{failed}: it was not done in time", remedy="see: journalctl -u treenail-*"
            )
        text = self._journal.error_of(run.invocation)
        raise TransactionError(
            f"{failed}: {text or f'it ended with {run.result} {run.status}'}",
            remedy=remedy_for(text, f"see: journalctl _SYSTEMD_INVOCATION_ID={run.invocation}"),
        )
