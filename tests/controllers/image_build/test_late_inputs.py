"""Inputs of a build that a paused leader creates too late."""

from pathlib import Path
from typing import cast

import pytest

from treenail.clocks import SystemClock
from treenail.controllers.image_build.build_planner import BuildPlanner
from treenail.controllers.image_build.job_builder import JobBuilder, JobSettings
from treenail.errors import NotLeaderError
from treenail.kube.api_client import Client, Json
from treenail.kube.lease import LateWrites
from treenail.kube.resources import CONFIGMAPS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail_lab.apiserver.serving.server import LabServer

BODY: Json = {"metadata": {"name": "inputs"}, "data": {"Containerfile": "FROM a"}}


def test_paused_leader_leaves_inputs_that_the_next_leader_wrote_again(tmp_path: Path) -> None:
    """The next leader writes equal content, starts its Job, and the paused one goes on."""
    settings = JobSettings(namespace="default")
    with LabServer(tmp_path / "server") as server:
        transport = HttpTransport(read_kubeconfig(str(server.admin_kubeconfig)), SystemClock())
        client = Client(transport)
        builders = [JobBuilder(client, cast("BuildPlanner", None), settings) for _ in range(2)]
        builders[0]._put(CONFIGMAPS, BODY)
        created = client.get(CONFIGMAPS, "inputs", namespace="default")
        builders[1]._put(CONFIGMAPS, BODY)
        with pytest.raises(NotLeaderError):
            LateWrites(client, lambda: False).check_created(CONFIGMAPS, created)
        assert client.get(CONFIGMAPS, "inputs", namespace="default")
        transport.close()
