"""Blockers of a drain are reported on the Node and in an Event within a minute."""

import json
from collections.abc import Callable

import pytest

from tests.controllers.drain.site import Acting, Site
from tests.kube.cluster import refusal
from treenail.api import annotations as key
from treenail.errors import TooLargeError
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import PODS

Act = Callable[..., Acting]
MINUTE_S = 60.0


def budget(site: Site, acting: Acting) -> None:
    site.pod("a", "web")
    site.budget("keep-web", "web")


def finalizer(site: Site, acting: Acting) -> None:
    site.pod("a", "web", finalizers=["example.com/hold"])
    end(site, "web")


def termination(site: Site, acting: Acting) -> None:
    """The kubelet is stopped."""
    site.pod("a", "web")
    site.server.set_kubelet("a", is_stopped=True)


def volume(site: Site, acting: Acting) -> None:
    spec = {
        "nodeName": "a",
        "containers": [{"name": "main", "image": "i"}],
        "volumes": [{"name": "disk", "persistentVolumeClaim": {"claimName": "claim"}}],
    }
    site.client.create(PODS, {"metadata": {"name": "web"}, "spec": spec}, namespace="shop")
    end(site, "web")


def webhook(site: Site, acting: Acting) -> None:
    site.pod("a", "web")

    def deny(request: ApiRequest) -> ApiResponse | None:
        if not request.path.endswith("/eviction"):
            return None
        text = 'admission webhook "guard.example.com" denied the request: not today'
        return refusal(403, "Forbidden", text)

    acting.wire.before = deny


def end(site: Site, pod: str) -> None:
    """The pod's containers end, and the kubelet stops."""
    site.server.set_kubelet("a", is_stopped=True)
    status = {
        "phase": "Running",
        "containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 0}}}],
    }
    site.client.patch(PODS, pod, {"status": status}, namespace="shop", subresource="status")


@pytest.mark.parametrize(
    ("arrange", "reason", "text"),
    [
        (budget, "pdb", "keep-web allows 0"),
        (finalizer, "finalizer", "waits for example.com/hold"),
        (termination, "termination", "still runs after its grace period of 30 s"),
        (volume, "volume", "it may wait for claim"),
        (webhook, "webhook", "guard.example.com"),
    ],
)
def test_blocker_is_reported_within_a_minute(
    site: Site, act: Act, arrange: Callable[[Site, Acting], None], reason: str, text: str
) -> None:
    site.node("a", reported=True)
    acting = act()
    arrange(site, acting)
    site.request_drain("a", "drain-b")
    acting.until(lambda: acting.wire.written("/eviction"))
    acting.settle()
    # A stuck pod is a blocker from the end of its grace period on.
    grace_s = 30.0 if reason in ("finalizer", "termination", "volume") else 0.0
    for _ in range(int(grace_s + MINUTE_S)):
        site.clock.move(1)
        acting.settle()

    assert site.blocked("a") == [("shop/web", reason)]
    ((event, message),) = site.events("a")
    assert event == "DrainBlocked"
    assert text in message
    assert message.startswith(f"drain-b, started at {site.record('a')['began']}, is blocked by ")
    assert site.conditions("a")["Drained"] == ("Unknown", "DrainBlocked")
    assert site.applied("a") == ""


def test_pod_with_a_grace_period_of_hours_is_reported_after_30_s(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    acting = act()
    site.pod("a", "web", grace_s=6 * 3600)
    site.server.set_kubelet("a", is_stopped=True)
    site.request_drain("a", "drain-b")
    acting.until(lambda: acting.wire.written("/eviction"), still=True)
    evicted = site.clock.monotonic()
    acting.until(lambda: site.blocked("a") == [("shop/web", "termination")])
    # The clock also moves while the watch reports the eviction.
    assert site.clock.monotonic() - evicted < 600
    acting.until(lambda: site.events("a"), still=True)
    ((event, message),) = site.events("a")
    assert event == "DrainBlocked"
    assert "shop/web: terminates until " in message
    assert "its grace period is 21600 s" in message


def test_short_refusal_is_not_reported(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    budget(site, act())
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: acting.wire.written("/eviction"))
    site.clock.move(20)
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-b")

    assert site.events("a") == []
    assert acting.wire.written("/nodes/a") == 2


def test_annotation_is_removed_after_the_drain(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    budget(site, acting)
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.blocked("a"))
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-b")

    assert key.DRAIN_BLOCKED not in site.notes("a")
    assert acting.wire.written("/nodes/a") == 3


def test_long_drain_repeats_event_without_node_write(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    budget(site, acting)
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.blocked("a"))
    writes = acting.wire.written("/nodes/a")
    events = acting.wire.written("/events")
    for _ in range(125):
        site.clock.move(10)
        acting.settle()

    assert acting.wire.written("/nodes/a") == writes
    assert acting.wire.written("/events") == events + 2
    assert len(site.events("a")) in (2, 3)


def test_killed_controller_keeps_record_and_blockers(site: Site, act: Act) -> None:
    site.node("a")
    first = act()
    budget(site, first)
    site.request_drain("a", "drain-b")
    first.until(lambda: site.blocked("a"))
    record, named = site.record("a"), site.notes("a")[key.DRAIN_BLOCKED]
    first.kill()
    site.clock.move(1800)
    second = act()
    second.until(lambda: second.wire.written("/events"))
    second.settle()

    assert site.record("a") == record
    assert site.notes("a")[key.DRAIN_BLOCKED] == named
    assert second.wire.written("/nodes/a") == 0
    # The begin in the record is what the node may have written: each process measures itself.
    assert "longest_drain_seconds 18" not in second.metrics.render_text()


def test_later_blocker_is_reported(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    budget(site, acting)
    site.pod("a", "slow", stop_s=25)
    site.server.set_kubelet("a", is_stopped=True)
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.blocked("a") == [("shop/web", "pdb")])
    acting.until(lambda: len(site.blocked("a")) == 2)

    assert site.blocked("a") == [("shop/web", "pdb"), ("shop/slow", "termination")]
    named = json.loads(site.notes("a")[key.DRAIN_BLOCKED])
    assert named[0]["budgets"] == [{"name": "keep-web", "disruptionsAllowed": 0}]


def test_pods_that_are_too_large_are_reported(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()

    def refuse(request: ApiRequest) -> ApiResponse | None:
        if request.path == "/api/v1/pods":
            raise TooLargeError("list pods: too many bytes", remedy="delete pods of namespace shop")
        return None

    acting.wire.before = refuse
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.events("a"))

    ((reason, message),) = site.events("a")
    assert reason == "DrainFailing"
    assert message.endswith("drain-b: list pods: too many bytes; delete pods of namespace shop")


def test_rejected_cordon_is_reported(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()

    def refuse(request: ApiRequest) -> ApiResponse | None:
        if request.method != "PATCH" or not request.path.endswith("/nodes/a"):
            return None
        return refusal(403, "Forbidden", 'nodes "a" is forbidden: no')

    acting.wire.before = refuse
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.events("a"))
    acting.wire.before = lambda _: None
    acting.until(lambda: site.applied("a") == "drain-b")

    ((reason, message),) = site.events("a")
    assert reason == "DrainFailing"
    assert "cannot apply drain-b: PATCH nodes a" in message
