"""States and conditions of builds: every recorded decision, and the deliberate difference."""

from typing import Any

import pytest

from tests.oracle import needs_oracle, records
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.image.build_result import (
    JobStatus,
    can_change_state,
    compute_build_conditions,
    compute_job_state,
)


def job(**status: Any) -> JobStatus:
    return JobStatus.from_json({"status": status})


@needs_oracle
def test_states_and_conditions_equal_those_of_the_mco() -> None:
    found = records("job_status")
    for record in found:
        deleting = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if record["deleting"] else {}
        document = {"metadata": deleting, "status": record["status"]}
        state = compute_job_state(JobStatus.from_json(document))
        assert state == record["progress"]
        conditions = [each.to_json() for each in compute_build_conditions(state)]
        expected = [{**each, "lastTransitionTime": ""} for each in record["conditions"]]
        assert conditions == expected
    assert len(found) == 8


@needs_oracle
def test_written_transitions_equal_those_of_the_mco() -> None:
    found = records("mosb_status_update_needed")
    for record in found:
        before = MachineOSBuild.from_json({"status": record["old"]})
        after = MachineOSBuild.from_json({"status": record["cur"]})
        assert can_change_state(before.state, after.state) is record["ok"], record["why"]
    assert len(found) == 75


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, BuildState.PREPARED),
        ({"active": 1}, BuildState.BUILDING),
        ({"uncountedTerminatedPods": {"succeeded": ["u"]}}, BuildState.BUILDING),
        ({"failed": 3}, BuildState.BUILDING),
        ({"failed": 4}, BuildState.FAILED),
        ({"succeeded": 1}, BuildState.SUCCEEDED),
        (
            {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
            BuildState.SUCCEEDED,
        ),
        (
            {"succeeded": 1, "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}]},
            BuildState.BUILDING,
        ),
        # The MCO reports Building forever: its Jobs have no podFailurePolicy and no deadline.
        ({"failed": 1, "conditions": [{"type": "Failed", "status": "True"}]}, BuildState.FAILED),
        ({"conditions": [{"type": "Failed", "status": "True"}]}, BuildState.FAILED),
        (
            {"active": 1, "conditions": [{"type": "FailureTarget", "status": "True"}]},
            BuildState.FAILED,
        ),
    ],
)
def test_state_of_a_job(status: dict[str, Any], state: BuildState) -> None:
    assert compute_job_state(job(**status)) is state


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"active": 1}, BuildState.INTERRUPTED),
        ({"failed": 3}, BuildState.INTERRUPTED),
        ({"failed": 4}, BuildState.FAILED),
        ({"succeeded": 1}, BuildState.SUCCEEDED),
        ({"failed": 1, "conditions": [{"type": "Failed", "status": "True"}]}, BuildState.FAILED),
    ],
)
def test_deleted_job_is_interrupted_unless_it_ended(
    status: dict[str, Any], state: BuildState
) -> None:
    document = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": status}
    assert compute_job_state(JobStatus.from_json(document)) is state


def test_reason_and_message_replace_those_of_the_true_condition() -> None:
    found = compute_build_conditions(BuildState.FAILED, "DiskFull", "no space\x1b[2J left")
    true = [each for each in found if each.status == "True"]
    assert [(each.type, each.reason, each.message) for each in true] == [
        ("Failed", "DiskFull", "no space\\u001b[2J left")
    ]
    assert len(found) == 5
    assert all(each.status == "False" for each in compute_build_conditions(BuildState.INITIAL))


def test_message_is_bounded() -> None:
    found = compute_build_conditions(BuildState.BUILDING, "", 100_000 * "x")
    assert max(len(each.message) for each in found) == 4096


def test_ended_builds_change_no_state() -> None:
    for before in BuildState:
        for after in BuildState:
            if before.has_ended:
                assert not can_change_state(before, after)
    assert can_change_state(BuildState.INITIAL, BuildState.FAILED)
    assert not can_change_state(BuildState.BUILDING, BuildState.PREPARED)
