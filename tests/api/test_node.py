"""The parts of a Node that the agent needs are read."""

import contextlib

import pytest
from hypothesis import given

from tests.api.fuzzing import damaged, fuzz, json_values
from treenail.api.node import Node
from treenail.errors import ConfigError

FULL = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "node-1",
        "uid": "u",
        "resourceVersion": "12",
        "labels": {"node-role.kubernetes.io/worker": ""},
        "annotations": {"machineconfiguration.openshift.io/state": "Done"},
    },
    "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
    "status": {
        "conditions": [
            {"type": "MemoryPressure", "status": "False"},
            {"type": "Ready", "status": "True", "reason": "KubeletReady"},
        ]
    },
}


def test_node_with_every_relevant_field_is_read() -> None:
    assert Node.from_json(FULL) == Node(
        name="node-1",
        annotations={"machineconfiguration.openshift.io/state": "Done"},
        labels={"node-role.kubernetes.io/worker": ""},
        is_unschedulable=True,
        is_ready=True,
        uid="u",
        resource_version="12",
    )


def test_new_node_is_not_ready_and_has_no_annotations() -> None:
    assert Node.from_json({"metadata": {"name": "a"}}) == Node(name="a")
    unknown = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    assert not Node.from_json({"metadata": {"name": "a"}, "status": unknown}).is_ready


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "Node.metadata.name: expected a string, found nothing"),
        (
            {"metadata": {"name": "a", "annotations": {"a.io/b": True}}},
            'Node.metadata.annotations["a.io/b"]: expected a string, found true',
        ),
        (None, "Node: expected an object, found null"),
    ],
)
def test_wrong_node_is_rejected_with_the_location(document: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Node.from_json(document)
    assert str(caught.value) == message


@fuzz
@given(json_values | damaged(FULL))
def test_any_value_is_read_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        Node.from_json(document)
