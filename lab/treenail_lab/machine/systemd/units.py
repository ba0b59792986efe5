"""Loaded units of systemd, their objects on the bus, and their jobs with the journal entries."""

import socket
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gi.repository import GLib

from treenail_lab.machine.bus.objects import ExportedObject, MethodCallback, MethodError
from treenail_lab.machine.systemd.transient_services import ServiceOutcome, TransientService
from treenail_lab.machine.unit_files import UnitFileTree, read_unit_settings

NAME = "org.freedesktop.systemd1"
PATH = "/org/freedesktop/systemd1"

_RUNNING = {
    "service": "running",
    "socket": "listening",
    "timer": "waiting",
    "path": "waiting",
    "mount": "mounted",
}

ListedUnit = tuple[str, str, str, str, str, str, str, int, str, str]


@dataclass(slots=True)
class LoadedUnit:
    """A unit in systemd's memory."""

    name: str
    load: str = "not-found"
    description: str = ""
    fragment: Path | None = None
    drop_ins: list[Path] = field(default_factory=list)
    kind: str = "simple"
    remain: bool = False
    is_reloadable: bool = False
    active: str = "inactive"
    sub: str = "dead"
    outcome: ServiceOutcome = field(default_factory=ServiceOutcome)
    invocation: bytes = b""
    active_since_us: int = 0
    transient: TransientService | None = None
    references: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        """Return the unit's object path, escaped as sd_bus_path_encode(3) does."""
        return f"{PATH}/unit/" + "".join(
            c if c.isascii() and c.isalnum() and (i or not c.isdigit()) else f"_{ord(c):02x}"
            for i, c in enumerate(self.name)
        )

    @property
    def is_pristine(self) -> bool:
        """Return whether a new transient unit may have this name: not loaded, not active."""
        return self.load == "not-found" and self.active == "inactive"

    def read_files(self, files: UnitFileTree) -> None:
        """Read the unit files again; the active state stays."""
        if self.transient is not None:
            return
        self.fragment = files.find_source(self.name)
        self.drop_ins = files.list_drop_ins(self.name)
        self.load = "not-found" if self.fragment is None else "loaded"
        if files.is_masked(self.name):
            self.load, self.drop_ins = "masked", []
        settings = {}
        if self.load == "loaded" and self.fragment is not None:
            settings = read_unit_settings([self.fragment, *self.drop_ins])
        self.description = settings.get("Unit.Description", self.name)
        self.kind = settings.get("Service.Type", "simple")
        self.remain = settings.get("Service.RemainAfterExit", "no") in ("yes", "true", "on", "1")
        self.is_reloadable = "Service.ExecReload" in settings

    def begin_run(self) -> None:
        """Begin a run with a new invocation id."""
        self.invocation = uuid.uuid4().bytes
        self.outcome = ServiceOutcome()
        self.active, self.sub = "activating", "start"

    def mark_running(self) -> None:
        """Set the state of a running unit, or of a finished oneshot."""
        if self.kind == "oneshot" and self.name.endswith(".service"):
            self.active, self.sub = ("active", "exited") if self.remain else ("inactive", "dead")
        else:
            kind = self.name.rpartition(".")[2]
            self.active, self.sub = "active", _RUNNING.get(kind, "active")
        self.active_since_us = GLib.get_real_time()

    def end_run(self, outcome: ServiceOutcome) -> None:
        """End the run with this outcome."""
        self.outcome = outcome
        if outcome.result != "success":
            self.active, self.sub = "failed", "failed"
        elif self.remain and not outcome.is_stopped:
            self.active, self.sub = "active", "exited"
        else:
            self.active, self.sub = "inactive", "dead"

    def build_row(self) -> ListedUnit:
        """Return the row of ListUnits."""
        row = (self.name, self.description or self.name, self.load, self.active, self.sub)
        return (*row, "", self.path, 0, "", "/")


class UnitObject:
    """The object of a unit: the interface Unit, and Service for services."""

    def __init__(
        self,
        connection: Any,
        interfaces: dict[str, Any],
        unit: LoadedUnit,
        methods: dict[str, MethodCallback],
    ) -> None:
        self._unit = unit
        self._unit_object = ExportedObject(
            connection, unit.path, interfaces[f"{NAME}.Unit"], methods
        )
        self._service_object = (
            ExportedObject(connection, unit.path, interfaces[f"{NAME}.Service"], {})
            if unit.name.endswith(".service")
            else None
        )

    def publish_properties(self, files: UnitFileTree, root: Path) -> None:
        """Publish the properties of the unit."""
        unit = self._unit
        self._unit_object.set_properties(
            Id=unit.name,
            Description=unit.description or unit.name,
            LoadState=unit.load,
            ActiveState=unit.active,
            SubState=unit.sub,
            FragmentPath=_format_path(unit.fragment, root),
            DropInPaths=[_format_path(path, root) for path in unit.drop_ins],
            UnitFileState=_read_file_state(unit, files),
            InvocationID=unit.invocation,
            Transient=unit.transient is not None,
            NeedDaemonReload=False,
            Job=(0, "/"),
            ActiveEnterTimestamp=unit.active_since_us,
        )
        if self._service_object is not None:
            outcome = unit.outcome
            self._service_object.set_properties(
                Type=unit.kind,
                RemainAfterExit=unit.remain,
                Result=outcome.result,
                MainPID=outcome.pid if unit.active in ("active", "activating") else 0,
                ExecMainPID=outcome.pid,
                ExecMainCode=outcome.code,
                ExecMainStatus=outcome.status,
            )

    def unregister(self) -> None:
        self._unit_object.unregister()
        if self._service_object is not None:
            self._service_object.unregister()


def _format_path(path: Path | None, root: Path) -> str:
    return "" if path is None else f"/{path.relative_to(root)}"


def _read_file_state(unit: LoadedUnit, files: UnitFileTree) -> str:
    if unit.transient is not None:
        return "transient"
    try:
        return files.read_state(unit.name)
    except MethodError:
        return ""


JOB_RESULTS = {"success": "done", "timeout": "timeout"}
_SOCKET = "run/systemd/journal/socket"
_MESSAGE_IDS = {
    "start": "39f53479d3a045ac8e11786248231fbf",
    "restart": "39f53479d3a045ac8e11786248231fbf",
    "stop": "9d1aaa27d60140bd96365438aad20286",
    "reload": "7b05ebc668384222baa8881179cfda54",
    "failed": "be02cf6855d2428ba40df7e9d022f03d",
}
_PAST = {
    "start": "Started",
    "restart": "Restarted",
    "stop": "Stopped",
    "reload": "Reloaded",
    "failed": "Failed to start",
}


class JobVerb(StrEnum):
    """The verbs of the manager's job methods: ``StartUnit`` and the like."""

    START = "Start"
    STOP = "Stop"
    RELOAD = "Reload"
    RESTART = "Restart"
    TRY_RESTART = "TryRestart"
    RELOAD_OR_RESTART = "ReloadOrRestart"
    RELOAD_OR_TRY_RESTART = "ReloadOrTryRestart"

    @property
    def command(self) -> str:
        """Return the verb in the spelling of systemctl."""
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in self.value).lstrip("-")

    def resolve_action(self, *, active: bool, reloadable: bool) -> str:
        """Return start, stop, reload, restart or ``nothing`` for a unit in that state."""
        match self:
            case JobVerb.START | JobVerb.STOP | JobVerb.RELOAD | JobVerb.RESTART:
                return self.command
            case JobVerb.RELOAD_OR_RESTART if not active:
                return "start"
            case JobVerb.RELOAD_OR_RESTART | JobVerb.RELOAD_OR_TRY_RESTART if active and reloadable:
                return "reload"
            case _:
                return "restart" if active else "nothing"


@dataclass(frozen=True, slots=True)
class UnitJob:
    """One job in the queue."""

    number: int
    verb: JobVerb
    unit: str

    @property
    def path(self) -> str:
        return f"{PATH}/job/{self.number}"


def log_job(root: Path, job: UnitJob, unit: LoadedUnit, result: str) -> None:
    """Write the result of the job to the journal, as systemd does."""
    verb = job.verb.command
    event = "failed" if result != "done" else verb
    fields = {
        "PRIORITY": "3" if event == "failed" else "6",
        "SYSLOG_IDENTIFIER": "systemd",
        "UNIT": job.unit,
        "JOB_ID": str(job.number),
        "JOB_TYPE": verb,
        "JOB_RESULT": result,
        "INVOCATION_ID": unit.invocation.hex(),
        "MESSAGE": f"{_PAST.get(event, 'Finished job for')} {unit.description or unit.name}.",
    }
    if event in _MESSAGE_IDS:
        fields["MESSAGE_ID"] = _MESSAGE_IDS[event]
    lines = "".join(f"{key}={value}\n" for key, value in fields.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        try:
            out.sendto(lines.encode(), str(root / _SOCKET))
        except OSError:
            # As systemd, go on without a journal.
            return
