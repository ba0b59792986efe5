"""``treenail-lab demo`` as anybody runs it."""

import json

import pytest

from tests.integration.commands import treenail_lab

pytestmark = pytest.mark.integration

QUICK = ("demo", "--json", "--size", "100", "--speed", "500")


def told(*arguments: str, code: int) -> dict[str, object]:
    """The document that the demo prints, once it ended with this code."""
    ended = treenail_lab(*QUICK, *arguments)
    assert ended.returncode == code, ended.stderr
    document: dict[str, object] = json.loads(ended.stdout)
    return document


def test_three_nodes_are_updated_one_after_the_other() -> None:
    document = told("--nodes", "3", code=0)
    nodes = document["nodes"]
    assert isinstance(nodes, list)
    assert [(node["name"], node["state"], node["updated"]) for node in nodes] == [
        ("worker-0", "Done", True),
        ("worker-1", "Done", True),
        ("worker-2", "Done", True),
    ]
    assert document["updated"] == ["worker-0", "worker-1", "worker-2"]
    assert document["mostOutOfService"] == 1
    assert all(node["evicted"] and node["out_of_service_s"] for node in nodes)
    assert document["failed"] == {}
    assert document["halted"] == ""


def test_plan_is_shown_before_anything_happens() -> None:
    ended = treenail_lab("demo", "--nodes", "1", "--size", "100", "--speed", "500")
    assert ended.returncode == 0, ended.stderr
    plan, _, rollout = ended.stdout.partition("\n\n")
    assert "pool worker: 1 of 1 node to rendered-worker-" in plan
    assert "    drain and reboot\n" in plan
    assert "osImageURL changed" in plan
    assert "0.0 s  worker-0   Done      41.20260101  waiting" in rollout
    assert "1 nodes updated in " in rollout


def test_node_that_fails_to_stage_is_never_cordoned() -> None:
    document = told("--nodes", "2", "--fail", "stage", code=1)
    assert document["updated"] == []
    assert document["cordoned"] == []
    assert document["mostOutOfService"] == 0
    assert list(document["failed"]) == ["worker-0"]
    assert "received unexpected HTTP status: 500" in document["failed"]["worker-0"]
    assert "is halted: node worker-0 failed first: " in document["halted"]


def test_image_by_tag_is_refused_with_what_to_write_instead() -> None:
    tag = "registry.example.com/os/node:latest"
    document = told("--nodes", "1", "--image", tag, code=1)
    assert document["cordoned"] == []
    (reason,) = document["failed"].values()
    assert tag in reason
    assert reason == document["halted"]
    assert "@sha256:" in reason
