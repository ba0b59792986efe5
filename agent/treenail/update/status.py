"""What a move looks like from outside: annotations, conditions, one event and one sentence.

Everything that anybody is told of an update is computed here from the same value, so the Node,
the MachineConfigNode, the journal and ``treenail status`` cannot disagree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.errors import (
    DrainError,
    DriftError,
    HostError,
    PreflightError,
    RetryPolicy,
    TreenailError,
)
from treenail.update.decision.actions import (
    AdoptAction,
    ApplyAction,
    CancelStagedAction,
    CommitAction,
    Decision,
    DrainAction,
    DropPrestagedAction,
    FinishAction,
    IdleAction,
    IntroduceNodeAction,
    PlanAction,
    PrestageAction,
    RebootAction,
    RecoverAction,
    RepairDriftAction,
    RetryAction,
    RollBackAction,
    UncordonAction,
    UnpinAction,
    VerifyAction,
    WaitAction,
)
from treenail.update.decision.desired import DesiredTarget
from treenail.update.decision.facts import Facts
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state.phases import Phase
from treenail.update.state.record import LedgerRecord, Target, UpdateRecord
from treenail.update.steps.steps import ConfigStep, ReloadUnit, RestartUnit


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A Kubernetes Event about this Node; ``type`` is Normal or Warning."""

    type: str
    reason: str
    message: str
    is_in_conditions: bool = False
    """The conditions written with it say the same; where there are any it is left out."""


@dataclass(frozen=True, slots=True)
class ReportedCondition:
    """A MachineConfigNode condition: its ``type`` and what is true of it now."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusReport:
    """What there is to tell; annotations of value None are to be absent."""

    summary: str
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    conditions: tuple[ReportedCondition, ...] = ()
    event: NodeEvent | None = None
    current: Target = field(default_factory=Target)
    desired: Target = field(default_factory=Target)


_INSTANT_ACTIONS = (
    AdoptAction,
    RecoverAction,
    RepairDriftAction,
    CommitAction,
    FinishAction,
    RetryAction,
    UnpinAction,
)


def make_report(facts: Facts, decision: Decision, failure: TreenailError | None) -> StatusReport:
    """The report of a decision about to be carried out, or of how its last attempt failed."""
    told = str(decision)
    if isinstance(decision, PrestageAction | DropPrestagedAction):
        return _report_prestage(facts, decision, failure)
    if failure is not None and failure.node_state is None:
        failure = None
    if isinstance(decision, IntroduceNodeAction):
        return StatusReport(told, annotations=decision.annotations)
    if failure is None and isinstance(decision, _INSTANT_ACTIONS):
        # Over in an instant; what they lead to is reported by the move after them.
        return StatusReport(told, event=_choose_event(facts, decision, None))
    if isinstance(decision, IdleAction) and not decision.is_settled:
        return StatusReport(told)
    failure = failure or _find_quarantine_error(facts, decision)
    return StatusReport(
        summary=told if failure is None else f"{told}: {failure}",
        annotations=_compute_annotations(facts, decision, failure),
        conditions=_compute_conditions(facts, decision, failure),
        event=_choose_event(facts, decision, failure),
        current=facts.record.current,
        desired=_find_desired_target(facts),
    )


def _report_prestage(
    facts: Facts, decision: PrestageAction | DropPrestagedAction, failure: TreenailError | None
) -> StatusReport:
    """Whether it succeeds or not, the node is at its target; so it says nothing else."""
    why = None if failure is None else format_reason(failure)
    at_rest = _compute_annotations(facts, IdleAction(str(decision), is_settled=True), None)
    # Whoever asked for another image in the meantime is not to take the complaint for its own.
    asked = _find_prestage_target(facts, decision)
    complaint = None if why is None or asked is None else f"{asked.image}: {why}"
    return StatusReport(
        summary=str(decision) if failure is None else f"{decision}: {failure}",
        annotations={**at_rest, key.PRESTAGED: None, key.PRESTAGE_ERROR: complaint},
        event=None if why is None else NodeEvent("Warning", "StagingAheadFailed", why),
        current=facts.record.current,
        desired=_find_desired_target(facts),
    )


def _find_prestage_target(
    facts: Facts, decision: PrestageAction | DropPrestagedAction
) -> Target | None:
    """What is staged, or dropped for, by the decision; what is asked for may be another by now."""
    if isinstance(decision, PrestageAction):
        return decision.target
    return facts.node.prestage if facts.node else None


def _find_quarantine_error(facts: Facts, decision: Decision) -> TreenailError | None:
    """Why the update that is being called off is refused from now on."""
    record = facts.record
    if isinstance(decision, RollBackAction):
        return HostError(decision.quarantine.reason, remedy=decision.quarantine.remedy)
    if record.update is None or record.quarantined is None:
        return None
    return HostError(record.quarantined.reason, remedy=record.quarantined.remedy)


def format_reason(failure: TreenailError) -> str:
    """The failure and its remedy as one text for people, as long as an annotation may be."""
    text = f"{failure}; {failure.remedy}" if failure.remedy else str(failure)
    return text[: key.REASON_LIMIT]


def _compute_annotations(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> dict[str, str | None]:
    wanted: dict[str, str | None] = {key.STATE: _choose_state(decision, failure)}
    if isinstance(decision, WaitAction) and decision.is_overdue:
        failure = DrainError(_format_overdue(decision))
    rebooting = isinstance(decision, RebootAction | VerifyAction | RollBackAction)
    wanted[key.REASON] = "" if failure is None else format_reason(failure)
    wanted[key.POST_CONFIG_ACTION] = "Rebooting" if rebooting else ""
    wanted |= _compute_current_annotations(facts)
    wanted |= _compute_staged_annotations(facts, decision)
    token = _find_drain_token(facts.record.update, decision)
    if token:
        wanted[key.DESIRED_DRAIN] = token
    return wanted


def _format_overdue(decision: WaitAction) -> str:
    return f"{decision.reason} for longer than allowed"


def _compute_staged_annotations(facts: Facts, decision: Decision) -> dict[str, str | None]:
    """What is staged ahead, while the node is at rest beside it."""
    kept = facts.record.prestaged
    has = isinstance(decision, IdleAction) and kept is not None and kept.is_done
    return {key.PRESTAGED: kept.target.image if kept and has else None, key.PRESTAGE_ERROR: None}


def _choose_state(decision: Decision, failure: TreenailError | None) -> str | None:
    if failure is not None:
        return failure.node_state
    if isinstance(decision, IdleAction):
        return NodeState.DONE
    return NodeState.WORKING


def _compute_current_annotations(facts: Facts) -> dict[str, str | None]:
    """What is current, in the spelling that was asked; other spellings would contradict it."""
    record: LedgerRecord = facts.record
    if not record.current.config:
        return {}
    wish = facts.node.desired if facts.node else None
    asked = wish.image_keys if isinstance(wish, DesiredTarget) else ()
    spelled: dict[str, str | None] = {key.CURRENT_CONFIG: record.current.config}
    if isinstance(wish, DesiredTarget):
        for desired, current in key.IMAGE_SPELLINGS.items():
            spelled[current] = record.current.image or None if desired in asked else None
    return spelled


def _find_desired_target(facts: Facts) -> Target:
    wish = facts.node.desired if facts.node else None
    if isinstance(wish, DesiredTarget):
        return wish.target
    return facts.record.update.target if facts.record.update else facts.record.current


def _find_drain_token(update: UpdateRecord | None, decision: Decision) -> str:
    if isinstance(decision, UncordonAction):
        return decision.token
    if update is None:
        return ""
    match update.phase:
        case (
            Phase.STAGING
            | Phase.DRAINING
            | Phase.APPLYING
            | Phase.REBOOTING
            | Phase.VERIFYING
            | Phase.ROLLING_BACK
        ):
            return update.drain_token
        case Phase.UNCORDONING | Phase.CANCELLING:
            # Only the move that asks for the uncordon may: before it, files are still put back.
            return ""


def list_service_events(steps: Sequence[ConfigStep], target: Target) -> Iterator[NodeEvent]:
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
            yield NodeEvent("Normal", reason, f"{verb} {', '.join(units)} for {target}")


def list_failed_service_events(step: object, failure: TreenailError) -> Iterator[NodeEvent]:
    """What could not be made to notice, if it was that which failed."""
    match step:
        case ReloadUnit():
            yield NodeEvent("Warning", "FailedServiceReload", format_reason(failure))
        case RestartUnit():
            yield NodeEvent("Warning", "FailedServiceRestart", format_reason(failure))
        case _:
            return


_PROGRESS_TYPES = (
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


AGENT_CONDITIONS = frozenset({"Updated", "NodeDegraded", *_PROGRESS_TYPES})
"""The MachineConfigNode conditions that this agent writes; the others have other writers."""


def _compute_conditions(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> tuple[ReportedCondition, ...]:
    """The conditions of the MachineConfigNode that are the agent's to write.

    Cordoned, Drained and Uncordoned are the drain controller's. Written at most once in a phase,
    and when the update is over; not for what is over in an instant because a reboot follows.
    """
    if failure is not None:
        called = (
            "PreflightFailed" if isinstance(failure, PreflightError) else str(failure.node_state)
        )
        return (ReportedCondition("NodeDegraded", "True", called, format_reason(failure)),)
    if isinstance(decision, IdleAction):
        to = f"Action during update to {facts.record.current.config}"
        over = tuple(
            ReportedCondition(kind, "False", "UpdateDone", f"{to} is over")
            for kind in _PROGRESS_TYPES
        )
        at = ReportedCondition("Updated", "True", "Updated", f"Node is at {facts.record.current}")
        return (at, *over, _NOT_DEGRADED)
    update = facts.record.update
    found = tuple(_list_progress_conditions(update, decision))
    if not found:
        return ()
    target = (
        decision.target
        if isinstance(decision, PlanAction | DrainAction | ApplyAction | VerifyAction)
        else facts.record.current
    )
    updating = f"Node is updating to {target}"
    return (ReportedCondition("Updated", "False", "Updating", updating), *found, _NOT_DEGRADED)


_NOT_DEGRADED = ReportedCondition("NodeDegraded", "False", "AsExpected", "The node is not degraded")


def _list_progress_conditions(
    update: UpdateRecord | None, decision: Decision
) -> Iterator[ReportedCondition]:
    """How far the update is when the move begins."""
    work = update.impact if update else None
    match decision:
        case PlanAction(target=target):
            yield ReportedCondition("UpdatePrepared", "Unknown", "Preparing", f"Preparing {target}")
            if target.image:
                pulling = f"Preparing {target}"
                yield ReportedCondition("ImagePulledFromRegistry", "Unknown", "Preparing", pulling)
        case DrainAction(target=target) if work is not None:
            yield from _list_prepared_conditions(target, work)
            yield ReportedCondition(
                "UpdateExecuted", "Unknown", "Draining", "Waiting for the node to be drained"
            )
        case ApplyAction(target=target) if work is not None and not work.needs_reboot:
            yield from _list_prepared_conditions(target, work)
            applying = f"Writing files, units and users of {target.config}"
            yield ReportedCondition(
                "UpdateExecuted", "Unknown", "UpdateExecutedAppliedFiles", applying
            )
            yield ReportedCondition(
                "AppliedFiles", "Unknown", "UpdateExecutedAppliedFiles", applying
            )
        case VerifyAction(target=target) if work is not None:
            yield from _list_executed_conditions(target, work)
            proving = f"Seeing whether the node is healthy with {target}"
            yield ReportedCondition("UpdatePostActionComplete", "Unknown", "Proving", proving)
        case UncordonAction() if update is not None and work is not None:
            if update.phase is not Phase.UNCORDONING:
                return
            yield from _list_executed_conditions(update.target, work)
            verified = f"Verified {update.target}"
            yield ReportedCondition("UpdatePostActionComplete", "True", "Verified", verified)
            resumed = f"Node may serve again with {update.target}"
            yield ReportedCondition("Resumed", "True", "Resumed", resumed)
        case _:
            return


def _list_prepared_conditions(target: Target, work: UpdateImpact) -> Iterator[ReportedCondition]:
    if work.os.is_empty:
        message = f"{target.config} can be reached; it costs: {work.level_name}"
        yield ReportedCondition("UpdatePrepared", "True", "UpdatePrepared", message)
        return
    yield ReportedCondition("UpdatePrepared", "True", "Staged", f"Staged {target}")
    if work.os.image:
        yield ReportedCondition("ImagePulledFromRegistry", "True", "Staged", f"Staged {target}")


def _list_executed_conditions(target: Target, work: UpdateImpact) -> Iterator[ReportedCondition]:
    yield from _list_prepared_conditions(target, work)
    yield ReportedCondition("UpdateExecuted", "True", "UpdateExecuted", f"Carried {target} out")
    if work.needs_write:
        wrote = f"Wrote files, units and users of {target.config}"
        yield ReportedCondition("AppliedFiles", "True", "UpdateExecutedAppliedFiles", wrote)
    if work.os.image:
        booted = f"Booted {target}"
        yield ReportedCondition("AppliedOSImage", "True", "UpdateExecutedAppliedOSImage", booted)
    if work.needs_reboot:
        yield ReportedCondition(
            "RebootedNode", "True", "Rebooted", f"Node was rebooted into {target}"
        )


def _choose_event(
    facts: Facts, decision: Decision, failure: TreenailError | None
) -> NodeEvent | None:
    if failure is not None:
        if isinstance(failure, DriftError):
            text = format_reason(failure)
            return NodeEvent("Warning", "ConfigDriftDetected", text, is_in_conditions=True)
        called = (
            "FailedToReconcile"
            if failure.retry_policy is RetryPolicy.ON_CHANGE
            else "OSUpdateFailed"
        )
        if isinstance(failure, PreflightError):
            called = "PreflightFailed"
        return NodeEvent("Warning", called, format_reason(failure), is_in_conditions=True)
    update = facts.record.update
    if update is not None and isinstance(decision, WaitAction) and decision.is_overdue:
        draining = update.phase is Phase.DRAINING
        called = "FailedToDrain" if draining else "FailedToUncordon"
        return NodeEvent("Warning", called, _format_overdue(decision))
    work = update.impact if update else None
    if update is None or work is None:
        return None
    why = f" because of {work.reasons[0]}" if work.reasons else ""
    match decision:
        case DrainAction(target=target) if work.os.is_empty:
            asking = f"Asking for the drain, for {target}{why}"
            return NodeEvent("Normal", "Drain", asking, is_in_conditions=True)
        case DrainAction(target=target):
            staged = f"Staged {target}; asking for the drain"
            return NodeEvent("Normal", "OSUpdateStaged", staged, is_in_conditions=True)
        case RebootAction(target=target, is_soft=softly):
            how = ", with a soft reboot if the kernel stays" if softly else ""
            return NodeEvent("Normal", "Reboot", f"Node will reboot into {target}{how}{why}")
        case UncordonAction() if update.phase is Phase.UNCORDONING and not work.os.is_empty:
            return NodeEvent("Normal", "OSUpgradeApplied", f"Booted and verified {update.target}")
        case FinishAction(is_done=True) if not work.needs_reboot:
            return NodeEvent("Normal", "SkipReboot", "Config changes do not require reboot.")
        case CancelStagedAction(reason=reason):
            return NodeEvent("Normal", "OSUpdateCancelled", f"Update called off: {reason}")
        case _:
            return None
