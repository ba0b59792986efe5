"""What a move looks like from outside: annotations, conditions, one event and one sentence.

Everything that anybody is told of an update is computed here from the same value, so the Node,
the MachineConfigNode, the journal and ``treenail status`` cannot disagree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.errors import (
    Again,
    DrainError,
    DriftError,
    HostError,
    PreflightError,
    TreenailError,
)
from treenail.update.decision.actions import (
    Adopt,
    Apply,
    Close,
    Commit,
    Decision,
    Drain,
    Drop,
    DropAhead,
    Forgive,
    Heal,
    Introduce,
    Prove,
    Reboot,
    Recover,
    Rest,
    Resume,
    Return,
    StageAhead,
    Unpin,
    Wait,
    Weigh,
)
from treenail.update.decision.desired import Wish
from treenail.update.decision.facts import Facts
from treenail.update.impact.impact import Work
from treenail.update.state.record import Phase, Record, Target, Update
from treenail.update.steps.steps import ReloadUnit, RestartUnit, Step


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event about this Node; ``type`` is Normal or Warning."""

    type: str
    reason: str
    message: str
    in_conditions: bool = False
    """The conditions written with it say the same; where there are any it is left out."""


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


_INSTANT = (Adopt, Recover, Heal, Commit, Close, Forgive, Unpin)


def report(facts: Facts, decision: Decision, failure: TreenailError | None) -> Report:
    """The report of a decision about to be carried out, or of how its last attempt failed."""
    told = str(decision)
    if isinstance(decision, StageAhead | DropAhead):
        return _beside(facts, decision, failure)
    if failure is not None and failure.state is None:
        failure = None
    if isinstance(decision, Introduce):
        return Report(told, annotations=decision.annotations)
    if failure is None and isinstance(decision, _INSTANT):
        # Over in an instant; what they lead to is reported by the move after them.
        return Report(told, event=_event(facts, decision, None))
    if isinstance(decision, Rest) and not decision.settled:
        return Report(told)
    failure = failure or _refused(facts, decision)
    return Report(
        sentence=told if failure is None else f"{told}: {failure}",
        annotations=_annotations(facts, decision, failure),
        conditions=_conditions(facts, decision, failure),
        event=_event(facts, decision, failure),
        current=facts.record.current,
        desired=_desired(facts),
    )


def _beside(
    facts: Facts, decision: StageAhead | DropAhead, failure: TreenailError | None
) -> Report:
    """Whether it succeeds or not, the node is at its target; so it says nothing else."""
    why = None if failure is None else reason_text(failure)
    at_rest = _annotations(facts, Rest(str(decision), settled=True), None)
    # Whoever asked for another image in the meantime is not to take the complaint for its own.
    asked = _staged_for(facts, decision)
    complaint = None if why is None or asked is None else f"{asked.image}: {why}"
    return Report(
        sentence=str(decision) if failure is None else f"{decision}: {failure}",
        annotations={**at_rest, key.STAGED: None, key.STAGING_ERROR: complaint},
        event=None if why is None else Event("Warning", "StagingAheadFailed", why),
        current=facts.record.current,
        desired=_desired(facts),
    )


def _staged_for(facts: Facts, decision: StageAhead | DropAhead) -> Target | None:
    """What is staged, or dropped for, by the decision; what is asked for may be another by now."""
    if isinstance(decision, StageAhead):
        return decision.target
    return facts.node.ahead if facts.node else None


def _refused(facts: Facts, decision: Decision) -> TreenailError | None:
    """Why the update that is being called off is refused from now on."""
    record = facts.record
    if isinstance(decision, Return):
        return HostError(decision.refuse.reason, remedy=decision.refuse.remedy)
    if record.update is None or record.refused is None:
        return None
    return HostError(record.refused.reason, remedy=record.refused.remedy)


def reason_text(failure: TreenailError) -> str:
    """The failure and its remedy as one text for people, as long as an annotation may be."""
    text = f"{failure}; {failure.remedy}" if failure.remedy else str(failure)
    return text[: key.REASON_LIMIT]


def _annotations(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> dict[str, str | None]:
    wanted: dict[str, str | None] = {key.STATE: _state(decision, failure)}
    if isinstance(decision, Wait) and decision.overdue:
        failure = DrainError(_overdue(decision))
    rebooting = isinstance(decision, Reboot | Prove | Return)
    wanted[key.REASON] = "" if failure is None else reason_text(failure)
    wanted[key.POST_CONFIG_ACTION] = "Rebooting" if rebooting else ""
    wanted |= _current(facts)
    wanted |= _staged(facts, decision)
    token = _drain_wanted(facts.record.update, decision)
    if token:
        wanted[key.DESIRED_DRAIN] = token
    return wanted


def _overdue(decision: Wait) -> str:
    return f"{decision.reason} for longer than allowed"


def _staged(facts: Facts, decision: Decision) -> dict[str, str | None]:
    """What is staged ahead, while the node is at rest beside it."""
    kept = facts.record.ahead
    has = isinstance(decision, Rest) and kept is not None and kept.done
    return {key.STAGED: kept.target.image if kept and has else None, key.STAGING_ERROR: None}


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
        case (
            Phase.STAGING
            | Phase.DRAINING
            | Phase.APPLYING
            | Phase.REBOOTING
            | Phase.PROVING
            | Phase.RETURNING
        ):
            return update.drain
        case Phase.RESUMING | Phase.RELEASING:
            # Only the move that asks for the uncordon may: before it, files are still put back.
            return ""


def served(steps: Sequence[Step], target: Target) -> Iterator[Event]:
    """What was made to notice the target without a reboot, in one Event of each kind."""
    for reason, verb, units in (
        (
            "ServiceReload",
            "Reloaded",
            [each.unit for each in steps if isinstance(each, ReloadUnit)],
        ),
        (
            "ServiceRestart",
            "Restarted",
            [each.unit for each in steps if isinstance(each, RestartUnit)],
        ),
    ):
        if units:
            yield Event("Normal", reason, f"{verb} {', '.join(units)} for {target}")


def not_served(step: object, failure: TreenailError) -> Iterator[Event]:
    """What could not be made to notice, if it was that which failed."""
    match step:
        case ReloadUnit():
            yield Event("Warning", "FailedServiceReload", reason_text(failure))
        case RestartUnit():
            yield Event("Warning", "FailedServiceRestart", reason_text(failure))
        case _:
            return


_PROGRESS = (
    "UpdatePrepared",
    "ImagePulledFromRegistry",
    "UpdateExecuted",
    "AppliedFiles",
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

    Cordoned, Drained and Uncordoned are the drain controller's. Written at most once in a phase,
    and when the update is over; not for what is over in an instant because a reboot follows.
    """
    if failure is not None:
        called = "PreflightFailed" if isinstance(failure, PreflightError) else str(failure.state)
        return (Verdict("NodeDegraded", "True", called, reason_text(failure)),)
    if isinstance(decision, Rest):
        to = f"Action during update to {facts.record.current.config}"
        over = tuple(Verdict(kind, "False", "UpdateDone", f"{to} is over") for kind in _PROGRESS)
        at = Verdict("Updated", "True", "Updated", f"Node is at {facts.record.current}")
        return (at, *over, _HEALTHY)
    update = facts.record.update
    found = tuple(_progress(update, decision))
    if not found:
        return ()
    target = (
        decision.target
        if isinstance(decision, Weigh | Drain | Apply | Prove)
        else facts.record.current
    )
    updating = f"Node is updating to {target}"
    return (Verdict("Updated", "False", "Updating", updating), *found, _HEALTHY)


_HEALTHY = Verdict("NodeDegraded", "False", "AsExpected", "The node is not degraded")


def _progress(update: Update | None, decision: Decision) -> Iterator[Verdict]:
    """How far the update is when the move begins."""
    work = update.work if update else None
    match decision:
        case Weigh(target=target):
            yield Verdict("UpdatePrepared", "Unknown", "Preparing", f"Preparing {target}")
            if target.image:
                pulling = f"Preparing {target}"
                yield Verdict("ImagePulledFromRegistry", "Unknown", "Preparing", pulling)
        case Drain(target=target) if work is not None:
            yield from _prepared(target, work)
            yield Verdict(
                "UpdateExecuted", "Unknown", "Draining", "Waiting for the node to be drained"
            )
        case Apply(target=target) if work is not None and not work.reboots:
            yield from _prepared(target, work)
            applying = f"Writing files, units and users of {target.config}"
            yield Verdict("UpdateExecuted", "Unknown", "UpdateExecutedAppliedFiles", applying)
            yield Verdict("AppliedFiles", "Unknown", "UpdateExecutedAppliedFiles", applying)
        case Prove(target=target) if work is not None:
            yield from _executed(target, work)
            proving = f"Seeing whether the node is healthy with {target}"
            yield Verdict("UpdatePostActionComplete", "Unknown", "Proving", proving)
        case Resume() if update is not None and work is not None:
            if update.phase is not Phase.RESUMING:
                return
            yield from _executed(update.target, work)
            verified = f"Verified {update.target}"
            yield Verdict("UpdatePostActionComplete", "True", "Verified", verified)
            resumed = f"Node may serve again with {update.target}"
            yield Verdict("Resumed", "True", "Resumed", resumed)
        case _:
            return


def _prepared(target: Target, work: Work) -> Iterator[Verdict]:
    if work.os.empty:
        message = f"{target.config} can be reached; it costs: {work.cost}"
        yield Verdict("UpdatePrepared", "True", "UpdatePrepared", message)
        return
    yield Verdict("UpdatePrepared", "True", "Staged", f"Staged {target}")
    if work.os.image:
        yield Verdict("ImagePulledFromRegistry", "True", "Staged", f"Staged {target}")


def _executed(target: Target, work: Work) -> Iterator[Verdict]:
    yield from _prepared(target, work)
    yield Verdict("UpdateExecuted", "True", "UpdateExecuted", f"Carried {target} out")
    if work.writes:
        wrote = f"Wrote files, units and users of {target.config}"
        yield Verdict("AppliedFiles", "True", "UpdateExecutedAppliedFiles", wrote)
    if work.os.image:
        booted = f"Booted {target}"
        yield Verdict("AppliedOSImage", "True", "UpdateExecutedAppliedOSImage", booted)
    if work.reboots:
        yield Verdict("RebootedNode", "True", "Rebooted", f"Node was rebooted into {target}")


def _event(facts: Facts, decision: Decision, failure: TreenailError | None) -> Event | None:
    if failure is not None:
        if isinstance(failure, DriftError):
            text = reason_text(failure)
            return Event("Warning", "ConfigDriftDetected", text, in_conditions=True)
        called = "FailedToReconcile" if failure.again is Again.ON_CHANGE else "OSUpdateFailed"
        if isinstance(failure, PreflightError):
            called = "PreflightFailed"
        return Event("Warning", called, reason_text(failure), in_conditions=True)
    update = facts.record.update
    if update is not None and isinstance(decision, Wait) and decision.overdue:
        draining = update.phase is Phase.DRAINING
        called = "FailedToDrain" if draining else "FailedToUncordon"
        return Event("Warning", called, _overdue(decision))
    work = update.work if update else None
    if update is None or work is None:
        return None
    why = f" because of {work.reasons[0]}" if work.reasons else ""
    match decision:
        case Drain(target=target) if work.os.empty:
            asking = f"Asking for the drain, for {target}{why}"
            return Event("Normal", "Drain", asking, in_conditions=True)
        case Drain(target=target):
            staged = f"Staged {target}; asking for the drain"
            return Event("Normal", "OSUpdateStaged", staged, in_conditions=True)
        case Reboot(target=target, softly=softly):
            how = ", with a soft reboot if the kernel stays" if softly else ""
            return Event("Normal", "Reboot", f"Node will reboot into {target}{how}{why}")
        case Resume() if update.phase is Phase.RESUMING and not work.os.empty:
            return Event("Normal", "OSUpgradeApplied", f"Booted and verified {update.target}")
        case Close(done=True) if not work.reboots:
            return Event("Normal", "SkipReboot", "Config changes do not require reboot.")
        case Drop(reason=reason):
            return Event("Normal", "OSUpdateCancelled", f"Update called off: {reason}")
        case _:
            return None
