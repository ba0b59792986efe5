"""systemd: units, unit files and jobs (org.freedesktop.systemd1(5)).

The state of the system clock is that of timedated (org.freedesktop.timedate1(5)).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail import clocks, errors, retry
from treenail.host.systemd import system_bus

SYSTEMD_NAME = "org.freedesktop.systemd1"
MANAGER = system_bus.BusInterface(
    SYSTEMD_NAME, "/org/freedesktop/systemd1", f"{SYSTEMD_NAME}.Manager"
)
_TIMEDATE_NAME = "org.freedesktop.timedate1"
_TIMEDATE = system_bus.BusInterface(_TIMEDATE_NAME, "/org/freedesktop/timedate1", _TIMEDATE_NAME)
_ALREADY_SUBSCRIBED = f"{SYSTEMD_NAME}.AlreadySubscribed"
# A daemon-reload runs every generator, for at most 90 s.
_CALL_S = 120.0
# Longer than the start limit of most units (90 s): its error names the cause.
_JOB_S = 300.0
_TIMEDATE_CALL_S = 10.0
# The arguments "runtime" and, where a method has it, "force".
_PERSISTENT = (False,)
_PERSISTENT_NO_FORCE = (False, False)
_DEFAULT_TARGET = "default.target"
# A unit whose Condition...= is not met is skipped. Its author intends that.
_SUCCESS_RESULTS = ("done", "skipped")


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """A unit in systemd; ``load_state`` is ``not-found`` without a unit file."""

    name: str
    load_state: str
    active_state: str
    sub_state: str
    path: str


class Systemd:
    """The service manager. Raises `UnitError` and `BusError`. For one thread.

    After changes of unit files call `reload_daemon`, once.
    """

    def __init__(
        self, bus: system_bus.SystemBus, clock: clocks.Clock, *, job_s: float = _JOB_S
    ) -> None:
        """``job_s`` is the time limit of one job."""
        self._bus = bus
        self._clock = clock
        self._job_s = job_s

    def count_soft_reboots(self) -> int | None:
        """Return the number of soft reboots since the kernel started; None if systemd has none.

        systemd counts them from version 256 on, and reboots softly from 254 on.
        """
        count = self._bus.read_properties(MANAGER, timeout_s=_CALL_S).get("SoftRebootsCount")
        return count if isinstance(count, int) else None

    def read_userspace_start(self) -> float:
        """Return the start of user space in seconds since the epoch; 0 if systemd has none."""
        # Microseconds of CLOCK_REALTIME (org.freedesktop.systemd1(5)).
        start = self._bus.read_properties(MANAGER, timeout_s=_CALL_S).get("UserspaceTimestamp")
        return start / 1e6 if isinstance(start, int) else 0.0

    def reload_daemon(self) -> None:
        """Read all unit files again, as ``systemctl daemon-reload`` does."""
        self._bus.call_method(MANAGER, "Reload", timeout_s=_CALL_S)

    def enable_units(self, *units: str) -> None:
        """Act as ``systemctl enable``."""
        self._change_unit_files("EnableUnitFiles", "enable", units, *_PERSISTENT_NO_FORCE)

    def disable_units(self, *units: str) -> None:
        """Act as ``systemctl disable``."""
        self._change_unit_files("DisableUnitFiles", "disable", units, *_PERSISTENT)

    def preset_units(self, *units: str) -> None:
        """Act as ``systemctl preset``: enable or disable by the presets of the vendor."""
        self._change_unit_files("PresetUnitFiles", "preset", units, *_PERSISTENT_NO_FORCE)

    def read_unit_file_state(self, unit: str) -> str:
        """Return the state of ``systemctl is-enabled``; empty without a unit file."""
        try:
            state = self._bus.call_method(MANAGER, "GetUnitFileState", unit, timeout_s=_CALL_S)
        except errors.BusError as error:
            if error.name == "org.freedesktop.DBus.Error.FileNotFound":
                return ""
            raise _make_unit_error(error, "read the state of", unit) from error
        return str(state)

    def read_states(self, *units: str) -> dict[str, str]:
        """Return the state of each unit as `read_unit_file_state` does."""
        return {unit: self.read_unit_file_state(unit) for unit in units}

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        """Return the current state of the units."""
        # It also answers for units that are not loaded or do not exist.
        rows = self._bus.call_method(MANAGER, "ListUnitsByNames", list(names), timeout_s=_CALL_S)
        return tuple(_parse_unit(row) for row in rows) if isinstance(rows, list) else ()

    def start_default_target(self) -> None:
        """Queue the start of all units of the default target that do not run; do not wait."""
        try:
            self._bus.call_method(
                MANAGER, "StartUnit", _DEFAULT_TARGET, "replace", timeout_s=_CALL_S
            )
        except errors.BusError as error:
            raise _make_unit_error(error, "start", _DEFAULT_TARGET) from error

    def restart_unit(self, unit: str) -> None:
        """Start the unit, or restart it if it runs, and wait for the job."""
        self._run_job("RestartUnit", "restart", unit)

    def reload_unit(self, unit: str) -> None:
        """Make the unit read its configuration again, and wait for the job."""
        self._run_job("ReloadUnit", "reload", unit)

    def _change_unit_files(
        self, method: str, verb: str, units: tuple[str, ...], *flags: bool
    ) -> None:
        try:
            # Unlike systemctl(1) these methods do not reload systemd.
            self._bus.call_method(MANAGER, method, list(units), *flags, timeout_s=_CALL_S)
        except errors.BusError as error:
            raise _make_unit_error(error, verb, ", ".join(units)) from error

    def _run_job(self, method: str, verb: str, unit: str) -> None:
        deadline = self._clock.monotonic() + self._job_s
        result = ""
        with receive_manager_signals(self._bus) as signals:
            try:
                # Subscribed before the call: a short job may end before the reply arrives.
                job = self._bus.call_method(MANAGER, method, unit, "replace", timeout_s=_CALL_S)
            except errors.BusError as error:
                raise _make_unit_error(error, verb, unit) from error

            def is_over(signal: system_bus.BusSignal | None) -> bool:
                nonlocal result
                match signal:
                    # The number of the job, its path, its unit and its result.
                    case system_bus.BusSignal("JobRemoved", (_, removed, _, str(job_result))) if (
                        removed == job
                    ):
                        result = job_result
                        return True
                return self._clock.monotonic() >= deadline

            if not signals.run_until(is_over):
                raise errors.BusError(f"cannot {verb} {unit}: the system bus closed the connection")
        if not result:
            raise errors.UnitError(
                f"cannot {verb} {unit}: the job did not end within {self._job_s:g} s",
                remedy="see what it waits for: systemctl list-jobs",
            )
        if result not in _SUCCESS_RESULTS:
            raise errors.UnitError(
                f"cannot {verb} {unit}: job {result}{self._describe_result(unit)}",
                remedy=f"see: systemctl status {unit}; journalctl -u {unit}",
            )

    def _describe_result(self, name: str) -> str:
        """Return the Result of the unit for the end of a sentence; empty where there is none."""
        for unit in self.list_units(name):
            kind = name.rpartition(".")[2].capitalize()
            interface = system_bus.BusInterface(SYSTEMD_NAME, unit.path, f"{SYSTEMD_NAME}.{kind}")
            try:
                properties = self._bus.read_properties(interface, timeout_s=_CALL_S)
            except errors.BusError:
                return ""
            result = properties.get("Result")
            status = properties.get("ExecMainStatus")
            if result:
                return f", result {result}" + (f", status {status}" if status else "")
        return ""


@contextmanager
def receive_manager_signals(bus: system_bus.SystemBus) -> Iterator[system_bus.BusSignals]:
    """Subscribe to the signals of systemd: it sends JobRemoved to subscribers only.

    The subscription brings every other signal of the manager too, so it ends with the context.
    """
    try:
        bus.call_method(MANAGER, "Subscribe", timeout_s=_CALL_S)
    except errors.BusError as error:
        if error.name != _ALREADY_SUBSCRIBED:
            raise
    try:
        with bus.receive_signals(MANAGER) as signals:
            yield signals
    finally:
        with suppress(errors.BusError):  # systemd drops subscribers that leave the bus
            bus.call_method(MANAGER, "Unsubscribe", timeout_s=_CALL_S)


def _parse_unit(row: tuple[object, ...]) -> SystemdUnit:
    try:
        name, _description, load, active, sub, _following, path, *_job = map(str, row)
    except (TypeError, ValueError) as error:
        raise errors.BusError(
            f"cannot list units: {SYSTEMD_NAME} describes a unit in another way",
            remedy="update treenail: it does not know this version of systemd",
        ) from error
    return SystemdUnit(name=name, load_state=load, active_state=active, sub_state=sub, path=path)


def _make_unit_error(
    error: errors.BusError, verb: str, unit: str
) -> errors.UnitError | errors.BusError:
    # Without a name there was no reply, and other names come from the bus: systemd did not decide
    # about the unit. It leaves the bus for a moment while it executes itself again.
    if not error.name or retry.is_service_starting(error):
        return error
    return errors.UnitError(f"cannot {verb} {unit}: {error}", remedy=error.remedy)


class Timedate:
    """The system clock. timedated asks the kernel: ProtectClock= denies the agent adjtimex(2)."""

    def __init__(self, bus: system_bus.SystemBus) -> None:
        self._bus = bus

    def is_synchronized(self) -> bool | None:
        """Return whether the clock is synchronized by NTP; None when timedated does not answer."""
        try:
            value = self._bus.read_properties(_TIMEDATE, timeout_s=_TIMEDATE_CALL_S).get(
                "NTPSynchronized"
            )
        except errors.BusError:
            return None
        return value if isinstance(value, bool) else None
