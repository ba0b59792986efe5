"""The events of a node in order, and the rules that must hold at every moment."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.update.state.ledger_record import Phase
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.schema.kinds import StorageKey
from treenail_lab.apiserver.store import StoreEvent

_VERIFIED = (Phase.UNCORDONING, None)
"""In these the target of an update may be reported; it has been found healthy, or there is none."""
_OUT_OF_SERVICE = (Phase.REBOOTING, Phase.VERIFYING, Phase.ROLLING_BACK)


@dataclass(frozen=True, slots=True)
class Boot:
    """The state of the disk at a boot, before the agent started."""

    digest: str
    ledger: object
    """Its document; None without one."""
    drained: bool
    """Whether the Node was out of service, as the drain controller had said."""
    asked_drain: str
    """The drain that the agent had requested until then."""


@dataclass(slots=True)
class Story:
    """Boots as the guest tells of them, and the Node as the API server has it."""

    node: str
    digest: str
    """Of the image that runs."""
    boots: list[Boot] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    """Lines for people."""
    images: dict[str, str] = field(default_factory=dict)
    """Digest of the image of each config that has one, outside image mode."""
    _notes: dict[str, str] = field(default_factory=dict)
    _cordoned: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began: float = field(default_factory=time.monotonic)

    def see(self, storage: StorageKey, event: StoreEvent) -> None:
        """Record a change in the API server, within the call that makes it."""
        metadata = event.object["metadata"]
        if storage[1] != "nodes" or metadata["name"] != self.node:
            return
        notes = dict(metadata.get("annotations") or {})
        with self._lock:
            for name in sorted({*notes, *self._notes}):
                if notes.get(name) != self._notes.get(name):
                    self._tell(f"{name.rpartition('/')[2]} = {notes.get(name)}")
            for spelling in key.IMAGE_SPELLINGS.values():
                self._check_report(spelling, notes)
            self._check_config(notes)
            self._notes = notes
            self._cordoned = bool(event.object["spec"].get("unschedulable"))

    def booted(self, found: Json) -> None:
        """Record a boot."""
        with self._lock:
            boot = Boot(
                digest=str(found.get("digest", "")),
                ledger=found.get("ledger"),
                drained=self._drained(),
                asked_drain=self._notes.get(key.DESIRED_DRAIN, ""),
            )
            update = _update(boot.ledger)
            self._tell(f"boot of {boot.digest[:19]}, the ledger says {update.get('phase')}")
            self._check_boot(boot, update)
            self.boots.append(boot)
            self.digest = boot.digest

    def _check_report(self, spelling: str, notes: dict[str, str]) -> None:
        """The image that the node says it has is the one that runs."""
        said = notes.get(spelling, "")
        if said and said != self._notes.get(spelling) and not said.endswith(self.digest):
            self._complain(f"{spelling} became {said} while {self.digest} ran")

    def _check_config(self, notes: dict[str, str]) -> None:
        """The image of the config that the node says it has is the one that runs."""
        said = notes.get(key.CURRENT_CONFIG, "")
        image = self.images.get(said, self.digest)
        if said != self._notes.get(key.CURRENT_CONFIG) and image != self.digest:
            self._complain(f"{said} was reported while {self.digest} ran")

    def _check_boot(self, boot: Boot, update: Mapping[str, object]) -> None:
        joined = key.CURRENT_CONFIG in self._notes
        if boot.digest != self.digest and joined and not boot.drained:
            self._complain(f"booted {boot.digest} in place of {self.digest} while in service")
        if boot.ledger == "broken":
            self._complain("the ledger is broken")
        asked = boot.asked_drain
        if asked.startswith("drain-") and update.get("drainToken") != asked:
            self._complain(f"{asked} was requested, but the ledger has {update.get('drain')!r}")
        target = update.get("target")
        phase = update.get("phase")
        if phase not in _VERIFIED and isinstance(target, dict) and self._is_reported(target):
            self._complain(f"{target['config']} was reported, and the ledger says {phase}")
        # Without a reboot, files that need no drain are verified in service.
        needs_drain = phase != Phase.VERIFYING or update.get("rebootCount") != 0
        if phase in _OUT_OF_SERVICE and needs_drain and joined and not boot.drained:
            self._complain(f"the node was in service, and the ledger says {phase}")

    def _is_reported(self, target: Mapping[str, object]) -> bool:
        """Whether the Node says that it has the target; only its image may change."""
        said = {self._notes.get(each, "") for each in key.IMAGE_SPELLINGS.values()}
        image = next(iter(said - {""}), "")
        return (target.get("config"), target.get("image") or "") == (
            self._notes.get(key.CURRENT_CONFIG),
            image,
        )

    def _drained(self) -> bool:
        asked = self._notes.get(key.DESIRED_DRAIN, "")
        acknowledged = self._notes.get(key.LAST_APPLIED_DRAIN, "")
        return self._cordoned and asked == acknowledged and asked.startswith("drain-")

    def _complain(self, text: str) -> None:
        self._tell(f"VIOLATION: {text}")
        self.violations.append(text)

    def _tell(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - self._began:8.1f} {text}")


def _update(ledger: object) -> Mapping[str, object]:
    found = ledger.get("update") if isinstance(ledger, dict) else None
    return found if isinstance(found, dict) else {}
