"""Programs that run as transient units of systemd, and so outlive this process.

A unit has a fixed name, so there is at most one of it: who starts it a second time finds the
first. It stays loaded when its program has ended, until it is released, so that the outcome can
still be read by a later process (`RemainAfterExit`; a failed unit stays by itself).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail.errors import BusError, UnitError
from treenail.host.systemd.bus import (
    BusInterface,
    BusSignal,
    BusSignals,
    SystemBus,
    make_unit_properties,
)

_NAME = "org.freedesktop.systemd1"
_MANAGER = BusInterface(_NAME, "/org/freedesktop/systemd1", f"{_NAME}.Manager")
_NO_SUCH_UNIT = f"{_NAME}.NoSuchUnit"
_UNIT_EXISTS = f"{_NAME}.UnitExists"
_ALREADY_SUBSCRIBED = f"{_NAME}.AlreadySubscribed"
# The last ones if it goes between two questions.
_UNIT_GONE = {
    _NO_SUCH_UNIT,
    "org.freedesktop.DBus.Error.UnknownObject",
    "org.freedesktop.DBus.Error.UnknownInterface",
    "org.freedesktop.DBus.Error.UnknownMethod",
}
_CALL_S = 60.0
_MICROSECONDS = 1_000_000
_CHANGING_STATES = {"activating", "deactivating", "reloading"}


@dataclass(frozen=True, slots=True)
class TransientJob:
    """A program to run: ``unit`` is its name for systemd, ``description`` for people."""

    unit: str
    description: str
    argv: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TransientRun:
    """How a job is, or how it ended.

    ``result`` is systemd's: ``success``, ``exit-code``, ``signal``, ``timeout`` and others;
    ``status`` is the exit code or the signal, ``invocation`` names the run in the journal.
    """

    description: str
    is_running: bool
    result: str
    status: int
    invocation: str

    @property
    def is_running_or_done(self) -> bool:
        """It runs or has ended well; one that failed is forgotten by the next."""
        return self.is_running or self.is_done

    @property
    def is_done(self) -> bool:
        """It has ended well."""
        return not self.is_running and self.result == "success"


class TransientUnits:
    """Starts and finds them. Raises `BusError`, `UnitError`; to be used by one thread."""

    def __init__(self, bus: SystemBus) -> None:
        self._bus = bus

    def find_run(self, unit: str) -> TransientRun | None:
        """The run of this name; None when there is none, or it was released."""
        return self._read_run(unit, is_referenced=False)

    def _read_run(self, unit: str, *, is_referenced: bool) -> TransientRun | None:
        """``is_referenced``: one that is inactive is there as long as it is held."""
        try:
            path = str(self._bus.call_method(_MANAGER, "GetUnit", unit, timeout_s=_CALL_S))
            of_unit = self._get_properties(path, "Unit")
            of_service = self._get_properties(path, "Service")
        except BusError as error:
            if error.name in _UNIT_GONE:
                return None
            raise
        state = of_unit.get("ActiveState")
        over = state == "inactive" and not _has_job(of_unit) and not is_referenced
        if of_unit.get("LoadState") == "not-found" or over:
            return None
        invocation = of_unit.get("InvocationID")
        return TransientRun(
            description=str(of_unit.get("Description")),
            is_running=state in _CHANGING_STATES or _has_job(of_unit),
            result=str(of_service.get("Result")),
            status=int(str(of_service.get("ExecMainStatus") or 0)),
            invocation=bytes(invocation).hex() if isinstance(invocation, list | bytes) else "",
        )

    def run_job(self, job: TransientJob, on_tick: Callable[[], None]) -> TransientRun:
        """Start the job, unless it runs or has run already, and return how it ended.

        ``on_tick`` is called about once a second; what it raises ends the waiting, not the job.
        A run of that name for something else raises `UnitError`; one that failed is done again.
        """
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            found = self.find_run(job.unit)
            if found is not None and not found.is_running_or_done:
                self._clear_unit(job.unit, signals)
                found = None
            if found is None:
                self._start_unit(job, {"RemainAfterExit": True})
                found = self.find_run(job.unit)
            if found is not None and found.description != job.description:
                raise UnitError(
                    f"{job.unit} is there for something else: {found.description}",
                    remedy=f"see: systemctl status {job.unit}",
                )
            ended = self._wait_for_end(job.unit, signals, on_tick)
        if ended is None:
            raise UnitError(f"{job.unit} was removed by somebody else during: {job.description}")
        return ended

    def run_once(self, job: TransientJob, on_tick: Callable[[], None]) -> TransientRun:
        """Start the job, whose name nobody else uses, and return how it ended; nothing is left.

        It is forgotten when this process ends, too. ``on_tick`` as for `run_job`.
        """
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            self._start_unit(job, {"AddRef": True, "CollectMode": "inactive-or-failed"})
            try:
                ended = self._wait_for_end(job.unit, signals, on_tick, is_referenced=True)
            finally:
                self._call_if_loaded("UnrefUnit", job.unit)
        if ended is None:
            raise UnitError(f"{job.unit} was removed by somebody else during: {job.description}")
        return ended

    def wait_for_unit(self, unit: str, on_tick: Callable[[], None]) -> None:
        """Return once the job of this name, if there is one, has ended; ``on_tick`` as for `run_job`."""
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            self._wait_for_end(unit, signals, on_tick)

    def stop_unit(self, unit: str, on_tick: Callable[[], None]) -> None:
        """End the job if it runs, and forget it; returns when it has ended."""
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            self._call_if_loaded("StopUnit", unit, "replace")
            self._wait_for_end(unit, signals, on_tick)
            self._clear_unit(unit, signals)

    def release_unit(self, unit: str) -> None:
        """Forget a job that has ended; returns when its name is free."""
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            self._clear_unit(unit, signals)

    def _clear_unit(self, unit: str, signals: BusSignals) -> None:
        self._call_if_loaded("StopUnit", unit, "replace")
        # systemd only begins to stop it; until it has, the name finds what is about to go.
        self._wait_for_end(unit, signals, lambda: None)
        self._call_if_loaded("ResetFailedUnit", unit)

    def _wait_for_end(
        self,
        unit: str,
        signals: BusSignals,
        on_tick: Callable[[], None],
        *,
        is_referenced: bool = False,
    ) -> TransientRun | None:
        """The run once it runs no more; looked at once a second too, for systemd may restart."""
        ended: TransientRun | None = None

        def over(signal: BusSignal | None) -> bool:
            nonlocal ended
            if signal is None:
                on_tick()
            elif signal.member != "JobRemoved" or signal.values[2] != unit:
                return False
            ended = self._read_run(unit, is_referenced=is_referenced)
            return ended is None or not ended.is_running

        ended = self._read_run(unit, is_referenced=is_referenced)
        if ended is not None and ended.is_running and not signals.run_until(over):
            raise BusError(f"the system bus went away during: {ended.description}")
        return ended

    def _start_unit(self, job: TransientJob, lifetime: Mapping[str, bool | str]) -> None:
        properties = make_unit_properties(
            job.argv,
            {
                "Description": job.description,
                "Type": "oneshot",
                **lifetime,
                "TimeoutStartUSec": int(job.timeout_s * _MICROSECONDS),
                "SyslogIdentifier": job.unit.removesuffix(".service"),
            },
        )
        arguments: Sequence[object] = (job.unit, "fail", properties, [])
        try:
            self._bus.call_method(_MANAGER, "StartTransientUnit", *arguments, timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _UNIT_EXISTS:
                raise

    def _get_properties(self, path: str, kind: str) -> dict[str, object]:
        target = BusInterface(_NAME, path, f"{_NAME}.{kind}")
        return self._bus.read_properties(target, timeout_s=_CALL_S)

    def _call_if_loaded(self, method: str, *arguments: str) -> None:
        try:
            self._bus.call_method(_MANAGER, method, *arguments, timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _NO_SUCH_UNIT:
                raise

    @contextmanager
    def _subscribe_manager(self) -> Iterator[None]:
        try:
            self._bus.call_method(_MANAGER, "Subscribe", timeout_s=_CALL_S)
        except BusError as error:
            if error.name != _ALREADY_SUBSCRIBED:
                raise
        try:
            yield
        finally:
            with suppress(BusError):  # then systemd forgot us, or will when we leave the bus
                self._bus.call_method(_MANAGER, "Unsubscribe", timeout_s=_CALL_S)


def _has_job(unit: dict[str, object]) -> bool:
    """A unit that was only just asked for is inactive still."""
    job = unit.get("Job")
    return isinstance(job, tuple) and job[0] != 0
