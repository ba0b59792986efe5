"""The next turn of a pool's rollout: which nodes are given the target now, and why no others.

Everything here is pure. The controller observes, writes what a turn says, and looks again when
something changed or the turn asks for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from treenail.api.machineconfigpool import MachineConfigPool
from treenail.controllers.rollout import estimate, order
from treenail.controllers.rollout.estimate import words
from treenail.controllers.rollout.gates import windows
from treenail.controllers.rollout.gates.os_image import Blocked, Hold, Proceed, Verdict
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.policy import RESUME, Order, Policy, Wave, policy
from treenail.controllers.rollout.progress import (
    Failure,
    Record,
    advance,
    members,
    next_look_s,
    room,
    soaked_at,
)
from treenail.controllers.rollout.select import candidates, max_unavailable, redirected
from treenail.controllers.rollout.staging import Staging, ready, staging
from treenail.controllers.rollout.status import Trouble, update_line
from treenail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do for a pool now."""

    give: tuple[str, ...] = ()
    """Nodes to be given the target, in this order.

    Only on condition that the annotations a node was judged by are unchanged: a node that seemed
    to be on its way may have arrived, and would be taken out of service once more.
    """
    target: Target | None = None
    """None when there is none to give."""
    record: Record | None = None
    """To be kept on the pool before any node is given anything; None means leave it."""
    waiting: str = ""
    remaining: str = ""
    trouble: Trouble | None = None
    look_again_s: float | None = None
    """When time alone may change the answer."""
    staging: Staging = field(default_factory=Staging)
    """What to ask of nodes that serve; it takes none out of service."""


def decide(
    pool: MachineConfigPool,
    nodes: Sequence[NodeFacts],
    image: Verdict,
    record: Record | None,
    *,
    now: float,
    gates: Sequence[Hold | Blocked] = (),
    last: str = "",
    blocked: Collection[str] = (),
) -> Turn:
    """The next turn.

    ``nodes`` are those of the pool, with what was written but may not be seen yet. ``image`` says
    what the target is; ``gates`` are others who ask to wait. The node ``last`` is taken when no
    other is left: the one that the controller runs on. Those that are ``blocked`` have pods that
    can't be evicted now; others are preferred to them.
    """
    try:
        careful = policy(pool)
        limit = max_unavailable(pool.name, pool.max_unavailable, len(nodes))
    except ConfigError as error:
        return Turn(record=record, trouble=invalid(error))
    for found in (image, *gates):
        if isinstance(found, Blocked):
            return Turn(record=record, trouble=Trouble(found.kind, found.reason))
    waiting = "; ".join(found.reason for found in (image, *gates) if isinstance(found, Hold))
    if not isinstance(image, Proceed):
        return Turn(record=record, waiting=waiting)
    if not image.target.config:
        return Turn(record=record, waiting="no configuration is rendered yet")
    resume = pool.metadata.annotations.get(RESUME, "")
    record = advance(record, careful, nodes, image.target, now=now, resume=resume)
    look = _Look(careful, nodes, image.target, record, limit, now, last, frozenset(blocked))
    stopped = pool.paused or pool.deleting
    ahead = staging(careful, nodes, image.target, stopped=stopped)
    if record.halted is not None:
        # What is staged stays: a person looks, and may let it go on.
        return look.turn(trouble=_halted(record, record.halted))
    if stopped or waiting:
        return replace(look.turn(waiting=waiting), staging=ahead)
    if ahead.waiting:
        return replace(look.turn(waiting=ahead.waiting), staging=ahead)
    return replace(_take(look), staging=ahead)


def invalid(error: ConfigError) -> Trouble:
    """What to say about a pool that can't be read."""
    remedy = f"; {error.remedy}" if error.remedy else ""
    return Trouble("InvalidConfiguration", f"{error}{remedy}")


@dataclass(frozen=True, slots=True)
class _Look:
    """What a turn is made from."""

    policy: Policy
    nodes: Sequence[NodeFacts]
    target: Target
    record: Record
    max_unavailable: int
    now: float
    last: str
    blocked: frozenset[str]

    @property
    def wave(self) -> Wave | None:
        waves = self.policy.waves
        return waves[self.record.wave] if self.record.wave < len(waves) else None

    @property
    def node_s(self) -> float:
        return estimate.node_s(self.nodes, self.target)

    def turn(
        self,
        give: Sequence[NodeFacts] = (),
        *,
        waiting: str = "",
        trouble: Trouble | None = None,
        again_s: float | None = None,
    ) -> Turn:
        """A turn, with when to look again at the latest."""
        timed_s = next_look_s(self.record, self.policy, self.nodes, self.target, now=self.now)
        times = [at for at in (timed_s, again_s) if at is not None]
        return Turn(
            give=tuple(node.name for node in give),
            target=self.target,
            record=self.record,
            waiting=waiting,
            remaining=self.remaining(),
            trouble=trouble,
            look_again_s=min(times) if times else None,
        )

    def remaining(self) -> str:
        """How many nodes are through, and how long the others may take."""
        total = len(self.nodes)
        done = sum(node.has(self.target) for node in self.nodes)
        if done == total:
            return ""
        left_s = estimate.left_s(
            total - done, self.max_unavailable, self.node_s, self.policy.windows, self.now
        )
        if left_s is None:
            return f"{done} of {total} nodes are updated, the maintenance windows are too short"
        soaks_s = sum(wave.soak_s for wave in self.policy.waves[self.record.wave :])
        return f"{done} of {total} nodes are updated, about {words(left_s + soaks_s)} left"


def _take(look: _Look) -> Turn:
    if all(node.asked_for(look.target) for node in look.nodes):
        return look.turn()
    closed, again_s = _closed(look)
    if closed:
        return look.turn(waiting=closed, again_s=again_s)
    space = room(look.record, look.policy, look.nodes, look.target)
    if space.members == 0:
        sentence = f"no node of the pool matches the nodeSelector of wave {look.record.wave + 1}"
        return look.turn(trouble=Trouble("EmptyWave", sentence))
    if space.left <= 0:
        return look.turn(waiting=_wave_words(look))
    give = _chosen(look)[: space.left]
    waiting = "" if give else "as many nodes are unavailable as may be"
    return look.turn(give, waiting=waiting, again_s=again_s)


def _chosen(look: _Look) -> Sequence[NodeFacts]:
    """Who is unavailable anyway turns first; of the others as many as the capacity allows."""
    turning = _of_wave(look, redirected(look.nodes, look.target))
    found = candidates(look.nodes, look.target, look.max_unavailable)
    turned = {node.name for node in turning}
    fresh = [node for node in _of_wave(look, found.nodes) if node.name not in turned]
    if look.policy.staged_at_once is not None and look.target.image:
        fresh = [node for node in fresh if ready(node, look.target)]
    if len(fresh) > 1:
        fresh = [node for node in fresh if node.name != look.last]
    # A node that fails already has the most to win, and its pods the least to lose.
    failing = order.by_zone(node for node in fresh if node.failing)
    sound = _ordered(look, [node for node in fresh if not node.failing])
    # The sort is stable: among the blocked and among the others the order is as it was.
    sound = sorted(sound, key=lambda node: node.name in look.blocked)
    return [*turning, *(*failing, *sound)[: found.capacity]]


def _of_wave(look: _Look, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    return nodes if look.wave is None else members(look.wave, nodes)


def _ordered(look: _Look, nodes: Sequence[NodeFacts]) -> Sequence[NodeFacts]:
    match look.policy.order:
        case Order.ZONES:
            return order.by_zone(nodes)
        case Order.SPREAD:
            return order.spread(nodes, [node for node in look.nodes if node.unavailable])


def _closed(look: _Look) -> tuple[str, float | None]:
    """Why no node may be taken out of service now, empty if it may; and until when that is so."""
    seen = windows.look(look.policy.windows, look.now)
    if isinstance(seen, windows.Closed):
        return f"the maintenance window opens at {seen.opens_at}", seen.opens_in_s
    if seen.left_s is None or look.node_s <= seen.left_s:
        return "", seen.left_s
    sentence = (
        f"a node takes about {words(look.node_s)}, and the maintenance window closes in "
        f"{words(seen.left_s)}"
    )
    return sentence, seen.left_s


def _wave_words(look: _Look) -> str:
    which = f"wave {look.record.wave + 1} of {len(look.policy.waves) + 1}"
    if look.record.settled_at is None:
        return f"{which} is given out and not through yet"
    left_s = soaked_at(look.record, look.policy) - look.now
    return f"{which} runs well, more nodes follow in {words(left_s)}"


def _halted(record: Record, first: Failure) -> Trouble:
    return Trouble(
        "Halted",
        f"The rollout of {update_line(record.target)} is halted: node {first.node} failed first: "
        f"{first.reason}; give the pool another target, or change its annotation {RESUME} to go "
        "on",
    )
