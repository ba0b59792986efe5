"""The status of a MachineConfigNode is read, updated and applied as one document."""

import contextlib

from hypothesis import given

from tests.api.fuzzing import damaged, fuzz, json_values
from treenail.api.machineconfignode import (
    MachineConfigNode,
    build_status_apply,
)
from treenail.api.object_meta import Condition, ObjectMeta, merge_conditions
from treenail.errors import ConfigError

EARLY, LATE = "2026-01-31T12:00:00Z", "2026-01-31T13:00:00Z"

FULL = {
    "metadata": {"name": "node-1", "generation": 3},
    "spec": {
        "node": {"name": "node-1"},
        "pool": {"name": "worker"},
        "configVersion": {"desired": "rendered-b"},
        "configImage": {"desiredImage": "r/i@sha256:2"},
    },
    "status": {
        "observedGeneration": 4,
        "configVersion": {"current": "rendered-a", "desired": "rendered-b"},
        "configImage": {"currentImage": "r/i@sha256:1", "desiredImage": "r/i@sha256:2"},
        "conditions": [{"type": "Updated", "status": "True", "lastTransitionTime": EARLY}],
    },
}


def test_every_field_is_read() -> None:
    assert MachineConfigNode.from_json(FULL) == MachineConfigNode(
        metadata=ObjectMeta(name="node-1", generation=3),
        pool="worker",
        desired_config="rendered-b",
        desired_image="r/i@sha256:2",
        current_config="rendered-a",
        current_image="r/i@sha256:1",
        reported_image="r/i@sha256:2",
        observed_generation=4,
        conditions=(Condition("Updated", "True", last_transition_time=EARLY),),
    )


def test_transition_time_changes_only_with_status() -> None:
    present = (Condition("A", "True", "R", "m", EARLY), Condition("B", "False", "R", "m", EARLY))
    news = (
        Condition("B", "False", "S", "n"),
        Condition("A", "False", "S", "n"),
        Condition("C", "True"),
    )
    assert merge_conditions(present, news, now=LATE) == (
        Condition("A", "False", "S", "n", LATE),
        Condition("B", "False", "S", "n", EARLY),
        Condition("C", "True", "", "", LATE),
    )


def test_status_apply_holds_all_conditions() -> None:
    conditions = (Condition("Updated", "True", "Updated", "done", EARLY),)
    assert build_status_apply(
        "node-1",
        conditions,
        current_config="rendered-a",
        desired_config="rendered-a",
        current_image="r/i@sha256:1",
    ) == {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfigNode",
        "metadata": {"name": "node-1"},
        "status": {
            "conditions": [conditions[0].to_json()],
            "configVersion": {"current": "rendered-a", "desired": "rendered-a"},
            "configImage": {"currentImage": "r/i@sha256:1"},
        },
    }


def test_status_apply_without_values_omits_or_defaults_them() -> None:
    applied = build_status_apply("n", (), current_config="", desired_config="")
    assert applied["status"] == {
        "conditions": [],
        "configVersion": {"desired": "not-yet-set"},
    }


@fuzz
@given(json_values | damaged(FULL))
def test_any_value_is_read_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        MachineConfigNode.from_json(document)
