"""Invariants of a drain under users, agents, kills and lost responses."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from treenail.api import annotations as key
from treenail.controllers.drain.blockers import parse_keys
from treenail.controllers.drain.controller import DrainNodeClient
from treenail.controllers.drain.decide import (
    CordonDecision,
    CordonOwner,
    DisownCordonDecision,
    DrainNode,
    EvictDecision,
    IdleDecision,
    UncordonDecision,
    decide_drain,
)
from treenail.errors import ConfigError, ConflictError, UnreachableError
from treenail.kube.api_client import Json, PatchType
from treenail.kube.resources import Resource

AT_REST = 12
"""Syncs after which every request must be applied when nothing else happens."""


class Server:
    """One Node: merge patches, conditional on its version; responses may get lost."""

    def __init__(self) -> None:
        self.version = 1
        self.annotations: dict[str, str] = {}
        self.unschedulable = False
        self.lose_answer = False

    def document(self) -> Json:
        return {
            "metadata": {
                "name": "n",
                "resourceVersion": str(self.version),
                "annotations": dict(self.annotations),
            },
            "spec": {"unschedulable": self.unschedulable},
        }

    def get(self, _resource: Resource, _name: str) -> Json:
        return self.document()

    def patch(
        self,
        _resource: Resource,
        _name: str,
        body: Any,
        _kind: PatchType = PatchType.MERGE,
        **_: Any,
    ) -> Json:
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise ConflictError("the object has been modified")
        self.change(body["metadata"]["annotations"])
        if "spec" in body:
            self.unschedulable = bool(body["spec"]["unschedulable"])
        if self.lose_answer:
            self.lose_answer = False
            raise UnreachableError("the answer is lost")
        return self.document()

    def change(self, notes: dict[str, str | None]) -> None:
        self.version += 1
        for name, value in notes.items():
            if value is None:
                self.annotations.pop(name, None)
            else:
                self.annotations[name] = value


class Cache:
    """The state from the watch, which may be stale."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.look()

    def look(self) -> None:
        self._seen = DrainNode.from_json(self._server.document())

    def find(self, _name: str) -> DrainNode:
        return self._seen


class Draining(RuleBasedStateMachine):
    """A node, its users, its agent, and controllers that restart."""

    @initialize(cordoned=st.booleans())
    def begin(self, cordoned: bool) -> None:
        self.server = Server()
        self.server.unschedulable = cordoned
        self.pods = 2
        self.token = 0
        # Whether the cordon belongs to a user, as the model knows it.
        self.theirs = cordoned
        self.restart()

    @rule()
    def restart(self) -> None:
        """The controller is killed, and another process starts."""
        self.cache = Cache(self.server)
        self.nodes = DrainNodeClient(self.server, self.cache)  # type: ignore[arg-type]  # stand-ins

    @rule()
    def watch_delivers(self) -> None:
        self.cache.look()

    @rule()
    def agent_requests_drain(self) -> None:
        self.token += 1
        self.server.change({key.DESIRED_DRAIN: f"drain-{self.token}"})

    @rule()
    def agent_requests_uncordon(self) -> None:
        self.server.change({key.DESIRED_DRAIN: f"uncordon-{self.token}"})

    @rule()
    def user_cordons(self) -> None:
        self.server.version += 1
        if not self.server.unschedulable:
            self.server.unschedulable = True
            # A quick uncordon and cordon cannot be distinguished from our cordon.
            self.theirs = not self._is_ours()

    @rule()
    def user_uncordons(self) -> None:
        self.server.version += 1
        self.server.unschedulable = self.theirs = False

    @rule()
    def heartbeat(self) -> None:
        self.server.version += 1

    @rule()
    def next_answer_is_lost(self) -> None:
        self.server.lose_answer = True

    @rule()
    def pod_leaves(self) -> None:
        self.pods = max(self.pods - 1, 0)

    @rule()
    def pod_comes(self) -> None:
        if not self.server.unschedulable:
            self.pods += 1

    @rule()
    def turn(self) -> None:
        """One sync of the controller."""
        was_cordoned, was_theirs = self.server.unschedulable, self.theirs
        node = self.nodes.get_latest("n")
        assert node is not None
        try:
            self._act(node)
        except ConflictError:
            self.nodes.read_node("n")
        except UnreachableError:
            pass
        if was_cordoned and not self.server.unschedulable:
            assert not was_theirs, "a cordon of a user was lifted"
        if not was_cordoned and self.server.unschedulable:
            self.theirs = False

    def _act(self, node: DrainNode) -> None:
        decision = decide_drain(node, 1_700_000_000.0)
        match decision:
            case CordonDecision(record):
                self.nodes.cordon_node(node, record)
            case EvictDecision() if self.pods == 0:
                before = self.server.annotations.get(key.LAST_APPLIED_DRAIN)
                try:
                    self.nodes.acknowledge_drain(node)
                finally:
                    if self.server.annotations.get(key.LAST_APPLIED_DRAIN) != before:
                        assert self.server.unschedulable
                        assert self.pods == 0
            case DisownCordonDecision(record):
                self.nodes.disown_cordon(node, record)
            case UncordonDecision(_, lift):
                self.nodes.acknowledge_uncordon(node, should_uncordon=lift, now=0.0)
            case _:
                pass

    def _is_ours(self) -> bool:
        record = DrainNode.from_json(self.server.document()).record
        return record is not None and record.cordon_owner is CordonOwner.DRAIN_CONTROLLER

    @invariant()
    def cordon_is_ours_by_the_record_or_theirs(self) -> None:
        if hasattr(self, "server") and self.server.unschedulable:
            assert self._is_ours() is not self.theirs

    def teardown(self) -> None:
        """Check that every request is applied soon when nothing else happens."""
        if not hasattr(self, "server"):
            return
        self.server.lose_answer = False
        for _ in range(AT_REST + self.pods):
            self.cache.look()
            self.pod_leaves()
            self.turn()
        node = DrainNode.from_json(self.server.document())
        assert decide_drain(node, 0.0) == IdleDecision()
        assert node.desired_drain == node.last_applied_drain
        if node.desired_drain.startswith("uncordon-"):
            assert node.unschedulable == self.theirs
            assert node.record is None


TestDraining = Draining.TestCase
TestDraining.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


@given(st.dictionaries(st.sampled_from([key.DESIRED_DRAIN, key.DRAIN, key.DRAIN_BLOCKED]),
                       st.text() | st.integers().map(str)))  # fmt: skip
def test_any_annotation_text_is_parsed(notes: dict[str, str]) -> None:
    try:
        node = DrainNode.from_json({"metadata": {"name": "n", "annotations": notes}})
    except ConfigError:
        return
    decide_drain(node, 1_700_000_000.0)
    parse_keys(node.drain_blocked)
