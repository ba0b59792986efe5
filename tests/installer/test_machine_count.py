"""The number of control-plane machines, and nodes that still need the bootstrap host."""

from pathlib import Path
from typing import Any

import pytest

from tests.installer.directories import make_pool, write_manifest
from tests.installer.joined_nodes import make_node
from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.controllers.handover.handover_objects import RegistryNode, describe_missing_nodes
from treenail.installer.directory.install_config import find_machine_count, parse_install_config
from treenail.installer.directory.install_files import InstallDirectory, read_config_content
from treenail.installer.directory.install_manifests import read_install_manifests

REGISTRY = "bootstrap.example.com:22625"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("controlPlane: {name: master, replicas: 3}\ncompute: [{replicas: 2}]\n", 3),
        ("controlPlane: {replicas: 2}\narbiter: {replicas: 1}\n", 3),
        ("controlPlane: {replicas: 1}\narbiter: {}\n", 1),
        ("arbiter: {replicas: 1}\n", None),
        ("controlPlane: {replicas: many}\n", None),
        ("controlPlane: {replicas: 0}\n", None),
        ("controlPlane: {replicas: true}\n", None),
        ("controlPlane: [1]\n", None),
        ("a: [\n", None),
        ("", None),
    ],
)
def test_count_is_that_of_the_install_config(text: str, count: int | None, tmp_path: Path) -> None:
    write_manifest(tmp_path, "manifests/pools.yaml", make_pool("master"))
    manifests = read_install_manifests(tmp_path)
    assert find_machine_count(manifests, text.encode()) == count
    assert find_machine_count(manifests, None) is None
    # The OpenShift installer has consumed the file.
    configmap: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "cluster-config-v1", "namespace": "kube-system"},
        "data": {"install-config": text},
    }
    write_manifest(tmp_path, "manifests/cluster-config.yaml", configmap)
    assert find_machine_count(read_install_manifests(tmp_path), None) == count


def test_directory_without_an_install_config_has_no_count(tmp_path: Path) -> None:
    assert read_config_content(InstallDirectory(tmp_path)) is None


def test_count_of_the_own_install_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "treenail-install.yaml").write_text("controlPlane: {replicas: 3}\n")
    content = read_config_content(InstallDirectory(tmp_path))
    assert find_machine_count(read_install_manifests(tmp_path), content) == 3


@pytest.mark.parametrize(
    "text",
    ["{replicas: true}", "{replicas: 0}", "{replicas: 101}", "{replicas: 3, name: master}", "3"],
)
def test_wrong_count_of_the_own_install_config_is_a_problem(text: str) -> None:
    content = f"pullSecret: ''\narbiter: {{replicas: 1}}\ncontrolPlane: {text}\n".encode()
    found = parse_install_config(content, "treenail-install.yaml")
    (problem,) = map(str, found.problems)
    assert problem == (
        "treenail-install.yaml, line 3: controlPlane: expected replicas, a number from 1 to 100, "
        "alone; write, for example: controlPlane: {replicas: 3}"
    )


def describe(machines: int | None, *nodes: Json, registry: str = REGISTRY) -> str:
    return describe_missing_nodes([RegistryNode.from_json(each) for each in nodes], registry,
                                  machines)  # fmt: skip


def test_nodes_that_joined_and_dropped_the_registry_need_nothing() -> None:
    assert describe(2, make_node("a"), make_node("b")) == ""
    assert describe(None, make_node("a")) == ""
    # After a deleted installation another registry is none of this one's.
    assert describe(1, make_node("a", registry="older.example.com:22625")) == ""


def test_machines_that_have_not_joined_are_counted() -> None:
    assert describe(None) == "0 of the machines of the control plane have joined"
    worker = make_node("w")
    worker["metadata"] = {"name": "w", "labels": {"node-role.kubernetes.io/worker": ""}}
    text = "1 of 3 machines of the control plane have joined"
    assert describe(3, make_node("a"), worker) == text


def test_node_without_a_report_may_still_use_the_registry() -> None:
    silent = make_node("b", has_reported=False)
    assert describe(2, make_node("a"), silent) == "the agent has not reported yet on node b"
    # Without a registry a machine needs the bootstrap host only until it joined.
    assert describe(2, make_node("a"), silent, registry="") == ""


def test_node_whose_switch_failed_is_named_with_its_reason() -> None:
    node: Any = make_node("a", registry=REGISTRY)
    reason = "the image lacks /etc/motd"
    node["metadata"]["annotations"] |= {key.STATE: "Degraded", key.REASON: reason}
    text = f"{REGISTRY} is still the mirror of node a; node a is Degraded: {reason}"
    assert describe(1, node) == text
    # It runs its image: another problem does not keep the bootstrap host.
    assert describe(1, node, registry="") == ""


def test_many_nodes_that_use_the_registry_give_a_short_text() -> None:
    nodes = [make_node(f"m{each}", registry=REGISTRY) for each in range(7)]
    assert describe(7, *nodes) == (
        f"{REGISTRY} is still the mirror of nodes m0, m1, m2, m3, m4 and 2 more"
    )
