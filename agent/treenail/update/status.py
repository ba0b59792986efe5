"""What a move looks like from outside: annotations, conditions, one event and one sentence.

Everything that anybody is told of an update is computed here from the same value, so the Node,
the MachineConfigNode, the journal and ``treenail status`` cannot disagree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.errors import Again, DrainError, TreenailError
from treenail.update.decide import (
    Adopt,
    Close,
    Commit,
    Decision,
    Drain,
    Drop,
    Forgive,
    Reboot,
    Refuse,
    Rest,
    Resume,
    Stage,
    Wait,
    uncordon_token,
)
from treenail.update.facts import Facts
from treenail.update.record import Phase, Record, Target, Update
from treenail.update.wish import Wish


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about this Node; ``type`` is Normal or Warning."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A MachineConfigNode condition: its ``type`` and what is true of it now."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """What there is to tell; annotations of value None are to be absent."""

    sentence: str
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    conditions: tuple[Verdict, ...] = ()
    event: Event | None = None
    current: Target = field(default_factory=Target)
    desired: Target = field(default_factory=Target)


def report(facts: Facts, decision: Decision, failure: TreenailError | None) -> Report:
    """The report of a decision about to be carried out, or of how its last attempt failed."""
    told = sentence(decision)
    if isinstance(decision, Adopt | Commit | Close | Forgive):
        # Over in an instant; what they lead to is reported by the move after them.
        return Report(told)
    if isinstance(decision, Rest) and not decision.settled:
        return Report(told)
    if failure is not None and failure.state is None:
        failure = None
    return Report(
        sentence=told if failure is None else f"{told}: {failure}",
        annotations=_annotations(facts, decision, failure),
        conditions=_conditions(facts, decision, failure),
        event=_event(facts, decision, failure),
        current=facts.record.current,
        desired=_desired(facts),
    )


def reason_text(failure: TreenailError) -> str:
    """The failure and its remedy as one text for people, as long as an annotation may be."""
    text = f"{failure}; {failure.remedy}" if failure.remedy else str(failure)
    return text[: key.REASON_LIMIT]


def sentence(decision: Decision) -> str:
    """What the node is doing, in a few words."""
    match decision:
        case Rest(reason=reason) | Wait(reason=reason):
            return reason
        case Adopt(target=target):
            return f"already at {target}"
        case Stage(target=target):
            return f"staging {target}"
        case Drain():
            return "asking for the drain"
        case Reboot(target=target):
            return f"rebooting into {target}"
        case Commit(target=target):
            return f"verified {target}"
        case Resume():
            return "asking for the uncordon"
        case Close(done=done):
            return "update done" if done else "update called off"
        case Drop(reason=reason):
            return f"calling the update off: {reason}"
        case Refuse():
            return "can't do what is asked for"
        case Forgive():
            return "another target is asked for"


def _annotations(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> dict[str, str | None]:
    wanted: dict[str, str | None] = {key.STATE: _state(decision, failure)}
    if isinstance(decision, Wait) and decision.overdue:
        failure = DrainError(f"{decision.reason} for longer than allowed")
    wanted[key.REASON] = "" if failure is None else reason_text(failure)
    wanted[key.POST_CONFIG_ACTION] = "Rebooting" if isinstance(decision, Reboot) else ""
    wanted |= _current(facts)
    token = _drain_wanted(facts.record.update, decision)
    if token:
        wanted[key.DESIRED_DRAIN] = token
    return wanted


def _state(decision: Decision, failure: TreenailError | None) -> str | None:
    if failure is not None:
        return failure.state
    if isinstance(decision, Rest):
        return NodeState.DONE
    return NodeState.WORKING


def _current(facts: Facts) -> dict[str, str | None]:
    """What is current, in the spelling that was asked; other spellings would contradict it."""
    record: Record = facts.record
    if not record.current.config:
        return {}
    wish = facts.node.wish if facts.node else None
    asked = wish.spellings if isinstance(wish, Wish) else ()
    spelled: dict[str, str | None] = {key.CURRENT_CONFIG: record.current.config}
    if isinstance(wish, Wish):
        for desired, current in key.IMAGE_SPELLINGS.items():
            spelled[current] = record.current.image or None if desired in asked else None
    return spelled


def _desired(facts: Facts) -> Target:
    wish = facts.node.wish if facts.node else None
    if isinstance(wish, Wish):
        return wish.target
    return facts.record.update.target if facts.record.update else facts.record.current


def _drain_wanted(update: Update | None, decision: Decision) -> str:
    if isinstance(decision, Resume):
        return decision.token
    if update is None:
        return ""
    match update.phase:
        case Phase.STAGING | Phase.DRAINING | Phase.REBOOTING:
            return update.drain
        case Phase.RESUMING | Phase.RELEASING:
            return uncordon_token(update.target.config) if update.drain else ""


_PREPARED = ("UpdatePrepared", "ImagePulledFromRegistry")
_PROGRESS = (
    "UpdatePrepared",
    "ImagePulledFromRegistry",
    "UpdateExecuted",
    "AppliedOSImage",
    "UpdatePostActionComplete",
    "RebootedNode",
    "UpdateComplete",
    "Resumed",
)


CONDITIONS_OF_THE_AGENT = frozenset({"Updated", "NodeDegraded", *_PROGRESS})
"""The MachineConfigNode conditions that this agent writes; the others have other writers."""


def _conditions(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> tuple[Verdict, ...]:
    """The conditions of the MachineConfigNode that are the agent's to write.

    Cordoned, Drained and Uncordoned are the drain controller's. Written when the staging begins,
    when it is over and when the update is, so that an update stays within two writes a phase.
    """
    if failure is not None:
        return (Verdict("NodeDegraded", "True", str(failure.state), reason_text(failure)),)
    healthy = Verdict("NodeDegraded", "False", "AsExpected", "The node is not degraded")
    if isinstance(decision, Rest):
        to = f"Action during update to {facts.record.current.config}"
        over = tuple(Verdict(kind, "False", "UpdateDone", f"{to} is over") for kind in _PROGRESS)
        at = Verdict("Updated", "True", "Updated", f"Node is at {facts.record.current}")
        return (at, *over, healthy)
    match decision:
        case Stage(target=target):
            updated = Verdict("Updated", "False", "Updating", f"Node is updating to {target}")
            pending = tuple(
                Verdict(kind, "Unknown", "Staging", f"Staging {target}") for kind in _PREPARED
            )
            return (updated, *pending, healthy)
        case Drain(target=target):
            updated = Verdict("Updated", "False", "Updating", f"Node is updating to {target}")
            staged = tuple(
                Verdict(kind, "True", "Staged", f"Staged {target}") for kind in _PREPARED
            )
            executing = Verdict(
                "UpdateExecuted", "Unknown", "Draining", "Waiting for the node to be drained"
            )
            return (updated, *staged, executing, healthy)
        case _:
            return ()


def _event(facts: Facts, decision: Decision, failure: TreenailError | None) -> Event | None:
    if failure is not None:
        called = "FailedToReconcile" if failure.again is Again.ON_CHANGE else "OSUpdateFailed"
        return Event("Warning", called, reason_text(failure))
    update = facts.record.update
    match decision:
        case Drain(target=target):
            return Event("Normal", "OSUpdateStaged", f"Staged {target}; asking for the drain")
        case Reboot(target=target):
            return Event("Normal", "Reboot", f"Node will reboot into {target}")
        case Resume() if update is not None and update.phase is Phase.RESUMING:
            return Event("Normal", "OSUpgradeApplied", f"Booted and verified {update.target}")
        case Drop(reason=reason):
            return Event("Normal", "OSUpdateCancelled", f"Update called off: {reason}")
        case _:
            return None
