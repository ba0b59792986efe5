"""The objects of an update, and what a Node says about its agent."""

from pathlib import Path
from typing import Any

import pytest

from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.controllers.drain.decide import DrainKeys
from treenail.controllers.hosted.in_place import upgrade_objects
from treenail.controllers.hosted.in_place.upgrade_objects import HostedNode, UpgradeContent
from treenail.daemon import upgrade_pod

CONTENT = UpgradeContent("clusters/np", "1111222233334444", "H4sI")


def build(content: UpgradeContent = CONTENT) -> dict[str, Any]:
    return {resource.kind: body for resource, body in upgrade_objects.build_objects(content)}


def test_config_and_hash_are_in_one_object() -> None:
    """A9-3."""
    objects = build()
    assert list(objects) == ["Namespace", "Role", "RoleBinding", "ConfigMap"]
    assert objects["ConfigMap"]["data"] == {"config": "H4sI", "hash": "1111222233334444"}
    refresh = build(UpgradeContent("clusters/np", "a", "b", is_refresh=True))
    assert refresh["ConfigMap"]["data"] == {"config": "b", "hash": "a", "mode": "refresh"}


def test_agents_look_where_the_objects_are() -> None:
    """The names are those of ``/etc/treenail/hosted.json``."""
    mode = node_mode.HostedMode("np", node_mode.name_upgrade_namespace("np"))
    objects = build()
    assert objects["Namespace"]["metadata"]["name"] == mode.upgrade_namespace
    assert objects["ConfigMap"]["metadata"]["name"] == mode.config_map


def test_nodes_may_get_that_config_map_only() -> None:
    objects = build()
    [rule] = objects["Role"]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["configmaps"], ["get"])
    assert rule["resourceNames"] == ["np-upgrade"]
    assert [each["name"] for each in objects["RoleBinding"]["subjects"]] == ["system:nodes"]


def test_each_object_names_its_owner() -> None:
    objects = [*build().values(), upgrade_objects.build_installer(CONTENT, "n", "i")]
    for body in objects:
        assert body["metadata"]["annotations"] == {hosted_key.NODE_POOL: "clusters/np"}
        assert body["metadata"]["labels"]["app.kubernetes.io/part-of"] == "treenail"


def test_installer_has_the_interface_of_a_machine_config_daemon() -> None:
    spec: Any = upgrade_objects.build_installer(CONTENT, "node-1", "registry/agent:1")["spec"]
    variables = {each["name"]: each["value"] for each in spec["containers"][0]["env"]}
    # The program in the pod reads the mode as it is written here.
    assert upgrade_pod.read_mode(variables[node_mode.VARIABLE], Path("/none")) == CONTENT.mode
    [container] = spec["containers"]
    assert container["command"] == ["/usr/bin/machine-config-daemon"]
    assert container["args"] == [
        "start", "--node-name=node-1", "--root-mount=/rootfs",
        "--kubeconfig=/var/lib/kubelet/kubeconfig",
        "--desired-configmap=/etc/machine-config-daemon-desired-config",
    ]  # fmt: skip
    assert container["securityContext"] == {"privileged": True}
    assert spec["hostPID"]
    assert spec["hostNetwork"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert not spec["automountServiceAccountToken"]


@pytest.mark.parametrize("node", ["a", "n." * 120 + "n"])
def test_installer_of_any_node_has_a_valid_name(node: str) -> None:
    name = upgrade_objects.name_installer(node)
    assert len(name) <= 253
    assert upgrade_objects.is_installer(node_mode.name_upgrade_namespace("np"), name)
    assert not upgrade_objects.is_installer("shop", name)
    assert name != upgrade_objects.name_installer(node[:-1] + "x")


def test_content_does_not_show_its_config() -> None:
    assert "xx" not in repr(UpgradeContent("a/b", "c", "x" * 9))


@pytest.mark.parametrize(
    ("notes", "has_drain"),
    [
        ({}, False),
        ({key.LAST_APPLIED_DRAIN: "uncordon-a"}, False),
        ({key.DESIRED_DRAIN: "drain-a"}, True),
        ({key.DESIRED_DRAIN: "drain-a", key.LAST_APPLIED_DRAIN: "drain-a"}, False),
        ({key.DESIRED_DRAIN: "uncordon-a", key.LAST_APPLIED_DRAIN: "drain-a"}, True),
    ],
)
def test_drain_is_over_when_both_annotations_are_equal(
    notes: dict[str, str], *, has_drain: bool
) -> None:
    document: Any = {"metadata": {"name": "n", "annotations": notes}}
    assert HostedNode.from_json(document).has_drain is has_drain
    keys = DrainKeys(hosted_key.HOSTED_DRAIN, hosted_key.HOSTED_APPLIED_DRAIN)
    assert not HostedNode.from_json(document, keys).has_drain
