"""The starter of a real cluster: what it says if it cannot start one."""

from pathlib import Path

import pytest

from tests.realcluster import (
    ClusterPrograms,
    RealCluster,
    RealClusterError,
    find_ports,
    find_programs,
)


def program(directory: Path, name: str, script: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_variables_that_are_not_set_are_named() -> None:
    with pytest.raises(RealClusterError, match="ETCD and KUBE_APISERVER: not set"):
        find_programs({})


def test_variable_that_names_no_program_is_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(RealClusterError, match=f"ETCD is {absent}, which is no program"):
        find_programs({"ETCD": str(absent)})


def test_controller_manager_is_optional(tmp_path: Path) -> None:
    etcd, server = (program(tmp_path, name, "") for name in ("etcd", "server"))
    environment = {"ETCD": str(etcd), "KUBE_APISERVER": str(server)}
    assert find_programs(environment) == ClusterPrograms(etcd, server)
    environment["KUBE_CONTROLLER_MANAGER"] = str(etcd)
    assert find_programs(environment) == ClusterPrograms(etcd, server, etcd)


@pytest.mark.process
def test_program_that_exits_is_named_with_its_last_words(tmp_path: Path) -> None:
    etcd = program(tmp_path, "etcd", "exec sleep 600")
    server = program(tmp_path, "server", "echo starting; echo no such option; exit 3")
    cluster = RealCluster(ClusterPrograms(etcd, server), tmp_path / "logs")
    with pytest.raises(RealClusterError) as caught, cluster:
        pytest.fail("it started")
    assert str(caught.value) == (
        "cannot start kube-apiserver: it exited with 3: no such option; "
        f"read {tmp_path}/logs/kube-apiserver.log"
    )
    assert not cluster.kubeconfig.exists()


def test_free_ports_differ() -> None:
    assert len(set(find_ports(5))) == 5
