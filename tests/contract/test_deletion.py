"""Finalizers, preconditions, owners and namespaces."""

from typing import Any

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.space import POLL_LIMIT_S, Space, names, owned_by
from tests.waiting import wait_until

HOLD = "example.com/hold"
INDEXES_OWNERS = 37
"""Since this minor version a cause names the index of the owner."""


def exists(space: Space, name: str) -> bool:
    return space.cluster.get(space.at("configmaps", name)).code == 200


def wait_gone(space: Space, *gone: str) -> None:
    wait_until(lambda: not any(exists(space, name) for name in gone), limit_s=POLL_LIMIT_S)


def release(space: Space, name: str) -> None:
    patch = {"metadata": {"finalizers": None}}
    space.cluster.patch(space.at("configmaps", name), patch)


def test_finalizer_holds_an_object_until_it_is_removed(space: Space) -> None:
    space.config_map("a", finalizers=[HOLD])
    answer = space.cluster.delete(space.at("configmaps", "a"))
    assert (answer.code, answer.body["kind"]) == (200, "ConfigMap")
    held = space.cluster.get(space.at("configmaps", "a")).ok()
    assert held["metadata"]["deletionGracePeriodSeconds"] == 0
    assert "deletionTimestamp" in held["metadata"]
    release(space, "a")
    assert not exists(space, "a")


def test_object_that_is_held_can_be_changed_but_not_held_longer(space: Space) -> None:
    space.config_map("a", finalizers=[HOLD])
    space.cluster.delete(space.at("configmaps", "a")).ok()
    at = space.at("configmaps", "a")
    assert space.cluster.patch(at, {"data": {"x": "1"}}).ok()["data"] == {"x": "1"}
    longer = {"metadata": {"finalizers": [HOLD, "example.com/more"]}}
    answer = space.cluster.patch(at, longer)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueForbidden", "metadata.finalizers")}
    release(space, "a")


def test_deleting_again_changes_nothing(space: Space) -> None:
    space.config_map("a", finalizers=[HOLD])
    first = space.cluster.delete(space.at("configmaps", "a")).ok()
    second = space.cluster.delete(space.at("configmaps", "a")).ok()
    assert second["metadata"] == first["metadata"]
    release(space, "a")


def test_client_cannot_mark_an_object_as_deleted(space: Space) -> None:
    space.config_map("a", deletionTimestamp="2020-01-01T00:00:00Z")
    assert "deletionTimestamp" not in space.cluster.get(space.at("configmaps", "a")).metadata


@pytest.mark.parametrize(
    "precondition", [{"uid": "00000000-0000-0000-0000-000000000000"}, {"resourceVersion": "1"}]
)
def test_deletion_of_another_object_conflicts(space: Space, precondition: Json) -> None:
    space.config_map("a")
    answer = space.cluster.delete(space.at("configmaps", "a"), {"preconditions": precondition})
    assert answer.verdict == (409, "Conflict")
    assert exists(space, "a")


def test_deletion_whose_preconditions_hold_is_done(space: Space) -> None:
    metadata = space.config_map("a")["metadata"]
    same = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
    assert space.cluster.delete(space.at("configmaps", "a"), {"preconditions": same}).code == 200


def family(space: Space, **reference: Any) -> Json:
    """A ConfigMap ``owner`` with the dependents ``one`` and ``two``."""
    owner = space.config_map("owner")
    for name in ("one", "two"):
        space.config_map(name, ownerReferences=owned_by(owner, **reference))
    return owner


@pytest.mark.controllers
def test_dependents_are_deleted_after_their_owner(space: Space) -> None:
    family(space)
    space.cluster.delete(space.at("configmaps", "owner"), {"propagationPolicy": "Background"}).ok()
    assert not exists(space, "owner")
    wait_gone(space, "one", "two")


@pytest.mark.controllers
def test_dependents_with_foreground_deletion_go_before_their_owner(space: Space) -> None:
    family(space, blockOwnerDeletion=True)
    hold = {"metadata": {"finalizers": [HOLD]}}
    space.cluster.patch(space.at("configmaps", "one"), hold).ok()
    answer = space.cluster.delete(
        space.at("configmaps", "owner"), {"propagationPolicy": "Foreground"}
    )
    assert answer.ok()["metadata"]["finalizers"] == ["foregroundDeletion"]
    wait_gone(space, "two")
    assert exists(space, "owner")
    release(space, "one")
    wait_gone(space, "owner", "one")


@pytest.mark.controllers
def test_dependents_that_are_orphaned_stay(space: Space) -> None:
    family(space)
    answer = space.cluster.delete(space.at("configmaps", "owner"), {"propagationPolicy": "Orphan"})
    assert answer.code == 200
    wait_gone(space, "owner")
    for name in ("one", "two"):
        assert "ownerReferences" not in space.cluster.get(space.at("configmaps", name)).metadata


@pytest.mark.controllers
def test_dependent_with_two_owners_stays_until_both_are_gone(space: Space) -> None:
    owners = [space.config_map("left"), space.config_map("right")]
    references = [reference for owner in owners for reference in owned_by(owner)]
    space.config_map("child", ownerReferences=references)
    space.cluster.delete(space.at("configmaps", "left")).ok()

    def owner_names() -> list[str]:
        found = space.cluster.get(space.at("configmaps", "child")).metadata
        return [reference["name"] for reference in found["ownerReferences"]]

    wait_until(lambda: owner_names() == ["right"], limit_s=POLL_LIMIT_S)
    space.cluster.delete(space.at("configmaps", "right")).ok()
    wait_gone(space, "child")


@pytest.mark.controllers
def test_owner_of_another_uid_is_no_owner(space: Space) -> None:
    owner = space.config_map("owner")
    references = owned_by(owner, uid="00000000-0000-0000-0000-000000000000")
    space.config_map("stray", ownerReferences=references)
    wait_gone(space, "stray")
    assert exists(space, "owner")


def test_incomplete_owner_reference_is_invalid(space: Space, minor: int) -> None:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": ""}
    answer = space.cluster.post(
        space.at("configmaps"), {"metadata": {"name": "a", "ownerReferences": [reference]}}
    )
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {
        ("FieldValueRequired", "metadata.ownerReferences[0].uid")
        if minor >= INDEXES_OWNERS
        else ("FieldValueInvalid", "metadata.ownerReferences.uid")
    }


def test_only_one_owner_can_be_the_controller(space: Space) -> None:
    references = [
        owned_by(space.config_map(name), controller=True)[0] for name in ("left", "right")
    ]
    answer = space.cluster.post(
        space.at("configmaps"), {"metadata": {"name": "a", "ownerReferences": references}}
    )
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "metadata.ownerReferences")}


@pytest.mark.controllers
def test_namespace_takes_its_contents_with_it(cluster: Cluster, space: Space) -> None:
    space.config_map("a", finalizers=[HOLD])
    at = f"/api/v1/namespaces/{space.name}"
    assert cluster.get(at).body["status"] == {"phase": "Active"}
    answer = cluster.delete(at)
    assert (answer.code, answer.body["status"]["phase"]) == (200, "Terminating")
    refused = cluster.post(space.at("configmaps"), {"metadata": {"name": "late"}})
    assert refused.verdict == (403, "Forbidden")
    wait_until(
        lambda: "deletionTimestamp" in cluster.get(space.at("configmaps", "a")).metadata,
        limit_s=POLL_LIMIT_S,
    )
    release(space, "a")
    wait_until(lambda: cluster.get(at).code == 404, limit_s=POLL_LIMIT_S)
    assert names(cluster.get(space.at("configmaps")).ok()) == []
