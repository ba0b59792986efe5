"""The record of an update: what a node must remember to survive a crash at any instruction.

One document holds both what is current and what is under way, so that "the new one is verified"
and "the update has passed its last step" are one atomic write, never two.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from treenail.errors import LedgerError
from treenail.update.state import boot_id as boot_ids
from treenail.update.state import boot_trial as probations
from treenail.update.state import json_types, retention
from treenail.update.state.boot_trial import Probation
from treenail.update.state.retention import Retained

if TYPE_CHECKING:
    from treenail.update.impact.impact import Work

Json = dict[str, object]

_SHORT = 12
HISTORY_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Target:
    """A rendered config and the OS image beside it; ``image`` is empty outside image mode."""

    config: str = ""
    image: str = ""

    @property
    def digest(self) -> str:
        """The manifest digest of the image, ``sha256:…``; empty without an image."""
        return self.image.partition("@")[2]

    def __str__(self) -> str:
        """For sentences: the digest is cut to what tells images apart."""
        if not self.image:
            return self.config or "nothing"
        short = self.image[: self.image.index("@") + len("@sha256:") + _SHORT]
        return f"{self.config} with {short}"


class Phase(StrEnum):
    """How far an update has come; each is entered by a write to the ledger."""

    STAGING = "staging"
    """Configs are read, what the OS needs is pulled and deployed, locked; the node serves."""
    DRAINING = "draining"
    """The drain is asked for; the deployment is still locked."""
    APPLYING = "applying"
    """Files, units and users are being written; all of that can be undone."""
    REBOOTING = "rebooting"
    """The point of no return: the deployment is unlocked and the reboot asked for."""
    PROVING = "proving"
    """The target is booted; whether the node is healthy with it is being found out."""
    RETURNING = "returning"
    """The target is not healthy: the previous deployment is made the default and rebooted into."""
    RESUMING = "resuming"
    """The target is reached and verified; the uncordon is asked for."""
    RELEASING = "releasing"
    """Called off: what was staged is dropped, files are put back, the drain is taken back."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update of this node, from the first step to the last."""

    id: str
    target: Target
    origin: Target
    phase: Phase
    boot_id: str
    """The boot in which ``phase`` was entered."""
    began: float
    """Seconds since the epoch."""
    entered: float
    """When ``phase`` was entered, seconds since the epoch."""
    work: "Work | None" = None
    """What there is to do; None until the configs were read, and can be reconciled."""
    staged_id: str = ""
    """The deployment that we staged; empty before, and when we died before it was noted."""
    drain: str = ""
    """The value of ``desiredDrain`` that we asked for last; empty before the first."""
    reboots: int = 0
    """How often the reboot into this target was asked for."""
    spent: tuple[tuple[Phase, float], ...] = ()
    """Seconds in each phase before this one, in the order in which they were entered first."""
    probation: Probation = field(default_factory=Probation)
    soft: bool = False
    """The last reboot kept the kernel."""

    def enter(self, phase: Phase, *, boot_id: str, now: float) -> "Update":
        """The update as it goes into ``phase``."""
        after_reboot = phase is Phase.PROVING and self.phase is Phase.REBOOTING
        soft = boot_ids.softly(self.boot_id, boot_id) if after_reboot else self.soft
        entered = replace(self, phase=phase, boot_id=boot_id, entered=now, soft=soft)
        return replace(entered, spent=self.spent_until(now))

    def spent_until(self, now: float) -> tuple[tuple[Phase, float], ...]:
        """Seconds in each phase, up to now; a clock that was set back takes nothing away."""
        found = dict(self.spent)
        found[self.phase] = found.get(self.phase, 0.0) + max(now - self.entered, 0.0)
        return tuple(found.items())


@dataclass(frozen=True, slots=True)
class Refused:
    """A target that is not tried again until another one is asked for."""

    target: Target
    reason: str
    remedy: str = ""
    called_off: bool = False
    """A person on the machine did not want it; nothing is wrong with it."""
    check: str = ""
    """The health check that failed; empty when it was refused before it was booted."""


@dataclass(frozen=True, slots=True)
class StagedAhead:
    """What is staged, or being staged, though the node is not asked to move to it yet."""

    target: Target
    boot_id: str
    """The boot in which it was staged, which it does not outlive."""
    staged_id: str = ""
    """The deployment; empty before it was noted, and when nothing had to be staged."""
    done: bool = False


class Outcome(StrEnum):
    """What became of an update."""

    DONE = "done"
    CALLED_OFF = "called off"
    """Another target was asked for, or somebody interfered; the node was as before."""
    FAILED = "failed"
    """The target was refused for good; the node was as before."""


@dataclass(frozen=True, slots=True)
class Past:
    """One update that is over; times are seconds since the epoch."""

    id: str
    target: Target
    origin: Target
    began: float
    ended: float
    outcome: Outcome
    reboots: int = 0
    reasons: tuple[str, ...] = ()
    """Why the node was disturbed."""
    failure: str = ""
    spent: tuple[tuple[Phase, float], ...] = ()
    """Seconds in each phase."""
    soft: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """What the ledger holds."""

    current: Target = Target()
    """Booted and verified; never set on the strength of a request alone."""
    update: Update | None = None
    refused: Refused | None = None
    history: tuple[Past, ...] = ()
    """The last updates, the newest first; no more than `HISTORY_LIMIT`."""
    booted: str = ""
    """The manifest digest that was booted when ``current`` was verified; empty if unknown."""
    ahead: StagedAhead | None = None
    blamed: Target = Target()
    """The target that the node was last sent back from because of the API server."""
    retained: Retained | None = None
    """The previous deployment, while it is pinned."""

    def closed(self, outcome: Outcome, *, now: float) -> "Record":
        """The record without its update, which is history."""
        update = self.update
        if update is None:
            return self
        refused = self.refused
        past = Past(
            id=update.id,
            target=update.target,
            origin=update.origin,
            began=update.began,
            ended=now,
            outcome=outcome,
            reboots=update.reboots,
            reasons=update.work.reasons if update.work else (),
            failure=refused.reason if refused and refused.target == update.target else "",
            spent=update.spent_until(now),
            soft=update.soft,
        )
        history = (past, *self.history)[:HISTORY_LIMIT]
        healthy = outcome is Outcome.DONE
        retained = self.retained and self.retained.closed(healthy=healthy, now=now)
        return replace(self, update=None, history=history, retained=retained)


def to_json(record: Record) -> Json:
    """The record as the ledger keeps it."""
    update, refused = record.update, record.refused
    return {
        "version": 1,
        "current": _target_to_json(record.current),
        "update": None
        if update is None
        else {
            "id": update.id,
            "target": _target_to_json(update.target),
            "origin": _target_to_json(update.origin),
            "phase": str(update.phase),
            "bootID": update.boot_id,
            "began": update.began,
            "entered": update.entered,
            "work": None if update.work is None else _work_to_json(update.work),
            "stagedID": update.staged_id,
            "drain": update.drain,
            "reboots": update.reboots,
            "spent": _spent_to_json(update.spent),
            "probation": probations.to_json(update.probation),
            "soft": update.soft,
        },
        "refused": None
        if refused is None
        else {
            "target": _target_to_json(refused.target),
            "reason": refused.reason,
            "remedy": refused.remedy,
            "calledOff": refused.called_off,
            "check": refused.check,
        },
        "history": [_past_to_json(past) for past in record.history],
        "booted": record.booted,
        "ahead": None
        if record.ahead is None
        else {
            "target": _target_to_json(record.ahead.target),
            "bootID": record.ahead.boot_id,
            "stagedID": record.ahead.staged_id,
            "done": record.ahead.done,
        },
        "blamed": _target_to_json(record.blamed),
        "retained": retention.to_json(record.retained),
    }


def from_json(document: Json | None) -> Record:
    """The record in a ledger document; an absent one is a node that has done nothing yet.

    Raises `LedgerError` when the document is not one that `to_json` wrote.
    """
    if document is None:
        return Record()
    try:
        update, refused = document["update"], document["refused"]
        return Record(
            current=_target_from_json(document["current"]),
            update=None if update is None else _update_from_json(json_types.mapping(update)),
            refused=None if refused is None else _refused_from_json(json_types.mapping(refused)),
            history=tuple(
                _past_from_json(json_types.mapping(past))
                for past in json_types.rows(document.get("history", []))
            ),
            booted=json_types.text(document.get("booted", "")),
            ahead=_ahead_from_json(json_types.mapping(ahead))
            if (ahead := document.get("ahead"))
            else None,
            blamed=_target_from_json(document["blamed"]) if "blamed" in document else Target(),
            retained=retention.from_json(document.get("retained")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"the ledger is not of a form this version writes: {error!r}",
            remedy="install the version that wrote it, or move the ledger away and let the node "
            "be compared with its desired config afresh",
        ) from error


def _update_from_json(document: Json) -> Update:
    return Update(
        id=json_types.text(document["id"]),
        target=_target_from_json(document["target"]),
        origin=_target_from_json(document["origin"]),
        phase=Phase(json_types.text(document["phase"])),
        boot_id=json_types.text(document["bootID"]),
        began=json_types.number(document["began"]),
        entered=json_types.number(document["entered"]),
        work=None
        if (work := document["work"]) is None
        else _work_from_json(json_types.mapping(work)),
        staged_id=json_types.text(document["stagedID"]),
        drain=json_types.text(document["drain"]),
        reboots=int(json_types.number(document["reboots"])),
        spent=_spent_from_json(document.get("spent", {})),
        probation=probations.from_json(document.get("probation")),
        soft=document.get("soft") is True,
    )


def _refused_from_json(document: Json) -> Refused:
    return Refused(
        target=_target_from_json(document["target"]),
        reason=json_types.text(document["reason"]),
        remedy=json_types.text(document["remedy"]),
        called_off=document.get("calledOff") is True,
        check=json_types.text(document.get("check", "")),
    )


def _ahead_from_json(document: Json) -> StagedAhead:
    return StagedAhead(
        target=_target_from_json(document["target"]),
        boot_id=json_types.text(document["bootID"]),
        staged_id=json_types.text(document["stagedID"]),
        done=document["done"] is True,
    )


def _past_to_json(past: Past) -> Json:
    return {
        "id": past.id,
        "target": _target_to_json(past.target),
        "origin": _target_to_json(past.origin),
        "began": past.began,
        "ended": past.ended,
        "outcome": str(past.outcome),
        "reboots": past.reboots,
        "reasons": list(past.reasons),
        "failure": past.failure,
        "spent": _spent_to_json(past.spent),
        "soft": past.soft,
    }


def _past_from_json(document: Json) -> Past:
    return Past(
        id=json_types.text(document["id"]),
        target=_target_from_json(document["target"]),
        origin=_target_from_json(document["origin"]),
        began=json_types.number(document["began"]),
        ended=json_types.number(document["ended"]),
        outcome=Outcome(json_types.text(document["outcome"])),
        reboots=int(json_types.number(document["reboots"])),
        reasons=tuple(map(json_types.text, json_types.rows(document["reasons"]))),
        failure=json_types.text(document["failure"]),
        spent=_spent_from_json(document.get("spent", {})),
        soft=document.get("soft") is True,
    )


def _spent_to_json(spent: tuple[tuple[Phase, float], ...]) -> Json:
    return {str(phase): seconds for phase, seconds in spent}


def _spent_from_json(value: object) -> tuple[tuple[Phase, float], ...]:
    return tuple(
        (Phase(phase), json_types.number(seconds))
        for phase, seconds in json_types.mapping(value).items()
    )


# Work drags all of configuration behind it, of which commands that read a record need nothing.


def _work_to_json(work: "Work") -> Json:
    from treenail.update.impact.impact import to_json  # noqa: PLC0415 - see above

    return to_json(work)


def _work_from_json(document: Json) -> "Work":
    from treenail.update.impact.impact import from_json  # noqa: PLC0415 - see above

    return from_json(document)


def _target_to_json(target: Target) -> Json:
    return {"config": target.config, "image": target.image}


def _target_from_json(value: object) -> Target:
    document = json_types.mapping(value)
    return Target(json_types.text(document["config"]), json_types.text(document["image"]))
