"""Objects: create, read, update, delete; names, versions and server-set fields."""

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.space import Space, config_map, names, pod


def test_created_object_is_read_back_with_what_the_server_adds(space: Space) -> None:
    made = space.cluster.post(space.at("configmaps"), config_map("a", {"x": "1"}))
    assert made.code == 201
    assert (made.body["apiVersion"], made.body["kind"]) == ("v1", "ConfigMap")
    assert made.metadata["namespace"] == space.name
    assert {"uid", "creationTimestamp", "resourceVersion", "managedFields"} <= made.metadata.keys()
    assert "selfLink" not in made.metadata
    assert space.cluster.get(space.at("configmaps", "a")).body == made.body


def test_kind_and_version_of_a_body_may_be_left_out(space: Space) -> None:
    made = space.cluster.post(space.at("configmaps"), {"metadata": {"name": "a"}})
    assert (made.code, made.body["kind"]) == (201, "ConfigMap")


def test_taken_name_is_already_exists(space: Space) -> None:
    space.config_map("a")
    again = space.cluster.post(space.at("configmaps"), config_map("a"))
    assert again.verdict == (409, "AlreadyExists")
    assert again.body["message"] == 'configmaps "a" already exists'
    assert again.body["details"] == {"name": "a", "kind": "configmaps"}


def test_missing_object_is_not_found(space: Space) -> None:
    for answer in (
        space.cluster.get(space.at("configmaps", "a")),
        space.cluster.delete(space.at("configmaps", "a")),
        space.cluster.patch(space.at("configmaps", "a"), {}),
        space.cluster.put(space.at("configmaps", "a"), config_map("a")),
    ):
        assert answer.verdict == (404, "NotFound")
        assert answer.body["message"] == 'configmaps "a" not found'
        assert (answer.body["kind"], answer.body["status"]) == ("Status", "Failure")


def test_unknown_kind_is_not_found(space: Space) -> None:
    assert space.cluster.get(space.at("gizmos")).code == 404
    assert space.cluster.get("/apis/absent.example/v1/gizmos").code == 404


def test_missing_namespace_takes_no_objects(cluster: Cluster) -> None:
    answer = cluster.post("/api/v1/namespaces/treenail-absent/configmaps", config_map("a"))
    assert answer.verdict == (404, "NotFound")
    assert answer.body["message"] == 'namespaces "treenail-absent" not found'


def test_malformed_body_is_a_bad_request(space: Space) -> None:
    answer = space.cluster.request("POST", space.at("configmaps"), b'{"metadata": ')
    assert answer.verdict == (400, "BadRequest")


@pytest.mark.parametrize(
    "metadata",
    [{"labels": ["a"]}, {"labels": "a"}, {"annotations": [1]}, {"finalizers": {"a": "b"}},
     {"finalizers": [1]}, {"ownerReferences": ["a"]}],
)  # fmt: skip
def test_values_of_the_wrong_type_are_a_bad_request(space: Space, metadata: Json) -> None:
    body = config_map("a", None, **metadata)
    assert space.cluster.post(space.at("configmaps"), body).verdict == (400, "BadRequest")


def test_body_of_another_kind_is_a_bad_request(space: Space) -> None:
    assert space.cluster.post(space.at("configmaps"), pod("a")).verdict == (400, "BadRequest")


def test_body_of_another_namespace_is_a_bad_request(space: Space) -> None:
    answer = space.cluster.post(space.at("configmaps"), config_map("a", namespace="default"))
    assert answer.verdict == (400, "BadRequest")


def test_unknown_media_type_is_rejected(space: Space) -> None:
    answer = space.cluster.request(
        "POST", space.at("configmaps"), b"a=b", content_type="text/plain"
    )
    assert answer.verdict == (415, "UnsupportedMediaType")


def test_bad_name_is_invalid(space: Space) -> None:
    answer = space.cluster.post(space.at("configmaps"), config_map("Not_A_Name"))
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "metadata.name")}
    assert answer.body["details"]["kind"] == "ConfigMap"


def test_missing_name_is_invalid(space: Space) -> None:
    answer = space.cluster.post(space.at("configmaps"), {"metadata": {}})
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "metadata.name")}


def test_bad_labels_are_invalid(space: Space) -> None:
    answer = space.cluster.post(
        space.at("configmaps"), config_map("a", labels={"ok": "not ok", "no no": "x"})
    )
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueInvalid", "metadata.labels")}


def test_generated_name_has_the_requested_prefix(space: Space) -> None:
    made = [
        space.cluster.post(space.at("configmaps"), {"metadata": {"generateName": "gen-"}}).ok()
        for _ in range(3)
    ]
    found = {obj["metadata"]["name"] for obj in made}
    assert len(found) == 3
    assert all(name.startswith("gen-") and len(name) == 9 for name in found)


def test_update_replaces_and_gets_a_new_version(space: Space) -> None:
    old = space.config_map("a", {"x": "1", "y": "1"})
    new = space.cluster.put(space.at("configmaps", "a"), config_map("a", {"x": "2"})).ok()
    assert new["data"] == {"x": "2"}
    assert new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
    assert new["metadata"]["uid"] == old["metadata"]["uid"]
    assert new["metadata"]["creationTimestamp"] == old["metadata"]["creationTimestamp"]


def test_update_that_changes_nothing_keeps_the_version(space: Space) -> None:
    old = space.config_map("a", {"x": "1"})
    assert space.cluster.put(space.at("configmaps", "a"), old).ok() == old
    assert space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "1"}}).ok() == old


def test_update_of_an_older_version_conflicts(space: Space) -> None:
    old = space.config_map("a", {"x": "1"})
    space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "2"}}).ok()
    answer = space.cluster.put(space.at("configmaps", "a"), old | {"data": {"x": "3"}})
    assert answer.verdict == (409, "Conflict")
    assert answer.body["message"] == (
        'Operation cannot be fulfilled on configmaps "a": the object has been modified; please '
        "apply your changes to the latest version and try again"
    )
    assert answer.body["details"] == {"name": "a", "kind": "configmaps"}


def test_patch_that_names_an_older_version_conflicts(space: Space) -> None:
    version = space.config_map("a")["metadata"]["resourceVersion"]
    space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "2"}}).ok()
    patch = {"metadata": {"resourceVersion": version}, "data": {"x": "3"}}
    answer = space.cluster.patch(space.at("configmaps", "a"), patch)
    assert answer.verdict == (409, "Conflict")


def test_another_uid_is_another_object(space: Space) -> None:
    space.config_map("a")
    other = config_map("a", uid="00000000-0000-0000-0000-000000000000")
    assert space.cluster.put(space.at("configmaps", "a"), other).verdict == (409, "Conflict")
    patched = space.cluster.patch(space.at("configmaps", "a"), other)
    assert patched.verdict == (422, "Invalid")
    assert patched.causes == {("FieldValueInvalid", "metadata.uid")}


def test_another_name_in_the_body_is_a_bad_request(space: Space) -> None:
    space.config_map("a")
    answer = space.cluster.put(space.at("configmaps", "a"), config_map("b"))
    assert answer.verdict == (400, "BadRequest")


def test_deleted_object_is_gone_and_named_in_the_response(space: Space) -> None:
    uid = space.config_map("a")["metadata"]["uid"]
    answer = space.cluster.delete(space.at("configmaps", "a"))
    assert (answer.code, answer.body["status"]) == (200, "Success")
    assert answer.body["details"] == {"name": "a", "kind": "configmaps", "uid": uid}
    assert space.cluster.get(space.at("configmaps", "a")).code == 404


def test_collection_is_deleted_by_selector(space: Space) -> None:
    space.config_map("a", labels={"go": "yes"})
    space.config_map("b", labels={"go": "no"})
    space.cluster.delete(space.at("configmaps"), labelSelector="go=yes").ok()
    left = space.cluster.get(space.at("configmaps"), labelSelector="go").ok()
    assert names(left) == ["b"]


def test_dry_run_responds_and_changes_nothing(space: Space) -> None:
    at = space.at("configmaps", "a")
    made = space.cluster.post(space.at("configmaps"), config_map("a", {"x": "1"}), dryRun="All")
    assert (made.code, made.body["data"]) == (201, {"x": "1"})
    assert space.cluster.get(at).code == 404
    kept = space.config_map("a", {"x": "1"})
    assert space.cluster.patch(at, {"data": {"x": "2"}}, dryRun="All").ok()["data"] == {"x": "2"}
    assert space.cluster.put(at, config_map("a"), dryRun="All").code == 200
    assert space.cluster.delete(at, dryRun="All").code == 200
    assert space.cluster.get(at).body == kept


def test_dry_run_reports_errors(space: Space) -> None:
    answer = space.cluster.post(space.at("configmaps"), config_map("A"), dryRun="All")
    assert answer.verdict == (422, "Invalid")


def test_wrong_method_is_not_allowed(space: Space) -> None:
    space.config_map("a")
    answer = space.cluster.post(space.at("configmaps", "a"), config_map("a"))
    assert answer.verdict == (405, "MethodNotAllowed")


def test_plain_texts_of_a_secret_are_stored_encoded(space: Space) -> None:
    secret = {"metadata": {"name": "s"}, "stringData": {"word": "hush"}}
    made = space.cluster.post(space.at("secrets"), secret).ok()
    assert (made["type"], made["data"]) == ("Opaque", {"word": "aHVzaA=="})
    assert "stringData" not in made


def test_immutable_config_map_cannot_be_changed(space: Space) -> None:
    made = space.cluster.post(
        space.at("configmaps"), config_map("a", {"x": "1"}) | {"immutable": True}
    )
    assert made.code == 201
    answer = space.cluster.patch(space.at("configmaps", "a"), {"data": {"x": "2"}})
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueForbidden", "data")}


def test_pod_begins_pending_with_defaults(space: Space) -> None:
    made = space.cluster.post(space.at("pods"), pod("p")).ok()
    assert made["status"]["phase"] == "Pending"
    assert made["spec"]["terminationGracePeriodSeconds"] == 30
    assert made["spec"]["restartPolicy"] == "Always"


def test_pod_keeps_its_spec(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    answer = space.cluster.patch(space.at("pods", "p"), {"spec": {"hostNetwork": True}})
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueForbidden", "spec")}


def test_pod_needs_containers(space: Space) -> None:
    empty = pod("p")
    empty["spec"]["containers"] = []
    answer = space.cluster.post(space.at("pods"), empty)
    assert answer.verdict == (422, "Invalid")
    assert answer.causes == {("FieldValueRequired", "spec.containers")}


def test_status_of_a_pod_changes_through_its_subresource_only(space: Space) -> None:
    space.cluster.post(space.at("pods"), pod("p")).ok()
    running = {"status": {"phase": "Running"}}
    assert space.cluster.patch(space.at("pods", "p"), running).ok()["status"]["phase"] == "Pending"
    by_status = space.cluster.patch(space.at("pods", "p", "status"), running).ok()
    assert by_status["status"]["phase"] == "Running"
    labelled = {"metadata": {"labels": {"seen": "yes"}}, "spec": {"hostname": "x"}}
    changed = space.cluster.patch(space.at("pods", "p", "status"), labelled).ok()
    assert changed["metadata"]["labels"] == {"seen": "yes"}
    assert "hostname" not in changed["spec"]
