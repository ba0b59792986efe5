"""A drain that a PodDisruptionBudget holds up."""

from treenail.api import annotations as key
from treenail.kube.api_client import Json
from treenail.kube.resources import PODDISRUPTIONBUDGETS
from treenail_lab.workload import APP, NAMESPACE, Workload
from vmlab.site import NODE, Site


def test_blocked_drain_prevents_the_reboot(site: Site) -> None:
    goal = site.goal(site.image("2"))
    workload = Workload(site.lab.client, replicas=2, max_unavailable=0)
    workload.start()
    try:
        site.ask(goal)
        site.wait(lambda: site.drains.blocked(NODE), "the drain is blocked", 300.0)
        assert site.node()["spec"].get("unschedulable") is True
        assert site.notes()[key.STATE] == "Working"
        assert "finalization locked" in site.machine.sh("ostree admin status")
        assert site.story.boots == []
        allowed: Json = {"spec": {"maxUnavailable": 2}}
        site.lab.client.patch(PODDISRUPTIONBUDGETS, APP, allowed, namespace=NAMESPACE)
        site.settle(goal)
    finally:
        workload.stop()
    assert [boot.digest for boot in site.story.boots] == [goal.digest]
