"""systemd: unit files and units."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail.clock import Clock
from treenail.errors import BusError, UnitError
from treenail.host.systemd.bus import Signal, SystemBus, Target

_NAME = "org.freedesktop.systemd1"
_MANAGER = Target(_NAME, "/org/freedesktop/systemd1", f"{_NAME}.Manager")
_ALREADY_SUBSCRIBED = f"{_NAME}.AlreadySubscribed"
# Reloading runs every generator, for at most 90 s.
_CALL_S = 120.0
# Longer than most units' own limits, which say better what went wrong.
_JOB_S = 300.0
# The arguments "runtime", and "force" where there is one.
_FOR_GOOD = (False,)
_GENTLY = (False, False)
_DEFAULT_TARGET = "default.target"
# A unit that a condition keeps from starting is skipped, and that is what its author wanted.
_WELL = ("done", "skipped")


@dataclass(frozen=True, slots=True)
class Unit:
    """What systemd knows of a unit; ``load`` is ``not-found`` when there is no file of it."""

    name: str
    load: str
    active: str
    sub: str
    path: str


class Systemd:
    """The service manager. Raises `UnitError` and `BusError`; to be used by one thread.

    What changes unit files does not reload: call `reload` afterwards, once.
    """

    def __init__(self, bus: SystemBus, clock: Clock, *, job_s: float = _JOB_S) -> None:
        """``job_s``: how long starting, stopping and the like may take."""
        self._bus = bus
        self._clock = clock
        self._job_s = job_s

    def soft_reboots(self) -> int | None:
        """How many there were since the kernel was started; None if systemd does not count them.

        It does so from 256 on; 254 and 255 reboot softly, and nobody can tell afterwards.
        """
        count = self._bus.properties(_MANAGER, timeout_s=_CALL_S).get("SoftRebootsCount")
        return count if isinstance(count, int) else None

    def started_at(self) -> float:
        """When user space was started, in seconds since the epoch; 0 if systemd does not say."""
        at = self._bus.properties(_MANAGER, timeout_s=_CALL_S).get("UserspaceTimestamp")
        return at / 1e6 if isinstance(at, int) else 0.0

    def reload(self) -> None:
        """Read all unit files anew."""
        self._bus.call(_MANAGER, "Reload", timeout_s=_CALL_S)

    def enable(self, *units: str) -> None:
        """As ``systemctl enable``, for good."""
        self._change("EnableUnitFiles", "enable", units, *_GENTLY)

    def disable(self, *units: str) -> None:
        """As ``systemctl disable``, for good."""
        self._change("DisableUnitFiles", "disable", units, *_FOR_GOOD)

    def mask(self, *units: str) -> None:
        """As ``systemctl mask``, for good."""
        self._change("MaskUnitFiles", "mask", units, *_GENTLY)

    def unmask(self, *units: str) -> None:
        """As ``systemctl unmask``."""
        self._change("UnmaskUnitFiles", "unmask", units, *_FOR_GOOD)

    def preset(self, *units: str) -> None:
        """As ``systemctl preset``, for good: enable or disable as the vendor says."""
        self._change("PresetUnitFiles", "preset", units, *_GENTLY)

    def unit_file_state(self, unit: str) -> str:
        """As ``systemctl is-enabled``, such as ``enabled`` or ``masked``; empty without a file."""
        try:
            state = self._bus.call(_MANAGER, "GetUnitFileState", unit, timeout_s=_CALL_S)
        except BusError as error:
            if error.name == "org.freedesktop.DBus.Error.FileNotFound":
                return ""
            raise _refused(error, "read the state of", unit) from error
        return str(state)

    def units(self, *names: str) -> tuple[Unit, ...]:
        """The units of these names, as they are now."""
        found = self._bus.call(_MANAGER, "ListUnitsByNames", list(names), timeout_s=_CALL_S)
        return tuple(_unit(row) for row in found) if isinstance(found, list) else ()

    def start(self, unit: str) -> None:
        """Return once it is started."""
        self._job("StartUnit", "start", unit)

    def start_default(self) -> None:
        """Have begun whatever the default target wants and does not run; returns at once."""
        try:
            self._bus.call(_MANAGER, "StartUnit", _DEFAULT_TARGET, "replace", timeout_s=_CALL_S)
        except BusError as error:
            raise _refused(error, "start", _DEFAULT_TARGET) from error

    def stop(self, unit: str) -> None:
        """Return once it is stopped."""
        self._job("StopUnit", "stop", unit)

    def restart(self, unit: str) -> None:
        """Return once it is stopped, if it ran, and started."""
        self._job("RestartUnit", "restart", unit)

    def try_restart(self, unit: str) -> None:
        """Return once it is restarted; nothing happens if it does not run."""
        self._job("TryRestartUnit", "restart", unit)

    def reload_unit(self, unit: str) -> None:
        """Return once it has read its configuration anew."""
        self._job("ReloadUnit", "reload", unit)

    def _change(self, method: str, verb: str, units: tuple[str, ...], *flags: bool) -> None:
        try:
            self._bus.call(_MANAGER, method, list(units), *flags, timeout_s=_CALL_S)
        except BusError as error:
            raise _refused(error, verb, ", ".join(units)) from error

    def _job(self, method: str, verb: str, unit: str) -> None:
        deadline = self._clock.monotonic() + self._job_s
        result = ""
        with self._subscribed(), self._bus.signals(_MANAGER) as signals:
            try:
                job = self._bus.call(_MANAGER, method, unit, "replace", timeout_s=_CALL_S)
            except BusError as error:
                raise _refused(error, verb, unit) from error

            def over(signal: Signal | None) -> bool:
                nonlocal result
                match signal:
                    case Signal("JobRemoved", (_, removed, _, str(how))) if removed == job:
                        result = how
                        return True
                return self._clock.monotonic() >= deadline

            if not signals.run(over):
                raise BusError(f"the system bus went away while systemd was to {verb} {unit}")
        if not result:
            raise UnitError(
                f"systemd did not {verb} {unit} within {self._job_s:g} s",
                remedy="see: systemctl list-jobs",
            )
        if result not in _WELL:
            raise UnitError(
                f"systemd could not {verb} {unit}: the job is {result}{self._reason(unit)}",
                remedy=f"see: systemctl status {unit}; journalctl -u {unit}",
            )

    @contextmanager
    def _subscribed(self) -> Iterator[None]:
        # Only subscribers are told of jobs; and while subscribed, one is told of everything.
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

    def _reason(self, name: str) -> str:
        """The unit's own Result, for the end of a sentence; not all kinds of units have one."""
        for unit in self.units(name):
            kind = name.rpartition(".")[2].capitalize()
            try:
                found = self._bus.properties(
                    Target(_NAME, unit.path, f"{_NAME}.{kind}"), timeout_s=_CALL_S
                )
            except BusError:
                return ""
            reason = found.get("Result")
            status = found.get("ExecMainStatus")
            if reason:
                return f", its result {reason}" + (f", status {status}" if status else "")
        return ""


def _unit(row: tuple[object, ...]) -> Unit:
    name, _description, load, active, sub, _following, path, *_job = map(str, row)
    return Unit(name=name, load=load, active=active, sub=sub, path=path)


def _refused(error: BusError, verb: str, unit: str) -> UnitError | BusError:
    if not error.name:
        return error
    return UnitError(f"systemd refuses to {verb} {unit}: {error}", remedy=error.remedy)
