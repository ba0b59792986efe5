"""A cluster that lies to the controller that builds OS images.

A pool gets its image from a Job, and then one for another config. The registry has the image of
the pool all the time, and nothing of a build is left over.
"""

import pytest

from tests.simulation.building import Building, BuildingCluster
from tests.simulation.matrix import FAMILIES, check_family, find_problems, list_writes

COMMAND = "make test-long ARGS=tests/simulation/test_lying_to_builds.py"
SAMPLE = (
    ("crash after the write", 7),
    ("answer lost", 0),
    ("outage of 15 s", 20),
    ("etcd restored to before the rollout", 0),
    ("etcd restored 15 writes back, with higher versions", 33),
    ("watches held for 60 s", 27),
    ("process stops for 100 s, another leads", 5),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> BuildingCluster:
    return BuildingCluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def writes(shared: BuildingCluster) -> list[str]:
    return list_writes(lambda: Building(shared))


def test_builds_with_sampled_faults_succeed(shared: BuildingCluster, writes: list[str]) -> None:
    assert find_problems(lambda: Building(shared), writes, list(SAMPLE)) == []


@pytest.mark.long
@pytest.mark.limit(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_builds_with_each_fault_at_each_write_succeed(
    shared: BuildingCluster, writes: list[str], family: str
) -> None:
    check_family(
        lambda: Building(shared),
        writes,
        family,
        where="two builds of an OS image",
        result="the pool has the image of its config, in the registry, and nothing is left over",
        command=COMMAND,
    )
