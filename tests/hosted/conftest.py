"""Two API servers for the tests of this folder: a management cluster and a hosted one."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.controllers import open_client
from tests.hosted.clusters import HostedClusters, run_upgrader
from tests.hosted.daemons import NodeDaemons
from tests.hosted.processes import LoggedProcess
from tests.realcluster import RealCluster, RealClusterError, find_programs
from treenail_lab.apiserver.serving.server import LabServer


@pytest.fixture(params=["lab", "real"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostedClusters]:
    """Two servers without the kinds of a hosted cluster: of the lab, or kube-apiservers."""
    with ExitStack() as exits:
        management, guest = (
            start_server(exits, request.param, tmp_path / name) for name in ("management", "guest")
        )
        kubeconfigs = [
            server.admin_kubeconfig if isinstance(server, LabServer) else server.kubeconfig
            for server in (management, guest)
        ]
        yield HostedClusters(
            management,
            *kubeconfigs,
            *(exits.enter_context(open_client(kubeconfig)) for kubeconfig in kubeconfigs),
        )


def start_server(exits: ExitStack, kind: str, directory: Path) -> LabServer | RealCluster:
    """Start an API server until the stack ends."""
    if kind == "lab":
        return exits.enter_context(LabServer(directory))
    try:
        found = find_programs(os.environ)
    except RealClusterError as error:
        pytest.skip(str(error))
    without_controllers = replace(found, kube_controller_manager=None)
    return exits.enter_context(RealCluster(without_controllers, directory))


@pytest.fixture
def clusters(servers: HostedClusters) -> HostedClusters:
    """Both servers with a hosted control plane without pools."""
    servers.create_control_plane()
    return servers


@pytest.fixture
def upgrader(clusters: HostedClusters, tmp_path: Path) -> Iterator[LoggedProcess]:
    """HyperShift's in-place upgrader and drainer."""
    with run_upgrader(clusters, tmp_path) as found:
        yield found
        # Shown if the test failed.
        sys.stdout.write(found.read_log()[-20_000:])
        assert found.is_running


@pytest.fixture
def daemons(clusters: HostedClusters, upgrader: LoggedProcess) -> Iterator[NodeDaemons]:
    """The daemons of the hosted cluster, beside HyperShift's upgrader."""
    with NodeDaemons(clusters) as found:
        yield found
