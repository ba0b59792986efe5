"""Drains of a hosted cluster: other annotations, a time limit, pods that stay."""

from collections.abc import Callable

import pytest

from tests.controllers.drain.site import Acting, Site
from tests.fixtures import hosted
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.controllers.drain.controller import DrainRules
from treenail.controllers.drain.decide import DrainKeys, DrainNode

Act = Callable[..., Acting]


def test_requests_are_read_and_acknowledged_in_other_annotations(site: Site, act: Act) -> None:
    """HyperShift's drainer acts on the usual ones."""
    usual = {key.DESIRED_DRAIN: "uncordon-a", key.LAST_APPLIED_DRAIN: "uncordon-a"}
    site.node("a", usual, pod="web")
    keys = DrainKeys(hosted_key.HOSTED_DRAIN, hosted_key.HOSTED_APPLIED_DRAIN)
    acting = act(rules=DrainRules(keys))
    for request in ("drain-b", "uncordon-b"):
        site.annotate("a", {keys.request: request})
        acting.until(lambda wanted=request: site.notes("a").get(keys.applied) == wanted)
        assert {name: site.notes("a")[name] for name in usual} == usual
        assert site.cordoned("a") is request.startswith("drain")
    assert site.pods("a") == []


def test_drain_with_a_limit_ends_and_names_the_pods_left(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    reports: list[tuple[str, str]] = []
    rules = DrainRules(
        find_limit_s=lambda _: 20.0,
        report_expired=lambda node, message: reports.append((node, message)),
    )
    site.request_drain("a", "drain-b")
    acting = act(rules=rules)
    began = site.clock.now()
    acting.until(lambda: site.applied("a") == "drain-b")
    assert 19.0 <= site.clock.now() - began < 40.0
    [(node, message)] = reports
    assert node == "a"
    assert message.startswith("the drain ended after 20 s")
    assert message.endswith("shop/web")
    assert site.pods("a") == ["web"]
    assert site.cordoned("a")


def test_skipped_pod_stays_and_delays_nothing(site: Site, act: Act) -> None:
    site.node("a", pod="web")
    site.pod("a", "installer")
    acting = act(rules=DrainRules(should_skip=lambda pod: pod.name == "installer"))
    acting.fulfil("a", "drain-b")
    assert site.pods("a") == ["installer"]


@pytest.mark.parametrize(
    ("status", "is_unreachable"), [("True", False), ("False", False), ("Unknown", True)]
)
def test_node_without_a_kubelet_is_unreachable(status: str, *, is_unreachable: bool) -> None:
    conditions = [hosted.make_condition("Ready", status)]
    document = {"metadata": {"name": "a"}, "status": {"conditions": conditions}}
    assert DrainNode.from_json(document).is_unreachable is is_unreachable
