"""The next move of a node that was rebooted into its target: stay there, or go back.

The API server is needed for none of this.
"""

from collections.abc import Sequence

from treenail.errors import RollbackError
from treenail.update.checks.health import (
    BOOT,
    Failed,
    Healthy,
    NotYet,
    did_not_boot,
    unhealthy,
    verdict,
)
from treenail.update.decision.actions import Commit, Decision, Drop, Prove, PutBack, Refuse, Return
from treenail.update.decision.decide_idle import LOOK
from treenail.update.decision.facts import Deployed, Facts
from treenail.update.impact.impact import Work
from treenail.update.impact.os_change import in_effect
from treenail.update.state.record import Refused, Update
from treenail.update.steps.steps import (
    Disable,
    Enable,
    MakeDirectory,
    MakeLink,
    Preset,
    Relabel,
    Step,
    WriteFile,
)

_ETC = "/etc/"

RETURNS_ALLOWED = 3
"""Reboots that were to lead back, before a person has to."""
AGAIN = (
    "the node has what it had before; the target is tried again once another one was asked for in "
    "between, or after 'treenail forgive'"
)


def in_deployment(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that change nothing but the booted deployment's own /etc.

    All else is shared with the deployment before it, and would stay behind on the way back.
    """
    return tuple(
        step
        for step in steps
        if isinstance(step, Enable | Disable | Preset)
        or (
            isinstance(step, WriteFile | MakeDirectory | MakeLink | Relabel)
            and step.path.startswith(_ETC)
        )
    )


def proving(facts: Facts, update: Update, work: Work) -> Decision:
    """In a boot on trial; the API server is needed for none of this."""
    target, deployed, record = update.target, facts.deployed, facts.record
    if deployed is None and not work.os.empty:
        return LOOK
    if deployed is not None and not in_effect(work.os, deployed.running):
        return PutBack() if facts.held else fell_back(facts, update, deployed)
    if update.probation.healthy:
        return Commit(target)
    if facts.trial is None or update.boot_id != facts.boot_id:
        return Prove(target, "the checks begin")
    found = verdict(facts.trial, update.probation, blamed_before=record.blamed == target)
    match found:
        case Healthy():
            return Commit(target)
        case NotYet(reason=reason):
            return Prove(target, reason)
        case Failed(check=check):
            reason = unhealthy(target, check)
            return Return(Refused(target, reason, AGAIN, check=check.name))


def returning(facts: Facts, update: Update, work: Work) -> Decision:
    """On the way back: with the OS by its previous deployment, without it by files alone."""
    deployed, refused = facts.deployed, facts.record.refused
    if deployed is None and not work.os.empty:
        return LOOK
    if refused is None:
        raise AssertionError("a node goes back without a reason")
    this_boot = update.boot_id == facts.boot_id
    if work.os.empty or deployed is None:
        if facts.held:
            return PutBack() if this_boot else Return(refused)
        return Return(refused) if this_boot else Drop("went back")
    if not in_effect(work.os, deployed.running):
        return PutBack() if facts.held else Drop("went back", update.staged_id)
    if not this_boot and update.probation.returns >= RETURNS_ALLOWED:
        return Refuse(
            RollbackError(
                f"{refused.reason}; going back did not succeed in {update.probation.returns} "
                "reboots",
                remedy="choose the earlier system in the boot menu, or with "
                "'rpm-ostree rollback' or 'bootc rollback'",
            )
        )
    return Return(refused)


def fell_back(facts: Facts, update: Update, deployed: Deployed) -> Drop:
    """The target was deployed, and its predecessor is booted: by the boot loader, or a person."""
    reason = did_not_boot(update.target, deployed.booted)
    refused = Refused(update.target, reason, AGAIN, check=BOOT)
    return Drop("the earlier system was booted", update.staged_id, facts.record.refused or refused)
