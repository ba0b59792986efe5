"""The drain protocol against a real API server: cordon, evict, acknowledge, uncordon."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.controllers.drain.site import Acting, Site, forget_pod
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import NODES

Act = Callable[..., Acting]


def test_drain_evicts_pods_and_acknowledges_the_request(site: Site, act: Act) -> None:
    site.node("a", reported=True, pod="web")
    acting = act()
    acting.fulfil("a", "drain-rendered-worker-b-1f-2")

    assert site.cordoned("a")
    assert site.pods("a") == []
    assert site.record("a")["cordonedBy"] == "drain-controller"
    assert site.conditions("a") == {
        "Cordoned": ("True", "UpdateExecutedCordoned"),
        "Drained": ("True", "UpdateExecutedDrained"),
        "Uncordoned": ("False", "NotYetOccurred"),
    }
    assert site.events("a") == []


def test_uncordon_is_one_write(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    acting = act()
    acting.fulfil("a", "drain-b")
    before = acting.wire.written("/nodes/a")
    acting.fulfil("a", "uncordon-b")
    acting.settle()

    assert acting.wire.written("/nodes/a") == before + 1
    assert not site.cordoned("a")
    notes = site.notes("a")
    began, _, ended = notes.pop(key.LAST_OUTAGE).partition("/")
    assert began <= ended
    assert notes == {key.DESIRED_DRAIN: "uncordon-b", key.LAST_APPLIED_DRAIN: "uncordon-b"}
    assert {kind: status for kind, (status, _) in site.conditions("a").items()} == {
        "Cordoned": "False",
        "Drained": "False",
        "Uncordoned": "True",
    }


def test_drain_of_empty_node_costs_three_writes(site: Site, act: Act) -> None:
    site.node("a", reported=True)
    acting = act()
    acting.fulfil("a", "drain-b")

    assert acting.wire.written("/nodes/a") == 2
    assert acting.wire.written("machineconfignodes") == 1


def test_nodes_without_request_are_not_written(site: Site, act: Act) -> None:
    site.node("a")
    site.node("b", {key.DESIRED_DRAIN: "uncordon-x", key.LAST_APPLIED_DRAIN: "uncordon-x"})
    acting = act()
    site.annotate("a", {"any": "thing"})
    site.set_cordon("a", cordoned=True)
    wait_until(acting.turn)
    acting.settle()

    assert acting.wire.writes == []


def test_unknown_request_is_reported_once_and_not_retried(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    site.request_drain("a", "reboot-now")
    acting.until(lambda: site.events("a"))
    site.clock.move(3600)
    acting.settle()

    ((reason, message),) = site.events("a")
    assert reason == "UnknownDrainRequest"
    assert "'reboot-now'" in message
    assert len(acting.wire.writes) == 1
    acting.fulfil("a", "drain-b")


def test_cordon_of_user_is_kept(site: Site, act: Act) -> None:
    site.node("a", unschedulable=True, reported=True, pod="web")
    acting = act()
    acting.fulfil("a", "drain-b")
    assert site.record("a")["cordonedBy"] == "other"
    acting.fulfil("a", "uncordon-b")

    assert site.cordoned("a")
    assert key.DRAIN not in site.notes("a")
    assert site.conditions("a")["Uncordoned"] == ("False", "CordonedByOther")
    assert site.conditions("a")["Cordoned"] == ("True", "CordonedByOther")


def test_uncordon_during_drain_cordons_again(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.cordoned("a"))
    began = site.record("a")
    site.set_cordon("a", cordoned=False)
    site.pod("a", "newcomer")
    acting.until(lambda: site.cordoned("a") and site.events("a"))

    assert site.applied("a") == ""
    assert site.record("a") == began
    assert [reason for reason, _ in site.events("a")] == ["CordonedAgain"]
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-b")
    assert site.pods("a") == []


def test_program_that_uncordons_each_time_is_named_and_slowed_down(site: Site, act: Act) -> None:
    site.node("a", reported=True, pod="web", kept=True)
    acting, began = act(), site.clock.monotonic()

    def uncordon(_: object) -> None:
        if site.cordoned("a"):
            site.set_cordon("a", cordoned=False)

    acting.wire.after = uncordon
    site.request_drain("a", "drain-b")
    # The budget blocks for 30 s, although the node is never cordoned for long.
    acting.until(lambda: site.blocked("a") == [("shop/web", "pdb")], limit_s=10.0)
    # The first cordon, and others at 0, 1, 3, 7, 15 and 31 s; then the blocker.
    assert acting.wire.written("/nodes/a") <= 9
    assert 30 <= site.clock.monotonic() - began < 60
    sentence = "another program uncordons the node: 5 times during drain-b; stop it."
    assert any(text.startswith(sentence) for _, text in site.events("a"))
    assert site.conditions("a")["Drained"] == ("Unknown", "DrainBlocked")
    acting.wire.after = lambda _: None
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-b", limit_s=30.0)


@pytest.mark.parametrize("owner", ["", "DaemonSet"])
def test_pods_that_return_to_the_cordoned_node_do_not_hold_the_drain(
    site: Site, act: Act, owner: str
) -> None:
    # A DaemonSet of another API group, whose controller tolerates the cordon, or bare pods.
    reference = {"apiVersion": "apps.kruise.io/v1alpha1", "kind": owner, "name": "agents"}
    more = {"ownerReferences": [{**reference, "uid": "u", "controller": True}]} if owner else {}
    site.node("a")
    site.pod("a", "web-0", stop_s=2, **more)
    acting, made = act(), 1
    site.request_drain("a", "drain-b")

    def is_drained() -> bool:
        nonlocal made
        if site.is_leaving(f"web-{made - 1}"):
            site.pod("a", f"web-{made}", stop_s=2, **more)
            made += 1
        return site.applied("a") == "drain-b"

    acting.until(is_drained, limit_s=60.0, still=True)
    assert acting.wire.written("/eviction") == 4
    assert site.pods("a") == ["web-4"]
    group = f"shop/{owner} agents" if owner else "shop/pods without a controller"
    assert [(reason, group in text) for reason, text in site.events("a")] == [
        ("PodsReturned", True)
    ]


def test_uncordon_during_drain_ends_cordon_of_user(site: Site, act: Act) -> None:
    site.node("a", unschedulable=True, pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.record("a"))
    site.set_cordon("a", cordoned=False)
    acting.until(lambda: site.cordoned("a"))
    acting.fulfil("a", "uncordon-b")

    assert not site.cordoned("a")


def test_cordon_after_uncordon_of_drained_node_belongs_to_user(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    acting.fulfil("a", "drain-b")
    site.set_cordon("a", cordoned=False)
    acting.until(lambda: site.record("a")["cordonedBy"] == "other")
    site.set_cordon("a", cordoned=True)
    acting.fulfil("a", "uncordon-b")

    assert site.cordoned("a")


def test_uncordon_just_before_acknowledgement_cordons_again(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()

    def uncordon(request: object) -> None:
        # After the last pod left and before the acknowledgement is sent.
        if site.cordoned("a"):
            acting.wire.after = lambda _: None
            site.set_cordon("a", cordoned=False)

    acting.wire.after = uncordon
    acting.fulfil("a", "drain-b")

    assert site.cordoned("a")
    assert ("CordonedAgain" in dict(site.events("a"))) is True


def test_uncordon_request_during_drain_stops_evictions(site: Site, act: Act) -> None:
    site.node("a", pod="web")
    site.pod("a", "db")
    site.budget("keep-web", "web")
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.pods("a") == ["web"])
    acting.fulfil("a", "uncordon-b")
    evictions = acting.wire.written("/eviction")
    site.drop_budget("keep-web")
    site.clock.move(60)
    acting.settle()

    assert acting.wire.written("/eviction") == evictions
    assert not site.cordoned("a")
    assert site.pods("a") == ["web"]
    wait_until(lambda: site.pod_watches() == 0)


def test_new_drain_request_replaces_the_first(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.record("a"))
    site.request_drain("a", "drain-c")
    acting.until(lambda: site.record("a").get("request") == "drain-c")
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-c")

    assert site.record("a")["cordonedBy"] == "drain-controller"


def test_withdrawn_drain_request_stops_evictions(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.blocked("a"))
    site.request_drain("a", None)
    acting.until(lambda: not site.blocked("a"))
    evictions = acting.wire.written("/eviction")
    site.clock.move(60)
    acting.settle()

    assert acting.wire.written("/eviction") == evictions
    assert site.cordoned("a"), "only another request uncordons the node"
    site.request_drain("a", "uncordon-b")
    acting.until(lambda: not site.cordoned("a"))


def test_deleted_node_is_forgotten(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: site.record("a"))
    wait_until(lambda: site.pod_watches() == 1)
    site.client.delete(NODES, "a")
    acting.until(lambda: site.pod_watches() == 0)


def test_cluster_without_machineconfignodes_is_drained(site: Site, act: Act) -> None:
    site.node("a")
    acting = act()
    for request in ("drain-b", "uncordon-b", "drain-c"):
        acting.fulfil("a", request)

    assert acting.wire.written("machineconfignodes") == 0


def test_max_parallel_limits_running_drains(site: Site, act: Act) -> None:
    for name in "abc":
        site.node(name)
        site.pod(name, f"web-{name}", stop_s=30)
    acting = act(max_parallel=2)
    for name in "abc":
        site.request_drain(name, "drain-b")
    acting.until(lambda: 'drains{state="waiting"} 1' in acting.metrics.render_text())

    cordoned = [name for name in "abc" if site.cordoned(name)]
    assert len(cordoned) == 2, "a waiting node stays in service"
    (waiting,) = set("abc") - set(cordoned)
    forget_pod(site, f"web-{cordoned[0]}")
    acting.until(lambda: site.cordoned(waiting))
    forget_pod(site, f"web-{cordoned[1]}")
    forget_pod(site, f"web-{waiting}")
    acting.until(lambda: all(site.applied(name) == "drain-b" for name in "abc"))


def test_blocked_drain_yields_its_slot(site: Site, act: Act) -> None:
    for name in "ab":
        site.node(name)
        site.pod(name, f"web-{name}")
    site.budget("keep", "web-a")
    acting = act(max_parallel=1)
    site.request_drain("a", "drain-x")
    acting.until(lambda: site.cordoned("a"))
    site.request_drain("b", "drain-x")
    acting.until(lambda: 'drains{state="waiting"} 1' in acting.metrics.render_text())
    assert not site.cordoned("b")
    site.clock.move(60)
    acting.until(lambda: site.applied("b") == "drain-x")

    assert site.cordoned("a")
    assert site.blocked("a") == [("shop/web-a", "pdb")]
    site.drop_budget("keep")
    site.clock.move(30)
    acting.until(lambda: site.applied("a") == "drain-x")


def test_oldest_drain_gets_disruptions_first(site: Site, act: Act) -> None:
    for name in "ab":
        site.node(name)
        for number in range(2):
            site.pod(name, f"web-{name}-{number}", app="web")
    site.node("c")
    site.budget("keep", "web", keep=4)
    acting = act()
    site.request_drain("a", "drain-x")
    acting.until(lambda: site.cordoned("a"))
    site.clock.move(2)
    site.request_drain("b", "drain-x")
    acting.until(lambda: site.cordoned("b"))
    acting.settle()
    left = []
    for number in range(4):
        site.pod("c", f"more-{number}", app="web")
        more = 3 - number
        acting.until(lambda more=more: len(site.pods("a") + site.pods("b")) == more)  # type: ignore[misc]
        left.append((len(site.pods("a")), len(site.pods("b"))))

    assert left == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_budget_change_retries_evictions_at_once(site: Site, act: Act) -> None:
    site.node("a")
    site.pod("a", "web-0", app="web")
    site.pod("a", "web-1", app="web")
    site.node("c")
    site.budget("keep", "web", keep=2)
    acting = act()
    site.request_drain("a", "drain-x")
    acting.until(lambda: acting.wire.written("/eviction") == 2)
    for number in range(2):
        site.pod("c", f"more-{number}", app="web")
        left = 1 - number
        # Without advancing the clock, which would trigger the next regular retry.
        acting.until(lambda left=left: len(site.pods("a")) == left, still=True)  # type: ignore[misc]
    acting.until(lambda: site.applied("a") == "drain-x", still=True)


def test_metrics_report_drains(site: Site, act: Act) -> None:
    site.node("a", pod="web", kept=True)
    acting = act()
    site.request_drain("a", "drain-b")
    acting.until(lambda: 'drains{state="blocked"} 1' in acting.metrics.render_text())
    site.clock.move(100)
    assert "treenail_controller_longest_drain_seconds 10" in acting.metrics.render_text()
    site.drop_budget("keep-web")
    acting.until(lambda: site.applied("a") == "drain-b")

    text = acting.metrics.render_text()
    assert "treenail_controller_drain_duration_seconds_count 1" in text
    assert 'treenail_controller_drains{state="blocked"} 0' in text
    assert 'treenail_controller_drains{state="running"} 0' in text


@pytest.mark.parametrize("request_text", ["drain-", "drain-a-b-c", "drain-ä/ö 1"])
def test_text_after_verb_is_opaque(site: Site, act: Act, request_text: str) -> None:
    site.node("a")
    acting = act()
    acting.fulfil("a", request_text)


def test_drain_is_repeated_after_restore_of_state_before_it(
    site: Site, act: Act, tmp_path: Path
) -> None:
    site.node("a")
    site.request_drain("a", "drain-b")
    site.server.save_state(tmp_path / "state.json")
    acting = act()
    acting.until(lambda: site.applied("a") == "drain-b")
    site.server.load_state(tmp_path / "state.json")
    acting.until(lambda: site.applied("a") == "drain-b")
    assert site.cordoned("a")
