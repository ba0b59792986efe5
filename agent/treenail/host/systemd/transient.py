"""Programs as transient units of systemd, which outlive this process.

A job has a fixed unit name, so it runs at most once at a time, and a second start joins it. The
unit stays loaded until it is released, so that a later process can read the result: a successful
one because of ``RemainAfterExit``, a failed one in any case.

`UnsandboxedRunner` waits for such a program: it runs outside the sandbox of the agent's unit.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from treenail import errors
from treenail.host.filesystem import atomic_files, root_directory
from treenail.host.system import proxies
from treenail.host.systemd import system_bus, systemd
from treenail.host.systemd.journal import SystemdJournal

_NO_SUCH_UNIT = f"{systemd.SYSTEMD_NAME}.NoSuchUnit"
_UNIT_EXISTS = f"{systemd.SYSTEMD_NAME}.UnitExists"
# The last three come when the unit is unloaded between two calls.
_UNIT_GONE = {
    _NO_SUCH_UNIT,
    "org.freedesktop.DBus.Error.UnknownObject",
    "org.freedesktop.DBus.Error.UnknownInterface",
    "org.freedesktop.DBus.Error.UnknownMethod",
}
_CALL_S = 60.0
_MICROSECONDS = 1_000_000
_JOB_S, _RESTART_US = 12 * 3600.0, 300 * _MICROSECONDS
_CHANGING_STATES = {"activating", "deactivating", "reloading"}


@dataclass(frozen=True, slots=True)
class TransientJob:
    """A program to run as ``unit``; ``description`` is shown by systemctl."""

    unit: str
    description: str
    argv: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TransientRun:
    """The state of a job.

    ``result`` is that of systemd: ``success``, ``exit-code``, ``signal``, ``timeout`` and others.
    ``status`` is the exit code or the signal, ``invocation`` the ID of the run in the journal.
    """

    description: str
    is_running: bool
    result: str
    status: int
    invocation: str

    @property
    def is_running_or_done(self) -> bool:
        """Return whether a new start of the job joins this run; a failed run is replaced."""
        return self.is_running or self.is_done

    @property
    def is_done(self) -> bool:
        """Return whether the run ended with success."""
        return not self.is_running and self.result == "success"


class TransientUnits:
    """Starts and finds transient units. Raises `BusError` and `UnitError`. For one thread."""

    def __init__(self, bus: system_bus.SystemBus) -> None:
        self._bus = bus

    def find_run(self, unit: str) -> TransientRun | None:
        """Return the run of the unit; None when there is none or it was released."""
        return self._read_run(unit, is_referenced=False)

    def _read_run(self, unit: str, *, is_referenced: bool) -> TransientRun | None:
        """Read the run; with ``is_referenced`` (AddRef) an inactive unit still has its result."""
        try:
            path = str(self._bus.call_method(systemd.MANAGER, "GetUnit", unit, timeout_s=_CALL_S))
            unit_properties = self._read_properties(path, "Unit")
            service_properties = self._read_properties(path, "Service")
        except errors.BusError as error:
            if error.name in _UNIT_GONE:
                return None
            raise
        state = unit_properties.get("ActiveState")
        has_job = _has_job(unit_properties)
        # Without AddRef and RemainAfterExit the properties of an ended unit are those of a fresh
        # stub, whose Result is "success" (seen with systemd 252).
        is_stub = state == "inactive" and not has_job and not is_referenced
        if unit_properties.get("LoadState") == "not-found" or is_stub:
            return None
        invocation = unit_properties.get("InvocationID")
        return TransientRun(
            description=str(unit_properties.get("Description")),
            is_running=state in _CHANGING_STATES or has_job,
            result=str(service_properties.get("Result")),
            status=int(str(service_properties.get("ExecMainStatus") or 0)),
            invocation=bytes(invocation).hex() if isinstance(invocation, list | bytes) else "",
        )

    def run_job(self, job: TransientJob, on_tick: Callable[[], None]) -> TransientRun:
        """Start the job, or join a run that is running or done, and return its end.

        ``on_tick`` is called about once a second; an exception of it ends the wait, not the job.
        A failed run is repeated. Raises `UnitError` when the unit runs something else.
        """
        with systemd.receive_manager_signals(self._bus) as signals:
            run = self.find_run(job.unit)
            if run is not None and not run.is_running_or_done:
                # A failed unit blocks its name.
                self._clear_unit(job.unit, signals)
                run = None
            if run is None:
                self._start_unit(job, {"RemainAfterExit": True})
                run = self.find_run(job.unit)
            if run is not None and run.description != job.description:
                raise errors.UnitError(
                    f"cannot start {job.unit}: it runs something else: {run.description}",
                    remedy=f"see: systemctl status {job.unit}",
                )
            run = self._wait_for_end(job.unit, signals, on_tick)
        return _require_run(run, job)

    def start_job(self, unit: str, description: str, argv: tuple[str, ...]) -> None:
        """Start a job without waiting for it. systemd repeats a failed run after five minutes.

        An earlier run goes on if it has the same description; else it is stopped.
        """
        run = self.find_run(unit)
        if run is None or run.description != description or not run.is_running_or_done:
            self.stop_unit(unit, lambda: None)
            self._start_unit(
                TransientJob(unit, description, argv, _JOB_S),
                {"RemainAfterExit": True, "Restart": "on-failure", "RestartUSec": _RESTART_US},
            )

    def run_once(self, job: TransientJob, on_tick: Callable[[], None]) -> TransientRun:
        """Start a job with a unique unit name and return its end; systemd keeps nothing of it.

        Calls ``on_tick`` as `run_job` does.
        """
        with systemd.receive_manager_signals(self._bus) as signals:
            # The reference also ends with our bus connection, so with this process.
            self._start_unit(job, {"AddRef": True, "CollectMode": "inactive-or-failed"})
            try:
                run = self._wait_for_end(job.unit, signals, on_tick, is_referenced=True)
            finally:
                self._call_if_loaded("UnrefUnit", job.unit)
        return _require_run(run, job)

    def wait_for_unit(self, unit: str, on_tick: Callable[[], None]) -> None:
        """Wait for the end of the job, if there is one; call ``on_tick`` as `run_job` does."""
        with systemd.receive_manager_signals(self._bus) as signals:
            self._wait_for_end(unit, signals, on_tick)

    def stop_unit(self, unit: str, on_tick: Callable[[], None]) -> None:
        """Stop the job if it runs, wait for its end, and release it."""
        with systemd.receive_manager_signals(self._bus) as signals:
            self._call_if_loaded("StopUnit", unit, "replace")
            self._wait_for_end(unit, signals, on_tick)
            self._clear_unit(unit, signals)

    def release_unit(self, unit: str) -> None:
        """Unload a unit whose job has ended, and wait until its name is free."""
        with systemd.receive_manager_signals(self._bus) as signals:
            self._clear_unit(unit, signals)

    def _clear_unit(self, unit: str, signals: system_bus.BusSignals) -> None:
        self._call_if_loaded("StopUnit", unit, "replace")
        # StopUnit queues a job. Until its end the name still finds the old unit.
        self._wait_for_end(unit, signals, lambda: None)
        self._call_if_loaded("ResetFailedUnit", unit)

    def _wait_for_end(
        self,
        unit: str,
        signals: system_bus.BusSignals,
        on_tick: Callable[[], None],
        *,
        is_referenced: bool = False,
    ) -> TransientRun | None:
        """Return the run once it has ended."""
        run: TransientRun | None = None

        def is_over(signal: system_bus.BusSignal | None) -> bool:
            nonlocal run
            # Read the state once a second too: systemd may restart, and the signal is lost.
            if signal is None:
                on_tick()
            # The values of JobRemoved are number, path, unit and result.
            elif signal.member != "JobRemoved" or signal.values[2] != unit:
                return False
            run = self._read_run(unit, is_referenced=is_referenced)
            return run is None or not run.is_running

        run = self._read_run(unit, is_referenced=is_referenced)
        if run is not None and run.is_running and not signals.run_until(is_over):
            raise errors.BusError(
                f"cannot wait for {unit} ({run.description}): the system bus closed the connection"
            )
        return run

    def _start_unit(self, job: TransientJob, lifetime: Mapping[str, bool | str | int]) -> None:
        properties = system_bus.make_unit_properties(
            job.argv,
            {
                "Description": job.description,
                # Its start job ends with the program (systemd.service(5)), and JobRemoved reports
                # that.
                "Type": "oneshot",
                **lifetime,
                # By default a unit of Type=oneshot has no time limit (systemd.service(5)).
                "TimeoutStartUSec": int(job.timeout_s * _MICROSECONDS),
                # By default it is the name of the program (systemd.exec(5)), which may be sh.
                "SyslogIdentifier": job.unit.removesuffix(".service"),
                # Not Environment: every user may read it, and a proxy's URL may have a login.
                "EnvironmentFiles": [proxies.PROXY_FILE],
            },
        )
        arguments: Sequence[object] = (job.unit, "fail", properties, [])
        try:
            self._bus.call_method(
                systemd.MANAGER, "StartTransientUnit", *arguments, timeout_s=_CALL_S
            )
        except errors.BusError as error:
            # Started by an earlier agent meanwhile: join it.
            if error.name != _UNIT_EXISTS:
                raise

    def _read_properties(self, path: str, kind: str) -> dict[str, object]:
        interface = system_bus.BusInterface(
            systemd.SYSTEMD_NAME, path, f"{systemd.SYSTEMD_NAME}.{kind}"
        )
        return self._bus.read_properties(interface, timeout_s=_CALL_S)

    def _call_if_loaded(self, method: str, *arguments: str) -> None:
        try:
            self._bus.call_method(systemd.MANAGER, method, *arguments, timeout_s=_CALL_S)
        except errors.BusError as error:
            if error.name != _NO_SUCH_UNIT:
                raise


def _has_job(unit_properties: dict[str, object]) -> bool:
    """Return whether a job is queued: a unit whose start is queued is still inactive."""
    job = unit_properties.get("Job")
    return isinstance(job, tuple) and job[0] != 0


def _require_run(run: TransientRun | None, job: TransientJob) -> TransientRun:
    if run is None:
        raise errors.UnitError(
            f"cannot read the result of {job.unit} ({job.description}): another program removed it"
        )
    return run


_OUTPUT_PREFIX = "/run/treenail/output"
_OUTPUT_LIMIT = 1024 * 1024
_REDIRECT_SCRIPT = 'exec "$@" >"$0"'


class UnsandboxedRunner:
    """Runs programs to their end, as `ProgramRunner` does, and returns their output.

    For one thread.
    """

    def __init__(
        self,
        units: TransientUnits,
        journal: SystemdJournal,
        root: root_directory.Root,
        *,
        heartbeat: Callable[[], None],
    ) -> None:
        """``heartbeat`` is called once a second while a program runs."""
        self._units = units
        self._journal = journal
        self._root = root
        self._files = atomic_files.HostFiles(root)
        self._heartbeat = heartbeat
        self._numbers = itertools.count(1)

    def run_command(self, argv: Sequence[str], *, timeout_s: float) -> bytes:
        """Return the standard output of the program, at most 1 MiB.

        Raises `CommandError` when it fails or exceeds ``timeout_s``, `BusError`, `FileError`.
        """
        # A unique name: unlike a job of the agent, no later process joins it.
        name = f"{os.getpid()}-{next(self._numbers)}"
        output = f"{_OUTPUT_PREFIX}-{name}"
        self._files.write_file(output, b"", mode=0o600)
        try:
            # The shell writes the output to a file that this process can read.
            redirected = ("/bin/sh", "-c", _REDIRECT_SCRIPT, str(self._root.resolve_path(output)))
            description = f"treenail: run {argv[0].rpartition('/')[2]}"
            unit = f"treenail-ask-{name}.service"
            job = TransientJob(unit, description, (*redirected, *argv), timeout_s)
            run = self._units.run_once(job, self._heartbeat)
            if run.result == "timeout":
                raise errors.CommandTimeoutError(f"{argv[0]} did not exit within {timeout_s:g} s")
            if not run.is_done:
                stderr = self._journal.read_error(run.invocation)
                raise errors.CommandError(
                    f"{argv[0]} failed with exit code {run.status}{': ' if stderr else ''}{stderr}",
                    stderr=stderr,
                )
            return self._files.read_file(output, limit=_OUTPUT_LIMIT) or b""
        finally:
            self._files.remove_file(output)
