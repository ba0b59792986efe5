"""Locks are released once, although several requests for it may come."""

from collections.abc import Callable

from treenail.controllers.pools.expected_writes import ExpectedPools
from treenail.controllers.pools.node_facts import LOCKED_BY, NodeFacts
from treenail.controllers.pools.os_image import GateAnswer, GatePending
from treenail.controllers.pools.rollout_policy import LockServer, ObservedPolicy, RolloutPolicy
from treenail.controllers.rollout.lock_manager import LockManager
from treenail.controllers.rollout.locks import LockHolder
from treenail.errors import ConflictError


def locked_node(version: int) -> NodeFacts:
    annotations = {LOCKED_BY: "workers http://locks.example.com"}
    metadata = {"name": "n0", "uid": "u", "resourceVersion": str(version)}
    return NodeFacts.from_json({"metadata": metadata | {"annotations": annotations}})


class LockServers:
    """Releases every lock; ``during_release`` runs meanwhile."""

    def __init__(self) -> None:
        self.released: list[LockHolder] = []
        self.during_release: Callable[[], object] = lambda: None

    def release_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        self.released.append(holder)
        self.during_release()
        return None


class NodeWriter:
    """Removes annotations, of the current version of a Node only."""

    def __init__(self, version: int) -> None:
        self.version = str(version)

    def clear_lock(self, node: NodeFacts) -> None:
        if node.resource_version != self.version:
            raise ConflictError("the object has been modified")
        self.version = f"{self.version}0"


def keep(servers: LockServers, writer: NodeWriter) -> LockManager:
    policy = RolloutPolicy(lock_server=LockServer("http://locks.example.com", "workers"))
    known = {"locked": ObservedPolicy("locked", policy)}
    return LockManager(servers, writer, ExpectedPools(), lambda: known)  # type: ignore[arg-type]  # what it uses


def test_node_in_an_outdated_cache_releases_its_lock_once() -> None:
    servers = LockServers()
    keeper = keep(servers, NodeWriter(1))
    assert keeper.release_orphan(locked_node(1)) is None
    assert keeper.release_orphan(locked_node(1)) is None
    assert len(servers.released) == 1


def test_lock_that_is_being_released_is_not_released_again() -> None:
    servers = LockServers()
    keeper = keep(servers, NodeWriter(1))
    answers: list[GateAnswer] = []
    servers.during_release = lambda: answers.append(keeper.release_orphan(locked_node(1)))
    assert keeper.release_orphan(locked_node(1)) is None
    assert isinstance(answers[0], GatePending)
    assert len(servers.released) == 1


def test_lock_of_a_later_assignment_is_released_too() -> None:
    servers, writer = LockServers(), NodeWriter(1)
    keeper = keep(servers, writer)
    keeper.release_orphan(locked_node(1))
    writer.version = "7"
    keeper.release_orphan(locked_node(7))
    assert len(servers.released) == 2
