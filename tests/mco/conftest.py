"""One cluster with the real machine-config-controller for the tests of this folder."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.contract.client import Cluster
from tests.mco import operator, programs
from tests.mco.nodes import LabNodes, allow_agents
from tests.mco.pool import Pool, run_pool
from tests.realcluster import RealCluster, RealClusterError, find_programs
from treenail_lab.images import make_image
from treenail_lab.lifetime.owner import owner


@pytest.fixture(scope="session")
def kube_server() -> Iterator[RealCluster]:
    """A real API server with the MCO's kinds."""
    kinds = programs.KINDS.read()
    try:
        found = find_programs(os.environ)
    except RealClusterError as error:
        pytest.skip(str(error))
    with RealCluster(found, watches_nodes=False) as server:
        cluster = Cluster.of_kubeconfig(server.kubeconfig)
        operator.install_kinds(cluster, kinds)
        allow_agents(cluster)
        yield server


@pytest.fixture(scope="session")
def controller(kube_server: RealCluster) -> Iterator[operator.Controller]:
    """The machine-config-controller with what its operator would create."""
    with owner.temporary_directory() as directory:
        found = operator.Controller(directory, kube_server.kubeconfig)
        cluster = Cluster.of_kubeconfig(kube_server.kubeconfig)
        operator.create_objects(cluster, found.read_version(), kube_server.authority)
        found.start()
        yield found
        found.stop()


@pytest.fixture(scope="module")
def node_names() -> list[str]:
    """Names of the nodes of the pool; modules may override it."""
    return ["n1"]


@pytest.fixture(scope="module")
def shared_pool(
    kube_server: RealCluster, controller: operator.Controller, node_names: list[str]
) -> Iterator[Pool]:
    """The pool ``worker`` with its nodes, at rest at its first config."""
    with owner.temporary_directory() as directory:
        image = make_image("os/node", "1", 20_000_000)
        nodes = LabNodes(directory, kube_server, [image], node_names)
        with run_pool(nodes, image, controller) as pool:
            yield pool


@pytest.fixture
def pool(shared_pool: Pool) -> Iterator[Pool]:
    """The same pool for each test of a module, without the configs of other tests."""
    yield shared_pool
    # Shown if the test failed.
    sys.stdout.write(f"{shared_pool.read().get('status')}\n{shared_pool.nodes.read_story()}")
    shared_pool.clean()
