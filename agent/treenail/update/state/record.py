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
from treenail.update.state.boot_trial import BootTrial
from treenail.update.state.retention import RetainedDeployment

if TYPE_CHECKING:
    from treenail.update.impact.impact import UpdateImpact

Json = dict[str, object]

_SHORT_DIGEST = 12
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
        short = self.image[: self.image.index("@") + len("@sha256:") + _SHORT_DIGEST]
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
    VERIFYING = "proving"
    """The target is booted; whether the node is healthy with it is being found out."""
    ROLLING_BACK = "returning"
    """The target is not healthy: the previous deployment is made the default and rebooted into."""
    UNCORDONING = "resuming"
    """The target is reached and verified; the uncordon is asked for."""
    CANCELLING = "releasing"
    """Called off: what was staged is dropped, files are put back, the drain is taken back."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
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
    impact: "UpdateImpact | None" = None
    """What there is to do; None until the configs were read, and can be reconciled."""
    staged_id: str = ""
    """The deployment that we staged; empty before, and when we died before it was noted."""
    drain_token: str = ""
    """The value of ``desiredDrain`` that we asked for last; empty before the first."""
    reboot_count: int = 0
    """How often the reboot into this target was asked for."""
    phase_seconds: tuple[tuple[Phase, float], ...] = ()
    """Seconds in each phase before this one, in the order in which they were entered first."""
    boot_trial: BootTrial = field(default_factory=BootTrial)
    is_soft_reboot: bool = False
    """The last reboot kept the kernel."""

    def enter_phase(self, phase: Phase, *, boot_id: str, now: float) -> "UpdateRecord":
        """The update as it goes into ``phase``."""
        after_reboot = phase is Phase.VERIFYING and self.phase is Phase.REBOOTING
        soft = (
            boot_ids.is_soft_reboot(self.boot_id, boot_id) if after_reboot else self.is_soft_reboot
        )
        entered = replace(self, phase=phase, boot_id=boot_id, entered=now, is_soft_reboot=soft)
        return replace(entered, phase_seconds=self.compute_phase_seconds(now))

    def compute_phase_seconds(self, now: float) -> tuple[tuple[Phase, float], ...]:
        """Seconds in each phase, up to now; a clock that was set back takes nothing away."""
        found = dict(self.phase_seconds)
        found[self.phase] = found.get(self.phase, 0.0) + max(now - self.entered, 0.0)
        return tuple(found.items())


@dataclass(frozen=True, slots=True)
class QuarantinedTarget:
    """A target that is not tried again until another one is asked for."""

    target: Target
    reason: str
    remedy: str = ""
    is_cancelled_by_user: bool = False
    """A person on the machine did not want it; nothing is wrong with it."""
    check: str = ""
    """The health check that failed; empty when it was refused before it was booted."""


@dataclass(frozen=True, slots=True)
class PrestagedTarget:
    """What is staged, or being staged, though the node is not asked to move to it yet."""

    target: Target
    boot_id: str
    """The boot in which it was staged, which it does not outlive."""
    staged_id: str = ""
    """The deployment; empty before it was noted, and when nothing had to be staged."""
    is_done: bool = False


class UpdateOutcome(StrEnum):
    """What became of an update."""

    DONE = "done"
    CANCELLED = "called off"
    """Another target was asked for, or somebody interfered; the node was as before."""
    FAILED = "failed"
    """The target was refused for good; the node was as before."""


@dataclass(frozen=True, slots=True)
class PastUpdate:
    """One update that is over; times are seconds since the epoch."""

    id: str
    target: Target
    origin: Target
    began: float
    ended: float
    outcome: UpdateOutcome
    reboot_count: int = 0
    reasons: tuple[str, ...] = ()
    """Why the node was disturbed."""
    failure: str = ""
    phase_seconds: tuple[tuple[Phase, float], ...] = ()
    """Seconds in each phase."""
    is_soft_reboot: bool = False


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What the ledger holds."""

    current: Target = Target()
    """Booted and verified; never set on the strength of a request alone."""
    update: UpdateRecord | None = None
    quarantined: QuarantinedTarget | None = None
    history: tuple[PastUpdate, ...] = ()
    """The last updates, the newest first; no more than `HISTORY_LIMIT`."""
    booted_digest: str = ""
    """The manifest digest that was booted when ``current`` was verified; empty if unknown."""
    prestaged: PrestagedTarget | None = None
    api_blamed: Target = Target()
    """The target that the node was last sent back from because of the API server."""
    retained: RetainedDeployment | None = None
    """The previous deployment, while it is pinned."""

    def close_update(self, outcome: UpdateOutcome, *, now: float) -> "LedgerRecord":
        """The record without its update, which is history."""
        update = self.update
        if update is None:
            return self
        refused = self.quarantined
        past = PastUpdate(
            id=update.id,
            target=update.target,
            origin=update.origin,
            began=update.began,
            ended=now,
            outcome=outcome,
            reboot_count=update.reboot_count,
            reasons=update.impact.reasons if update.impact else (),
            failure=refused.reason if refused and refused.target == update.target else "",
            phase_seconds=update.compute_phase_seconds(now),
            is_soft_reboot=update.is_soft_reboot,
        )
        history = (past, *self.history)[:HISTORY_LIMIT]
        healthy = outcome is UpdateOutcome.DONE
        retained = self.retained and self.retained.end_trial(is_healthy=healthy, now=now)
        return replace(self, update=None, history=history, retained=retained)


def to_json(record: LedgerRecord) -> Json:
    """The record as the ledger keeps it."""
    update, refused = record.update, record.quarantined
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
            "work": None if update.impact is None else _work_to_json(update.impact),
            "stagedID": update.staged_id,
            "drain": update.drain_token,
            "reboots": update.reboot_count,
            "spent": _spent_to_json(update.phase_seconds),
            "probation": probations.to_json(update.boot_trial),
            "soft": update.is_soft_reboot,
        },
        "refused": None
        if refused is None
        else {
            "target": _target_to_json(refused.target),
            "reason": refused.reason,
            "remedy": refused.remedy,
            "calledOff": refused.is_cancelled_by_user,
            "check": refused.check,
        },
        "history": [_past_to_json(past) for past in record.history],
        "booted": record.booted_digest,
        "ahead": None
        if record.prestaged is None
        else {
            "target": _target_to_json(record.prestaged.target),
            "bootID": record.prestaged.boot_id,
            "stagedID": record.prestaged.staged_id,
            "done": record.prestaged.is_done,
        },
        "blamed": _target_to_json(record.api_blamed),
        "retained": retention.to_json(record.retained),
    }


def from_json(document: Json | None) -> LedgerRecord:
    """The record in a ledger document; an absent one is a node that has done nothing yet.

    Raises `LedgerError` when the document is not one that `to_json` wrote.
    """
    if document is None:
        return LedgerRecord()
    try:
        update, refused = document["update"], document["refused"]
        return LedgerRecord(
            current=_target_from_json(document["current"]),
            update=None if update is None else _decode_update(json_types.expect_object(update)),
            quarantined=None
            if refused is None
            else _refused_from_json(json_types.expect_object(refused)),
            history=tuple(
                _past_from_json(json_types.expect_object(past))
                for past in json_types.expect_list(document.get("history", []))
            ),
            booted_digest=json_types.expect_string(document.get("booted", "")),
            prestaged=_ahead_from_json(json_types.expect_object(ahead))
            if (ahead := document.get("ahead"))
            else None,
            api_blamed=_target_from_json(document["blamed"]) if "blamed" in document else Target(),
            retained=retention.from_json(document.get("retained")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"the ledger is not of a form this version writes: {error!r}",
            remedy="install the version that wrote it, or move the ledger away and let the node "
            "be compared with its desired config afresh",
        ) from error


def _decode_update(document: Json) -> UpdateRecord:
    return UpdateRecord(
        id=json_types.expect_string(document["id"]),
        target=_target_from_json(document["target"]),
        origin=_target_from_json(document["origin"]),
        phase=Phase(json_types.expect_string(document["phase"])),
        boot_id=json_types.expect_string(document["bootID"]),
        began=json_types.expect_number(document["began"]),
        entered=json_types.expect_number(document["entered"]),
        impact=None
        if (work := document["work"]) is None
        else _work_from_json(json_types.expect_object(work)),
        staged_id=json_types.expect_string(document["stagedID"]),
        drain_token=json_types.expect_string(document["drain"]),
        reboot_count=int(json_types.expect_number(document["reboots"])),
        phase_seconds=_spent_from_json(document.get("spent", {})),
        boot_trial=probations.from_json(document.get("probation")),
        is_soft_reboot=document.get("soft") is True,
    )


def _refused_from_json(document: Json) -> QuarantinedTarget:
    return QuarantinedTarget(
        target=_target_from_json(document["target"]),
        reason=json_types.expect_string(document["reason"]),
        remedy=json_types.expect_string(document["remedy"]),
        is_cancelled_by_user=document.get("calledOff") is True,
        check=json_types.expect_string(document.get("check", "")),
    )


def _ahead_from_json(document: Json) -> PrestagedTarget:
    return PrestagedTarget(
        target=_target_from_json(document["target"]),
        boot_id=json_types.expect_string(document["bootID"]),
        staged_id=json_types.expect_string(document["stagedID"]),
        is_done=document["done"] is True,
    )


def _past_to_json(past: PastUpdate) -> Json:
    return {
        "id": past.id,
        "target": _target_to_json(past.target),
        "origin": _target_to_json(past.origin),
        "began": past.began,
        "ended": past.ended,
        "outcome": str(past.outcome),
        "reboots": past.reboot_count,
        "reasons": list(past.reasons),
        "failure": past.failure,
        "spent": _spent_to_json(past.phase_seconds),
        "soft": past.is_soft_reboot,
    }


def _past_from_json(document: Json) -> PastUpdate:
    return PastUpdate(
        id=json_types.expect_string(document["id"]),
        target=_target_from_json(document["target"]),
        origin=_target_from_json(document["origin"]),
        began=json_types.expect_number(document["began"]),
        ended=json_types.expect_number(document["ended"]),
        outcome=UpdateOutcome(json_types.expect_string(document["outcome"])),
        reboot_count=int(json_types.expect_number(document["reboots"])),
        reasons=tuple(map(json_types.expect_string, json_types.expect_list(document["reasons"]))),
        failure=json_types.expect_string(document["failure"]),
        phase_seconds=_spent_from_json(document.get("spent", {})),
        is_soft_reboot=document.get("soft") is True,
    )


def _spent_to_json(spent: tuple[tuple[Phase, float], ...]) -> Json:
    return {str(phase): seconds for phase, seconds in spent}


def _spent_from_json(value: object) -> tuple[tuple[Phase, float], ...]:
    return tuple(
        (Phase(phase), json_types.expect_number(seconds))
        for phase, seconds in json_types.expect_object(value).items()
    )


# Work drags all of configuration behind it, of which commands that read a record need nothing.


def _work_to_json(work: "UpdateImpact") -> Json:
    from treenail.update.impact.impact import to_json  # noqa: PLC0415 - see above

    return to_json(work)


def _work_from_json(document: Json) -> "UpdateImpact":
    from treenail.update.impact.impact import from_json  # noqa: PLC0415 - see above

    return from_json(document)


def _target_to_json(target: Target) -> Json:
    return {"config": target.config, "image": target.image}


def _target_from_json(value: object) -> Target:
    document = json_types.expect_object(value)
    return Target(
        json_types.expect_string(document["config"]), json_types.expect_string(document["image"])
    )
