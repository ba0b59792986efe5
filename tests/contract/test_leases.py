"""Leases, as leader election uses them."""

from typing import Any

import pytest

from tests.contract.client import Json
from tests.contract.space import Space

GROUP = "coordination.k8s.io/v1"


def lease(holder: str, **metadata: Any) -> Json:
    return {
        "apiVersion": GROUP,
        "kind": "Lease",
        "metadata": {"name": "leader"} | metadata,
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": 15,
            "renewTime": "2026-01-01T00:00:00.000000Z",
        },
    }


def test_concurrent_updates_of_one_version_have_one_winner(space: Space) -> None:
    made = space.cluster.post(space.at("leases", group=GROUP), lease("old")).ok()
    version = made["metadata"]["resourceVersion"]
    at = space.at("leases", "leader", group=GROUP)
    answers = [
        space.cluster.put(at, lease(holder, resourceVersion=version))
        for holder in ("left", "right")
    ]
    assert [answer.code for answer in answers] == [200, 409]
    assert space.cluster.get(at).body["spec"]["holderIdentity"] == "left"


def test_concurrent_creates_have_one_winner(space: Space) -> None:
    at = space.at("leases", group=GROUP)
    assert space.cluster.post(at, lease("left")).code == 201
    assert space.cluster.post(at, lease("right")).verdict == (409, "AlreadyExists")


def test_update_without_resource_version_is_rejected(space: Space) -> None:
    space.cluster.post(space.at("leases", group=GROUP), lease("old")).ok()
    answer = space.cluster.put(space.at("leases", "leader", group=GROUP), lease("new"))
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "metadata.resourceVersion")}


def test_update_creates_a_missing_object(space: Space) -> None:
    answer = space.cluster.put(space.at("leases", "leader", group=GROUP), lease("new"))
    assert answer.code == 201


@pytest.mark.parametrize(
    ("field", "value"), [("leaseDurationSeconds", 0), ("leaseTransitions", -1)]
)
def test_malformed_lease_is_invalid(space: Space, field: str, value: int) -> None:
    body = lease("a")
    body["spec"][field] = value
    answer = space.cluster.post(space.at("leases", group=GROUP), body)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", f"spec.{field}")}
