"""The kinds that treenail installs, on the lab's API server and on a real one."""

import re
from typing import Any

import pytest

from tests.controllers.rollout.test_schema import (
    INVALID_POLICIES,
    MAX_UNAVAILABLE,
    REJECTED_BY_RULES,
    REJECTED_BY_THE_CONTROLLER,
    VALID_POLICIES,
)
from tests.fixtures.objects import Objects
from treenail.api.disruptionpolicy import ClusterDisruptionPolicy, RestartPolicyAction
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.errors import InvalidError
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGNODES,
    MACHINECONFIGPOOLS,
    MACHINECONFIGURATIONS,
    OSIMAGESTREAMS,
    ROLLOUTPOLICIES,
    Resource,
)


@pytest.mark.parametrize(
    ("resource", "spec", "said"),
    [
        (MACHINECONFIGPOOLS, {"maxUnavailable": [1]}, "maxUnavailable"),
        (MACHINECONFIGPOOLS, {"paused": "yes"}, "paused"),
        (MACHINECONFIGPOOLS, {"pinnedImageSets": [{"name": "A_"}]}, "pinnedImageSets"),
        (MACHINECONFIGPOOLS, {"osImageStream": {}}, "osImageStream.name"),
        (MACHINECONFIGPOOLS, {"osImage": "registry.example.com/os:latest"}, "spec.osImage"),
        (MACHINECONFIGPOOLS, {"osImageTag": {"follow": True}}, "osImageTag.name"),
        (MACHINECONFIGPOOLS, {"osImageTag": {"name": "os:stable"}}, "osImageTag.name"),
        (MACHINECONFIGPOOLS, {"imageFiles": "Both"}, "imageFiles"),
        (MACHINECONFIGPOOLS, {"rolloutPolicy": ""}, "rolloutPolicy"),
        (ROLLOUTPOLICIES, {"canary": {"nodes": 0}}, "canary.nodes"),
        (ROLLOUTPOLICIES, {"waves": ["110%"]}, r"waves\[0\]"),
        (ROLLOUTPOLICIES, {"soak": "5 min"}, "soak"),
        (ROLLOUTPOLICIES, {"maxFailures": -1}, "maxFailures"),
        (
            ROLLOUTPOLICIES,
            {"windows": [{"days": ["Sat"], "start": "1:00", "duration": "4h"}]},
            "timeZone",
        ),
        (
            # The misspelt field is dropped before the validation.
            ROLLOUTPOLICIES,
            {"windows": [{"day": ["Sat"], "start": "1:00", "duration": "4h", "timeZone": "UTC"}]},
            "days: Required value",
        ),
        (ROLLOUTPOLICIES, {"alerts": {"url": "prometheus", "names": ["a"]}}, "alerts.url"),
        (ROLLOUTPOLICIES, {"healthMode": "off"}, "healthMode"),
        (
            MACHINECONFIGURATIONS,
            {"nodeDisruptionPolicy": {"files": [{"path": "/etc/x", "actions": []}]}},
            "actions",
        ),
        (CONTROLLERCONFIGS, {"baseOSContainerImage": 1}, "baseOSContainerImage"),
        (MACHINECONFIGNODES, {"node": {"name": "a"}}, "configVersion"),
        (
            MACHINECONFIGNODES,
            {"node": {"name": "a"}, "pool": {"name": "A_"}, "configVersion": {"desired": "x"}},
            "pool.name",
        ),
    ],
)
def test_invalid_object_is_rejected_by_the_crds(
    objects: Objects, resource: Resource, spec: Json, said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        objects.make(resource, spec=spec)


def test_valid_pool_is_stored_unchanged(objects: Objects) -> None:
    spec: Json = {
        "machineConfigSelector": {
            "matchExpressions": [{"key": "role", "operator": "In", "values": ["a", "b"]}]
        },
        "nodeSelector": {"matchLabels": {"role": ""}},
        "paused": True,
        "maxUnavailable": "10%",
        "configuration": {"name": "x", "source": [{"kind": "MachineConfig", "name": "00"}]},
        "osImageTag": {"name": "registry.example.com/os:stable", "follow": True, "pullSecret": "a"},
        "osImageStream": {"name": "rhel-10"},
    }
    made = objects.make(MACHINECONFIGPOOLS, spec=spec)
    status: Json = {
        "observedGeneration": 1,
        "machineCount": 3,
        "osImageTag": {
            "tag": "registry.example.com/os:stable",
            "image": f"registry.example.com/os@sha256:{'1' * 64}",
            "resolvedAt": "2026-01-01T00:00:00Z",
            "earlier": ["registry.example.com/os@sha256:x"],
            "reason": "TagNotFound",
            "message": "x",
        },
        "conditions": [{"type": "Updated", "status": "True", "reason": "x"}],
    }
    written = objects.write_status(MACHINECONFIGPOOLS, status)

    assert made["spec"] == spec
    assert written["status"] == status


def test_digest_and_tag_of_a_pool_exclude_each_other(real_objects: Objects) -> None:
    spec: Json = {
        "osImage": f"registry.example.com/os@sha256:{'1' * 64}",
        "osImageTag": {"name": "registry.example.com/os:stable"},
    }
    with pytest.raises(InvalidError, match="exclude each other"):
        real_objects.make(MACHINECONFIGPOOLS, spec=spec)


POLICY: Json = {
    "canary": {"nodes": 2, "soak": "1h30m", "nodeSelector": {"matchLabels": {"canary": ""}}},
    "waves": [5, "50%"],
    "soak": "90s",
    "maxFailures": 3,
    "rebootTimeout": "20m",
    "order": "spread",
    "prestage": {"maxParallel": 7},
    "windows": [{"days": ["Sat"], "start": "1:20", "duration": "4h", "timeZone": "Europe/Berlin"}],
    "fleetLock": {"url": "http://locks.example.com", "group": "workers"},
    "alerts": {
        "url": "https://prometheus.example.com",
        "names": ["ApiErrors"],
        "secret": "prometheus",
    },
    "healthMode": "Report",
    "resume": {"worker": "1"},
}


def test_valid_policy_is_stored_unchanged_and_parsed(objects: Objects) -> None:
    made = objects.make(ROLLOUTPOLICIES, spec=POLICY)
    assert made["spec"] == POLICY
    assert ObservedPolicy.from_json(made).error is None


def test_objects_of_a_policy_can_be_removed_by_apply(objects: Objects) -> None:
    for spec in (POLICY, {"maxFailures": 1}):
        assert objects.apply(ROLLOUTPOLICIES, spec=spec)["spec"] == spec


def test_node_disruption_policy_applies_without_a_status(objects: Objects) -> None:
    actions = [{"type": "Restart", "restart": {"serviceName": "chronyd.service"}}]
    files = [{"path": "/etc/chrony.conf", "actions": actions}]
    made = objects.make(MACHINECONFIGURATIONS, spec={"nodeDisruptionPolicy": {"files": files}})
    found = ClusterDisruptionPolicy.from_json(made)
    assert found.is_settled
    assert found.policy.files[-1].actions == (RestartPolicyAction("chronyd.service"),)


def test_controllerconfig_keeps_unknown_fields(objects: Objects) -> None:
    spec: Json = {"baseOSContainerImage": "x", "infra": {"status": {"platform": "None"}}}
    assert objects.make(CONTROLLERCONFIGS, spec=spec)["spec"] == spec


def test_release_images_of_a_machineconfignode_are_stored_unchanged(objects: Objects) -> None:
    objects.make(MACHINECONFIGNODES, spec=machine_config_node(objects.name))
    release = {
        "name": "ocp-release-bundle-4.22.0-x86_64",
        "image": f"localhost:22625/openshift/release@sha256:{'a' * 64}",
        "conditions": [
            {
                "type": "Available",
                "status": "True",
                "reason": "Installed",
                "message": "",
                "lastTransitionTime": "2026-11-22T00:00:00Z",
            }
        ],
    }
    status = {"configVersion": {"desired": "x"}, "internalReleaseImage": {"releases": [release]}}
    found = objects.write_status(MACHINECONFIGNODES, status)
    assert found["status"] == status


def machine_config_node(name: str) -> Json:
    return {"node": {"name": name}, "pool": {"name": "a"}, "configVersion": {"desired": "x"}}


def policy_of(*actions: Json) -> Json:
    files: Any = [{"path": "/etc/x", "actions": list(actions)}]
    return {"nodeDisruptionPolicy": {"files": files}}


REBOOT, NONE = {"type": "Reboot"}, {"type": "None"}
UNIT: Json = {"serviceName": "a.service"}


@pytest.mark.parametrize(
    ("resource", "spec", "said"),
    [
        (MACHINECONFIGNODES, machine_config_node("another"), "should match metadata.name"),
        (
            ROLLOUTPOLICIES,
            {"alerts": {"url": "http://a.example", "names": ["a"], "secret": "a"}},
            "the url must be an https URL",
        ),
        (MACHINECONFIGURATIONS, policy_of(REBOOT, {"type": "Drain"}), "Reboot must be the only"),
        (MACHINECONFIGURATIONS, policy_of(NONE, {"type": "Drain"}), "None must be the only"),
        (MACHINECONFIGURATIONS, policy_of({"type": "Reload"}), "reload is required"),
        (MACHINECONFIGURATIONS, policy_of({"type": "Restart"}), "restart is required"),
        (MACHINECONFIGURATIONS, policy_of({**NONE, "restart": UNIT}), "forbidden otherwise"),
    ],
)
def test_rule_of_a_kind_rejects_an_object(
    real_objects: Objects, resource: Resource, spec: Json, said: str
) -> None:
    with pytest.raises(InvalidError, match=said):
        real_objects.make(resource, spec=spec)


def synchronized(**counts: int) -> Json:
    names = ("available", "machine", "ready", "unavailable", "updated")
    found: Any = {"machineCount" if n == "machine" else f"{n}MachineCount": 2 for n in names}
    return {
        "poolSynchronizersStatus": [{"poolSynchronizerType": "PinnedImageSets", **found, **counts}]
    }


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (synchronized(machineCount=1), "must not exceed machineCount"),
        (synchronized(availableMachineCount=1), "must not exceed availableMachineCount"),
    ],
)
def test_rule_of_a_pool_rejects_a_status(real_objects: Objects, status: Json, said: str) -> None:
    real_objects.make(MACHINECONFIGPOOLS, spec={})
    real_objects.write_status(MACHINECONFIGPOOLS, synchronized())
    with pytest.raises(InvalidError, match=said):
        real_objects.write_status(MACHINECONFIGPOOLS, status)


def pinned(**generations: int) -> Json:
    return {"pinnedImageSets": [{"name": "a", **generations}]}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"observedGeneration": 1}, "observedGeneration must not decrease"),
        (pinned(desiredGeneration=1), "a generation must not decrease"),
        (pinned(currentGeneration=3, desiredGeneration=2), "must not be less than the current"),
        (pinned(lastFailedGeneration=1, desiredGeneration=2), "must have an error"),
    ],
)
def test_rule_of_a_machineconfignode_rejects_a_status(
    real_objects: Objects, status: Json, said: str
) -> None:
    real_objects.make(MACHINECONFIGNODES, spec=machine_config_node(real_objects.name))
    real_objects.write_status(
        MACHINECONFIGNODES, {"observedGeneration": 2, **pinned(desiredGeneration=2)}
    )
    with pytest.raises(InvalidError, match=re.escape(said)):
        real_objects.write_status(MACHINECONFIGNODES, status)


def test_status_and_spec_are_written_apart(objects: Objects) -> None:
    made: Any = objects.make(MACHINECONFIGPOOLS, spec={"paused": True}, status={"machineCount": 9})
    assert "status" not in made
    written: Any = objects.write_status(MACHINECONFIGPOOLS, {"machineCount": 3})
    assert written["metadata"]["generation"] == made["metadata"]["generation"]
    changed: Any = objects.apply(MACHINECONFIGPOOLS, spec={"maxUnavailable": 2})
    assert changed["metadata"]["generation"] == made["metadata"]["generation"] + 1
    assert changed["spec"] == {"paused": True, "maxUnavailable": 2}
    assert changed["status"] == {"machineCount": 3}


def test_field_outside_of_a_kind_is_dropped(objects: Objects) -> None:
    made = objects.make(MACHINECONFIGPOOLS, spec={"paused": True, "pausd": True})
    assert made["spec"] == {"paused": True}


def test_max_unavailable_is_judged_as_by_the_parser(objects: Objects) -> None:
    accepted = []
    for value, _ in MAX_UNAVAILABLE:
        try:
            objects.make(MACHINECONFIGPOOLS, spec={"maxUnavailable": value})
        except InvalidError:
            continue
        accepted.append(value)
        objects.remove()
    assert accepted == [value for value, is_valid in MAX_UNAVAILABLE if is_valid]


def test_stream_object_is_the_only_one_and_its_default_is_available(real_objects: Objects) -> None:
    image = f"registry.example.com/os@sha256:{'1' * 64}"
    status: Json = {
        "defaultStream": "a",
        "availableStreams": [{"name": "a", "osImage": image}],
    }
    with pytest.raises(InvalidError, match="expected the name cluster"):
        real_objects.make(OSIMAGESTREAMS, spec={"defaultStream": "a"})
    real_objects.name = "cluster"
    real_objects.make(OSIMAGESTREAMS, spec={"defaultStream": "x"})
    with pytest.raises(InvalidError, match="expected defaultStream to be one of availableStreams"):
        real_objects.write_status(OSIMAGESTREAMS, {**status, "defaultStream": "b"})
    assert real_objects.write_status(OSIMAGESTREAMS, status)["status"] == status
    with pytest.raises(InvalidError, match=r"one of status\.availableStreams"):
        real_objects.client.patch(OSIMAGESTREAMS, "cluster", {"spec": {"defaultStream": "y"}})
    real_objects.client.patch(OSIMAGESTREAMS, "cluster", {"spec": {"defaultStream": "a"}})


def test_policies_are_judged_as_by_the_parser(real_objects: Objects) -> None:
    for spec in [*VALID_POLICIES, *REJECTED_BY_THE_CONTROLLER]:
        assert real_objects.make(ROLLOUTPOLICIES, spec=spec)["spec"] == spec
        real_objects.remove()
    accepted = []
    for spec in [*INVALID_POLICIES, *REJECTED_BY_RULES]:
        try:
            real_objects.make(ROLLOUTPOLICIES, spec=spec)
        except InvalidError:
            continue
        accepted.append(spec)
        real_objects.remove()
    # Kubernetes 1.30 does not check the format of an integer; the controller does.
    too_large = [{"maxFailures": 2**31}, {"prestage": {"maxParallel": 2**31}}]
    assert accepted in ([], too_large)
