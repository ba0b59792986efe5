"""The command that ``status --hosted`` prints for a degraded node lets HyperShift go on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures import hosted
from tests.hosted import conductor, programs
from tests.hosted.clusters import HostedClusters, InPlacePool
from tests.hosted.daemons import NodeDaemons
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail_lab.controllers import CONTROLLER_COMMAND

pytestmark = [pytest.mark.integration]

LIMIT_S = 120.0
BAD, FIXED = hosted.NEW_HASH, "2c2c2c2c"
_COMMAND = re.compile(r"kubectl --kubeconfig one\.kubeconfig annotate node \S+ [^\s\"]+-")


@pytest.fixture(autouse=True)
def find_upgrader() -> None:
    programs.find_program("inplace")
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")


def read_status(clusters: HostedClusters) -> str:
    done = subprocess.run(
        [
            *CONTROLLER_COMMAND,
            "status",
            "--hosted",
            "--json",
            f"--kubeconfig={clusters.management_kubeconfig}",
        ],
        check=False,  # a pool that waits is exit code 1 or 2
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_printed_command_frees_a_degraded_pool(
    clusters: HostedClusters, daemons: NodeDaemons, tmp_path: Path
) -> None:
    conductor.create_objects(clusters)
    pool = InPlacePool(clusters, "np", ["w1", "w2"])
    pool.create()
    management = {"inPlace": {"maxUnavailable": -1}}
    conductor.create_pool(clusters, "np", "InPlace", 1, {}, management=management)
    daemons.failing.add(BAD)
    with conductor.run_conductor(clusters, tmp_path):
        pool.set_target(BAD)

        def find_degraded() -> list[str]:
            return [
                name
                for name in pool.nodes
                if daemons.get_node(name).state == key.NodeState.DEGRADED
            ]

        (degraded,) = wait_until(find_degraded, limit_s=LIMIT_S)
        pool.set_target(FIXED)
        wait_until(
            lambda: hosted_key.UPGRADE_STOPPED in pool.read_machine_set().metadata.annotations,
            limit_s=LIMIT_S,
        )
        command = wait_until(lambda: _COMMAND.search(read_status(clusters)), limit_s=LIMIT_S)
        assert degraded in command[0]
        shutil.copy(clusters.guest_kubeconfig, tmp_path / "one.kubeconfig")
        subprocess.run(
            command[0].split(), cwd=tmp_path, check=True, env=dict(os.environ), timeout=60
        )
        wait_until(lambda: pool.read_machine_set().current_hash == FIXED, limit_s=LIMIT_S)
    assert daemons.applied == {name: [FIXED] for name in pool.nodes}
