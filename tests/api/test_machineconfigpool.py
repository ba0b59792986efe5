"""A MachineConfigPool is read field by field; wrong fields are rejected."""

from typing import Any

import pytest

from treenail.api.machineconfigpool import MachineConfigPool, PoolConfiguration
from treenail.api.object_meta import Condition
from treenail.errors import ConfigError
from treenail.label_selector import LabelRequirement, LabelSelector, SelectorOperator

ROLE = "machineconfiguration.openshift.io/role"
POOL: dict[str, Any] = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "MachineConfigPool",
    "metadata": {"name": "infra", "uid": "u", "generation": 3, "labels": {"a": "b"}},
    "spec": {
        "machineConfigSelector": {"matchLabels": {ROLE: "infra"}},
        "nodeSelector": {"matchLabels": {"role/infra": ""}},
        "paused": True,
        "maxUnavailable": "20%",
        "configuration": {
            "name": "rendered-infra-2",
            "source": [{"kind": "MachineConfig", "name": "00-worker"}, {"name": "50-infra"}],
        },
        "osImageStream": {"name": "rhel-10"},
    },
    "status": {
        "configuration": {"name": "rendered-infra-1"},
        "conditions": [{"type": "Updated", "status": "False"}],
        "certExpirys": [],
    },
}


def test_every_relevant_field_is_read() -> None:
    pool = MachineConfigPool.from_json(POOL)
    assert (pool.name, pool.metadata.uid, pool.metadata.generation) == ("infra", "u", 3)
    assert pool.machine_config_selector == LabelSelector(
        (LabelRequirement(ROLE, SelectorOperator.IN, ("infra",)),)
    )
    assert pool.node_selector == LabelSelector(
        (LabelRequirement("role/infra", SelectorOperator.IN, ("",)),)
    )
    assert pool.paused
    assert not pool.is_deleting
    assert pool.max_unavailable == "20%"
    assert pool.configuration == PoolConfiguration("rendered-infra-2", ("00-worker", "50-infra"))
    assert pool.os_image_stream == "rhel-10"
    assert pool.status_configuration == PoolConfiguration("rendered-infra-1")
    assert pool.conditions == (Condition("Updated", "False"),)
    assert pool.status == POOL["status"]


def test_absent_fields_select_and_limit_nothing() -> None:
    pool = MachineConfigPool.from_json({"metadata": {"name": "p"}})
    assert pool.machine_config_selector is None
    assert pool.node_selector is None
    assert pool.max_unavailable is None
    assert pool.configuration == PoolConfiguration()


def test_pool_with_deletion_timestamp_is_deleting() -> None:
    meta = {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert MachineConfigPool.from_json({"metadata": meta}).is_deleting


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"maxUnavailable": 1.5}, "spec.maxUnavailable: expected a count or a percentage"),
        ({"maxUnavailable": True}, "spec.maxUnavailable: expected a count or a percentage"),
        ({"paused": "yes"}, "spec.paused: expected true or false"),
        ({"nodeSelector": []}, "spec.nodeSelector: expected an object, found a list"),
    ],
)
def test_wrong_field_is_rejected_by_name(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        MachineConfigPool.from_json({"metadata": {"name": "p"}, "spec": spec})
    assert str(raised.value).startswith(sentence)


def test_object_of_other_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match="kind: expected MachineConfigPool, found 'Node'"):
        MachineConfigPool.from_json({"kind": "Node"})
