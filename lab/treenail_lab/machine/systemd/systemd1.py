"""An emulated systemd manager: units, jobs and unit files.

Units with a unit file run no process: starting them changes their state. Transient units run their
commands. Every job writes the journal entry that systemd writes, so tests can read which units
were started, reloaded and stopped.
"""

import signal
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from gi.repository import Gio, GLib

from treenail_lab.machine import rootfs
from treenail_lab.machine.bus.objects import (
    INVALID_ARGS,
    ExportedObject,
    MethodCall,
    MethodCallback,
    MethodError,
    ReplyValues,
    load_interfaces,
)
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.machine.systemd.transient_services import (
    ServiceOutcome,
    TransientService,
    parse_properties,
)
from treenail_lab.machine.systemd.units import (
    JOB_RESULTS,
    NAME,
    PATH,
    JobVerb,
    LoadedUnit,
    UnitJob,
    UnitObject,
    log_job,
)
from treenail_lab.machine.unit_files import (
    NO_SUCH_UNIT,
    UNIT_EXISTS,
    UNIT_MASKED,
    UnitFileMethods,
    UnitFileTree,
)

_NOT_APPLICABLE = f"{NAME}.JobTypeNotApplicable"
_MODES = ("replace", "fail", "isolate", "ignore-dependencies", "ignore-requirements")
_SOFT_REBOOTS_COUNT_SINCE = 256
_AUTO_RESTART = "auto-restart"
_RESTART_MS = 500
"""Delay before a failed service starts again, whatever its RestartSec= is."""
_DEFAULT_TARGET = "default.target"
_REBOOT_UNITS = ("reboot.target", "systemd-reboot.service")


class EmulatedSystemd:
    """The manager object; it calls ``on_job(verb, unit)`` for every requested job."""

    def __init__(
        self,
        connection: Any,
        root: Path,
        settings: Callable[[], MachineSettings],
        *,
        on_job: Callable[[str, str], None],
        reboot: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._root = root
        self._settings = settings
        self._on_job = on_job
        self._reboot = reboot
        self._unit_files = UnitFileTree(root)
        self._interfaces = load_interfaces("systemd1.xml")
        self._units: dict[str, LoadedUnit] = {}
        self._unit_objects: dict[str, UnitObject] = {}
        self._stop_jobs: dict[str, UnitJob] = {}
        self._subscribers: set[str] = set()
        self._watches: dict[str, int] = {}
        self._job_count = 0
        self._object = ExportedObject(
            connection, PATH, self._interfaces[f"{NAME}.Manager"], self._build_methods()
        )
        self._object.set_properties(
            Version=f"{settings().systemd_version}-lab",
            SystemState="running",
            UserspaceTimestamp=round(time.time() * 1e6),
        )
        if settings().systemd_version >= _SOFT_REBOOTS_COUNT_SINCE:
            self._object.set_properties(SoftRebootsCount=rootfs.count_soft_reboots(root))
        self._load_units()
        for name in self._unit_files.list_wanted():
            unit = self._find_or_load_unit(name)
            self._simulate_start(unit, again=False)
            self._publish_unit(unit)

    def _build_methods(self) -> dict[str, MethodCallback]:
        return {
            **{f"{verb}Unit": partial(self._handle_job, verb) for verb in JobVerb},
            "Reload": self._handle_reload,
            "Reboot": self._handle_reboot,
            "Subscribe": self._handle_subscribe,
            "Unsubscribe": self._handle_unsubscribe,
            "GetUnit": self._handle_get_unit,
            "LoadUnit": lambda call: (self._find_or_load_unit(call.arguments[0]).path,),
            "StartTransientUnit": self._handle_start_transient,
            "KillUnit": self._handle_kill,
            "ResetFailedUnit": self._handle_reset_failed,
            "RefUnit": lambda call: self._add_reference(call, self._find_loaded(call.arguments[0])),
            "UnrefUnit": lambda call: self._drop_reference(
                call, self._find_loaded(call.arguments[0])
            ),
            "ListUnits": lambda _call: ([u.build_row() for u in self._list_known()],),
            "ListUnitsByNames": self._handle_list_by_names,
            "ListUnitsByPatterns": self._handle_list_by_patterns,
            **UnitFileMethods(
                self._root, self._unit_files, self._announce_unit_files
            ).build_table(),
        }

    # Units

    def _find_or_load_unit(self, name: str) -> LoadedUnit:
        unit = self._units.get(name)
        if unit is None:
            unit = self._units[name] = LoadedUnit(name)
            unit.read_files(self._unit_files)
            methods: dict[str, MethodCallback] = {
                "Ref": lambda call: self._add_reference(call, unit),
                "Unref": lambda call: self._drop_reference(call, unit),
            }
            self._unit_objects[name] = UnitObject(self._connection, self._interfaces, unit, methods)
            self._publish_unit(unit)
            self._emit_signal("UnitNew", "(so)", name, unit.path)
        return unit

    def _find_loaded(self, name: str) -> LoadedUnit:
        unit = self._units.get(name)
        if unit is None or unit.is_pristine:
            raise MethodError(NO_SUCH_UNIT, f"Unit {name} not loaded.")
        return unit

    def _list_known(self) -> list[LoadedUnit]:
        return [u for _, u in sorted(self._units.items()) if not u.is_pristine]

    def _handle_get_unit(self, call: MethodCall) -> ReplyValues:
        return (self._find_loaded(call.arguments[0]).path,)

    def _load_units(self) -> None:
        for name in self._unit_files.list_names():
            self._find_or_load_unit(name)
        for unit in list(self._units.values()):
            unit.read_files(self._unit_files)
            self._publish_unit(unit)

    def _publish_unit(self, unit: LoadedUnit) -> None:
        # A transient unit may be unloaded before its job ends.
        shown = self._unit_objects.get(unit.name)
        if shown is not None:
            shown.publish_properties(self._unit_files, self._root)

    def _unload_if_ended(self, unit: LoadedUnit) -> None:
        """Unload an inactive transient unit, unless a client holds a reference to it."""
        service = unit.transient
        if service is None or unit.references:
            return
        if unit.active == "inactive" or (unit.active == "failed" and service.should_collect):
            del self._units[unit.name]
            self._unit_objects.pop(unit.name).unregister()
            self._emit_signal("UnitRemoved", "(so)", unit.name, unit.path)

    def _handle_list_by_names(self, call: MethodCall) -> ReplyValues:
        return ([self._find_or_load_unit(name).build_row() for name in call.arguments[0]],)

    def _handle_list_by_patterns(self, call: MethodCall) -> ReplyValues:
        states, patterns = call.arguments
        return (
            [
                unit.build_row()
                for unit in self._list_known()
                if (not states or {unit.load, unit.active, unit.sub} & set(states))
                and (not patterns or any(fnmatchcase(unit.name, p) for p in patterns))
            ],
        )

    def _add_reference(self, call: MethodCall, unit: LoadedUnit) -> ReplyValues:
        unit.references.add(call.sender)
        self._watch_client(call.sender)
        return ()

    def _drop_reference(self, call: MethodCall, unit: LoadedUnit) -> ReplyValues:
        unit.references.discard(call.sender)
        self._unload_if_ended(unit)
        return ()

    def _watch_client(self, sender: str) -> None:
        if sender not in self._watches:
            self._watches[sender] = Gio.bus_watch_name_on_connection(
                self._connection, sender, Gio.BusNameWatcherFlags.NONE, None, self._on_client_gone
            )

    def _on_client_gone(self, _connection: Any, sender: str) -> None:
        Gio.bus_unwatch_name(self._watches.pop(sender))
        self._subscribers.discard(sender)
        for unit in list(self._units.values()):
            if sender in unit.references:
                unit.references.discard(sender)
                self._unload_if_ended(unit)

    def _handle_kill(self, call: MethodCall) -> ReplyValues:
        name, _whom, number = call.arguments
        unit = self._find_loaded(name)
        if unit.transient is not None:
            unit.transient.kill(number)
        elif number in (signal.SIGKILL, signal.SIGABRT) and unit.active == "active":
            unit.end_run(ServiceOutcome("signal", 2, number))
            self._publish_unit(unit)
        return ()

    def _handle_reset_failed(self, call: MethodCall) -> ReplyValues:
        unit = self._find_loaded(call.arguments[0])
        if unit.active == "failed":
            unit.active, unit.sub, unit.outcome = "inactive", "dead", ServiceOutcome()
            self._publish_unit(unit)
            self._unload_if_ended(unit)
        return ()

    # Jobs

    def _handle_job(self, verb: JobVerb, call: MethodCall) -> ReplyValues:
        name, mode = call.arguments
        if mode not in _MODES:
            raise MethodError(INVALID_ARGS, f"Job mode {mode} invalid")
        if name in _REBOOT_UNITS and verb is JobVerb.START:
            GLib.idle_add(self._reboot)
            return (self._announce_job(UnitJob(self._take_job_number(), verb, name)),)
        if name == _DEFAULT_TARGET and verb is JobVerb.START:
            job = UnitJob(self._take_job_number(), verb, name)
            GLib.idle_add(self._start_wanted_units, job)
            return (self._announce_job(job),)
        unit = self._find_or_load_unit(name)
        starting = verb not in (JobVerb.STOP, JobVerb.RELOAD)
        if starting and unit.load == "masked":
            raise MethodError(UNIT_MASKED, f"Unit {name} is masked.")
        if unit.is_pristine:
            raise MethodError(NO_SUCH_UNIT, f"Unit {name} not {'found' if starting else 'loaded'}.")
        if verb is JobVerb.RELOAD and not unit.is_reloadable:
            text = f"Job type reload is not applicable for unit {name}."
            raise MethodError(_NOT_APPLICABLE, text)
        self._on_job(verb.command, name)
        job = UnitJob(self._take_job_number(), verb, name)
        path = self._announce_job(job)
        GLib.idle_add(self._run_job, job, unit)
        return (path,)

    def _take_job_number(self) -> int:
        self._job_count += 1
        return self._job_count

    def _announce_job(self, job: UnitJob) -> str:
        self._emit_signal("JobNew", "(uos)", job.number, job.path, job.unit)
        return job.path

    def _run_job(self, job: UnitJob, unit: LoadedUnit) -> bool:
        active = unit.active == "active"
        action = job.verb.resolve_action(active=active, reloadable=unit.is_reloadable)
        service = unit.transient
        if action in ("stop", "restart") and service is not None and service.stop():
            self._stop_jobs[unit.name] = job
            return False
        result = "done"
        if action == "stop" and (active or unit.sub == _AUTO_RESTART):
            unit.end_run(ServiceOutcome(is_stopped=True))
        elif action == "reload" and not active:
            result = "failed"
        elif action in ("start", "restart") and service is None:
            result = self._simulate_start(unit, again=action == "restart")
        self._finish_job(job, unit, result)
        self._unload_if_ended(unit)
        return False

    def _start_wanted_units(self, job: UnitJob) -> bool:
        """Start the units that a boot starts, if they are loaded and not active."""
        for unit in map(self._find_or_load_unit, self._unit_files.list_wanted()):
            if unit.active == "active" or unit.load != "loaded":
                continue
            if self._simulate_start(unit, again=False) == "done":
                self._on_job(job.verb.command, unit.name)
            self._publish_unit(unit)
        self._emit_signal("JobRemoved", "(uoss)", job.number, job.path, job.unit, "done")
        return False

    def _simulate_start(self, unit: LoadedUnit, *, again: bool) -> str:
        if unit.active == "active" and not again:
            return "done"
        unit.begin_run()
        if unit.name in self._settings().failing_units:
            unit.end_run(ServiceOutcome("exit-code", 1, 1))
            return "failed"
        unit.mark_running()
        return "done"

    def _finish_job(self, job: UnitJob, unit: LoadedUnit, result: str) -> None:
        self._publish_unit(unit)
        log_job(self._root, job, unit, result)
        self._emit_signal("JobRemoved", "(uoss)", job.number, job.path, job.unit, result)

    def _handle_start_transient(self, call: MethodCall) -> ReplyValues:
        name, mode, _, _ = call.arguments
        if mode not in _MODES:
            raise MethodError(INVALID_ARGS, f"Job mode {mode} invalid")
        if not self._find_or_load_unit(name).is_pristine:
            raise MethodError(
                UNIT_EXISTS, f"Unit {name} was already loaded or has a fragment file."
            )
        listed = call.invocation.get_message().get_unix_fd_list()
        # Stolen from the message: PyGObject keeps messages, and with them their descriptors.
        fds = listed.steal_fds() if listed is not None else []
        service = parse_properties(call.read_argument(2), fds, self._root)
        if not service.commands:
            raise MethodError(INVALID_ARGS, f"Unit {name} has no ExecStart")
        unit = self._units[name]
        unit.transient, unit.load, unit.kind = service, "loaded", service.kind
        unit.remain, unit.description = service.remain, service.description
        if service.add_reference:
            self._add_reference(call, unit)
        job = UnitJob(self._take_job_number(), JobVerb.START, name)
        path = self._announce_job(job)
        self._run_transient_unit(job, unit, service)
        return (path,)

    def _run_transient_unit(
        self, job: UnitJob, unit: LoadedUnit, service: TransientService
    ) -> None:
        oneshot = service.kind == "oneshot"

        def ended(outcome: ServiceOutcome) -> None:
            unit.end_run(outcome)
            if unit.active == "failed" and service.restart == "on-failure":
                unit.active, unit.sub = "activating", _AUTO_RESTART
                GLib.timeout_add(_RESTART_MS, start_again)
            stop = self._stop_jobs.pop(unit.name, None)
            if oneshot:
                result = JOB_RESULTS.get(outcome.result, "failed")
                self._finish_job(job, unit, result if stop is None else "canceled")
            if stop is not None:
                self._finish_job(stop, unit, "done")
            self._publish_unit(unit)
            self._unload_if_ended(unit)

        def start_again() -> bool:
            if unit.sub == _AUTO_RESTART:
                self._run_transient_unit(job, unit, service)
            return False

        unit.begin_run()
        pid = service.start(self._root, unit.invocation, ended)
        unit.outcome = ServiceOutcome(pid=pid)
        if not oneshot:
            unit.mark_running()
            # Not before the call is answered: the caller does not know the job yet.
            GLib.idle_add(self._finish_job, job, unit, "done")
        self._publish_unit(unit)

    # The manager itself

    def _handle_reload(self, _call: MethodCall) -> ReplyValues:
        self._emit_signal("Reloading", "(b)", True)  # noqa: FBT003  the signal's body
        self._load_units()
        self._emit_signal("Reloading", "(b)", False)  # noqa: FBT003  the signal's body
        return ()

    def _handle_reboot(self, _call: MethodCall) -> ReplyValues:
        GLib.idle_add(self._reboot)
        return ()

    def _handle_subscribe(self, call: MethodCall) -> ReplyValues:
        if call.sender in self._subscribers:
            raise MethodError(f"{NAME}.AlreadySubscribed", "Client is already subscribed.")
        self._subscribers.add(call.sender)
        self._watch_client(call.sender)
        return ()

    def _handle_unsubscribe(self, call: MethodCall) -> ReplyValues:
        if call.sender not in self._subscribers:
            raise MethodError(f"{NAME}.NotSubscribed", "Client is not subscribed.")
        self._subscribers.discard(call.sender)
        return ()

    def _announce_unit_files(self) -> None:
        self._emit_signal("UnitFilesChanged", "()")

    def _emit_signal(self, name: str, signature: str, *values: object) -> None:
        if self._subscribers:
            self._object.emit_signal(name, signature, *values)
