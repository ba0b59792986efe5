"""The server's history of changes, and its snapshots."""

import json
import stat
from pathlib import Path

import pytest

from tests.contract.client import Cluster, Json
from tests.contract.conftest import GADGET, definition
from tests.contract.space import names
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.apiserver.store import Store

THINGS = ("", "things")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def thing(name: str, **fields: object) -> Json:
    return {"metadata": {"name": name}} | fields


def test_store_drops_old_changes_and_answers_410() -> None:
    store = Store(history=10)
    first = store.version
    for number in range(50):
        store.put_object(THINGS, thing("a", number=number))
    with pytest.raises(ApiError) as caught:
        store.read_events(THINGS, first)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")
    kept = store.read_events(THINGS, store.version - 10)
    assert [event.object["number"] for event in kept] == list(range(40, 50))


def test_store_returns_objects_at_older_version() -> None:
    store = Store()
    store.put_object(THINGS, thing("a", x=1))
    store.put_object(THINGS, thing("b", x=1))
    then = store.version
    store.put_object(THINGS, thing("a", x=2))
    store.remove_object(THINGS, ("", "b"))
    store.put_object(THINGS, thing("c", x=1))
    past = store.read_at(THINGS, then)
    assert {where[1]: obj["x"] for where, obj in past.items()} == {"a": 1, "b": 1}


def test_versions_count_all_kinds_together() -> None:
    store = Store()
    versions = [
        int(store.put_object(storage, thing("a"))["metadata"]["resourceVersion"])
        for storage in (THINGS, ("", "others"), THINGS)
    ]
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]


def fill(cluster: Cluster) -> None:
    cluster.post("/api/v1/nodes", {"metadata": {"name": "a", "labels": {"x": "y"}}}).ok()
    cluster.post(CRDS, definition("lab.example", "Gadget", "gadgets", GADGET, None)).ok()
    gadget = {"apiVersion": "lab.example/v1", "kind": "Gadget", "metadata": {"name": "g"}}
    cluster.post("/apis/lab.example/v1/namespaces/default/gadgets", gadget).ok()


def test_saved_state_can_be_loaded_elsewhere(
    lab: LabServer, admin: Cluster, tmp_path: Path
) -> None:
    fill(admin)
    node = admin.get("/api/v1/nodes/a").body
    file = tmp_path / "state.json"
    lab.save_state(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with LabServer(tmp_path / "second") as second:
        second.load_state(file)
        other = Cluster.of_kubeconfig(second.admin_kubeconfig)
        assert other.get("/api/v1/nodes/a").body == node
        gadgets = other.get("/apis/lab.example/v1/gadgets").ok()
        assert names(gadgets) == ["g"]
        changed = other.patch("/api/v1/nodes/a", {"metadata": {"labels": {"x": "z"}}}).ok()
        assert int(changed["metadata"]["resourceVersion"]) > int(
            node["metadata"]["resourceVersion"]
        )


def test_load_ends_watches_and_removes_later_objects(
    lab: LabServer, admin: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    lab.save_state(file)
    fill(admin)
    version = admin.get("/api/v1/nodes").metadata["resourceVersion"]
    with admin.watch("/api/v1/nodes", resourceVersion=version) as events:
        lab.load_state(file)
        error = next(events)
    assert (error["type"], error["object"]["code"]) == ("ERROR", 410)
    assert names(admin.get("/api/v1/nodes").ok()) == []
    assert admin.get("/apis/lab.example/v1/gadgets").code == 404


def test_state_is_saved_and_loaded_over_http(admin: Cluster) -> None:
    fill(admin)
    state = admin.get("/lab/snapshot").ok()
    admin.delete("/api/v1/nodes/a").ok()
    admin.put("/lab/snapshot", state).ok()
    assert names(admin.get("/api/v1/nodes").ok()) == ["a"]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"format": 9},
        {"format": 1, "resourceVersion": "x", "kinds": []},
        {"format": 1, "resourceVersion": 1, "kinds": [{}]},
        {"format": 1, "resourceVersion": 1,
         "kinds": [{"group": "", "plural": "nodes", "objects": [{}]}]},
        {"format": 1, "resourceVersion": 1, "kinds": 7},
    ],
)  # fmt: skip
def test_invalid_state_is_refused_and_changes_nothing(admin: Cluster, state: Json) -> None:
    before = admin.get("/lab/snapshot").body
    assert admin.put("/lab/snapshot", state).verdict == (400, "BadRequest")
    assert admin.get("/lab/snapshot").body == before


def test_snapshot_file_is_plain_json(lab: LabServer, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    lab.save_state(file)
    plurals = {kind["plural"] for kind in json.loads(file.read_text())["kinds"]}
    assert {"namespaces", "clusterroles", "serviceaccounts"} <= plurals
