"""Values of HyperShift and Cluster API: both versions of Cluster API, wrong types, names."""

import copy
from typing import Any

import pytest

from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.errors import ConfigError

Json = dict[str, Any]
NEW = {"type": "Available", "status": "True"}
OLD = {"type": "Ready", "status": "False", "reason": "Draining"}


def change_at(document: Json, path: str, value: object) -> Json:
    """A copy of a document with a value at a path; None removes the key."""
    changed = copy.deepcopy(document)
    *parents, last = path.split(".")
    place = changed
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
    return changed


def convert_to_v1beta1(document: Json, moves: list[tuple[str, object, str, object]]) -> Json:
    """The same object of v1beta1: fields of v1beta2 move, and their values change."""
    changed = change_at(document, "apiVersion", "cluster.x-k8s.io/v1beta1")
    for path, _, old_path, value in moves:
        changed = change_at(change_at(changed, path, None), old_path, value)
    return changed


STATUS = [
    ("status.conditions", [NEW], "status.v1beta2.conditions", [NEW]),
    ("status.deprecated.v1beta1.conditions", [OLD], "status.conditions", [OLD]),
]
FAILURE = [("status.deprecated.v1beta1.failureMessage", "no", "status.failureMessage", "no")]
TEMPLATE = "spec.template.spec."
DRAIN = (TEMPLATE + "deletion.nodeDrainTimeoutSeconds", 5430, TEMPLATE + "nodeDrainTimeout")
VERSIONS: list[tuple[Any, Json, list[Any]]] = [
    (
        clusterapi.ClusterMachine,
        hosted.make_machine("m-0"),
        [
            ("spec.deletion.nodeDrainTimeoutSeconds", 0, "spec.nodeDrainTimeout", "0s"),
            *STATUS,
            *FAILURE,
        ],
    ),
    (clusterapi.MachineSet, hosted.make_machine_set(), [(*DRAIN, "1h30m30s")]),
    (
        clusterapi.MachineDeployment,
        hosted.make_machine_deployment(),
        [
            (*DRAIN, "1h30m30s"),
            ("spec.rollout.strategy", {"type": "OnDelete"}, "spec.strategy", {"type": "OnDelete"}),
            ("status.upToDateReplicas", 1, "status.updatedReplicas", 1),
        ],
    ),
]


@pytest.mark.parametrize(("kind", "document", "moves"), VERSIONS)
def test_both_versions_of_cluster_api_become_the_same_value(
    kind: Any, document: Json, moves: list[Any]
) -> None:
    for path, value, _, _ in moves:
        document = change_at(document, path, value)
    value = kind.from_json(document)
    old = kind.from_json(convert_to_v1beta1(document, moves))
    assert value == old
    assert type(old) is kind
    if kind is clusterapi.ClusterMachine:
        assert [each.type for each in value.conditions] == ["Available"]
        assert [each.reason for each in value.old_conditions] == ["Draining"]
    assert value.drain_timeout_s in {0, 5430}
    assert value.node_pool == "clusters/np"


@pytest.mark.parametrize(
    ("kind", "document", "path", "value", "message"),
    [
        (
            nodepool.NodePool, hosted.make_node_pool(), "spec.management.upgradeType", "Later",
            "spec.management.upgradeType: expected Replace or InPlace, found 'Later'",
        ),
        (
            nodepool.NodePool, hosted.make_node_pool(), "spec.replicas", "2",
            "spec.replicas: expected an integer, found a string",
        ),
        (
            nodepool.NodePool, hosted.make_node_pool(), "status.conditions", {},
            "status.conditions: expected a list, found an object",
        ),
        (
            nodepool.NodePool, hosted.make_node_pool(), "spec.nodeDrainTimeout", "soon",
            "spec.nodeDrainTimeout: expected a duration such as 1h30m0s, found a string",
        ),
        (
            nodepool.NodePool, hosted.make_node_pool(),
            "spec.management.inPlace.maxUnavailable", True,
            "spec.management.inPlace.maxUnavailable: expected a count or a percentage, found true",
        ),
        (
            nodepool.HostedControlPlane, hosted.make_control_plane(),
            "status.kubeConfig", {"name": "a", "key": ""},
            "status.kubeConfig.key: expected a string, found an empty string",
        ),
        (
            clusterapi.ClusterMachine, hosted.make_machine("m-0"),
            "apiVersion", "cluster.x-k8s.io/v1",
            "apiVersion: expected v1beta2 or v1beta1 of cluster.x-k8s.io, found ",
        ),
        (
            clusterapi.MachineSet, hosted.make_machine_set(), "kind", "Machine",
            "kind: expected MachineSet, found ",
        ),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_with_its_path(
    kind: Any, document: Json, path: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.from_json(change_at(document, path, value))
    assert str(caught.value).startswith(message)


def test_fields_of_a_pool() -> None:
    pool = nodepool.NodePool.from_json(
        hosted.make_node_pool(
            "np", "InPlace", annotations={hosted_key.ROLLOUT_POLICY: "slow"},
            management={"inPlace": {"maxUnavailable": -1}}, nodeDrainTimeout="20m0s",
            config=[{"name": "kubelet"}], autoScaling={"max": 3},
        )
    )  # fmt: skip
    assert (pool.full_name, pool.is_in_place, pool.rollout_policy) == ("clusters/np", True, "slow")
    assert (pool.in_place_max_unavailable, pool.drain_timeout_s) == (-1, 1200)
    assert (pool.configs, pool.autoscaling) == (("kubelet",), nodepool.AutoScaling(None, 3))
    assert (pool.current_hash, pool.version) == (hosted.OLD_HASH, "4.22.0")


def test_control_plane_namespace_has_no_dots() -> None:
    cluster = nodepool.HostedCluster.from_json(hosted.make_hosted_cluster("a.b"))
    assert cluster.control_plane_namespace == "clusters-a-b"


@pytest.mark.parametrize(
    ("secret", "value"),
    [
        ("user-data-np-1b1b1b1b", "1b1b1b1b"),
        ("token-np-1b1b1b1b", "1b1b1b1b"),
        ("user-data-np-2-1b1b1b1b", "2-1b1b1b1b"),
        ("user-data-other-1b1b1b1b", ""),
        ("", ""),
    ],
)
def test_hash_in_the_name_of_a_secret(secret: str, value: str) -> None:
    pool = nodepool.NodePool.from_json(hosted.make_node_pool())
    assert pool.read_secret_hash(secret) == value


@pytest.mark.parametrize(
    ("text", "is_paused", "is_valid"),
    [
        ("", False, True),
        ("true", True, True),
        ("T", True, True),
        ("false", False, True),
        ("yes", False, False),
        ("2026-11-28T12:00:00Z", True, True),
        ("2026-11-28T09:00:00Z", False, True),
        ("2026-11-28", False, False),
    ],
)
def test_pause_is_a_boolean_or_a_time(text: str, *, is_paused: bool, is_valid: bool) -> None:
    now = 1795860000.0  # 2026-11-28T10:00:00Z
    assert nodepool.is_paused(text, now) is is_paused
    assert nodepool.is_valid_pause(text) is is_valid
