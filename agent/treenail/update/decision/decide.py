"""Facts to the node's next move: start reading here.

The order of an update is: weigh what there is to do, stage what the OS needs, locked, while the
node serves, have the node drained if that costs a drain, write files, units and users, unlock and
reboot if it costs a reboot, verify, ask for the uncordon. Two rules hold in every state:

* The machine changes only out of service, unless the change disturbs nothing. A staged deployment
  stays locked until the drain is acknowledged, because anybody's reboot finalizes an unlocked one.
* Until the reboot is asked for, a changed mind costs nothing: files are put back, what was staged
  is dropped and the drain taken back. From then on the update goes through, whether the API server
  answers or not.
"""

from treenail.update.decision import decide_prestage
from treenail.update.decision.actions import (
    Apply,
    Close,
    Decision,
    Drain,
    Drop,
    Prove,
    PutBack,
    Reboot,
    Recover,
    Rest,
    Resume,
    Stage,
    Unpin,
    Wait,
    Weigh,
)
from treenail.update.decision.decide_boot import fell_back, proving, returning
from treenail.update.decision.decide_idle import (
    LOOK,
    misbaked,
    misbaked_error,
    refuse_foreign,
    without_update,
)
from treenail.update.decision.desired import Wish
from treenail.update.decision.facts import Deployed, Facts, NodeSeen
from treenail.update.decision.request import cancels, refused
from treenail.update.impact.impact import Work
from treenail.update.impact.os_change import in_effect
from treenail.update.state import boot_id
from treenail.update.state.record import Phase, Refused, Update

REBOOTS_ALLOWED = 3
_UNCORDON_LIMIT_S = 600.0
"""Reboots into one target before it is refused: a power cut may take one, a broken boot all."""


def decide(facts: Facts) -> Decision:
    """The one next move that the facts call for."""
    if facts.shutting_down:
        return Rest("the machine is going down")
    if facts.cut_short:
        return Recover()
    update = facts.record.update
    if update is None:
        return _let_go(facts) or without_update(facts)
    return _making_room(facts, _within(facts, update))


def _within(facts: Facts, update: Update) -> Decision:
    match update.phase:
        case Phase.STAGING | Phase.DRAINING | Phase.APPLYING:
            return _before_reboot(facts, update)
        case Phase.REBOOTING:
            return _rebooting(facts, update)
        case Phase.PROVING:
            return proving(facts, update, update.work or Work())
        case Phase.RETURNING:
            return returning(facts, update, update.work or Work())
        case Phase.RESUMING:
            return _back_in_service(facts, update, done=True)
        case Phase.RELEASING:
            return _releasing(facts, update)


def looks_at_deployments(facts: Facts, *, first: bool) -> bool:
    """Whether the next decision needs the deployments.

    A node at rest must not ask: each question would start rpm-ostreed, which exits when idle.
    """
    update, node = facts.record.update, facts.node
    if update is not None:
        asks = update.work is None or update.work.reboots
        return asks and update.phase is not Phase.RESUMING
    if node is None or not isinstance(node.wish, Wish):
        return False
    asks = facts.forced or decide_prestage.looks(facts)
    return first or asks or node.wish.target != facts.record.current


def stands(node: NodeSeen | None, update: Update) -> bool:
    """Whether the update's target is still wanted; as long as nobody can be asked, it is."""
    if node is None:
        return True
    return isinstance(node.wish, Wish) and node.wish.target == update.target


def drain_token(config: str, previous: str) -> str:
    """The token that asks for a drain and differs from ``previous``.

    The drain controller of the reference reads what stands before the first hyphen and compares
    the whole; a peer that expects exactly ``drain-<config>`` is served by the first attempt.
    """
    plain = f"drain-{config}"
    if previous.partition(".again-")[0] != plain:
        return plain
    return f"{plain}.again-{int(previous.partition('.again-')[2] or 0) + 1}"


def uncordon_token(config: str) -> str:
    """The token that asks for the uncordon."""
    return f"uncordon-{config}"


def _ours(update: Update, work: Work, deployed: Deployed) -> bool:
    """Whether we staged what is staged; where that was not noted, by what we had asked for."""
    if update.staged_id:
        return deployed.staged_id == update.staged_id
    if work.os.image:
        return deployed.staged == work.os.digest
    return deployed.locked and deployed.staged == deployed.booted


def _let_go(facts: Facts) -> Unpin | None:
    """The previous deployment, when it was kept for long enough."""
    kept = facts.record.retained
    over = kept is not None and kept.over(now=facts.now, keep_s=facts.keep_s)
    return Unpin(kept.id) if kept and over else None


def _making_room(facts: Facts, decision: Decision) -> Decision:
    """Before a third deployment comes, for which /boot may be too small, the oldest is let go."""
    kept = facts.record.retained
    comes = isinstance(decision, Stage) or (isinstance(decision, Reboot) and decision.staged_id)
    return Unpin(kept.id) if comes and kept and kept.since is not None else decision


def _before_reboot(facts: Facts, update: Update) -> Decision:
    target, work, deployed = update.target, update.work, facts.deployed
    if cancels(facts.request, update):
        reason = "a person on this machine asked for that"
        return Drop(reason, _our_staged_id(facts, update), refused(update))
    if not stands(facts.node, update):
        return Drop("another target is asked for", _our_staged_id(facts, update))
    if work is None:
        return Weigh(target)
    if facts.held and update.boot_id != facts.boot_id:
        return _booted(facts, update, work)
    if work.reboots:
        if deployed is None:
            return LOOK
        if not work.os.empty and in_effect(work.os, deployed.running):
            return Weigh(target)
        staging = _staging(facts, update, work, deployed)
        if staging is not None:
            return staging
    return _in_service(facts, update, work) or _out_of_service(facts, update, work)


def _staging(facts: Facts, update: Update, work: Work, deployed: Deployed) -> Decision | None:
    """What there is to do until that is staged, and nothing else, which the update needs."""
    if not deployed.staged_id:
        return None if work.os.empty else Stage(update.target)
    if work.os.empty or not _ours(update, work, deployed):
        return refuse_foreign(deployed)
    if not deployed.locked:
        reason = "somebody unlocked the staged deployment while the node was in service"
        return Drop(reason, deployed.staged_id)
    if misbaked(facts, update.target, deployed.staged_config):
        error = misbaked_error(update.target, deployed.staged_config)
        bad = Refused(update.target, str(error), error.remedy)
        return Drop("the image was built from another config", deployed.staged_id, bad)
    return None


def _in_service(facts: Facts, update: Update, work: Work) -> Decision | None:
    """What there is to do until the node is out of service; None when it is, or need not be."""
    if not facts.drains or not work.drains:
        return None
    if facts.node is None and update.phase is Phase.APPLYING and update.boot_id == facts.boot_id:
        # The drain was acknowledged before this phase was entered, in this same boot.
        return None
    if facts.held and facts.node is not None:
        if facts.node.handshake.drained_for(update.drain):
            return None
        reason = "the node came back into service while its files were being changed"
        return Drop(reason, _our_staged_id(facts, update))
    return _drain(facts, update)


def _drain(facts: Facts, update: Update) -> Decision | None:
    """What there is to do until the node is drained; None when it is."""
    if facts.node is None:
        return Wait("waiting for the API server, to ask for the drain")
    handshake = facts.node.handshake
    if handshake.asked and not handshake.drain_asked and not handshake.settled:
        # Asking now could cross the drain controller's uncordon on the way.
        return Wait("waiting for the uncordon that was asked for before")
    token = update.drain
    if not token.startswith("drain-"):
        return Drain(update.target, drain_token(update.target.config, ""))
    if handshake.drained_for(token):
        return None
    if handshake.asked == handshake.applied == token:
        # Drained once, but somebody made the node schedulable: only a new token drains it again.
        return Drain(update.target, drain_token(update.target.config, token))
    if handshake.asked != token or update.phase is not Phase.DRAINING:
        return Drain(update.target, token)
    overdue = facts.now - update.entered > facts.drain_limit_s
    return Wait("waiting for the drain", overdue=overdue)


def _out_of_service(facts: Facts, update: Update, work: Work) -> Decision:
    if work.reboots and (facts.held or not work.writes):
        return _reboot(facts, update, work, _our_staged_id(facts, update))
    return Apply(update.target)


def _reboot(facts: Facts, update: Update, work: Work, staged_id: str) -> Reboot:
    """A soft one at most once: one that led elsewhere is made good by a full one."""
    asked_now = update.phase is Phase.REBOOTING and update.boot_id == facts.boot_id
    first = update.reboots - asked_now == 0
    softly = facts.softly and first and bool(staged_id) and work.os.keeps_kernel
    return Reboot(update.target, staged_id, softly=softly)


def _rebooting(facts: Facts, update: Update) -> Decision:
    target, work, deployed = update.target, update.work or Work(), facts.deployed
    if update.boot_id != facts.boot_id:
        return _booted(facts, update, work)
    if not stands(facts.node, update):
        return Drop("another target is asked for", _our_staged_id(facts, update))
    if deployed is None:
        return LOOK
    staged_id = _our_staged_id(facts, update)
    if deployed.staged_id and not staged_id:
        return refuse_foreign(deployed)
    if not staged_id and not work.os.empty:
        return _once_more(facts, update, work, deployed) or Stage(target)
    reboot = _reboot(facts, update, work, staged_id)
    if facts.node is None or not facts.drains or not work.drains:
        # The drain was acknowledged before this phase was entered, in this same boot.
        return reboot
    if facts.node.handshake.drained_for(update.drain):
        return reboot
    if facts.held or (staged_id and not deployed.locked):
        return Drop("the node came back into service while it was about to reboot", staged_id)
    return _drain(facts, update) or reboot


def _booted(facts: Facts, update: Update, work: Work) -> Decision:
    """After a boot of an update that had changed files, or unlocked what it staged."""
    target, deployed = update.target, facts.deployed
    if deployed is None and not work.os.empty:
        return LOOK
    if deployed is None or in_effect(work.os, deployed.running):
        return Prove(target, "the checks begin")
    soft = update.phase is Phase.REBOOTING and boot_id.softly(update.boot_id, facts.boot_id)
    once_more = _once_more(facts, update, work, deployed) if soft else None
    if once_more is not None and update.reboots < REBOOTS_ALLOWED:
        return once_more
    if facts.held:
        return PutBack()
    if update.staged_id and update.staged_id in deployed.others:
        return fell_back(facts, update, deployed)
    if update.reboots >= REBOOTS_ALLOWED:
        return Drop(
            "the reboot did not lead to the target",
            _our_staged_id(facts, update),
            Refused(
                target,
                f"{target} was staged and rebooted into {update.reboots} times, but each "
                f"time {deployed.booted or 'something without a digest'} was booted",
                "see why with 'journalctl -b -1 -u ostree-finalize-staged'; it is tried again "
                "once another target was asked for in between",
            ),
        )
    if not stands(facts.node, update):
        return Drop("another target is asked for", _our_staged_id(facts, update))
    return _staging(facts, update, work, deployed) or Stage(target)


def _once_more(facts: Facts, update: Update, work: Work, deployed: Deployed) -> Decision | None:
    """Into what is ours and boots next, if a soft reboot led elsewhere; it is a full one."""
    ours = update.staged_id
    if not ours or ours not in {deployed.staged_id, deployed.pending_id}:
        return None
    if not stands(facts.node, update):
        return Drop("another target is asked for", ours)
    drained = facts.node is None or facts.node.handshake.drained_for(update.drain)
    if facts.drains and work.drains and not drained:
        return Drop("the node came back into service while it was about to reboot", ours)
    return Reboot(update.target, deployed.staged_id if deployed.staged_id == ours else "")


def _our_staged_id(facts: Facts, update: Update) -> str:
    """The staged deployment if it is ours; empty otherwise."""
    work, deployed = update.work, facts.deployed
    if work is None or deployed is None or work.os.empty or not deployed.staged_id:
        return ""
    return deployed.staged_id if _ours(update, work, deployed) else ""


def _given_up(facts: Facts, update: Update) -> str:
    """What was ours and did not boot, if the boot loader would try it again; empty otherwise."""
    pending = facts.deployed.pending_id if facts.deployed else ""
    return pending if pending == update.staged_id else ""


def _releasing(facts: Facts, update: Update) -> Decision:
    if facts.deployed is None and looks_at_deployments(facts, first=False):
        return LOOK
    if staged_id := _our_staged_id(facts, update) or _given_up(facts, update):
        return Drop("called off", staged_id)
    if facts.held:
        return PutBack()
    return _back_in_service(facts, update, done=False)


def _back_in_service(facts: Facts, update: Update, *, done: bool) -> Decision:
    if not facts.drains or not update.drain:
        return Close(done=done)
    if facts.node is None:
        return Wait("waiting for the API server, to ask for the uncordon")
    handshake = facts.node.handshake
    if handshake.drain_asked:
        return Resume(uncordon_token(update.target.config))
    if handshake.settled:
        return Close(done=done)
    overdue = facts.now - update.entered > _UNCORDON_LIMIT_S
    return Wait("waiting for the uncordon", overdue=overdue)
