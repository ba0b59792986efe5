"""systemd: unit files and units."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from treenail.clock import Clock
from treenail.errors import BusError, UnitError
from treenail.host.systemd.bus import BusInterface, BusSignal, SystemBus

_NAME = "org.freedesktop.systemd1"
_MANAGER = BusInterface(_NAME, "/org/freedesktop/systemd1", f"{_NAME}.Manager")
_ALREADY_SUBSCRIBED = f"{_NAME}.AlreadySubscribed"
# Reloading runs every generator, for at most 90 s.
_CALL_S = 120.0
# Longer than most units' own limits, which say better what went wrong.
_JOB_S = 300.0
# The arguments "runtime", and "force" where there is one.
_PERSISTENT = (False,)
_PERSISTENT_NO_FORCE = (False, False)
_DEFAULT_TARGET = "default.target"
# A unit that a condition keeps from starting is skipped, and that is what its author wanted.
_SUCCESS_RESULTS = ("done", "skipped")


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """What systemd knows of a unit; ``load_state`` is ``not-found`` when there is no file of it."""

    name: str
    load_state: str
    active_state: str
    sub_state: str
    path: str


class Systemd:
    """The service manager. Raises `UnitError` and `BusError`; to be used by one thread.

    What changes unit files does not reload: call `reload_daemon` afterwards, once.
    """

    def __init__(self, bus: SystemBus, clock: Clock, *, job_s: float = _JOB_S) -> None:
        """``job_s``: how long starting, stopping and the like may take."""
        self._bus = bus
        self._clock = clock
        self._job_s = job_s

    def count_soft_reboots(self) -> int | None:
        """How many there were since the kernel was started; None if systemd does not count them.

        It does so from 256 on; 254 and 255 reboot softly, and nobody can tell afterwards.
        """
        count = self._bus.read_properties(_MANAGER, timeout_s=_CALL_S).get("SoftRebootsCount")
        return count if isinstance(count, int) else None

    def read_userspace_start(self) -> float:
        """When user space was started, in seconds since the epoch; 0 if systemd does not say."""
        at = self._bus.read_properties(_MANAGER, timeout_s=_CALL_S).get("UserspaceTimestamp")
        return at / 1e6 if isinstance(at, int) else 0.0

    def reload_daemon(self) -> None:
        """Read all unit files anew."""
        self._bus.call_method(_MANAGER, "Reload", timeout_s=_CALL_S)

    def enable_units(self, *units: str) -> None:
        """As ``systemctl enable``, for good."""
        self._change_unit_files("EnableUnitFiles", "enable", units, *_PERSISTENT_NO_FORCE)

    def disable_units(self, *units: str) -> None:
        """As ``systemctl disable``, for good."""
        self._change_unit_files("DisableUnitFiles", "disable", units, *_PERSISTENT)

    def mask_units(self, *units: str) -> None:
        """As ``systemctl mask``, for good."""
        self._change_unit_files("MaskUnitFiles", "mask", units, *_PERSISTENT_NO_FORCE)

    def unmask_units(self, *units: str) -> None:
        """As ``systemctl unmask``."""
        self._change_unit_files("UnmaskUnitFiles", "unmask", units, *_PERSISTENT)

    def preset_units(self, *units: str) -> None:
        """As ``systemctl preset``, for good: enable or disable as the vendor says."""
        self._change_unit_files("PresetUnitFiles", "preset", units, *_PERSISTENT_NO_FORCE)

    def read_unit_file_state(self, unit: str) -> str:
        """As ``systemctl is-enabled``, such as ``enabled`` or ``masked``; empty without a file."""
        try:
            state = self._bus.call_method(_MANAGER, "GetUnitFileState", unit, timeout_s=_CALL_S)
        except BusError as error:
            if error.name == "org.freedesktop.DBus.Error.FileNotFound":
                return ""
            raise _make_refusal(error, "read the state of", unit) from error
        return str(state)

    def list_units(self, *names: str) -> tuple[SystemdUnit, ...]:
        """The units of these names, as they are now."""
        found = self._bus.call_method(_MANAGER, "ListUnitsByNames", list(names), timeout_s=_CALL_S)
        return tuple(_parse_unit(row) for row in found) if isinstance(found, list) else ()

    def start_unit(self, unit: str) -> None:
        """Return once it is started."""
        self._run_job("StartUnit", "start", unit)

    def start_default_target(self) -> None:
        """Have begun whatever the default target wants and does not run; returns at once."""
        try:
            self._bus.call_method(
                _MANAGER, "StartUnit", _DEFAULT_TARGET, "replace", timeout_s=_CALL_S
            )
        except BusError as error:
            raise _make_refusal(error, "start", _DEFAULT_TARGET) from error

    def stop_unit(self, unit: str) -> None:
        """Return once it is stopped."""
        self._run_job("StopUnit", "stop", unit)

    def restart_unit(self, unit: str) -> None:
        """Return once it is stopped, if it ran, and started."""
        self._run_job("RestartUnit", "restart", unit)

    def try_restart_unit(self, unit: str) -> None:
        """Return once it is restarted; nothing happens if it does not run."""
        self._run_job("TryRestartUnit", "restart", unit)

    def reload_unit(self, unit: str) -> None:
        """Return once it has read its configuration anew."""
        self._run_job("ReloadUnit", "reload", unit)

    def _change_unit_files(
        self, method: str, verb: str, units: tuple[str, ...], *flags: bool
    ) -> None:
        try:
            self._bus.call_method(_MANAGER, method, list(units), *flags, timeout_s=_CALL_S)
        except BusError as error:
            raise _make_refusal(error, verb, ", ".join(units)) from error

    def _run_job(self, method: str, verb: str, unit: str) -> None:
        deadline = self._clock.monotonic() + self._job_s
        result = ""
        with self._subscribe_manager(), self._bus.receive_signals(_MANAGER) as signals:
            try:
                job = self._bus.call_method(_MANAGER, method, unit, "replace", timeout_s=_CALL_S)
            except BusError as error:
                raise _make_refusal(error, verb, unit) from error

            def over(signal: BusSignal | None) -> bool:
                nonlocal result
                match signal:
                    case BusSignal("JobRemoved", (_, removed, _, str(how))) if removed == job:
                        result = how
                        return True
                return self._clock.monotonic() >= deadline

            if not signals.run_until(over):
                raise BusError(f"the system bus went away while systemd was to {verb} {unit}")
        if not result:
            raise UnitError(
                f"systemd did not {verb} {unit} within {self._job_s:g} s",
                remedy="see: systemctl list-jobs",
            )
        if result not in _SUCCESS_RESULTS:
            raise UnitError(
                f"systemd could not {verb} {unit}: the job is {result}{self._describe_result(unit)}",
                remedy=f"see: systemctl status {unit}; journalctl -u {unit}",
            )

    @contextmanager
    def _subscribe_manager(self) -> Iterator[None]:
        # Only subscribers are told of jobs; and while subscribed, one is told of everything.
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

    def _describe_result(self, name: str) -> str:
        """The unit's own Result, for the end of a sentence; not all kinds of units have one."""
        for unit in self.list_units(name):
            kind = name.rpartition(".")[2].capitalize()
            try:
                found = self._bus.read_properties(
                    BusInterface(_NAME, unit.path, f"{_NAME}.{kind}"), timeout_s=_CALL_S
                )
            except BusError:
                return ""
            reason = found.get("Result")
            status = found.get("ExecMainStatus")
            if reason:
                return f", its result {reason}" + (f", status {status}" if status else "")
        return ""


def _parse_unit(row: tuple[object, ...]) -> SystemdUnit:
    name, _description, load, active, sub, _following, path, *_job = map(str, row)
    return SystemdUnit(name=name, load_state=load, active_state=active, sub_state=sub, path=path)


def _make_refusal(error: BusError, verb: str, unit: str) -> UnitError | BusError:
    if not error.name:
        return error
    return UnitError(f"systemd refuses to {verb} {unit}: {error}", remedy=error.remedy)
