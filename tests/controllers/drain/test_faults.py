"""Every accepted request is fulfilled, superseded or tried again, whatever happens to whom."""

from collections.abc import Callable

import pytest

from tests.controllers.drain.site import Acting, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.request import ApiRequest
from treenail.kube.resources import MACHINECONFIGNODES
from treenail_lab.apiserver.serving.faults import FaultMatch, LoseAnswerFault, RejectFault

Act = Callable[..., Acting]
DRAINER = "drainer"


class Killed(Exception):
    """The process is no more."""


class Story:
    """Drain and uncordon of one node, by controllers that are killed at their n-th write."""

    def __init__(self, site: Site, act: Act, name: str) -> None:
        self.site = site
        self.name = name
        self._act = act
        self.writes = 0
        self.kills_at = -1
        self.sent = False

    def run(self) -> None:
        site, name = self.site, self.name
        site.node(name)
        site.machine_config_node(name)
        for pod in ("x", "y"):
            site.pod(name, f"{name}-{pod}")
        site.ask(name, "drain-b")
        self._until(lambda: site.applied(name) == "drain-b")
        assert site.cordoned(name)
        assert site.pods(name) == []
        site.ask(name, "uncordon-b")
        self._until(lambda: site.applied(name) == "uncordon-b")
        assert not site.cordoned(name)
        assert set(site.notes(name)) == {key.DESIRED_DRAIN, key.LAST_APPLIED_DRAIN}

    def _until(self, reached: Callable[[], bool]) -> None:
        acting = self._alive()
        while True:
            try:
                acting.until(reached)
            except Killed:
                acting.kill()
                acting = self._alive()
            else:
                acting.kill()
                return

    def _alive(self) -> Acting:
        acting = self._act()
        acting.wire.before = lambda request: self._meet(request, sent=False)
        acting.wire.after = lambda request: self._meet(request, sent=True)
        return acting

    def _meet(self, request: ApiRequest, *, sent: bool) -> None:
        if request.method == "GET":
            return
        self.writes += not sent
        if self.writes == self.kills_at and sent is self.sent:
            self.kills_at = -1
            raise Killed


@pytest.mark.limit(180)
def test_controller_killed_at_any_write_leaves_no_request_undone(site: Site, act: Act) -> None:
    measured = Story(site, act, "measured")
    measured.run()
    assert measured.writes >= 8
    for number in range(1, measured.writes + 1):
        for sent in (False, True):
            story = Story(site, act, f"n{number}-{sent}".lower())
            story.kills_at, story.sent = number, sent
            story.run()
            assert story.kills_at == -1, "it was killed"


def test_cordon_of_a_human_outlives_every_kill(site: Site, act: Act) -> None:
    for number in range(1, 4):
        name = f"n{number}"
        site.node(name, unschedulable=True)
        story = Story(site, act, name)
        story.kills_at, story.sent = number, True
        for request in ("drain-b", "uncordon-b"):
            site.ask(name, request)
            story._until(
                lambda name=name, request=request: site.applied(name) == request  # type: ignore[misc]
            )
        assert site.cordoned(name)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (LoseAnswerFault(), FaultMatch(resource="nodes", user=DRAINER)),
        (LoseAnswerFault(), FaultMatch(resource="pods/eviction", user=DRAINER)),
        (LoseAnswerFault(), FaultMatch(resource="machineconfignodes/status", user=DRAINER)),
        (RejectFault(429, retry_after_s=1), FaultMatch(resource="nodes", user=DRAINER)),
        (RejectFault(429, retry_after_s=1), FaultMatch(resource="pods/eviction", user=DRAINER)),
        (RejectFault(503, retry_after_s=0), FaultMatch(resource="nodes", user=DRAINER)),
        (RejectFault(503, retry_after_s=0), FaultMatch(resource="pods", user=DRAINER)),
        (RejectFault(500, retry_after_s=0), FaultMatch(resource="pods/eviction", user=DRAINER)),
        (
            RejectFault(500, retry_after_s=0),
            FaultMatch(resource="machineconfignodes", user=DRAINER),
        ),
        (RejectFault(500, retry_after_s=0), FaultMatch(resource="events", user=DRAINER)),
    ],
)
def test_faults_of_the_server_delay_a_drain_and_no_more(
    site: Site, act: Act, fault: LoseAnswerFault | RejectFault, match: FaultMatch
) -> None:
    site.node("a")
    site.machine_config_node("a")
    site.pod("a", "web")
    acting = act()
    for request in ("drain-b", "uncordon-b"):
        site.server.inject_fault(fault, match, times=3)
        site.ask("a", request)
        acting.until(lambda request=request: site.applied("a") == request)  # type: ignore[misc]
        site.server.lift_fault()
    acting.until(
        lambda: site.conditions("a").get("Uncordoned") == ("True", "UpdateCompleteUncordoned")
    )

    assert site.pods("a") == []
    assert not site.cordoned("a")


def blind(site: Site) -> None:
    """From now on nobody is told of Nodes."""
    wait_until(
        lambda: site.server.call_api(lambda api: api.watches.count_watches().get("nodes", 0))
    )
    site.server.inject_fault(
        RejectFault(503, retry_after_s=0), FaultMatch(verb="watch", resource="nodes")
    )
    wait_until(lambda: site.server.cut_watches("nodes"))


def test_stale_cache_does_nothing_twice(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    blind(site)
    site.ask("a", "drain-b")
    acting.queue.add("a")
    acting.settle()
    assert acting.wire.writes == [], "what it sees is the past"

    site.server.lift_fault()
    acting.until(lambda: site.applied("a") == "drain-b")
    blind(site)
    writes = list(acting.wire.writes)
    acting.queue.add("a")
    acting.settle()
    assert acting.wire.writes == writes, "what it wrote is known, whatever the cache shows"


def test_request_that_changes_behind_a_stale_cache_is_not_answered(site: Site, act: Act) -> None:
    site.node("a")
    site.pod("a", "web")
    site.budget("keep-web", "web")
    acting = act()
    site.ask("a", "drain-b")
    acting.until(lambda: site.cordoned("a"))
    blind(site)
    site.ask("a", "uncordon-b")
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a"))

    assert site.applied("a") == "uncordon-b"
    assert not site.cordoned("a")


def test_node_that_changes_all_the_time_is_drained(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    changes = iter(range(6))

    def heartbeat(request: ApiRequest) -> None:
        # Right before each of our writes, so that its version is an old one.
        if request.method == "PATCH" and (number := next(changes, None)) is not None:
            site.annotate("a", {"heartbeat": str(number)})

    acting.wire.before = heartbeat
    site.ask("a", "drain-b")
    acting.until(lambda: site.applied("a") == "drain-b")

    assert next(changes, None) is None


def test_conditions_that_could_not_be_written_are_written_later(site: Site, act: Act) -> None:
    site.node("a")
    site.machine_config_node("a")
    acting = act()
    match = FaultMatch(resource="machineconfignodes/status", user=DRAINER)
    site.server.inject_fault(RejectFault(500, retry_after_s=0), match)
    site.ask("a", "drain-b")
    acting.until(lambda: site.applied("a") == "drain-b")
    assert site.conditions("a") == {}
    site.server.lift_fault()
    acting.until(lambda: site.conditions("a"))

    assert site.conditions("a")["Drained"] == ("True", "UpdateExecutedDrained")
    site.clock.move(3600)
    writes = len(acting.wire.writes)
    acting.settle()
    assert len(acting.wire.writes) == writes


def test_transition_times_move_only_with_the_status(site: Site, act: Act) -> None:
    site.node("a")
    site.machine_config_node("a")
    first = act()
    site.ask("a", "drain-b")
    first.until(lambda: site.applied("a") == "drain-b")
    first.kill()
    before = site.client.get(MACHINECONFIGNODES, "a")["status"]
    site.clock.move(100)
    site.ask("a", "drain-c")
    second = act()
    second.until(lambda: site.applied("a") == "drain-c")

    after = site.client.get(MACHINECONFIGNODES, "a")["status"]
    assert _times(after) == _times(before)
    assert after != before


def _times(status: object) -> list[str]:
    return [each["lastTransitionTime"] for each in status["conditions"]]  # type: ignore[index]  # a dict
