"""A server of one's own for every test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from treenail_lab.apiserver.serving.server import LabServer


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabServer]:
    with LabServer(tmp_path / "lab") as server:
        yield server


@pytest.fixture
def admin(lab: LabServer) -> Cluster:
    return Cluster.of_kubeconfig(lab.admin_kubeconfig)
