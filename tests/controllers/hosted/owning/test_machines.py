"""The MachineDeployment or MachineSet of an owned NodePool."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import nodepool
from treenail.api.machineconfig import MachineConfig
from treenail.controllers.hosted.config.pool_config import PoolConfig, PoolConfigError
from treenail.controllers.hosted.owning import machines
from treenail.kube import resources

Json = dict[str, Any]
OLD, NEW = hosted.OLD_HASH, "1b1b1b1b1b1b1b1b"
TEMPLATE = machines.MachineTemplate(
    "infrastructure.cluster.x-k8s.io/v1beta1", "AgentMachineTemplate", "np"
)
AUTOSCALER = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-{}-size"


def make_config(rollout: str = "r1", target: str = NEW) -> PoolConfig:
    document = {"metadata": {"name": "np"}, "spec": {"config": {"ignition": {"version": "3.2.0"}}}}
    return PoolConfig(MachineConfig.from_json(document), target, rollout, "4.22.1", hosted.RELEASE)


def make_inputs(
    found: Json | None = None, *, rollout: str = "r1", seed: str = "r1", version: str = "v1beta2",
    template: machines.MachineTemplate | None = TEMPLATE, **pool: Any,
) -> machines.MachineInputs:  # fmt: skip
    notes = {hosted_key.CURRENT_ROLLOUT_CONFIG: seed, **pool.pop("annotations", {})}
    document = hosted.make_node_pool(
        annotations=notes, upgrade_type=pool.pop("upgrade_type", "Replace"), **pool
    )
    return machines.MachineInputs(
        nodepool.NodePool.from_json(document), hosted.CONTROL_PLANE, "one", make_config(rollout),
        template, found or {}, version,
    )  # fmt: skip


def build(inputs: machines.MachineInputs, *, can_roll: bool = True) -> Json:
    """The object after the write of the controller."""
    rolled = machines.find_rolled_hash(inputs, can_roll=can_roll)
    wanted = machines.build_owner(inputs, rolled)
    kind = "MachineSet" if inputs.pool.is_in_place else "MachineDeployment"
    head = {"apiVersion": f"cluster.x-k8s.io/{inputs.capi_version}", "kind": kind}
    return merge(head | inputs.found, resources.find_changes(inputs.found, wanted))


def merge(found: Json, changes: Json) -> Json:
    result = dict(found)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merge(result.get(name) or {}, value)
        else:
            result[name] = value
    return result


def rolled_parts(document: Json) -> tuple[Any, ...]:
    """The fields for which Cluster API replaces a machine."""
    spec = document["spec"]["template"]["spec"]
    return spec["bootstrap"], spec.get("version"), spec["infrastructureRef"]


def test_new_deployment_has_what_cluster_api_requires() -> None:
    made = build(make_inputs(management={"replace": {"rollingUpdate": {"maxSurge": "25%"}}}))
    spec, label = made["spec"], "one-one-np"
    labels = {label: label, "cluster.x-k8s.io/cluster-name": "one"}
    assert spec["clusterName"] == spec["template"]["spec"]["clusterName"] == "one"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == labels
    assert spec["replicas"] == 2
    assert spec["rollout"]["strategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%"}
    }  # fmt: skip
    assert rolled_parts(made) == (
        {"dataSecretName": f"user-data-np-{NEW}"},
        "4.22.1",
        {"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": TEMPLATE.kind, "name": "np"},
    )
    notes = made["metadata"]["annotations"]
    assert notes[hosted_key.NODE_POOL] == "clusters/np"
    assert notes[hosted_key.ROLLOUT_CONFIG] == "r1"


def test_deployment_of_v1beta1_has_its_fields() -> None:
    made = build(make_inputs(version="v1beta1", nodeDrainTimeout="1m30s"))
    spec = made["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate"}
    assert "rollout" not in spec
    assert spec["template"]["spec"]["nodeDrainTimeout"] == "90s"
    assert spec["template"]["spec"]["infrastructureRef"] == {
        "apiVersion": TEMPLATE.api_version, "kind": TEMPLATE.kind, "name": "np",
        "namespace": hosted.CONTROL_PLANE,
    }  # fmt: skip


def test_new_machine_set_begins_updated_and_has_no_target_of_hypershift() -> None:
    made = build(make_inputs(upgrade_type="InPlace"))
    notes = made["metadata"]["annotations"]
    assert notes[hosted_key.TARGET_CONFIG] == notes[hosted_key.UPDATED_CONFIG] == NEW
    assert hosted_key.TARGET_CONFIG_VERSION not in notes
    assert "rollout" not in made["spec"]
    assert made["spec"]["selector"]["matchLabels"] == {"one-one-np": "one-one-np"}


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
def test_object_of_hypershift_is_adopted_without_a_rolled_machine(kind: str) -> None:
    found = hosted.make_machine_deployment(target=OLD)
    if kind == "InPlace":
        found = hosted.make_machine_set(target=OLD, current=OLD)
    inputs = make_inputs(found, upgrade_type=kind, template=None, nodeDrainTimeout="5m")
    made = build(inputs)
    assert rolled_parts(made) == rolled_parts(found)
    assert made["spec"]["selector"] == found["spec"]["selector"]
    assert made["spec"]["template"]["spec"]["deletion"] == {"nodeDrainTimeoutSeconds": 300}
    assert machines.find_rolled_hash(inputs) == OLD
    again = replace(inputs, found=made)
    assert resources.find_changes(made, machines.build_owner(again, OLD)) == {}
    if kind == "InPlace":
        notes = made["metadata"]["annotations"]
        assert notes[hosted_key.TARGET_CONFIG] == notes[hosted_key.UPDATED_CONFIG] == OLD


@pytest.mark.parametrize("kind", ["Replace", "InPlace"])
@pytest.mark.parametrize("is_taken_over", [True, False])
def test_another_rollout_hash_rolls_once(kind: str, is_taken_over: bool) -> None:
    found = hosted.make_machine_deployment(target=OLD)
    if kind == "InPlace":
        found = hosted.make_machine_set(target=OLD, current=OLD)
    if not is_taken_over:
        found = build(make_inputs(found, upgrade_type=kind))
    inputs = make_inputs(found, upgrade_type=kind, rollout="r2")
    paused = build(inputs, can_roll=False)
    assert rolled_parts(paused)[:2] == rolled_parts(found)[:2]
    made = build(inputs)
    assert rolled_parts(made)[:2] == ({"dataSecretName": f"user-data-np-{NEW}"}, "4.22.1")
    if kind == "InPlace":
        notes = made["metadata"]["annotations"]
        assert (notes[hosted_key.TARGET_CONFIG], notes[hosted_key.UPDATED_CONFIG]) == (NEW, OLD)
    later = make_inputs(made, upgrade_type=kind, rollout="r2")
    later = replace(later, config=make_config("r2", target="2c" * 8))
    assert not machines.needs_rollout(later)
    assert machines.find_rolled_hash(later) == NEW
    refreshed = build(later)
    assert rolled_parts(refreshed) == rolled_parts(made)
    # The nodes get the rest of the config without drain and reboot, if they may.
    assert refreshed["metadata"]["annotations"][hosted_key.TARGET_CONFIG] == "2c" * 8


@pytest.mark.parametrize(
    ("scaling", "capacity", "present", "replicas", "bounds"),
    [
        ({"min": 2, "max": 5}, "", 3, 3, ("2", "5")),
        ({"min": 2, "max": 5}, "", 1, 2, ("2", "5")),
        ({"min": 2, "max": 5}, "", 9, 5, ("2", "5")),
        ({"min": 0, "max": 5}, "", 0, 1, ("1", "5")),
        ({"max": 5}, "", 0, 1, ("1", "5")),
        ({"min": 0, "max": 5}, "cpu=4,memory=16Gi", 0, 0, ("0", "5")),
        (None, "cpu=4", 7, 2, ("0", "0")),
    ],
)
def test_autoscaler_decides_within_its_limits(
    scaling: Json | None, capacity: str, present: int, replicas: int, bounds: tuple[str, str]
) -> None:
    found = hosted.make_machine_deployment(target=OLD)
    found["spec"]["replicas"] = present
    spec: Json = {"autoScaling": scaling, "replicas": None} if scaling else {}
    made = build(make_inputs(found, annotations={hosted_key.CAPACITY: capacity}, **spec))
    notes = made["metadata"]["annotations"]
    assert made["spec"]["replicas"] == replicas
    assert (notes[AUTOSCALER.format("min")], notes[AUTOSCALER.format("max")]) == bounds
    if capacity:
        assert notes["capacity.cluster-autoscaler.kubernetes.io/cpu"] == "4"


def test_capacity_of_the_template_allows_zero_machines() -> None:
    template = replace(TEMPLATE, has_capacity=True)
    made = build(make_inputs(template=template, autoScaling={"min": 0, "max": 3}, replicas=None))
    assert made["spec"]["replicas"] == 0


def test_fields_of_others_and_defaults_stay() -> None:
    found = build(make_inputs())
    found["spec"]["progressDeadlineSeconds"] = 600
    found["metadata"]["annotations"]["team"] = "a"
    found["metadata"]["annotations"]["cluster.x-k8s.io/paused"] = "true"
    made = build(make_inputs(found, replicas=5))
    assert made["spec"].pop("replicas") == 5
    assert made["metadata"]["annotations"].pop("team") == "a"
    assert "cluster.x-k8s.io/paused" not in made["metadata"]["annotations"]


def test_another_template_of_the_user_is_written() -> None:
    found = build(make_inputs())
    made = build(make_inputs(found, template=replace(TEMPLATE, name="large")))
    assert rolled_parts(made)[2]["name"] == "large"
    assert rolled_parts(made)[:2] == rolled_parts(found)[:2]


def test_on_delete_has_no_limits() -> None:
    found = build(make_inputs(management={"replace": {"rollingUpdate": {"maxSurge": 2}}}))
    made = build(make_inputs(found, management={"replace": {"strategy": "OnDelete"}}))
    assert made["spec"]["rollout"]["strategy"] == {"type": "OnDelete"}


ROLLING, BAD_LIMIT = "rollingUpdate", "InvalidMaxUnavailable"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"autoScaling": {"min": 1, "max": 2}}, "ReplicasAndAutoscaling"),
        ({"management": {"inPlace": {"maxUnavailable": "0%"}}}, BAD_LIMIT),
        ({"management": {"inPlace": {"maxUnavailable": "200%"}}}, BAD_LIMIT),
        ({"management": {"inPlace": {"maxUnavailable": "some"}}}, BAD_LIMIT),
        ({"management": {"inPlace": {"maxUnavailable": -1}}}, BAD_LIMIT),
        ({"management": {"inPlace": {"maxUnavailable": 1}}}, ""),
        ({"management": {"replace": {ROLLING: {"maxUnavailable": "200%"}}}}, BAD_LIMIT),
        ({"management": {"replace": {ROLLING: {"maxSurge": "text"}}}}, BAD_LIMIT),
        ({"management": {"replace": {ROLLING: {"maxSurge": 0}}}}, BAD_LIMIT),
        ({"management": {"replace": {ROLLING: {"maxSurge": 0, "maxUnavailable": "0%"}}}},
         BAD_LIMIT),
        ({"management": {"replace": {ROLLING: {"maxSurge": 0, "maxUnavailable": 1}}}}, ""),
        ({"management": {"replace": {ROLLING: {"maxUnavailable": "0%"}}}}, ""),
        ({"annotations": {hosted_key.CAPACITY: "cpu:4"}}, "InvalidCapacity"),
        ({"annotations": {hosted_key.CAPACITY: "disks=4"}}, "InvalidCapacity"),
    ],
)  # fmt: skip
def test_bad_field_has_a_reason_and_a_remedy(spec: Json, reason: str) -> None:
    kind = "InPlace" if "inPlace" in spec.get("management", {}) else "Replace"
    pool = make_inputs(upgrade_type=kind, **spec).pool
    if not reason:
        machines.check_pool(pool)
        return
    with pytest.raises(PoolConfigError) as caught:
        machines.check_pool(pool)
    assert caught.value.reason == reason
    assert caught.value.remedy


def test_object_of_another_pool_is_refused() -> None:
    """The namespace a-b-c is that of cluster b-c in a, and of cluster c in a-b."""
    notes = {hosted_key.NODE_POOL: "other/np"}
    found = hosted.make_machine_deployment(annotations=notes)
    with pytest.raises(PoolConfigError, match="is of NodePool other/np") as caught:
        machines.read_owner(make_inputs().pool, found)
    assert caught.value.reason == "OtherNodePool"


@pytest.mark.parametrize(
    ("version", "field", "value"),
    [
        ("v1beta2", "remediation", {"triggerIf": {"unhealthyLessThanOrEqualTo": 2}}),
        ("v1beta1", "maxUnhealthy", 2),
    ],
)
def test_health_check_selects_the_machines_of_the_pool(
    version: str, field: str, value: object
) -> None:
    found = hosted.make_machine_deployment()
    made: Any = machines.build_health_check(make_inputs(found, version=version))
    assert made["spec"]["selector"] == found["spec"]["selector"]
    assert made["spec"][field] == value


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("one-x7k2p", "one", "np"), "one-x7k2p-one-np"),
        (("a" * 20, "b" * 20, "np"), "aaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbb-"),
        (("a" * 20, "b" * 20, "p" * 40), "aaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbb-"),
    ],
)
def test_label_of_machines_is_at_most_43_characters(
    names: tuple[str, str, str], label: str
) -> None:
    found = machines.build_label(*names)
    assert found.startswith(label)
    assert len(found) <= 43
