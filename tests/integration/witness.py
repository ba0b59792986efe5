"""The history of a node: every change, with the state of the machine at that moment.

The witness is called within the call that makes a change, and inspects the machine at that moment.
So "the image was staged and locked when the drain was requested" is observed, not guessed.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treenail.api import annotations as key
from treenail.update.status import AGENT_CONDITIONS
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.serving.server import ApiServer
from treenail_lab.apiserver.store import StoreEvent
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.ostree.sysroot import Sysroot

AGENT = "treenail"
AGENT_KEYS = (
    key.STATE,
    key.REASON,
    key.POST_CONFIG_ACTION,
    key.DESIRED_DRAIN,
    *((key.CURRENT_CONFIG, *key.IMAGE_SPELLINGS.values())),
)


def select_agent_conditions(machine_config_node: Json | None) -> list[Json]:
    """Return the conditions that the agent writes."""
    status: Json = (machine_config_node or {}).get("status") or {}
    return [each for each in status.get("conditions") or [] if each["type"] in AGENT_CONDITIONS]


def _has_agent_change(event: StoreEvent) -> bool:
    before, after = select_agent_conditions(event.previous), select_agent_conditions(event.object)
    return before != after


def _true(machine_config_node: Json | None) -> set[str]:
    return {
        each["type"]
        for each in select_agent_conditions(machine_config_node)
        if each["status"] == "True"
    }


@dataclass(frozen=True, slots=True)
class Sight:
    """The Node after a change, and its machine at that moment."""

    at: float
    """Seconds since the epoch."""
    notes: dict[str, str]
    cordoned: bool
    booted: str
    """Manifest digest; empty while the machine is down."""
    staged: str
    locked: bool
    phase: str
    """Of the ledger; empty without an update."""

    @property
    def drained(self) -> bool:
        """Return whether the agent's drain is acknowledged and the Node is cordoned."""
        requested = self.notes.get(key.DESIRED_DRAIN, "")
        acknowledged = self.notes.get(key.LAST_APPLIED_DRAIN, "")
        return self.cordoned and requested == acknowledged and requested.startswith("drain-")

    def changes(self, before: "Sight") -> set[str]:
        """Return the changed annotations of the agent's handshake, by short names."""
        names = {*self.notes, *before.notes}
        found = {
            name.removeprefix(key.PREFIX)
            for name in names
            if name.startswith(key.PREFIX) and self.notes.get(name) != before.notes.get(name)
        }
        return found | ({"cordoned"} if self.cordoned != before.cordoned else set())


@dataclass(frozen=True, slots=True)
class Write:
    """A write of the agent."""

    resource: str
    phase: str
    """The phase of the ledger; without an update the state of the Node."""


@dataclass(slots=True)
class Witness:
    """The history of one node."""

    node: str
    machine: LabMachine
    sights: list[Sight] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    turned: list[str] = field(default_factory=list)
    """The agent's conditions that became true, in order."""
    then: Callable[[], object] | None = None
    """Called in the server's thread after each change of the Node."""

    def attend(self, api: ApiServer) -> None:
        """Observe every change from now on; call it in the server's thread."""
        api.store.add_listener(self._see)

    def violations(self) -> list[str]:
        """Return each finalization of another OS while the Node was in service."""
        found = []
        for entry in self.machine.read_journal({"SYSLOG_IDENTIFIER": "ostree"}):
            text, at = str(entry["MESSAGE"]), int(str(entry["__REALTIME_TIMESTAMP"])) / 1e6
            last = next((sight for sight in reversed(self.sights) if sight.at <= at), None)
            if text.startswith("Finalized") and not (last and last.drained):
                found.append(f"{text} while in service, {last}")
        return found

    def _see(self, storage: StorageKey, event: StoreEvent) -> None:
        _, plural = storage
        metadata = event.object["metadata"]
        if plural == "nodes" and metadata["name"] == self.node:
            self._see_node(event)
        elif plural == "events" and event.object["source"]["component"] == AGENT:
            self._wrote("events", self.sights[-1].notes)
        elif plural == "machineconfignodes" and select_agent_conditions(
            event.object
        ) != select_agent_conditions(event.previous):
            self._wrote("machineconfignodes", self.sights[-1].notes)
            self.turned += sorted(_true(event.object) - _true(event.previous))

    def _see_node(self, event: StoreEvent) -> None:
        notes = event.object["metadata"].get("annotations") or {}
        before = self.sights[-1].notes if self.sights else {}
        if any(notes.get(each) != before.get(each) for each in AGENT_KEYS):
            self._wrote("nodes", notes)
        booted, staged, locked = self._deployed()
        self.sights.append(
            Sight(
                at=time.time(),
                notes=dict(notes),
                cordoned=bool(event.object["spec"].get("unschedulable")),
                booted=booted,
                staged=staged,
                locked=locked,
                phase=self.phase(),
            )
        )
        if self.then is not None:
            self.then()

    def _wrote(self, resource: str, notes: dict[str, str]) -> None:
        # The agent reports the reboot before it records it.
        action = notes.get(key.POST_CONFIG_ACTION, "").lower()
        self.writes.append(Write(resource, action or self.phase() or notes.get(key.STATE, "")))

    def phase(self) -> str:
        """Of the update that the ledger holds; empty without one."""
        update = self._ledger().get("update")
        return str(update["phase"]) if update else ""

    def has_report(self) -> bool:
        """Return whether the agent recorded that its Node shows the current target."""
        return bool(self._ledger().get("reported", True))

    def _ledger(self) -> dict[str, Any]:
        try:
            ledger = json.loads((self.machine.root / "var/lib/treenail/ledger.json").read_bytes())
        except FileNotFoundError:
            return {}
        assert isinstance(ledger, dict)
        return ledger

    def _deployed(self) -> tuple[str, str, bool]:
        sysroot = Sysroot(self.machine.root)
        try:
            booted, staged = sysroot.find_booted(), sysroot.read_staged()
        except FileNotFoundError:  # during a change, which has ended at the next read
            return self._deployed()
        return (
            booted.digest if booted and self.machine.is_on else "",
            staged.digest if staged else "",
            sysroot.is_staged_locked(),
        )
