"""The rollout of pools: look at the caches, decide, write, say how it stands.

`RolloutController.sync` is one pass for one pool. All that it has to remember is in the cluster,
so it may be stopped between any two writes, and another one goes on.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from treenail.api import annotations as key
from treenail.api.machineconfigpool import API_VERSION, ARBITER, KIND, MASTER, MachineConfigPool
from treenail.clock import Clock, rfc3339
from treenail.controllers.rollout import report, status
from treenail.controllers.rollout.act import Api, Each, Writer
from treenail.controllers.rollout.decide import Turn, decide, invalid
from treenail.controllers.rollout.expected import ExpectedNodes, ExpectedPools
from treenail.controllers.rollout.gates import os_image
from treenail.controllers.rollout.gates.external import LockServer
from treenail.controllers.rollout.gates.os_image import Blocked, Hold, Proceed, Verdict
from treenail.controllers.rollout.nodes import NodeFacts, Target
from treenail.controllers.rollout.observe import Grouping, Picture, SeenPool, Sight
from treenail.controllers.rollout.policy import Policy, policy
from treenail.controllers.rollout.progress import STATE, Record
from treenail.controllers.rollout.status import DEGRADED, PoolStatus, Trouble, View
from treenail.errors import ClusterError, ConfigError, Conflict, Forbidden, Invalid, NotFound
from treenail.kube.events import Regarding
from treenail.kube.resources import MACHINECONFIGS

log = logging.getLogger(__name__)

CONFLICT_S = 0.5
"""When to look again after somebody else was quicker: the cache will show what they did."""
GATE_S = 30.0
"""How often somebody who asks to wait is asked again."""


class Caches(Protocol):
    """Pools and nodes by name, as watches show them."""

    def pools(self) -> Mapping[str, SeenPool]: ...
    def nodes(self) -> Mapping[str, NodeFacts]: ...


class Gates(Protocol):
    """Who else is asked; None is a yes."""

    def ask(self, policy: Policy) -> Hold | Blocked | None: ...
    def lock(self, server: LockServer, node: str) -> Hold | Blocked | None: ...
    def unlock(self, server: LockServer, node: str) -> Hold | Blocked | None: ...


class Events(Protocol):
    """Where people are told."""

    def warning(self, regarding: Regarding, reason: str, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """How rollouts are done in this cluster."""

    image_key: str = key.DESIRED_OS_IMAGE
    """The annotation of a node that asks for an image."""
    own_node: str = ""
    """The node that this process runs on, which is left for last."""
    image: Callable[[MachineConfigPool], Verdict] = os_image.annotated
    """Which target a pool is after: the seat of the gate for images built in the cluster."""


@dataclass(slots=True)
class _Pass:
    """What is seen, decided and met in one pass."""

    sight: Sight
    pool: MachineConfigPool
    nodes: tuple[NodeFacts, ...]
    now: float
    target: Target
    turn: Turn = field(default_factory=Turn)
    again_s: list[float] = field(default_factory=list)
    errors: list[ClusterError] = field(default_factory=list)

    def met(self, error: ClusterError) -> None:
        """Go on in spite of the error; the pass is repeated."""
        if isinstance(error, Conflict):
            self.again_s.append(CONFLICT_S)
        else:
            self.errors.append(error)


class RolloutController:
    """Brings the nodes of pools to their pool's target. Thread-safe for different pools."""

    def __init__(
        self,
        api: Api,
        caches: Caches,
        clock: Clock,
        gates: Gates,
        events: Events,
        settings: Settings,
        *,
        each: Each = map,
        blocked: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._api = api
        self._caches = caches
        self._clock = clock
        self._gates = gates
        self._events = events
        self._settings = settings
        self._blocked = blocked
        self._grouping = Grouping()
        self._expected = ExpectedNodes()
        self._pools = ExpectedPools()
        self._told: dict[str, float] = {}
        self._found: dict[str, str] = {}
        self._writer = Writer(
            api,
            clock,
            self._expected,
            each=each,
            image_key=settings.image_key,
        )

    def sync(self, name: str) -> float | None:
        """One pass for the pool; after how many seconds the next is due at the latest.

        The pool's status is written whatever else fails. Raises `ClusterError` when the pass has
        to be repeated.
        """
        nodes = self._caches.nodes()
        picture = self._grouping.look(self._caches.pools(), nodes)
        sight = picture.of(name)
        self._expected.keep(nodes)
        if sight is None:
            self._forget(name)
            return None
        pool = self._pools.latest(sight.seen.pool)
        seen = self._expected.over(sight.nodes)
        target = Target(pool.configuration.name, "")
        found = _Pass(sight, pool, seen, self._clock.now(), target)
        found.turn = self._turn(found, picture)
        self._act(found)
        self._report(found)
        if found.errors:
            raise found.errors[0]
        if found.turn.look_again_s is not None:
            found.again_s.append(found.turn.look_again_s)
        return min(found.again_s, default=None)

    def _forget(self, name: str) -> None:
        self._pools.forget(name)
        self._told.pop(name, None)
        self._found.pop(name, None)

    def _turn(self, found: _Pass, picture: Picture) -> Turn:
        pool = found.pool
        try:
            _check(found.sight)
            verdict = self._settings.image(pool)
            text = pool.metadata.annotations.get(STATE)
            record = None if text is None else Record.from_text(text)
            if isinstance(verdict, Proceed):
                found.target = verdict.target
            inside = tuple(self._inside(found.sight, picture))
        except ConfigError as error:
            return Turn(trouble=invalid(error))

        def turn(*outside: Hold | Blocked, blocked: frozenset[str] = frozenset()) -> Turn:
            return decide(
                pool,
                found.nodes,
                verdict,
                record,
                now=found.now,
                gates=(*inside, *outside),
                last=self._settings.own_node,
                blocked=blocked,
            )

        decided = turn()
        if not decided.give:
            return decided
        asked = self._missing(pool) or self._gates.ask(policy(pool))
        if asked is None:
            blocked = self._blocked()
            return turn(blocked=blocked) if blocked else decided
        found.again_s.append(GATE_S)
        return turn(asked)

    def _inside(self, sight: Sight, picture: Picture) -> Iterator[Hold]:
        """Why the pool has to wait for another one."""
        name = sight.seen.pool.name
        for other in sight.unreadable:
            yield Hold(f"pool {other} can't be read, so nobody knows which nodes are its own")
        if name in (MASTER, ARBITER) and picture.members.get(ARBITER) and MASTER in picture.pools:
            masters = self._expected.over(picture.members.get(MASTER, ()))
            arbiters = self._expected.over(picture.members[ARBITER])
            verdict = self._settings.image(self._pools.latest(picture.pools[MASTER].pool))
            want = verdict.target if isinstance(verdict, Proceed) else Target("", "")
            hold = os_image.control_plane(name, masters, arbiters, want)
            if hold is not None:
                yield hold

    def _missing(self, pool: MachineConfigPool) -> Blocked | None:
        """A config that does not exist is given to nobody."""
        config = pool.configuration.name
        if self._found.get(pool.name) == config:
            return None
        try:
            self._api.get(MACHINECONFIGS, config)
        except NotFound:
            return Blocked(
                f"MachineConfig {config}, which spec.configuration names, does not exist",
                "MissingMachineConfig",
            )
        except ClusterError as error:
            return Blocked(f"MachineConfig {config} can't be looked up: {error}", "ClusterError")
        self._found[pool.name] = config
        return None

    def _act(self, found: _Pass) -> None:
        record = found.turn.record
        # Before any node is given anything: who comes next has to know how far it went.
        if record is not None and record.to_text() != found.pool.metadata.annotations.get(STATE):
            try:
                found.pool = self._pools.wrote(found.pool, self._writer.record(found.pool, record))
            except ClusterError as error:
                found.met(error)
                return
        self._give(found)
        self._stage(found)
        self._unlock(found)
        found.nodes = self._expected.over(found.sight.nodes)

    def _give(self, found: _Pass) -> None:
        turn = found.turn
        if turn.target is None:
            return
        chosen = [*self._unanswered(found, turn.target)]
        by_name = {node.name: node for node in found.nodes}
        lock = policy(found.pool).lock if turn.give else None
        for name in turn.give:
            if lock is not None and (answer := self._gates.lock(lock, name)) is not None:
                found.turn = _held(turn, answer)
                found.again_s.append(GATE_S)
                break
            chosen.append(by_name[name])
        if not chosen:
            return
        server = "" if lock is None else lock.text
        outcome = self._writer.give(chosen, turn.target, found.pool.name, server)
        for error in outcome.errors:
            found.met(error)

    def _stage(self, found: _Pass) -> None:
        """Ask for what is to be staged ahead, or take it back; nothing depends on it."""
        ahead = found.turn.staging
        by_name = {node.name: node for node in found.sight.nodes}
        for names, target in ((ahead.ask, found.turn.target), (ahead.take_back, None)):
            nodes = [by_name[name] for name in names if name not in found.turn.give]
            for error in self._writer.stage(nodes, target):
                found.met(error)

    def _unanswered(self, found: _Pass, target: Target) -> tuple[NodeFacts, ...]:
        """Nodes whose last write got no answer: they count as given, so it has to be made sure."""
        record = found.turn.record
        halted = record is not None and record.halted is not None
        if halted or found.pool.paused or found.pool.deleting:
            return ()
        return self._expected.unsure(found.nodes, target)

    def _unlock(self, found: _Pass) -> None:
        """Give back the locks of nodes that are through, also of a pool that is paused."""
        for node in self._expected.over(found.sight.nodes):
            server = LockServer.from_text(node.locked_by)
            if server is None or not (node.done and node.in_service):
                continue
            if (answer := self._gates.unlock(server, node.name)) is not None:
                log.warning("the lock of node %s is not given back: %s", node.name, answer.reason)
                found.again_s.append(GATE_S)
                return
            try:
                self._writer.unlocked(node)
            except NotFound:
                continue
            except ClusterError as error:
                found.met(error)

    def _report(self, found: _Pass) -> None:
        wanted = self._status(found)
        told = self._told.get(found.pool.name, float("-inf"))
        due_s = report.due_in_s(found.pool, wanted, self._clock.monotonic() - told)
        if due_s is None:
            return
        if due_s > 0:
            found.again_s.append(due_s)
            return
        before = found.pool
        try:
            found.pool = self._pools.wrote(before, self._writer.status(before, wanted))
        except ClusterError as error:
            found.met(error)
            return
        self._told[before.name] = self._clock.monotonic()
        self._warn(before, wanted)

    def _status(self, found: _Pass) -> PoolStatus:
        trouble = found.turn.trouble or _beside(found)
        view = View(
            pool=found.pool,
            target=found.target,
            nodes=found.nodes,
            waiting=found.turn.waiting,
            remaining=found.turn.remaining,
            trouble=trouble,
        )
        now = rfc3339(found.now)
        if trouble is not None and _unusable(found.sight):
            return report.unusable(found.pool, trouble, now=now)
        return status.calculate(view, now=now)

    def _warn(self, pool: MachineConfigPool, written: PoolStatus) -> None:
        before = [(each.status, each.message) for each in pool.conditions if each.type == DEGRADED]
        for condition in written.conditions:
            now = (condition.status, condition.message)
            if condition.type == DEGRADED and condition.status == "True" and now not in before:
                regarding = Regarding(
                    KIND, pool.name, uid=pool.metadata.uid, api_version=API_VERSION
                )
                self._events.warning(regarding, condition.reason, condition.message)


def _unusable(sight: Sight) -> bool:
    selector = sight.seen.pool.node_selector
    return sight.seen.error is not None or (selector is not None and selector.selects_all)


def _check(sight: Sight) -> None:
    """Raises `ConfigError` for a pool of which nobody knows which nodes it means."""
    if sight.seen.error is not None:
        raise sight.seen.error
    if _unusable(sight):
        raise ConfigError(
            f"spec.nodeSelector of pool {sight.seen.pool.name} has no requirements and would "
            "select every node, so it selects none",
            remedy="write a nodeSelector with at least one requirement",
        )


def _held(turn: Turn, answer: Hold | Blocked) -> Turn:
    """The turn when a lock server does not let (more) nodes go."""
    match answer:
        case Hold(reason):
            return replace(turn, waiting=reason)
        case Blocked(reason, kind):
            return replace(turn, trouble=Trouble(kind, reason))


def _beside(found: _Pass) -> Trouble | None:
    """What a person has to look at although the rollout goes on."""
    if disputes := found.sight.disputes:
        more = f"; and {len(disputes) - 1} more such nodes" if len(disputes) > 1 else ""
        return Trouble("NodeInTwoPools", f"{invalid(disputes[0]).message}{more}")
    refused = [error for error in found.errors if isinstance(error, Forbidden | Invalid)]
    return Trouble("WriteRefused", str(refused[0])) if refused else None
