"""A node without an update: whether it rests, and what it begins."""

from treenail.config.drift import Drift
from treenail.errors import ConfigError, DriftError, HostError, PreflightError
from treenail.update.checks.preflight import staged_by_other
from treenail.update.decision import decide_prestage
from treenail.update.decision.actions import (
    Adopt,
    Decision,
    Forgive,
    Heal,
    Introduce,
    Refuse,
    Rest,
    Resume,
    Wait,
    Weigh,
)
from treenail.update.decision.desired import Unusable, Wish
from treenail.update.decision.facts import Deployed, Facts, Handshake
from treenail.update.decision.request import Kind, Request
from treenail.update.drift.drift_policy import remedy, sentence
from treenail.update.state.record import Target

LOOK = Wait("waiting for a look at the deployments")


def without_update(facts: Facts) -> Decision:
    """The next move of a node that has no update under way."""
    if facts.node is None:
        return Wait("waiting for the API server to show this Node")
    wish = facts.node.wish
    if isinstance(wish, Unusable):
        return Refuse(wish.error)
    if not isinstance(wish, Wish):
        if facts.introduction and not facts.node.claimed.config:
            return Introduce(facts.introduction)
        return Rest("no config is asked of this node")
    if facts.forced:
        return LOOK if facts.deployed is None else Weigh(wish.target)
    bad = facts.record.refused
    if bad is not None:
        if bad.target != wish.target or facts.request == Request(Kind.FORGIVE):
            return Forgive()
        return _unless_drained(facts, Refuse(HostError(bad.reason, remedy=bad.remedy)))
    return _drifted(facts) or decide_prestage.beside(
        facts, _wished(facts, wish.target), wish.target
    )


def misbaked(facts: Facts, target: Target, baked: str) -> bool:
    """Whether files and units would be those of another config than the target's."""
    return facts.images_bake and bool(target.image) and baked not in {"", target.config}


def misbaked_error(target: Target, baked: str) -> ConfigError:
    """Why the target can't be had with this image."""
    return ConfigError(
        f"the image {target.image} was built from {baked}, and the node is asked for "
        f"{target.config} beside it",
        remedy=f"ask for an image that was built from {target.config}, or set image_files in "
        'agent.toml to "write" if this one bakes nothing',
    )


def refuse_foreign(deployed: Deployed) -> Refuse:
    """What is staged is somebody else's, and not ours to drop."""
    found = staged_by_other(deployed.staged_id)
    return Refuse(PreflightError(str(found), reasons=(found.reason,), remedy=found.remedy))


def _asked_to_heal(facts: Facts) -> tuple[Drift, ...]:
    """What a person asks to have put right, of what would be left as it is."""
    request, drift = facts.request, facts.drift
    if request is None or request.kind is not Kind.HEAL:
        return ()
    left_alone = (*drift.blocking, *drift.reported)
    return tuple(each for each in left_alone if each.subject in request.paths)


def _drifted(facts: Facts) -> Decision | None:
    """What there is to do about drift before anything else is done; None when nothing is."""
    drift, config = facts.drift, facts.record.current.config
    healed = (*drift.healed, *_asked_to_heal(facts))
    if healed:
        return Heal(healed)
    if not drift.blocking:
        return None
    error = DriftError(
        sentence(drift.blocking, config, drift.fought),
        remedy=remedy(drift.blocking, drift.fought),
    )
    return _unless_drained(facts, Refuse(error))


def _wished(facts: Facts, target: Target) -> Decision:
    record, deployed = facts.record, facts.deployed
    if deployed is None:
        # It is looked at whenever the wish is not what is current.
        return _unless_drained(facts, Rest(f"at {target}", settled=True))
    expected = target.digest or record.booted
    as_booted = deployed.booted == expected or not expected
    if record.current == target and as_booted:
        return _unless_drained(facts, Rest(f"at {target}", settled=True))
    if as_booted and misbaked(facts, target, deployed.booted_config):
        return Refuse(misbaked_error(target, deployed.booted_config))
    if record.current == Target() and _found_at(facts, deployed, target):
        return Adopt(target)
    if target.image and deployed.booted != target.digest:
        return _foreign(deployed, target) or Weigh(target)
    return Weigh(target)


def _found_at(facts: Facts, deployed: Deployed, target: Target) -> bool:
    """Whether a machine that nobody has a record of is the target: by its image, or as claimed."""
    if target.image:
        return deployed.booted == target.digest
    return facts.node is not None and facts.node.claimed == target


def _unless_drained(facts: Facts, otherwise: Decision) -> Decision:
    """Take back a drain that nothing under way needs: one from before the ledger was lost."""
    handshake = facts.node.handshake if facts.node else Handshake()
    if handshake.drain_asked:
        return Resume("uncordon-" + handshake.asked.removeprefix("drain-"))
    if handshake.asked and not handshake.settled:
        return Wait("waiting for the uncordon")
    return otherwise


def _foreign(deployed: Deployed, target: Target) -> Refuse | None:
    """Somebody else's staged deployment is in the way."""
    if not deployed.staged_id:
        return None
    if target.image and deployed.staged == target.digest and deployed.locked:
        return None
    return refuse_foreign(deployed)
