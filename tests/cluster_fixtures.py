"""The lab's API server and the real cluster, with the kinds and the access of agents installed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Cluster
from tests.controllers.clusters import collection_of
from tests.controllers.objects import Objects
from tests.waiting import wait_until
from treenail.clocks import SystemClock
from treenail.kube.api_client import Client
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail_lab.apiserver.serving.server import LabServer

KUBECONFIG = os.environ.get("TREENAIL_TEST_KUBECONFIG", "")
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.cluster,
        pytest.mark.skipif(not KUBECONFIG, reason="TREENAIL_TEST_KUBECONFIG is not set"),
    ],
)
_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def real_kubeconfig() -> Iterator[Path]:
    """The administrator's kubeconfig of the real cluster."""
    path = Path(KUBECONFIG)
    cluster = Cluster.of_kubeconfig(path)
    pools = cluster.get("/apis/machineconfiguration.openshift.io/v1/machineconfigpools")
    if pools.body.get("items"):
        pytest.skip("the cluster has pools, which are not to be touched")
    created = []
    for document in [*installation.load_crds(), *installation.build_node_access()]:
        collection = collection_of(document)
        answer = cluster.post(collection, document)
        if answer.code == 201:
            created.append(f"{collection}/{answer.metadata['name']}")
        else:
            assert answer.verdict == (409, "AlreadyExists"), answer.body
    for kind in installation.load_crds():
        wait_until(lambda kind=kind: _is_served(cluster, kind), limit_s=_LIMIT_S)
    yield path
    for place in reversed(created):
        cluster.delete(place)
    for place in created:
        wait_until(lambda place=place: cluster.get(place).code == 404, limit_s=_LIMIT_S)


@pytest.fixture(scope="session")
def lab_kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The administrator's kubeconfig of a lab for tests that remove what they create."""
    with LabServer(tmp_path_factory.mktemp("kinds")) as server:
        cluster = Cluster.of_kubeconfig(server.admin_kubeconfig)
        for document in [*installation.load_crds(), *installation.build_node_access()]:
            cluster.post(collection_of(document), document).ok()
        yield server.admin_kubeconfig


@pytest.fixture(scope="session", params=["lab", REAL])
def shared_kubeconfig(request: pytest.FixtureRequest) -> Path:
    """The administrator's kubeconfig of the lab and of the real cluster."""
    found: Path = request.getfixturevalue(f"{request.param}_kubeconfig")
    return found


@pytest.fixture(autouse=True)
def controllers(request: pytest.FixtureRequest) -> None:
    """Skip tests that need the controllers of a real cluster that has none."""
    if request.node.get_closest_marker("controllers") and "real" in request.node.name:
        kubeconfig: Path = request.getfixturevalue("real_kubeconfig")
        if not Cluster.of_kubeconfig(kubeconfig).has_controllers():
            pytest.skip("no kube-controller-manager serves the cluster")


def _is_served(cluster: Cluster, kind: dict[str, Any]) -> bool:
    spec = kind["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    return cluster.get(path).code == 200


@pytest.fixture(params=["lab", REAL])
def kubeconfig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The administrator's kubeconfig of a lab of the test's own, and of the real cluster."""
    if request.param == "real":
        yield request.getfixturevalue("real_kubeconfig")
        return
    with LabServer(tmp_path / "api") as server:
        yield server.admin_kubeconfig


@pytest.fixture
def objects(shared_kubeconfig: Path) -> Iterator[Objects]:
    """Objects on the lab and on the real cluster."""
    with _open_objects(shared_kubeconfig) as found:
        yield found


@pytest.fixture(params=[REAL])
def real_objects(real_kubeconfig: Path) -> Iterator[Objects]:
    """On the real cluster only: the lab does not evaluate the rules of a kind."""
    with _open_objects(real_kubeconfig) as found:
        yield found


@contextmanager
def _open_objects(kubeconfig: Path) -> Iterator[Objects]:
    transport = HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock())
    found = Objects(Client(transport))
    yield found
    found.remove()
    transport.close()
