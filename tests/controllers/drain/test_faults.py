"""Every accepted request is fulfilled, superseded or retried, despite kills and faults."""

from collections.abc import Callable

import pytest

from tests.controllers.drain.site import Acting, Site
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.controllers.drain.conditions import (
    DrainConditionWriter,
    DrainStage,
    build_drain_conditions,
)
from treenail.kube.request import ApiRequest
from treenail.kube.resources import MACHINECONFIGNODES
from treenail_lab.apiserver.serving.faults import FaultMatch, LoseAnswerFault, RejectFault

Act = Callable[..., Acting]
DRAINER = "drainer"


class Killed(Exception):
    """The process was killed."""


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
        site.node(name, reported=True)
        for pod in ("x", "y"):
            site.pod(name, f"{name}-{pod}")
        site.request_drain(name, "drain-b")
        self._until(lambda: site.applied(name) == "drain-b")
        assert site.cordoned(name)
        assert site.pods(name) == []
        site.request_drain(name, "uncordon-b")
        self._until(lambda: site.applied(name) == "uncordon-b")
        assert not site.cordoned(name)
        assert set(site.notes(name)) == {
            key.DESIRED_DRAIN,
            key.LAST_APPLIED_DRAIN,
            key.LAST_OUTAGE,
        }
        self._until(lambda: site.conditions(name).get("Uncordoned", ("",))[0] == "True")

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


def test_controller_killed_at_any_write_completes_requests(site: Site, act: Act) -> None:
    measured = Story(site, act, "measured")
    measured.run()
    assert measured.writes >= 8
    for number in range(1, measured.writes + 1):
        for sent in (False, True):
            story = Story(site, act, f"n{number}-{sent}".lower())
            story.kills_at, story.sent = number, sent
            story.run()
            assert story.kills_at == -1, "it was killed"


def test_cordon_of_user_survives_kill_at_any_write(site: Site, act: Act) -> None:
    for number in range(1, 4):
        name = f"n{number}"
        site.node(name, unschedulable=True)
        story = Story(site, act, name)
        story.kills_at, story.sent = number, True
        for request in ("drain-b", "uncordon-b"):
            site.request_drain(name, request)
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
def test_server_faults_only_delay_a_drain(
    site: Site, act: Act, fault: LoseAnswerFault | RejectFault, match: FaultMatch
) -> None:
    site.node("a", reported=True, pod="web")
    acting = act()
    for request in ("drain-b", "uncordon-b"):
        site.server.inject_fault(fault, match, times=3)
        acting.fulfil("a", request)
        site.server.lift_fault()
    acting.until(
        lambda: site.conditions("a").get("Uncordoned") == ("True", "UpdateCompleteUncordoned")
    )

    assert site.pods("a") == []
    assert not site.cordoned("a")


def blind(site: Site) -> None:
    """Stop all watches of Nodes."""
    wait_until(
        lambda: site.server.call_api(lambda api: api.watches.count_watches().get("nodes", 0))
    )
    site.server.inject_fault(
        RejectFault(503, retry_after_s=0), FaultMatch(verb="watch", resource="nodes")
    )
    wait_until(lambda: site.server.cut_watches("nodes"))


def test_stale_cache_repeats_no_write(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    blind(site)
    site.request_drain("a", "drain-b")
    acting.queue.add("a")
    acting.settle()
    assert acting.wire.writes == [], "the cache is stale"

    site.server.lift_fault()
    acting.until(lambda: site.applied("a") == "drain-b")
    blind(site)
    writes = list(acting.wire.writes)
    acting.queue.add("a")
    acting.settle()
    assert acting.wire.writes == writes, "own writes are known despite the stale cache"


def test_request_changed_behind_stale_cache_is_not_acknowledged(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.cordoned("a"))
    blind(site)
    site.request_drain("a", "uncordon-b")
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a"))

    assert site.applied("a") == "uncordon-b"
    assert not site.cordoned("a")


def test_constantly_changing_node_is_drained(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    changes = iter(range(6))

    def heartbeat(request: ApiRequest) -> None:
        # Just before each write of the controller, so that its version is old.
        if request.method == "PATCH" and (number := next(changes, None)) is not None:
            site.annotate("a", {"heartbeat": str(number)})

    acting.wire.before = heartbeat
    acting.fulfil("a", "drain-b")

    assert next(changes, None) is None


def test_failed_write_of_conditions_is_retried(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    acting = act()
    match = FaultMatch(resource="machineconfignodes/status", user=DRAINER)
    site.server.inject_fault(RejectFault(500, retry_after_s=0), match)
    acting.fulfil("a", "drain-b")
    assert site.conditions("a") == {}
    site.server.lift_fault()
    acting.until(lambda: site.conditions("a"))

    assert site.conditions("a")["Drained"] == ("True", "UpdateExecutedDrained")
    site.clock.move(3600)
    writes = len(acting.wire.writes)
    acting.settle()
    assert len(acting.wire.writes) == writes


def test_drain_that_a_restored_object_shows_is_corrected(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    acting = act()
    acting.fulfil("a", "drain-b")
    drained = site.client.get(MACHINECONFIGNODES, "a")["status"]
    site.request_drain("a", "uncordon-b")
    acting.until(lambda: site.conditions("a")["Uncordoned"][0] == "True")
    site.client.patch(MACHINECONFIGNODES, "a", {"status": drained}, subresource="status")
    assert site.conditions("a")["Drained"][0] == "True"

    acting.until(lambda: site.conditions("a")["Drained"][0] == "False")
    assert site.conditions("a")["Uncordoned"][0] == "True"


def test_corrected_conditions_have_time_to_reach_the_cache(site: Site) -> None:
    site.node("a", reported=True)
    writer = DrainConditionWriter(site.client, site.clock)
    conditions = build_drain_conditions(DrainStage.UNCORDONED, "uncordon-b")
    assert writer.correct_conditions("a", conditions) is None
    writer.flush_conditions("a")
    site.clock.move(1)
    assert writer.correct_conditions("a", conditions) == pytest.approx(4)
    site.clock.move(4)
    assert writer.correct_conditions("a", conditions) is None


def test_transition_time_changes_only_with_status(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    first = act()
    first.fulfil("a", "drain-b")
    first.kill()
    before = site.client.get(MACHINECONFIGNODES, "a")["status"]
    site.clock.move(100)
    site.request_drain("a", "drain-c")
    second = act()
    second.until(lambda: site.applied("a") == "drain-c")

    after = site.client.get(MACHINECONFIGNODES, "a")["status"]
    assert _times(after) == _times(before)
    assert after != before


def _times(status: object) -> list[str]:
    return [each["lastTransitionTime"] for each in status["conditions"]]  # type: ignore[index]  # a dict
