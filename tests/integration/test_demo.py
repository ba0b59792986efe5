"""``treenail-lab demo``, run as a user runs it."""

import json

import pytest

from tests.integration.commands import treenail_lab

pytestmark = pytest.mark.integration

QUICK = ("demo", "--json", "--size", "100", "--speed", "500")


def run_demo(*arguments: str, code: int) -> dict[str, object]:
    """Run the demo, check its exit code and return the document that it prints."""
    completed = treenail_lab(*QUICK, *arguments)
    assert completed.returncode == code, completed.stderr
    document: dict[str, object] = json.loads(completed.stdout)
    return document


def test_three_nodes_are_updated_one_after_the_other() -> None:
    document = run_demo("--nodes", "3", code=0)
    nodes = document["nodes"]
    assert isinstance(nodes, list)
    assert [(node["name"], node["state"], node["updated"]) for node in nodes] == [
        ("worker-0", "Done", True),
        ("worker-1", "Done", True),
        ("worker-2", "Done", True),
    ]
    assert document["updated"] == ["worker-0", "worker-1", "worker-2"]
    assert document["maxOutOfService"] == 1
    assert all(node["evictedPods"] and node["outOfServiceSeconds"] for node in nodes)
    assert document["failed"] == {}
    assert document["halted"] == ""


def test_demo_shows_plan_then_status_then_what_to_try() -> None:
    completed = treenail_lab("demo", "--nodes", "1", "--size", "100", "--speed", "500")
    assert completed.returncode == 0, completed.stderr
    plan, _, rollout = completed.stdout.partition("\n\n$ treenail-controller status --watch\n")
    assert plan.startswith("starting 1 machines, which will move from 41.20260101 to 42.20260601\n")
    assert "    drain and reboot\n" in plan
    assert "osImageURL changed" in plan
    assert "Z worker: Updating, 0 of 1 nodes updated" in rollout
    assert "Z worker-0: Done, 42.20260601, updated\n" in rollout
    assert "\n1 nodes updated in " in rollout
    assert rollout.endswith("the same in your own cluster\n")


def test_nodes_of_a_hosted_cluster_are_updated_in_place_one_after_the_other() -> None:
    completed = treenail_lab("demo", "--hosted", "--nodes", "2")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    joined, _, update = completed.stdout.partition("\n\n$ kubectl -n clusters apply ")
    assert joined.startswith("starting a management cluster, and a hosted cluster for 2 machines\n")
    assert "\nclusters/np InPlace  Updated  " in joined
    assert "cordoned" not in joined
    assert "rebooting" in update
    assert "1 updated, 1 updating\n" in update
    assert "\n2 nodes updated in place in " in update
    assert "at most 1 out of service at once\n" in update
    assert max(map(len, completed.stdout.splitlines())) <= 80


def test_node_that_fails_to_stage_is_never_cordoned() -> None:
    document = run_demo("--nodes", "2", "--fail", "stage", code=0)
    assert document["updated"] == []
    assert document["cordoned"] == []
    assert document["maxOutOfService"] == 0
    assert list(document["failed"]) == ["worker-0"]
    assert "received unexpected HTTP status: 500" in document["failed"]["worker-0"]
    assert "is halted: node worker-0 failed first: " in document["halted"]
    assert document["resume"] == (
        "kubectl patch rolloutpolicy careful --type merge -p "
        '\'{"spec": {"resume": {"worker": "1"}}}\''
    )


# The text and the exit code of each failure are those of tests/lab/demo/test_demo_text.py.
@pytest.mark.long
def test_blocked_drain_is_shown_with_the_command_that_permits_it() -> None:
    document = run_demo("--nodes", "1", "--fail", "drain", code=0)
    assert document["updated"] == []
    assert "violate the pod's disruption budget" in document["failed"]["worker-0"]
    assert document["resume"].startswith("kubectl -n default patch pdb web ")


def test_image_by_tag_is_refused_with_what_to_write_instead() -> None:
    tag = "registry.example.com/os/node:latest"
    completed = treenail_lab(*QUICK, "--nodes", "1", "--image", tag)
    assert completed.returncode == 1
    assert f'spec.osImage: Invalid value: "{tag}"' in completed.stderr
    assert "@sha256:" in completed.stderr
