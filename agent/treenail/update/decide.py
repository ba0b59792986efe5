"""Facts to the node's next move: start reading here.

The order of an update is: stage the image locked while the node serves, have the node drained,
unlock and reboot, verify the booted digest, ask for the uncordon. Two rules hold in every state:

* The machine changes only out of service. A staged deployment stays locked until the drain is
  acknowledged, because anybody's reboot finalizes an unlocked one.
* Until the reboot is asked for, a changed mind costs nothing: what was staged is dropped and the
  drain taken back. From then on the update goes through, whether the API server answers or not.
"""

from dataclasses import dataclass

from treenail.errors import ConfigError, HostError, TreenailError
from treenail.update.facts import Deployed, Facts, Handshake, NodeSeen
from treenail.update.record import Phase, Refused, Target, Update
from treenail.update.wish import Unusable, Wish

REBOOTS_ALLOWED = 3
"""Reboots into one target before it is refused: a power cut may take one, a broken boot all."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do. ``settled`` when the node is what it is asked to be."""

    reason: str
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Something is awaited from outside; ``overdue`` when it takes longer than it may."""

    reason: str
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """The machine already is the target: record it as current."""

    target: Target


@dataclass(frozen=True, slots=True)
class Stage:
    """Pull and deploy the target's image, locked."""

    target: Target


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask for the drain with this token."""

    target: Target
    token: str


@dataclass(frozen=True, slots=True)
class Reboot:
    """Unlock what is staged and reboot into it."""

    target: Target


@dataclass(frozen=True, slots=True)
class Commit:
    """The target is booted: record it as current."""

    target: Target


@dataclass(frozen=True, slots=True)
class Resume:
    """Ask for the uncordon with this token."""

    token: str


@dataclass(frozen=True, slots=True)
class Close:
    """The update is over; ``done`` when it reached its target."""

    done: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Call the update off and drop what it staged; refuse its target if there is a reason to."""

    reason: str
    refuse: Refused | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The wish can't be obeyed; a person has to act."""

    error: TreenailError


@dataclass(frozen=True, slots=True)
class Forgive:
    """Another target is asked for: forget the refusal of the former."""


Decision = (
    Rest | Wait | Adopt | Stage | Drain | Reboot | Commit | Resume | Close | Drop | Refuse | Forgive
)


def decide(facts: Facts) -> Decision:
    """The one next move that the facts call for."""
    if facts.shutting_down:
        return Rest("the machine is going down")
    update = facts.record.update
    if update is None:
        return _without_update(facts)
    match update.phase:
        case Phase.STAGING:
            return _before_reboot(facts, update)
        case Phase.DRAINING:
            return _before_reboot(facts, update)
        case Phase.REBOOTING:
            return _rebooting(facts, update)
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
        return update.phase is not Phase.RESUMING
    if node is None or not isinstance(node.wish, Wish):
        return False
    return first or node.wish.target != facts.record.current


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


def _without_update(facts: Facts) -> Decision:
    if facts.node is None:
        return Wait("waiting for the API server to show this Node")
    wish = facts.node.wish
    if isinstance(wish, Unusable):
        return Refuse(wish.error)
    if not isinstance(wish, Wish):
        return Rest("no config is asked of this node")
    refused = facts.record.refused
    if refused is not None:
        if refused.target != wish.target:
            return Forgive()
        return _unless_drained(facts, Refuse(HostError(refused.reason, remedy=refused.remedy)))
    if not wish.target.image:
        return _without_image(facts, wish)
    deployed = facts.deployed
    if deployed is None:
        return _at_target(facts, wish.target)
    if deployed.booted == wish.target.digest:
        if facts.record.current != wish.target:
            return Adopt(wish.target)
        return _at_target(facts, wish.target)
    return _foreign(deployed, wish.target) or Stage(wish.target)


def _without_image(facts: Facts, wish: Wish) -> Decision:
    """Outside image mode: files and units are not written by this version."""
    current = facts.record.current
    if current == wish.target:
        return _at_target(facts, wish.target)
    if current == Target() and facts.node is not None and facts.node.claimed == wish.target:
        return Adopt(wish.target)
    return Refuse(
        ConfigError(
            f"the node is asked for {wish.target.config} without an OS image beside it, and "
            "files and units are not written by this version",
            remedy="set machineconfiguration.openshift.io/desiredOSImage to an image built from "
            f"{wish.target.config}, or set desiredConfig back to "
            f"{current.config or 'what the node has'}",
        )
    )


def _at_target(facts: Facts, target: Target) -> Decision:
    return _unless_drained(facts, Rest(f"at {target}", settled=True))


def _unless_drained(facts: Facts, otherwise: Decision) -> Decision:
    """Take back a drain that nothing under way needs: one from before the ledger was lost."""
    handshake = facts.node.handshake if facts.node else Handshake()
    if handshake.drain_asked:
        return Resume("uncordon-" + handshake.asked.removeprefix("drain-"))
    if handshake.asked and not handshake.settled:
        return Wait("waiting for the uncordon")
    return otherwise


def _foreign(deployed: Deployed, target: Target) -> Refuse | None:
    """Somebody else's staged deployment is in the way; it is not ours to drop."""
    if not deployed.staged_id or (deployed.staged == target.digest and deployed.locked):
        return None
    return Refuse(
        HostError(
            f"deployment {deployed.staged_id} is staged on this machine, and not by treenail",
            remedy="drop it with 'rpm-ostree cleanup --pending', or reboot into it",
        )
    )


def _before_reboot(facts: Facts, update: Update) -> Decision:
    target, deployed = update.target, facts.deployed
    if not stands(facts.node, update):
        return Drop("another target is asked for")
    if deployed is None:
        return Wait("waiting for a look at the deployments")
    if deployed.booted == target.digest:
        return Commit(target)
    if not deployed.staged_id:
        return Stage(target)
    if deployed.staged != target.digest:
        return _foreign(deployed, target) or Stage(target)
    if not deployed.locked:
        return Drop("somebody unlocked the staged deployment while the node was in service")
    return _drain(facts, update)


def _drain(facts: Facts, update: Update) -> Decision:
    if not facts.drains:
        return Reboot(update.target)
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
        return Reboot(update.target)
    if handshake.asked == handshake.applied == token:
        # Drained once, but somebody made the node schedulable: only a new token drains it again.
        return Drain(update.target, drain_token(update.target.config, token))
    if handshake.asked != token or update.phase is not Phase.DRAINING:
        return Drain(update.target, token)
    overdue = facts.now - update.entered > facts.drain_limit_s
    return Wait("waiting for the drain", overdue=overdue)


def _rebooting(facts: Facts, update: Update) -> Decision:
    target, deployed = update.target, facts.deployed
    if deployed is None:
        return Wait("waiting for a look at the deployments")
    if deployed.booted == target.digest:
        return Commit(target)
    if update.boot_id == facts.boot_id and not stands(facts.node, update):
        return Drop("another target is asked for")
    if update.boot_id != facts.boot_id and update.reboots >= REBOOTS_ALLOWED:
        return Drop(
            "the reboot did not lead to the target",
            Refused(
                target,
                f"{target.image} was staged and rebooted into {update.reboots} times, but each "
                f"time {deployed.booted or 'something without a digest'} was booted",
                "see why with 'journalctl -b -1 -u ostree-finalize-staged'; it is tried again "
                "once another target was asked for in between",
            ),
        )
    if not deployed.staged_id:
        return Stage(target)
    if deployed.staged != target.digest:
        return _foreign(deployed, target) or Stage(target)
    if facts.node is None or not facts.drains:
        # The drain was acknowledged before this phase was entered, in this same boot.
        return Reboot(target)
    if facts.node.handshake.drained_for(update.drain):
        return Reboot(target)
    if not deployed.locked:
        return Drop("the node came back into service while its deployment was unlocked")
    return _drain(facts, update)


def _releasing(facts: Facts, update: Update) -> Decision:
    deployed = facts.deployed
    if deployed is None:
        return Wait("waiting for a look at the deployments")
    if deployed.staged and deployed.staged == update.target.digest:
        return Drop("called off")
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
    return Wait("waiting for the uncordon")
