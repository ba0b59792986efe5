"""Inputs of served configs from the lab's API server and from a directory."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.contract.client import Cluster
from tests.fakes.clock import FakeClock
from tests.fixtures.objects import collection_of
from tests.provisioning.samples import (
    IMAGE,
    NEW,
    OLD,
    Json,
    make_config,
    make_controller_config,
    make_file,
    make_image_build,
    make_image_config,
    make_large_configs,
    make_pool,
)
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.errors import TreenailError
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.provisioning.content.cluster_source import ClusterSource
from treenail.provisioning.content.directory_source import DirectorySource
from treenail.provisioning.content.source import (
    CONFIG_LIMIT,
    PackedConfig,
    PoolMissingError,
    PoolSource,
    SourceError,
    SourceSettings,
    SourceUnreadyError,
)
from treenail_lab.apiserver.serving.server import LabServer

LIMIT_S = 60.0
SETTINGS = SourceSettings()


class Place(Protocol):
    """Where the objects of a test are."""

    source: PoolSource

    def put(self, document: Json) -> None:
        """Create or replace the object."""


class DirectoryPlace:
    def __init__(self, directory: Path) -> None:
        self.source = DirectorySource(directory, SETTINGS)
        self._directory = directory

    def put(self, document: Json) -> None:
        name = f"{document['kind']}-{document['metadata']['name']}.json"
        (self._directory / name).write_text(json.dumps(document))


class ClusterPlace:
    def __init__(self, cluster: Cluster, source: PoolSource, clock: FakeClock) -> None:
        self.source = source
        self.clock = clock
        self._cluster = cluster

    def put_node(self, name: str, image: str) -> None:
        """Create or replace a Node that reports an image."""
        annotations = {"machineconfiguration.openshift.io/currentOSImage": image}
        body = {"metadata": {"name": name, "annotations": annotations}}
        if self._cluster.post("/api/v1/nodes", body).code == 409:
            self._cluster.patch(f"/api/v1/nodes/{name}", body).ok()

    def put(self, document: Json) -> None:
        collection = collection_of(document)
        path = f"{collection}/{document['metadata']['name']}"
        before = self._cluster.get(path)
        if before.code == 200:
            changed = {**document, "metadata": before.body["metadata"]}
            found = self._cluster.put(path, changed).ok()
        else:
            found = self._cluster.post(collection, document).ok()
        if status := document.get("status"):
            generation = found["metadata"]["generation"]
            status = {**status, "observedGeneration": generation}
            self._cluster.patch(f"{path}/status", {"status": status}).ok()


@pytest.fixture(params=["directory", "cluster"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return DirectoryPlace(tmp_path)
    return request.getfixturevalue("cluster_place")


@pytest.fixture
def cluster_place(tmp_path: Path) -> Iterator[ClusterPlace]:
    with ExitStack() as stack:
        server = stack.enter_context(LabServer(tmp_path))
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        for document in installation.load_crds():
            cluster.post(collection_of(document), document).ok()
        transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
        stack.callback(transport.close)
        client, clock = Client(transport), FakeClock()
        informers = InformerSet(client, SystemClock())
        source = ClusterSource(informers, SETTINGS, client, clock)
        informers.start()
        stack.callback(informers.stop)
        assert informers.wait_until_synced(LIMIT_S)
        yield ClusterPlace(cluster, source, clock)


def wait_for(condition: Callable[[], Any]) -> Any:
    def attempt() -> Any:
        try:
            return condition()
        except TreenailError:
            return None

    return wait_until(attempt, limit_s=LIMIT_S)


def test_inputs_of_a_pool_name_its_objects(place: Place) -> None:
    for document in (
        make_pool(),
        make_config(NEW, make_file("/etc/motd")),
        make_controller_config(),
        make_image_config(),
        make_image_build(),
    ):
        place.put(document)
    if isinstance(place, ClusterPlace):
        place.put_node("worker-0", IMAGE)
    found = wait_for(
        lambda: (
            (each := place.source.read_inputs("worker")).image.image
            and each.controller_config
            and each
        )
    )
    assert found.config.name == NEW
    assert found.image.image == IMAGE
    assert found.controller_config.kubelet_ca == b"kubelet ca"
    rendered = json.loads(found.read_rendered())
    assert rendered["spec"]["config"]["storage"]["files"][0]["path"] == "/etc/motd"
    assert "managedFields" not in rendered["metadata"]
    assert place.source.describe_staleness() == ""


@pytest.mark.parametrize("place", ["cluster"], indirect=True)
def test_pool_that_returns_to_an_older_config_gets_its_contents(place: Place) -> None:
    names = [config["metadata"]["name"] for config in make_large_configs()]
    for config in make_large_configs():
        place.put(config)
    for name in names:
        place.put(make_pool(new=name))
        found = wait_for(
            lambda name=name: (
                (each := place.source.read_inputs("worker")).config.name == name and each
            )
        )
        assert json.loads(found.read_rendered())["metadata"]["name"] == name


def test_versions_change_with_the_inputs_and_not_with_the_counts(place: Place) -> None:
    place.put(make_config(OLD))
    place.put(make_config(NEW))
    place.put(make_pool(updated=1))
    found = wait_for(
        lambda: (each := place.source.read_inputs("worker")).config.name == NEW and each
    )
    place.put(make_pool(updated=2))
    more = wait_for(
        lambda: (
            (each := place.source.read_inputs("worker")).pool.status["updatedMachineCount"] == 2
            and each
        )
    )
    assert more.versions == found.versions
    place.put(make_pool(updated=0))
    old = wait_for(lambda: (each := place.source.read_inputs("worker")).config.name == OLD and each)
    assert old.versions != found.versions


def test_versions_change_with_who_writes_files_beside_an_image(place: Place) -> None:
    place.put(make_config(NEW))
    place.put(make_pool())
    before = wait_for(lambda: place.source.read_inputs("worker"))
    place.put(make_pool(imageFiles="Write"))
    after = wait_for(lambda: (each := place.source.read_inputs("worker")).pool.image_files and each)
    assert after.versions != before.versions


def test_missing_pool_is_reported(place: Place) -> None:
    place.put(make_pool(name="other"))
    with pytest.raises(PoolMissingError, match="worker"):
        place.source.read_inputs("worker")


def test_missing_rendered_config_is_reported(place: Place) -> None:
    place.put(make_pool())
    wait_until(
        lambda: isinstance(fail(place.source), SourceError) and NEW in str(fail(place.source)),
        limit_s=LIMIT_S,
    )


def test_rendered_config_that_the_watch_has_not_seen_is_unready(
    cluster_place: ClusterPlace,
) -> None:
    cluster_place.put(make_pool())
    source = cluster_place.source
    wait_until(lambda: NEW in str(fail(source)), limit_s=LIMIT_S)
    error = fail(source)
    assert isinstance(error, SourceUnreadyError)
    assert f"cannot find MachineConfig {NEW}" in str(error)
    cluster_place.clock.move(31)
    assert not isinstance(fail(source), SourceUnreadyError)
    cluster_place.put(make_config())
    wait_for(lambda: source.read_inputs("worker"))


def test_image_that_no_node_runs_is_not_served(cluster_place: ClusterPlace) -> None:
    rebuilt = "quay.io/example/os@sha256:" + "12" * 32
    place = cluster_place
    for document in (make_pool(), make_config(), make_image_config(), make_image_build()):
        place.put(document)
    place.put_node("worker-0", IMAGE)

    def read_image() -> str:
        return place.source.read_inputs("worker").image.image

    wait_for(lambda: read_image() == IMAGE)
    # A rebuild of the same config: the status of the pool still counts the nodes of before.
    place.put(make_image_config(rebuilt))
    place.put(make_image_build(pull_spec=rebuilt))
    wait_for(lambda: read_image() == "")
    place.put_node("worker-1", rebuilt)
    wait_for(lambda: read_image() == rebuilt)
    # The only Node that runs it gets another image.
    place.put_node("worker-1", IMAGE)
    wait_for(lambda: read_image() == "")


def test_malformed_certificate_is_reported(place: Place) -> None:
    place.put(make_pool())
    place.put(make_config())
    place.put(make_controller_config(cloudProviderCAData="not base64"))
    wait_until(
        lambda: "cloudProviderCAData" in str(fail(place.source)),
        limit_s=LIMIT_S,
    )
    assert "not base64" not in str(fail(place.source))


def test_two_controllerconfigs_are_reported_unless_one_has_the_right_name(place: Place) -> None:
    place.put(make_pool())
    place.put(make_config())
    place.put(make_controller_config("a"))
    place.put(make_controller_config("b"))
    wait_until(
        lambda: "expected one ControllerConfig, found a, b" in str(fail(place.source)),
        limit_s=LIMIT_S,
    )
    place.put(make_controller_config())
    assert wait_for(lambda: place.source.read_inputs("worker").controller_config)


def fail(source: PoolSource) -> TreenailError | None:
    try:
        source.read_inputs("worker")
    except TreenailError as error:
        return error
    return None


def test_cluster_that_is_not_listed_yet_is_unready(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server:
        transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
        client = Client(transport)
        source = ClusterSource(InformerSet(client, SystemClock()), SETTINGS, client)
        with pytest.raises(SourceUnreadyError, match="not listed"):
            source.read_inputs("worker")
        transport.close()


def test_directory_with_the_output_of_render_serves_its_only_config(tmp_path: Path) -> None:
    place = DirectoryPlace(tmp_path)
    pool = make_pool(new="", old="", updated=0)
    del pool["status"]
    other = make_config("rendered-worker-gpu-" + "2" * 32)
    (tmp_path / "all.json").write_text(
        json.dumps({"kind": "List", "items": [pool, make_config(NEW), other]})
    )
    assert place.source.read_inputs("worker").config.name == NEW
    place.put(make_config(OLD))
    with pytest.raises(SourceError, match="2 rendered configs"):
        place.source.read_inputs("worker")


def test_file_that_cannot_be_read_is_named_where_an_object_is_missing(tmp_path: Path) -> None:
    place = DirectoryPlace(tmp_path)
    place.put(make_pool())
    place.put(make_config())
    (tmp_path / "broken.yaml").write_text("{")
    assert place.source.read_inputs("worker").config.name == NEW
    with pytest.raises(SourceError, match=r"broken\.yaml"):
        place.source.read_inputs("infra")


def test_directory_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        DirectorySource(tmp_path / "missing", SETTINGS).read_inputs("worker")


def test_config_above_the_limit_is_reported_and_not_kept() -> None:
    packed = PackedConfig.from_json(make_config(NEW, make_file("/etc/big", "x" * CONFIG_LIMIT)))
    assert not packed.content
    with pytest.raises(SourceError, match="limit is 8388608"):
        packed.read_text()
