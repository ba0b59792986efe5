"""A NodeDisruptionPolicy is read; a contradictory one is rejected."""

import contextlib

import pytest
from hypothesis import given

from tests.api.fuzzing import damaged, fuzz, json_values
from treenail.api.disruptionpolicy import (
    DEFAULT_POLICY,
    ClusterDisruptionPolicy,
    DaemonReloadPolicyAction,
    DisruptionPolicy,
    DrainPolicyAction,
    FileDisruptionPolicy,
    NonePolicyAction,
    RebootPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
    SpecialPolicyAction,
    UnitDisruptionPolicy,
)
from treenail.errors import ConfigError

FULL = {
    "files": [
        {"path": "/etc/a", "actions": [{"type": "None"}]},
        {
            "path": "/etc/b",
            "actions": [
                {"type": "Drain"},
                {"type": "DaemonReload"},
                {"type": "Reload", "reload": {"serviceName": "b.service"}},
                {"type": "Special"},
            ],
        },
    ],
    "units": [
        {
            "name": "c.service",
            "actions": [{"type": "Restart", "restart": {"serviceName": "c.service"}}],
        }
    ],
    "sshkey": {"actions": [{"type": "Reboot"}]},
}


KINDS = "None, DaemonReload, Drain, Reboot, Special, Reload, Restart"


def policy(document: object) -> DisruptionPolicy:
    return DisruptionPolicy.from_json(document, "spec")


def refusal(*actions: object) -> str:
    with pytest.raises(ConfigError) as caught:
        policy({"files": [{"path": "/etc/a", "actions": list(actions)}]})
    return str(caught.value).removeprefix("spec.files[0].actions")


def test_every_field_is_read() -> None:
    assert policy(FULL) == DisruptionPolicy(
        files=(
            FileDisruptionPolicy("/etc/a", (NonePolicyAction(),)),
            FileDisruptionPolicy(
                "/etc/b",
                (
                    DrainPolicyAction(),
                    DaemonReloadPolicyAction(),
                    ReloadPolicyAction("b.service"),
                    SpecialPolicyAction(),
                ),
            ),
        ),
        units=(UnitDisruptionPolicy("c.service", (RestartPolicyAction("c.service"),)),),
        ssh_key_actions=(RebootPolicyAction(),),
    )
    assert policy({}) == DisruptionPolicy(ssh_key_actions=(NonePolicyAction(),))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((), ": expected at least one action, found none"),
        (({"type": "None"}, {"type": "Drain"}), ": Reboot and None must be the only action"),
        (({"type": "Reboot"}, {"type": "Reboot"}), ": Reboot and None must be the only action"),
        (({"type": "Reload"},), "[0].reload.serviceName: expected a string, found nothing"),
        (({},), "[0].type: expected a string, found nothing"),
        (
            ({"type": "Stop"},),
            f"[0].type: expected one of {KINDS}, found 'Stop'",
        ),
    ],
)
def test_invalid_actions_are_rejected(actions: tuple[object, ...], message: str) -> None:
    assert refusal(*actions) == message


def test_policy_overrides_the_one_of_the_same_path_or_name() -> None:
    found = DEFAULT_POLICY.override_with(
        DisruptionPolicy(
            files=(
                FileDisruptionPolicy("/etc/containers/policy.json", (NonePolicyAction(),)),
                FileDisruptionPolicy("/etc/new", (DrainPolicyAction(),)),
            ),
            units=(UnitDisruptionPolicy("iri-registry.service", (NonePolicyAction(),)),),
            ssh_key_actions=(RebootPolicyAction(),),
        )
    )
    files = {entry.path: entry.actions for entry in found.files}
    assert files["/etc/containers/policy.json"] == (NonePolicyAction(),)
    assert files["/etc/new"] == (DrainPolicyAction(),)
    assert len(files) == len(found.files) == len(DEFAULT_POLICY.files) + 1
    assert found.units == (UnitDisruptionPolicy("iri-registry.service", (NonePolicyAction(),)),)
    assert found.ssh_key_actions == (RebootPolicyAction(),)


def test_status_policy_takes_precedence_over_spec() -> None:
    document = {
        "metadata": {"generation": 3},
        "spec": {"nodeDisruptionPolicy": {"files": FULL["files"][:1]}},
        "status": {
            "observedGeneration": 3,
            "nodeDisruptionPolicyStatus": {"clusterPolicies": FULL},
        },
    }
    assert ClusterDisruptionPolicy.from_json(document) == ClusterDisruptionPolicy(
        policy(FULL), is_settled=True
    )
    document["status"] = {}
    assert ClusterDisruptionPolicy.from_json(document).is_settled
    document["status"] = {"observedGeneration": 2}
    found = ClusterDisruptionPolicy.from_json(document)
    assert found == ClusterDisruptionPolicy(
        DEFAULT_POLICY.override_with(policy({"files": FULL["files"][:1]})), is_settled=False
    )


@fuzz
@given(
    damaged({"status": {"nodeDisruptionPolicyStatus": {"clusterPolicies": FULL}}})
    | damaged({"spec": {"nodeDisruptionPolicy": FULL}})
    | json_values
)
def test_any_policy_is_read_or_rejected(document: object) -> None:
    with contextlib.suppress(ConfigError):
        ClusterDisruptionPolicy.from_json(document)
