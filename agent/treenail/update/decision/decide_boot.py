"""The next move of a node that was rebooted into its target: stay there, or go back.

The API server is needed for none of this.
"""

from collections.abc import Sequence

from treenail.errors import RollbackError
from treenail.update.checks.health import (
    BOOT,
    HealthyVerdict,
    PendingVerdict,
    UnhealthyVerdict,
    decide_verdict,
    format_not_booted,
    format_unhealthy,
)
from treenail.update.decision.actions import (
    CancelStagedAction,
    CommitAction,
    Decision,
    RefuseAction,
    RestoreAction,
    RollBackAction,
    VerifyAction,
)
from treenail.update.decision.decide_idle import WAIT_FOR_DEPLOYMENTS
from treenail.update.decision.facts import DeploymentState, Facts
from treenail.update.impact.impact import UpdateImpact
from treenail.update.impact.os_change import is_in_effect
from treenail.update.state.record import QuarantinedTarget, UpdateRecord
from treenail.update.steps.steps import (
    ConfigStep,
    DisableUnits,
    EnableUnits,
    MakeDirectory,
    MakeLink,
    PresetUnits,
    RelabelEntry,
    WriteFile,
)

_ETC_DIRECTORY = "/etc/"

ROLLBACK_REBOOTS_ALLOWED = 3
"""Reboots that were to lead back, before a person has to."""
RETRY_REMEDY = (
    "the node has what it had before; the target is tried again once another one was asked for in "
    "between, or after 'treenail forgive'"
)


def select_deployment_steps(steps: Sequence[ConfigStep]) -> tuple[ConfigStep, ...]:
    """The steps that change nothing but the booted deployment's own /etc.

    All else is shared with the deployment before it, and would stay behind on the way back.
    """
    return tuple(
        step
        for step in steps
        if isinstance(step, EnableUnits | DisableUnits | PresetUnits)
        or (
            isinstance(step, WriteFile | MakeDirectory | MakeLink | RelabelEntry)
            and step.path.startswith(_ETC_DIRECTORY)
        )
    )


def decide_verification(facts: Facts, update: UpdateRecord, work: UpdateImpact) -> Decision:
    """In a boot on trial; the API server is needed for none of this."""
    target, deployed, record = update.target, facts.deployments, facts.record
    if deployed is None and not work.os.is_empty:
        return WAIT_FOR_DEPLOYMENTS
    if deployed is not None and not is_in_effect(work.os, deployed.running):
        return RestoreAction() if facts.has_undo else cancel_unbooted(facts, update, deployed)
    if update.boot_trial.is_healthy:
        return CommitAction(target)
    if facts.trial_status is None or update.boot_id != facts.boot_id:
        return VerifyAction(target, "the checks begin")
    found = decide_verdict(
        facts.trial_status, update.boot_trial, is_api_blamed=record.api_blamed == target
    )
    match found:
        case HealthyVerdict():
            return CommitAction(target)
        case PendingVerdict(reason=reason):
            return VerifyAction(target, reason)
        case UnhealthyVerdict(check=check):
            reason = format_unhealthy(target, check)
            return RollBackAction(QuarantinedTarget(target, reason, RETRY_REMEDY, check=check.name))


def decide_rollback(facts: Facts, update: UpdateRecord, work: UpdateImpact) -> Decision:
    """On the way back: with the OS by its previous deployment, without it by files alone."""
    deployed, refused = facts.deployments, facts.record.quarantined
    if deployed is None and not work.os.is_empty:
        return WAIT_FOR_DEPLOYMENTS
    if refused is None:
        raise AssertionError("a node goes back without a reason")
    this_boot = update.boot_id == facts.boot_id
    if work.os.is_empty or deployed is None:
        if facts.has_undo:
            return RestoreAction() if this_boot else RollBackAction(refused)
        return RollBackAction(refused) if this_boot else CancelStagedAction("went back")
    if not is_in_effect(work.os, deployed.running):
        return (
            RestoreAction() if facts.has_undo else CancelStagedAction("went back", update.staged_id)
        )
    if not this_boot and update.boot_trial.rollback_reboots >= ROLLBACK_REBOOTS_ALLOWED:
        return RefuseAction(
            RollbackError(
                f"{refused.reason}; going back did not succeed in {update.boot_trial.rollback_reboots} "
                "reboots",
                remedy="choose the earlier system in the boot menu, or with "
                "'rpm-ostree rollback' or 'bootc rollback'",
            )
        )
    return RollBackAction(refused)


def cancel_unbooted(
    facts: Facts, update: UpdateRecord, deployed: DeploymentState
) -> CancelStagedAction:
    """The target was deployed, and its predecessor is booted: by the boot loader, or a person."""
    reason = format_not_booted(update.target, deployed.booted_digest)
    refused = QuarantinedTarget(update.target, reason, RETRY_REMEDY, check=BOOT)
    return CancelStagedAction(
        "the earlier system was booted", update.staged_id, facts.record.quarantined or refused
    )
