"""Jobs of systemd, and the journal entry of their result."""

import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from treenail_lab.machine.systemd.units import PATH, LoadedUnit

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
