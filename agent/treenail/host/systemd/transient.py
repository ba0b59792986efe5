"""Programs that run as transient units of systemd, and so outlive this process.

A unit has a fixed name, so there is at most one of it: who starts it a second time finds the
first. It stays loaded when its program has ended, until it is released, so that the outcome can
still be read by a later process (`RemainAfterExit`; a failed unit stays by itself).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail.errors import BusError, UnitError
from treenail.host.systemd.bus import Signal, Signals, SystemBus, Target, unit_properties

_NAME = "org.freedesktop.systemd1"
_MANAGER = Target(_NAME, "/org/freedesktop/systemd1", f"{_NAME}.Manager")
_NO_SUCH_UNIT = f"{_NAME}.NoSuchUnit"
_UNIT_EXISTS = f"{_NAME}.UnitExists"
_ALREADY_SUBSCRIBED = f"{_NAME}.AlreadySubscribed"
# The last ones if it goes between two questions.
_GONE = {
    _NO_SUCH_UNIT,
    "org.freedesktop.DBus.Error.UnknownObject",
    "org.freedesktop.DBus.Error.UnknownInterface",
    "org.freedesktop.DBus.Error.UnknownMethod",
}
_CALL_S = 60.0
_US = 1_000_000
_ON_THE_MOVE = {"activating", "deactivating", "reloading"}


@dataclass(frozen=True, slots=True)
class Job:
    """A program to run: ``unit`` is its name for systemd, ``what`` for people."""

    unit: str
    what: str
    argv: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """How a job is, or how it ended.

    ``result`` is systemd's: ``success``, ``exit-code``, ``signal``, ``timeout`` and others;
    ``status`` is the exit code or the signal, ``invocation`` names the run in the journal.
    """

    what: str
    running: bool
    result: str
    status: int
    invocation: str

    @property
    def matters(self) -> bool:
        """It runs or has ended well; one that failed is forgotten by the next."""
        return self.running or self.done

    @property
    def done(self) -> bool:
        """It has ended well."""
        return not self.running and self.result == "success"


class TransientUnits:
    """Starts and finds them. Raises `BusError`, `UnitError`; to be used by one thread."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    def find(self, unit: str) -> Run | None:
        """The run of this name; None when there is none, or it was released."""
        return self._look(unit, kept=False)

    def _look(self, unit: str, *, kept: bool) -> Run | None:
        """``kept``: one that is inactive is there as long as it is held."""
        try:
            path = str(self._bus.call(_MANAGER, "GetUnit", unit, timeout_s=_CALL_S))
            of_unit = self._properties(path, "Unit")
            of_service = self._properties(path, "Service")
        except BusError as error:
            if error.name in _GONE:
                return None
            raise
        state = of_unit.get("ActiveState")
        over = state == "inactive" and not _has_job(of_unit) and not kept
        if of_unit.get("LoadState") == "not-found" or over:
            return None
        invocation = of_unit.get("InvocationID")
        return Run(
            what=str(of_unit.get("Description")),
            running=state in _ON_THE_MOVE or _has_job(of_unit),
            result=str(of_service.get("Result")),
            status=int(str(of_service.get("ExecMainStatus") or 0)),
            invocation=bytes(invocation).hex() if isinstance(invocation, list | bytes) else "",
        )

    def run(self, job: Job, each: Callable[[], None]) -> Run:
        """Start the job, unless it runs or has run already, and return how it ended.

        ``each`` is called about once a second; what it raises ends the waiting, not the job.
        A run of that name for something else raises `UnitError`; one that failed is done again.
        """
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            found = self.find(job.unit)
            if found is not None and not found.matters:
                self._clear(job.unit, signals)
                found = None
            if found is None:
                self._start(job, {"RemainAfterExit": True})
                found = self.find(job.unit)
            if found is not None and found.what != job.what:
                raise UnitError(
                    f"{job.unit} is there for something else: {found.what}",
                    remedy=f"see: systemctl status {job.unit}",
                )
            ended = self._end_of(job.unit, signals, each)
        if ended is None:
            raise UnitError(f"{job.unit} was removed by somebody else during: {job.what}")
        return ended

    def once(self, job: Job, each: Callable[[], None]) -> Run:
        """Start the job, whose name nobody else uses, and return how it ended; nothing is left.

        It is forgotten when this process ends, too. ``each`` as for `run`.
        """
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            self._start(job, {"AddRef": True, "CollectMode": "inactive-or-failed"})
            try:
                ended = self._end_of(job.unit, signals, each, kept=True)
            finally:
                self._tolerant("UnrefUnit", job.unit)
        if ended is None:
            raise UnitError(f"{job.unit} was removed by somebody else during: {job.what}")
        return ended

    def wait(self, unit: str, each: Callable[[], None]) -> None:
        """Return once the job of this name, if there is one, has ended; ``each`` as for `run`."""
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            self._end_of(unit, signals, each)

    def stop(self, unit: str, each: Callable[[], None]) -> None:
        """End the job if it runs, and forget it; returns when it has ended."""
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            self._tolerant("StopUnit", unit, "replace")
            self._end_of(unit, signals, each)
            self._clear(unit, signals)

    def release(self, unit: str) -> None:
        """Forget a job that has ended; returns when its name is free."""
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            self._clear(unit, signals)

    def _clear(self, unit: str, signals: Signals) -> None:
        self._tolerant("StopUnit", unit, "replace")
        # systemd only begins to stop it; until it has, the name finds what is about to go.
        self._end_of(unit, signals, lambda: None)
        self._tolerant("ResetFailedUnit", unit)

    def _end_of(
        self, unit: str, signals: Signals, each: Callable[[], None], *, kept: bool = False
    ) -> Run | None:
        """The run once it runs no more; looked at once a second too, for systemd may restart."""
        ended: Run | None = None

        def over(signal: Signal | None) -> bool:
            nonlocal ended
            if signal is None:
                each()
            elif signal.member != "JobRemoved" or signal.values[2] != unit:
                return False
            ended = self._look(unit, kept=kept)
            return ended is None or not ended.running

        ended = self._look(unit, kept=kept)
        if ended is not None and ended.running and not signals.run(over):
            raise BusError(f"the system bus went away during: {ended.what}")
        return ended

    def _start(self, job: Job, lasting: Mapping[str, bool | str]) -> None:
        properties = unit_properties(
            job.argv,
            {
                "Description": job.what,
                "Type": "oneshot",
                **lasting,
                "TimeoutStartUSec": int(job.limit_s * _US),
                "SyslogIdentifier": job.unit.removesuffix(".service"),
            },
        )
        arguments: Sequence[object] = (job.unit, "fail", properties, [])
        try:
            self._bus.call(_MANAGER, "StartTransientUnit", *arguments, timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _UNIT_EXISTS:
                raise

    def _properties(self, path: str, kind: str) -> dict[str, object]:
        target = Target(_NAME, path, f"{_NAME}.{kind}")
        return self._bus.properties(target, timeout_s=_CALL_S)

    def _tolerant(self, method: str, *arguments: str) -> None:
        try:
            self._bus.call(_MANAGER, method, *arguments, timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _NO_SUCH_UNIT:
                raise

    @contextmanager
    def _subscribed(self) -> Iterator[None]:
        try:
            self._bus.call(_MANAGER, "Subscribe", timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _ALREADY_SUBSCRIBED:
                raise
        try:
            yield
        finally:
            with suppress(BusError):  # then systemd forgot us, or will when we leave the bus
                self._bus.call(_MANAGER, "Unsubscribe", timeout_s=_CALL_S)


def _has_job(unit: dict[str, object]) -> bool:
    """A unit that was only just asked for is inactive still."""
    job = unit.get("Job")
    return isinstance(job, tuple) and job[0] != 0
