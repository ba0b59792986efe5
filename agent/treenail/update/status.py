"""The report of an action: annotations, conditions, an Event and a sentence.

The Node, the MachineConfigNode, the journal and ``treenail status`` show values from the same
report, so that they cannot contradict each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from treenail import errors, sanitize
from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.update.decision import actions, node_state
from treenail.update.impact.impact import UpdateImpact
from treenail.update.state import ledger_record
from treenail.update.steps import step_types


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A Kubernetes Event about this Node; ``type`` is Normal or Warning."""

    type: str
    reason: str
    message: str
    is_in_conditions: bool = False
    """The conditions of the same report have this message; a Normal Event is then omitted."""


@dataclass(frozen=True, slots=True)
class ReportedCondition:
    """A condition of the MachineConfigNode."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A report; an annotation with the value None must not exist."""

    summary: str
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    conditions: tuple[ReportedCondition, ...] = ()
    event: NodeEvent | None = None
    current: ledger_record.Target = field(default_factory=ledger_record.Target)
    desired: ledger_record.Target = field(default_factory=ledger_record.Target)
    requested: ledger_record.Target | None = None
    """The desired target if the agent refuses it; it may be invalid. None if it does not."""
    failure: errors.TreenailError | None = None
    """The failure that the annotations show."""


_INSTANT_ACTIONS = (
    actions.AdoptAction,
    actions.RecoverAction,
    actions.RepairDriftAction,
    actions.CommitAction,
    actions.FinishAction,
    actions.RetryAction,
    actions.ExcuseTargetAction,
    actions.UnpinAction,
)


def make_report(
    facts: node_state.Facts,
    decision: actions.Decision,
    failure: errors.TreenailError | None,
    *,
    is_overdue: bool = False,
) -> StatusReport:
    """Return the report of an action that begins, or of the failure of its last attempt.

    ``is_overdue``: the failure lasts longer than its ``wait_limit_s``.
    """
    if isinstance(decision, actions.PrestageAction | actions.DropPrestagedAction):
        return _report_prestage(facts, decision, failure)
    if failure is None and isinstance(decision, actions.RefuseAction):
        failure = decision.reported_error
    if failure is not None and failure.node_state is None and not is_overdue:
        report = _report_action(facts, decision, None)
        return _add_wait(report, failure) if report.annotations else report
    return _report_action(facts, decision, failure)


def _add_wait(report: StatusReport, cause: errors.TreenailError) -> StatusReport:
    """Return the report of an action that waits until another program can answer."""
    if report.annotations.get(key.REASON):
        return report
    reason = format_reason(cause)
    return replace(
        report,
        summary=f"{report.summary}: {cause}",
        annotations={**report.annotations, key.REASON: reason},
        event=NodeEvent("Warning", "UpdateWaiting", reason),
    )


def _report_action(
    facts: node_state.Facts, decision: actions.Decision, failure: errors.TreenailError | None
) -> StatusReport:
    summary = str(decision)
    if isinstance(decision, actions.AnnotateNodeAction):
        event = NodeEvent("Warning", "RequestReplaced", decision.warning)
        return StatusReport(
            summary, annotations=decision.annotations, event=event if decision.warning else None
        )
    if failure is None and isinstance(decision, _INSTANT_ACTIONS):
        # These take an instant; the next action reports their result.
        return StatusReport(summary, event=_choose_event(facts, decision, None))
    if isinstance(decision, actions.IdleAction) and not decision.is_settled:
        return StatusReport(summary)
    failure = failure or _find_overdue_error(decision) or _find_quarantine_error(facts, decision)
    return StatusReport(
        summary=summary if failure is None else f"{summary}: {failure}",
        annotations=_compute_annotations(facts, decision, failure),
        conditions=_compute_conditions(facts, decision, failure),
        event=_choose_event(facts, decision, failure),
        current=facts.record.current,
        desired=_find_desired_target(facts),
        requested=_find_invalid_target(facts),
        failure=failure,
    )


def _report_prestage(
    facts: node_state.Facts,
    decision: actions.PrestageAction | actions.DropPrestagedAction,
    failure: errors.TreenailError | None,
) -> StatusReport:
    """Return the report of a pre-stage action; the node is at its target whatever the result."""
    reason = None if failure is None else format_reason(failure)
    idle = _compute_annotations(facts, actions.IdleAction(str(decision), is_settled=True), None)
    # The image comes first: the request may have changed since, and must not get this error.
    target = _find_prestage_target(facts, decision)
    error = None if reason is None or target is None else f"{target.image}: {reason}"
    return StatusReport(
        summary=str(decision) if failure is None else f"{decision}: {failure}",
        annotations={**idle, key.PRESTAGED: None, key.PRESTAGE_ERROR: error},
        event=None if reason is None else NodeEvent("Warning", "PrestageFailed", reason),
        current=facts.record.current,
        desired=_find_desired_target(facts),
    )


def _find_prestage_target(
    facts: node_state.Facts, decision: actions.PrestageAction | actions.DropPrestagedAction
) -> ledger_record.Target | None:
    """Return the target that the action stages, or makes room for."""
    if isinstance(decision, actions.PrestageAction):
        return decision.target
    return facts.node.prestage if facts.node else None


def _find_overdue_error(decision: actions.Decision) -> errors.TreenailError | None:
    if not (isinstance(decision, actions.WaitAction) and decision.is_overdue):
        return None
    return errors.OverdueError(
        f"{decision.reason} for longer than its limit", remedy=decision.remedy
    )


def _find_quarantine_error(
    facts: node_state.Facts, decision: actions.Decision
) -> errors.TreenailError | None:
    """Return why the update that rolls back or is cancelled is quarantined; None if it is not."""
    quarantined = facts.record.quarantined if facts.record.update else None
    if isinstance(decision, actions.RollBackAction):
        quarantined = decision.quarantine
    if quarantined is None or quarantined.is_withdrawn:
        return None
    return errors.HostError(quarantined.reason, remedy=quarantined.remedy)


def format_reason(failure: errors.TreenailError) -> str:
    """Return the failure and its remedy as one printable text of an annotation's length."""
    text = f"{failure}; {failure.remedy}" if failure.remedy else str(failure)
    return sanitize.escape_text(text)[: key.REASON_LIMIT]


def _compute_annotations(
    facts: node_state.Facts, decision: actions.Decision, failure: errors.TreenailError | None
) -> dict[str, str | None]:
    changes: dict[str, str | None] = {key.STATE: _choose_state(facts, decision, failure)}
    # The Machine Config Daemon shows a reboot only here; its state annotation stays Working.
    is_rebooting = isinstance(decision, actions.RebootAction | actions.RollBackAction) or (
        isinstance(decision, actions.VerifyAction) and not _is_live(facts.record.update)
    )
    problem = failure
    if problem is None and isinstance(decision, actions.VerifyAction) and decision.problem:
        problem = errors.HostError(decision.problem, remedy=actions.TRIAL_REMEDY)
    changes[key.REASON] = "" if problem is None else format_reason(problem)
    changes[key.POST_CONFIG_ACTION] = "Rebooting" if is_rebooting else ""
    # `NodeClient.write_progress` writes it while a transaction runs.
    changes[key.PROGRESS] = None
    changes[key.BOOTSTRAP_REGISTRY] = facts.bootstrap_registry or None
    changes |= _compute_current_annotations(facts)
    changes |= _compute_staged_annotations(facts, decision)
    token = _find_drain_token(facts.record.update, decision)
    if token:
        changes[key.DESIRED_DRAIN] = token
    return changes


def _is_live(update: ledger_record.UpdateRecord | None) -> bool:
    """Return whether the update needs no reboot."""
    return update is not None and update.impact is not None and not update.impact.needs_reboot


def _compute_staged_annotations(
    facts: node_state.Facts, decision: actions.Decision
) -> dict[str, str | None]:
    """Return the annotations about the pre-staged image, which only an idle node has."""
    prestaged = facts.record.prestaged
    image = None
    if isinstance(decision, actions.IdleAction) and prestaged is not None and prestaged.is_done:
        image = prestaged.target.image
    return {key.PRESTAGED: image, key.PRESTAGE_ERROR: None}


def _choose_state(
    facts: node_state.Facts, decision: actions.Decision, failure: errors.TreenailError | None
) -> str | None:
    if failure is not None:
        return failure.node_state or NodeState.DEGRADED
    update = facts.record.update
    # As HyperShift's daemon: Done, the new config and the uncordon request are one write.
    is_reached = update is not None and update.phase is ledger_record.Phase.UNCORDONING
    if isinstance(decision, actions.IdleAction) or (facts.is_hosted and is_reached):
        return NodeState.DONE
    return NodeState.WORKING


def _compute_current_annotations(facts: node_state.Facts) -> dict[str, str | None]:
    """Return the annotations about the current target, in the spelling of the request."""
    record: ledger_record.LedgerRecord = facts.record
    if not record.current.config:
        return {}
    desired = facts.node.desired if facts.node else None
    changes: dict[str, str | None] = {key.CURRENT_CONFIG: record.current.config}
    if isinstance(desired, node_state.NoTarget) and record.current.image:
        # The spelling is that of the next request; until then the own one.
        changes[key.CURRENT_OS_IMAGE] = record.current.image
    # A node that leaves image mode runs its image until the reboot: the annotation stays.
    if isinstance(desired, node_state.DesiredTarget) and (
        desired.image_keys or not record.current.image
    ):
        for desired_key, current_key in key.IMAGE_SPELLINGS.items():
            is_requested = desired_key in desired.image_keys
            changes[current_key] = record.current.image or None if is_requested else None
    is_list = bool(record.current.image) and record.booted_digest != record.current.digest
    changes[key.BOOTED_DIGEST] = record.booted_digest or None if is_list else None
    return changes


def _find_desired_target(facts: node_state.Facts) -> ledger_record.Target:
    desired = facts.node.desired if facts.node else None
    if isinstance(desired, node_state.DesiredTarget):
        return desired.target
    return facts.record.update.target if facts.record.update else facts.record.current


def _find_invalid_target(facts: node_state.Facts) -> ledger_record.Target | None:
    desired = facts.node.desired if facts.node else None
    return desired.target if isinstance(desired, node_state.InvalidTarget) else None


def _find_drain_token(update: ledger_record.UpdateRecord | None, decision: actions.Decision) -> str:
    if isinstance(decision, actions.UncordonAction):
        return decision.token
    if update is None or isinstance(decision, actions.CancelStagedAction):
        return ""
    # Only UncordonAction requests the uncordon: before it, files are still restored.
    is_ending = update.phase in (ledger_record.Phase.UNCORDONING, ledger_record.Phase.CANCELLING)
    return "" if is_ending else update.drain_token


def list_service_events(
    steps: Sequence[step_types.ConfigStep], target: ledger_record.Target
) -> Iterator[NodeEvent]:
    """Return an Event for the reloaded units and one for the restarted units."""
    for kind, reason, verb in (
        (step_types.ReloadUnit, "ServiceReload", "Reloaded"),
        (step_types.RestartUnit, "ServiceRestart", "Restarted"),
    ):
        units = [step.unit for step in steps if isinstance(step, kind)]
        if units:
            yield NodeEvent("Normal", reason, f"{verb} {', '.join(units)} for {target}")


def list_failed_service_events(step: object, failure: errors.TreenailError) -> Iterator[NodeEvent]:
    """Return the Event for a unit that could not be reloaded or restarted."""
    match step:
        case step_types.ReloadUnit():
            yield NodeEvent("Warning", "FailedServiceReload", format_reason(failure))
        case step_types.RestartUnit():
            yield NodeEvent("Warning", "FailedServiceRestart", format_reason(failure))
        case _:
            return


# Condition types of the MachineConfigNode API.
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
"""The conditions of the MachineConfigNode that the agent writes."""


def _compute_conditions(
    facts: node_state.Facts, decision: actions.Decision, failure: errors.TreenailError | None
) -> tuple[ReportedCondition, ...]:
    """Return the agent's conditions of the MachineConfigNode.

    The drain controller writes Cordoned, Drained and Uncordoned. The agent writes conditions at
    most once in a phase and after the update, but not right before a reboot.
    """
    if failure is not None:
        is_preflight = isinstance(failure, errors.PreflightError)
        state = failure.node_state or NodeState.DEGRADED.value
        reason = "PreflightFailed" if is_preflight else state
        return (ReportedCondition("NodeDegraded", "True", reason, format_reason(failure)),)
    if isinstance(decision, actions.IdleAction):
        message = f"Action during update to {facts.record.current.config} is over"
        ended = tuple(
            ReportedCondition(kind, "False", "UpdateDone", message) for kind in _PROGRESS_TYPES
        )
        at_target = f"Node is at {facts.record.current}"
        return (ReportedCondition("Updated", "True", "Updated", at_target), *ended, NOT_DEGRADED)
    update = facts.record.update
    progress = tuple(_list_progress_conditions(update, decision))
    if not progress:
        return ()
    target = (
        decision.target
        if isinstance(
            decision,
            actions.PlanAction | actions.DrainAction | actions.ApplyAction | actions.VerifyAction,
        )
        else facts.record.current
    )
    updating = f"Node is updating to {target}"
    return (ReportedCondition("Updated", "False", "Updating", updating), *progress, NOT_DEGRADED)


NOT_DEGRADED = ReportedCondition("NodeDegraded", "False", "AsExpected", "The node is not degraded")
"""The condition of a node without a failure."""


def _list_progress_conditions(
    update: ledger_record.UpdateRecord | None, decision: actions.Decision
) -> Iterator[ReportedCondition]:
    """Return the conditions about the progress of the update when the action begins."""
    impact = update.impact if update else None
    match decision:
        case actions.PlanAction(target=target):
            yield ReportedCondition("UpdatePrepared", "Unknown", "Preparing", f"Preparing {target}")
            if target.image:
                message = f"Preparing {target}"
                yield ReportedCondition("ImagePulledFromRegistry", "Unknown", "Preparing", message)
        case actions.DrainAction(target=target) if impact is not None:
            yield from _list_prepared_conditions(target, impact)
            yield ReportedCondition(
                "UpdateExecuted", "Unknown", "Draining", "Waiting for the node to be drained"
            )
        case actions.ApplyAction(target=target) if impact is not None and not impact.needs_reboot:
            yield from _list_prepared_conditions(target, impact)
            applying = f"Writing files, units and users of {target.config}"
            yield ReportedCondition(
                "UpdateExecuted", "Unknown", "UpdateExecutedAppliedFiles", applying
            )
            yield ReportedCondition(
                "AppliedFiles", "Unknown", "UpdateExecutedAppliedFiles", applying
            )
        case actions.VerifyAction(target=target) if impact is not None:
            yield from _list_executed_conditions(target, impact)
            verifying = f"Checking the health of the node with {target}"
            yield ReportedCondition("UpdatePostActionComplete", "Unknown", "Verifying", verifying)
        case actions.UncordonAction() if update is not None and impact is not None:
            if update.phase is not ledger_record.Phase.UNCORDONING:
                return
            yield from _list_executed_conditions(update.target, impact)
            verified = f"Verified {update.target}"
            yield ReportedCondition("UpdatePostActionComplete", "True", "Verified", verified)
            resumed = f"Node resumes service with {update.target}"
            yield ReportedCondition("Resumed", "True", "Resumed", resumed)
        case _:
            return


def _list_prepared_conditions(
    target: ledger_record.Target, impact: UpdateImpact
) -> Iterator[ReportedCondition]:
    if impact.os.is_empty:
        message = f"Prepared {target.config}; disruption: {impact.level_name}"
        yield ReportedCondition("UpdatePrepared", "True", "UpdatePrepared", message)
        return
    yield ReportedCondition("UpdatePrepared", "True", "Staged", f"Staged {target}")
    if impact.os.image:
        yield ReportedCondition("ImagePulledFromRegistry", "True", "Staged", f"Staged {target}")


def _list_executed_conditions(
    target: ledger_record.Target, impact: UpdateImpact
) -> Iterator[ReportedCondition]:
    yield from _list_prepared_conditions(target, impact)
    yield ReportedCondition(
        "UpdateExecuted", "True", "UpdateExecuted", f"Executed the update to {target}"
    )
    if impact.needs_write:
        wrote = f"Wrote files, units and users of {target.config}"
        yield ReportedCondition("AppliedFiles", "True", "UpdateExecutedAppliedFiles", wrote)
    if impact.os.image:
        booted = f"Booted {target}"
        yield ReportedCondition("AppliedOSImage", "True", "UpdateExecutedAppliedOSImage", booted)
    if impact.needs_reboot:
        yield ReportedCondition(
            "RebootedNode", "True", "Rebooted", f"Node was rebooted into {target}"
        )


def _make_failure_event(facts: node_state.Facts, failure: errors.TreenailError) -> NodeEvent:
    reason = "OSUpdateFailed"
    if isinstance(failure, errors.OverdueError):
        update = facts.record.update
        is_draining = update is not None and update.phase is ledger_record.Phase.DRAINING
        reason = "FailedToDrain" if is_draining else "FailedToUncordon"
    elif isinstance(failure, errors.ConfigRejectedError):
        reason = "ConfigUnavailable"
    elif isinstance(failure, errors.DriftError):
        reason = "ConfigDriftDetected"
    elif isinstance(failure, errors.PreflightError):
        reason = "PreflightFailed"
    elif failure.retry_policy is errors.RetryPolicy.ON_CHANGE:
        reason = "FailedToReconcile"
    return NodeEvent("Warning", reason, format_reason(failure), is_in_conditions=True)


def _choose_event(
    facts: node_state.Facts, decision: actions.Decision, failure: errors.TreenailError | None
) -> NodeEvent | None:
    if failure is not None:
        return _make_failure_event(facts, failure)
    update = facts.record.update
    impact = update.impact if update else None
    if update is None or impact is None:
        return None
    cause = f" because of {impact.reasons[0]}" if impact.reasons else ""
    match decision:
        case actions.DrainAction(target=target) if impact.os.is_empty:
            message = f"Requesting the drain for {target}{cause}"
            return NodeEvent("Normal", "Drain", message, is_in_conditions=True)
        case actions.DrainAction(target=target):
            message = f"Staged {target}; requesting the drain"
            return NodeEvent("Normal", "OSUpdateStaged", message, is_in_conditions=True)
        case actions.RebootAction(target=target, is_soft=is_soft):
            how = ", with a soft reboot if the kernel stays" if is_soft else ""
            return NodeEvent("Normal", "Reboot", f"Node will reboot into {target}{how}{cause}")
        case actions.UncordonAction() if (
            update.phase is ledger_record.Phase.UNCORDONING and not impact.os.is_empty
        ):
            return NodeEvent("Normal", "OSUpgradeApplied", f"Booted and verified {update.target}")
        case actions.FinishAction(is_done=True) if not impact.needs_reboot:
            return NodeEvent("Normal", "SkipReboot", "Config changes do not require reboot.")
        case actions.CancelStagedAction(reason=reason):
            return NodeEvent("Normal", "OSUpdateCancelled", f"Update cancelled: {reason}")
        case _:
            return None
