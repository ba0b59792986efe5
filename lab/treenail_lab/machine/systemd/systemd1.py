"""A stand-in for systemd's manager: units, jobs, unit files.

Units from files do not run anything: starting them changes their state. Transient units run for
real. Every job leaves the entry in the journal that systemd writes, so a test can read there what
was started, reloaded and stopped.
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
    Call,
    ExportedObject,
    Method,
    Refusal,
    Values,
    interfaces,
)
from treenail_lab.machine.settings import Settings
from treenail_lab.machine.systemd.jobs import RESULTS, Job, Verb, log_job
from treenail_lab.machine.systemd.transient_services import (
    Outcome,
    TransientService,
    read_properties,
)
from treenail_lab.machine.systemd.unit_file_methods import UnitFileMethods
from treenail_lab.machine.systemd.unit_files import (
    NO_SUCH_UNIT,
    UNIT_EXISTS,
    UNIT_MASKED,
    UnitFiles,
)
from treenail_lab.machine.systemd.units import NAME, PATH, Unit, UnitObject

_NOT_APPLICABLE = f"{NAME}.JobTypeNotApplicable"
_MODES = ("replace", "fail", "isolate", "ignore-dependencies", "ignore-requirements")
_COUNTS_SOFT_REBOOTS = 256
_DEFAULT_TARGET = "default.target"
_REBOOT_UNITS = ("reboot.target", "systemd-reboot.service")


class Systemd1:
    """The manager object. ``told(verb, unit)`` hears of every job that is asked for."""

    def __init__(
        self,
        connection: Any,
        root: Path,
        settings: Callable[[], Settings],
        *,
        told: Callable[[str, str], None],
        reboot: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._root = root
        self._settings = settings
        self._told = told
        self._reboot = reboot
        self._files = UnitFiles(root)
        self._interfaces = interfaces("systemd1.xml")
        self._units: dict[str, Unit] = {}
        self._objects: dict[str, UnitObject] = {}
        self._stopping: dict[str, Job] = {}
        self._subscribers: set[str] = set()
        self._watches: dict[str, int] = {}
        self._jobs = 0
        self._face = ExportedObject(
            connection, PATH, self._interfaces[f"{NAME}.Manager"], self._methods()
        )
        self._face.set_properties(
            Version=f"{settings().systemd_version}-lab",
            SystemState="running",
            UserspaceTimestamp=round(time.time() * 1e6),
        )
        if settings().systemd_version >= _COUNTS_SOFT_REBOOTS:
            self._face.set_properties(SoftRebootsCount=rootfs.soft_reboots(root))
        self._load_all()
        for name in self._files.wanted():
            unit = self._unit(name)
            self._pretend_to_start(unit, again=False)
            self._show(unit)

    def _methods(self) -> dict[str, Method]:
        return {
            **{f"{verb}Unit": partial(self._job_asked, verb) for verb in Verb},
            "Reload": self._reload,
            "Reboot": self._reboot_asked,
            "Subscribe": self._subscribe,
            "Unsubscribe": self._unsubscribe,
            "GetUnit": self._unit_path,
            "LoadUnit": lambda call: (self._unit(call.values[0]).path,),
            "StartTransientUnit": self._start_transient,
            "KillUnit": self._kill,
            "ResetFailedUnit": self._reset_failed,
            "RefUnit": lambda call: self._refer(call, self._loaded(call.values[0])),
            "UnrefUnit": lambda call: self._unrefer(call, self._loaded(call.values[0])),
            "ListUnits": lambda _call: ([u.listed() for u in self._known()],),
            "ListUnitsByNames": self._list_by_names,
            "ListUnitsByPatterns": self._list_by_patterns,
            **UnitFileMethods(self._root, self._files, self._files_changed).table(),
        }

    # Units

    def _unit(self, name: str) -> Unit:
        unit = self._units.get(name)
        if unit is None:
            unit = self._units[name] = Unit(name)
            unit.read(self._files)
            methods: dict[str, Method] = {
                "Ref": lambda call: self._refer(call, unit),
                "Unref": lambda call: self._unrefer(call, unit),
            }
            self._objects[name] = UnitObject(self._connection, self._interfaces, unit, methods)
            self._show(unit)
            self._signal("UnitNew", "(so)", name, unit.path)
        return unit

    def _loaded(self, name: str) -> Unit:
        unit = self._units.get(name)
        if unit is None or unit.pristine:
            raise Refusal(NO_SUCH_UNIT, f"Unit {name} not loaded.")
        return unit

    def _known(self) -> list[Unit]:
        return [u for _, u in sorted(self._units.items()) if not u.pristine]

    def _unit_path(self, call: Call) -> Values:
        return (self._loaded(call.values[0]).path,)

    def _load_all(self) -> None:
        for name in self._files.names():
            self._unit(name)
        for unit in list(self._units.values()):
            unit.read(self._files)
            self._show(unit)

    def _show(self, unit: Unit) -> None:
        # A transient unit may be forgotten by the time its job is.
        shown = self._objects.get(unit.name)
        if shown is not None:
            shown.show(self._files, self._root)

    def _forget_if_over(self, unit: Unit) -> None:
        """A transient unit is gone once it is inactive, unless somebody refers to it."""
        service = unit.transient
        if service is None or unit.references:
            return
        if unit.active == "inactive" or (unit.active == "failed" and service.collect):
            del self._units[unit.name]
            self._objects.pop(unit.name).withdraw()
            self._signal("UnitRemoved", "(so)", unit.name, unit.path)

    def _list_by_names(self, call: Call) -> Values:
        return ([self._unit(name).listed() for name in call.values[0]],)

    def _list_by_patterns(self, call: Call) -> Values:
        states, patterns = call.values
        return (
            [
                unit.listed()
                for unit in self._known()
                if (not states or {unit.load, unit.active, unit.sub} & set(states))
                and (not patterns or any(fnmatchcase(unit.name, p) for p in patterns))
            ],
        )

    def _refer(self, call: Call, unit: Unit) -> Values:
        unit.references.add(call.sender)
        self._watch(call.sender)
        return ()

    def _unrefer(self, call: Call, unit: Unit) -> Values:
        unit.references.discard(call.sender)
        self._forget_if_over(unit)
        return ()

    def _watch(self, sender: str) -> None:
        if sender not in self._watches:
            self._watches[sender] = Gio.bus_watch_name_on_connection(
                self._connection, sender, Gio.BusNameWatcherFlags.NONE, None, self._gone
            )

    def _gone(self, _connection: Any, sender: str) -> None:
        Gio.bus_unwatch_name(self._watches.pop(sender))
        self._subscribers.discard(sender)
        for unit in list(self._units.values()):
            if sender in unit.references:
                unit.references.discard(sender)
                self._forget_if_over(unit)

    def _kill(self, call: Call) -> Values:
        name, _whom, number = call.values
        unit = self._loaded(name)
        if unit.transient is not None:
            unit.transient.kill(number)
        elif number in (signal.SIGKILL, signal.SIGABRT) and unit.active == "active":
            unit.end(Outcome("signal", 2, number))
            self._show(unit)
        return ()

    def _reset_failed(self, call: Call) -> Values:
        unit = self._loaded(call.values[0])
        if unit.active == "failed":
            unit.active, unit.sub, unit.outcome = "inactive", "dead", Outcome()
            self._show(unit)
            self._forget_if_over(unit)
        return ()

    # Jobs

    def _job_asked(self, verb: Verb, call: Call) -> Values:
        name, mode = call.values
        if mode not in _MODES:
            raise Refusal(INVALID_ARGS, f"Job mode {mode} invalid")
        if name in _REBOOT_UNITS and verb is Verb.START:
            GLib.idle_add(self._reboot)
            return (self._new_job(Job(self._next(), verb, name)),)
        if name == _DEFAULT_TARGET and verb is Verb.START:
            job = Job(self._next(), verb, name)
            GLib.idle_add(self._start_wanted, job)
            return (self._new_job(job),)
        unit = self._unit(name)
        starting = verb not in (Verb.STOP, Verb.RELOAD)
        if starting and unit.load == "masked":
            raise Refusal(UNIT_MASKED, f"Unit {name} is masked.")
        if unit.pristine:
            raise Refusal(NO_SUCH_UNIT, f"Unit {name} not {'found' if starting else 'loaded'}.")
        if verb is Verb.RELOAD and not unit.reloadable:
            text = f"Job type reload is not applicable for unit {name}."
            raise Refusal(_NOT_APPLICABLE, text)
        self._told(verb.command, name)
        job = Job(self._next(), verb, name)
        path = self._new_job(job)
        GLib.idle_add(self._perform, job, unit)
        return (path,)

    def _next(self) -> int:
        self._jobs += 1
        return self._jobs

    def _new_job(self, job: Job) -> str:
        self._signal("JobNew", "(uos)", job.number, job.path, job.unit)
        return job.path

    def _perform(self, job: Job, unit: Unit) -> bool:
        active = unit.active == "active"
        action = job.verb.action(active=active, reloadable=unit.reloadable)
        service = unit.transient
        if action in ("stop", "restart") and service is not None and service.stop():
            self._stopping[unit.name] = job
            return False
        result = "done"
        if action == "stop" and active:
            unit.end(Outcome(stopped=True))
        elif action == "reload" and not active:
            result = "failed"
        elif action in ("start", "restart") and service is None:
            result = self._pretend_to_start(unit, again=action == "restart")
        self._finish(job, unit, result)
        self._forget_if_over(unit)
        return False

    def _start_wanted(self, job: Job) -> bool:
        """Start what a boot would, as far as it does not run and was read."""
        for unit in map(self._unit, self._files.wanted()):
            if unit.active == "active" or unit.load != "loaded":
                continue
            if self._pretend_to_start(unit, again=False) == "done":
                self._told(job.verb.command, unit.name)
            self._show(unit)
        self._signal("JobRemoved", "(uoss)", job.number, job.path, job.unit, "done")
        return False

    def _pretend_to_start(self, unit: Unit, *, again: bool) -> str:
        if unit.active == "active" and not again:
            return "done"
        unit.begin()
        if unit.name in self._settings().failing_units:
            unit.end(Outcome("exit-code", 1, 1))
            return "failed"
        unit.run()
        return "done"

    def _finish(self, job: Job, unit: Unit, result: str) -> None:
        self._show(unit)
        log_job(self._root, job, unit, result)
        self._signal("JobRemoved", "(uoss)", job.number, job.path, job.unit, result)

    def _start_transient(self, call: Call) -> Values:
        name, mode, _, _ = call.values
        if mode not in _MODES:
            raise Refusal(INVALID_ARGS, f"Job mode {mode} invalid")
        if not self._unit(name).pristine:
            raise Refusal(UNIT_EXISTS, f"Unit {name} was already loaded or has a fragment file.")
        listed = call.invocation.get_message().get_unix_fd_list()
        # Taken out of the message: gi keeps messages, and with them what is still in their lists.
        fds = listed.steal_fds() if listed is not None else []
        service = read_properties(call.argument(2), fds, self._root)
        if not service.commands:
            raise Refusal(INVALID_ARGS, f"Unit {name} has no ExecStart")
        unit = self._units[name]
        unit.transient, unit.load, unit.kind = service, "loaded", service.kind
        unit.remain, unit.description = service.remain, service.description
        if service.add_reference:
            self._refer(call, unit)
        job = Job(self._next(), Verb.START, name)
        path = self._new_job(job)
        self._run_transient(job, unit, service)
        return (path,)

    def _run_transient(self, job: Job, unit: Unit, service: TransientService) -> None:
        oneshot = service.kind == "oneshot"

        def ended(outcome: Outcome) -> None:
            unit.end(outcome)
            stop = self._stopping.pop(unit.name, None)
            if oneshot:
                result = RESULTS.get(outcome.result, "failed")
                self._finish(job, unit, result if stop is None else "canceled")
            if stop is not None:
                self._finish(stop, unit, "done")
            self._show(unit)
            self._forget_if_over(unit)

        unit.begin()
        pid = service.start(self._root, unit.invocation, ended)
        unit.outcome = Outcome(pid=pid)
        if not oneshot:
            unit.run()
            # Not before the call is answered: who asked does not know the job yet.
            GLib.idle_add(self._finish, job, unit, "done")
        self._show(unit)

    # The manager itself

    def _reload(self, _call: Call) -> Values:
        self._signal("Reloading", "(b)", True)  # noqa: FBT003  the signal's body
        self._load_all()
        self._signal("Reloading", "(b)", False)  # noqa: FBT003  the signal's body
        return ()

    def _reboot_asked(self, _call: Call) -> Values:
        GLib.idle_add(self._reboot)
        return ()

    def _subscribe(self, call: Call) -> Values:
        if call.sender in self._subscribers:
            raise Refusal(f"{NAME}.AlreadySubscribed", "Client is already subscribed.")
        self._subscribers.add(call.sender)
        self._watch(call.sender)
        return ()

    def _unsubscribe(self, call: Call) -> Values:
        if call.sender not in self._subscribers:
            raise Refusal(f"{NAME}.NotSubscribed", "Client is not subscribed.")
        self._subscribers.discard(call.sender)
        return ()

    def _files_changed(self) -> None:
        self._signal("UnitFilesChanged", "()")

    def _signal(self, name: str, signature: str, *values: object) -> None:
        if self._subscribers:
            self._face.signal(name, signature, *values)
