"""Causes of a waiting NodePool: one table of facts, with what the user reads and the next step."""

import dataclasses
from typing import Any

import pytest

from tests.controllers.hosted.status.pool_samples import (
    AGED,
    NOW,
    TOKEN,
    YOUNG,
    make_facts,
    read_machine,
    read_node,
)
from tests.fixtures import hosted
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import nodepool
from treenail.api.object_meta import Condition
from treenail.controllers.hosted.status import causes

make_condition = hosted.make_condition
NEW, OLD = hosted.NEW_HASH, hosted.OLD_HASH
STARTING = {"phase": "Provisioning"}
DRAINED = {
    "phase": "Deleting", "nodeRef": {"name": "np-0"},
    "deletion": {"nodeDrainStartTime": AGED},
    "conditions": [make_condition("Deleting", "True", "DrainingNode", "Pod ns/db: no budget")],
}  # fmt: skip
OLD_DRAINED = {
    "phase": "Deleting", "nodeRef": {"name": "np-0"},
    "deprecated": {"v1beta1": {"conditions": [
        make_condition("DrainingSucceeded", "False", "DrainingFailed", "pod ns/db"),
    ]}},
}  # fmt: skip


def make_cluster(*conditions: Any, **spec: Any) -> nodepool.HostedCluster:
    """A cluster whose desired release differs from the one of its spec."""
    document = hosted.make_hosted_cluster(**spec)
    document["status"]["version"]["desired"]["image"] = "quay.io/example/release:4.21.0"
    return nodepool.HostedCluster.from_json(hosted.with_status(document, *conditions))


HELD = make_cluster(
    make_condition("Progressing", "False", "Blocked", "ClusterVersionUpgradeable is false"),
    make_condition("ClusterVersionUpgradeable", "False", "AdminAckRequired", "remove v1beta3"),
)
STOPPED = {hosted_key.UPGRADE_STOPPED: "Node np-0 in nodepool degraded: disk\x1b[2J full"}
NODES = {
    "np-0": read_node("np-0", state="Degraded", reason="disk full", desiredConfig=NEW),
    "np-1": read_node("np-1", desiredDrain=f"drain-{NEW}", lastAppliedDrain=""),
}
NO_TOKEN: dict[str, Any] = {"token": None}
WAITING = (read_machine("np-0", NEW, node="", status=STARTING),)

DETACHING = {
    "phase": "Deleting", "nodeRef": {"name": "np-0"},
    "conditions": [make_condition("Deleting", "True", "WaitingForVolumeDetach", "pvc-1")],
    "deprecated": {"v1beta1": {"conditions": [make_condition("DrainingSucceeded", "True")]}},
}  # fmt: skip
UNREADY = {
    "phase": "Running", "nodeRef": {"name": "np-0"},
    "conditions": [
        make_condition("InfrastructureReady", "True"),
        {**make_condition("NodeHealthy", "False", "NodeNotReady"), "lastTransitionTime": YOUNG},
    ],
}  # fmt: skip
IGNITION = nodepool.HostedCluster.from_json(
    hosted.with_status(hosted.make_hosted_cluster(), ignitionEndpoint="ign.example.com")
)


def make_halted(kind: str) -> Condition:
    return Condition(kind, "True", "Halted", "node a is degraded", hosted.SINCE)


CASES: list[tuple[str, str, dict[str, Any], tuple[str, bool, str], str]] = [
    ("at rest", "Replace", {}, ("", False, ""), ""),
    ("at rest in place", "InPlace", {"target": OLD}, ("", False, ""), ""),
    (
        "paused",
        "Replace",
        {
            "pool": {"pausedUntil": "true"},
            "conditions": [make_condition("ReconciliationActive", "False", "ReconciliationPaused")],
        },
        ("Paused", True, hosted.SINCE),
        'patch nodepool np --type merge -p \'{"spec":{"pausedUntil":null}}\'',
    ),
    (
        "paused until later",
        "Replace",
        {"pool": {"pausedUntil": "2026-11-28T13:00:00Z"}},
        ("Paused", True, ""),
        "pausedUntil",
    ),
    (
        "paused until yesterday",
        "Replace",
        {"pool": {"pausedUntil": "2026-11-27T13:00:00Z"}},
        ("", False, ""),
        "",
    ),
    (
        "cluster paused",
        "Replace",
        {"cluster": make_cluster(pausedUntil="true")},
        ("Paused", True, ""),
        "patch hostedcluster one",
    ),
    (
        "bad pause",
        "Replace",
        {"pool": {"pausedUntil": "soon"}},
        ("InvalidPause", False, ""),
        "edit nodepool np",
    ),
    (
        "no cluster",
        "Replace",
        {"cluster": None},
        ("ClusterMissing", True, ""),
        "delete nodepool np",
    ),
    (
        "no cluster seen",
        "Replace",
        {"cluster": None, "unread": ("HostedClusters: forbidden",)},
        ("", False, ""),
        "",
    ),
    (
        "upgrade held",
        "Replace",
        {"cluster": HELD},
        ("UpgradeHeld", True, hosted.SINCE),
        f"force-upgrade-to={hosted.RELEASE}",
    ),
    (
        "upgrade held, pool of another release",
        "Replace",
        {"cluster": HELD, "pool": {"release": {"image": "quay.io/example/release:4.20.9"}}},
        ("", False, ""),
        "",
    ),
    (
        "core config, by the condition",
        "Replace",
        {
            "core_configs": None,
            "conditions": [
                make_condition(
                    "ValidMachineConfig",
                    "False",
                    "ValidationFailed",
                    "failed to get: expected 3 core ignition configs, found 2",
                )
            ],
        },
        ("MissingCoreConfig", True, hosted.SINCE),
        "get configmaps -l hypershift.openshift.io/core-ignition-config=true",
    ),
    (
        "core config, by the count",
        "Replace",
        {"core_configs": 1},
        ("MissingCoreConfig", True, ""),
        "logs",
    ),
    (
        "core config for mirrors",
        "Replace",
        {"core_configs": 2, "cluster": make_cluster(imageContentSources=[{"source": "a"}])},
        ("MissingCoreConfig", True, ""),
        "logs",
    ),
    ("core configs of a newer release", "Replace", {"core_configs": 2}, ("", False, ""), ""),
    (
        "bad config",
        "Replace",
        {
            "conditions": [
                make_condition("ValidMachineConfig", "False", "ValidationFailed", "kind x")
            ]
        },
        ("ValidMachineConfig", True, hosted.SINCE),
        "kubectl -n clusters edit nodepool np",
    ),
    (
        "unknown condition",
        "Replace",
        {"conditions": [make_condition("ValidFuture", "False", "Nope")]},
        ("ValidFuture", True, hosted.SINCE),
        "describe nodepool np",
    ),
    (
        "version skew",
        "Replace",
        {"conditions": [make_condition("SupportedVersionSkew", "False", "UnsupportedSkew")]},
        ("SupportedVersionSkew", False, hosted.SINCE),
        "edit nodepool np",
    ),
    (
        "no autoscaling",
        "Replace",
        {"conditions": [make_condition("AutoscalingEnabled", "False", "AsExpected")]},
        ("", False, ""),
        "",
    ),
    (
        "bad autoscaling",
        "Replace",
        {
            "conditions": [
                make_condition("AutoscalingEnabled", "False", "ValidationFailed", "min=0")
            ]
        },
        ("AutoscalingEnabled", True, hosted.SINCE),
        "correct spec.autoScaling",
    ),
    (
        "replicas and autoscaling",
        "Replace",
        {"pool": {"autoScaling": {"max": 3}}},
        ("ReplicasAndAutoscaling", False, ""),
        "remove one",
    ),
    (
        "a change that rolls no node",
        "Replace",
        {"conditions": [make_condition("ConfigUpdatePending", "True", "ManagementConfigDrift")]},
        ("ConfigUpdatePending", False, hosted.SINCE),
        "",
    ),
    (
        "degraded, by the MachineSet",
        "InPlace",
        {
            "target": NEW,
            "template": {"annotations": STOPPED},
            "conditions": [make_condition("UpdatingConfig", "False", "InplaceUpgradeFailed")],
        },
        ("NodeDegraded", True, hosted.SINCE),
        "--kubeconfig one.kubeconfig annotate node np-0 machineconfiguration.openshift.io/state-",
    ),
    (
        "degraded, by the node",
        "InPlace",
        {"target": NEW, "nodes": NODES},
        ("NodeDegraded", True, ""),
        "annotate node np-0 machineconfiguration.openshift.io/state-",
    ),
    (
        "degraded, and repaired",
        "InPlace",
        {"target": NEW, "template": {"annotations": STOPPED}, "nodes": {}},
        ("Updating", False, ""),
        "",
    ),
    (
        "stopped for another reason",
        "InPlace",
        {"target": NEW, "template": {"annotations": {hosted_key.UPGRADE_STOPPED: "no pods"}}},
        ("UpgradeStopped", True, ""),
        "",
    ),
    (
        "drain in place",
        "InPlace",
        {"target": NEW, "nodes": {"np-1": NODES["np-1"]}},
        ("NodeDraining", False, ""),
        "get poddisruptionbudgets -A",
    ),
    ("token gone", "Replace", NO_TOKEN, ("TokenMissing", False, ""), "logs deployment/operator"),
    (
        "token gone, Secrets not read",
        "Replace",
        {**NO_TOKEN, "token_name": ""},
        ("", False, ""),
        "",
    ),
    (
        "token gone, a machine waits",
        "Replace",
        {**NO_TOKEN, "machines": WAITING},
        ("TokenMissing", True, ""),
        "logs deployment/operator",
    ),
    (
        "token expired",
        "Replace",
        {"token": dataclasses.replace(TOKEN, expires_at=AGED)},
        ("TokenExpired", False, AGED),
        f"delete secret token-np-{OLD}",
    ),
    (
        "token with a malformed end",
        "Replace",
        {"token": dataclasses.replace(TOKEN, expires_at="soon")},
        ("TokenExpired", False, ""),
        "delete secret",
    ),
    (
        "token that ends later",
        "Replace",
        {"token": dataclasses.replace(TOKEN, expires_at="2026-11-28T12:00:01Z")},
        ("", False, ""),
        "",
    ),
    (
        "token not renewed",
        "Replace",
        {"token": dataclasses.replace(TOKEN, rotated_at="2026-11-28T00:30:00.5Z")},
        ("TokenNotRenewed", False, "2026-11-28T11:30:00Z"),
        "logs deployment/ignition-server",
    ),
    (
        "payload of a bad config",
        "Replace",
        {
            "token": dataclasses.replace(
                TOKEN, reason="InvalidConfig", message="token: eyJhbGciOi.x.y", has_payload=False
            ),
            "machines": WAITING,
        },
        ("PayloadMissing", True, AGED),
        "logs deployment/ignition-server",
    ),
    (
        "payload of Replace is not stored",
        "Replace",
        {"token": dataclasses.replace(TOKEN, has_payload=False)},
        ("", False, ""),
        "",
    ),
    (
        "payload of InPlace is stored",
        "InPlace",
        {"target": NEW, "token": dataclasses.replace(TOKEN, has_payload=False)},
        ("PayloadMissing", True, AGED),
        "logs",
    ),
    (
        "payload, by the condition",
        "Replace",
        {
            **NO_TOKEN,
            "token_name": "",
            "conditions": [make_condition("ValidGeneratedPayload", "False", "InvalidConfig", "x")],
        },
        ("PayloadMissing", False, hosted.SINCE),
        "logs",
    ),
    (
        "payload made since the condition",
        "Replace",
        {"conditions": [make_condition("ValidGeneratedPayload", "False", "InvalidConfig", "x")]},
        ("", False, ""),
        "",
    ),
    (
        "stale copy",
        "Replace",
        {"stale_copies": (f"user-data-np-{OLD}-userdata",)},
        ("StaleUserData", False, ""),
        f"kubectl -n clusters-one delete secret user-data-np-{OLD}-userdata",
    ),
    (
        "stale copy, a machine waits",
        "Replace",
        {"stale_copies": ("a",), "machines": WAITING},
        ("StaleUserData", True, ""),
        "delete secret a",
    ),
    (
        "endless drain",
        "Replace",
        {"machines": (read_machine("np-0", deleting=YOUNG, status=DRAINED),)},
        ("Draining", True, AGED),
        "annotate machine np-0 machine.cluster.x-k8s.io/exclude-node-draining=",
    ),
    (
        "endless drain of v1beta1",
        "Replace",
        {"machines": (read_machine("np-0", deleting=AGED, status=OLD_DRAINED),)},
        ("Draining", True, AGED),
        "exclude-node-draining=",
    ),
    (
        "young drain",
        "Replace",
        {"machines": (read_machine("np-0", deleting=YOUNG, status=OLD_DRAINED),)},
        ("Draining", False, YOUNG),
        "",
    ),
    (
        "deletion without a drain",
        "Replace",
        {"machines": (read_machine("np-0", deleting=AGED),)},
        ("Deleting", True, AGED),
        "describe machine np-0",
    ),
    (
        "failed machine",
        "Replace",
        {"machines": (read_machine("np-0", status={"phase": "Failed"}, node=""),)},
        ("MachineFailed", True, AGED),
        "describe machine np-0",
    ),
    (
        "machine starts",
        "Replace",
        {"machines": (read_machine("np-0", node="", status=STARTING, created=YOUNG),)},
        ("MachineStarting", False, YOUNG),
        "",
    ),
    (
        "machine does not join",
        "Replace",
        {"machines": WAITING},
        ("MachineStarting", True, AGED),
        "np-0",
    ),
    (
        "Ignition not reached",
        "Replace",
        {
            "cluster": IGNITION,
            "machines": WAITING,
            "conditions": [
                make_condition("ReachedIgnitionEndpoint", "False", "ignitionNotReached")
            ],
        },
        ("IgnitionNotReached", True, AGED),
        "curl -k https://ign.example.com/ignition",
    ),
    (
        "unready machine",
        "Replace",
        {
            "machines": (
                read_machine(
                    "np-0",
                    status={
                        "phase": "Running",
                        "nodeRef": {"name": "n"},
                        "conditions": [make_condition("NodeHealthy", "Unknown", "NodeGone")],
                    },
                ),
            )
        },
        ("MachineNotReady", True, hosted.SINCE),
        "describe machine np-0",
    ),
    (
        "no node selected",
        "InPlace",
        {"target": NEW, "template": {"limit": "-1"}},
        ("NoNodeSelected", True, ""),
        "correct spec.management",
    ),
    (
        "not conducted yet",
        "InPlace",
        {
            "target": NEW,
            "template": {"limit": "-1"},
            "pool": {"annotations": {hosted_key.ROLLOUT_POLICY: "slow"}},
        },
        ("NotConducted", False, ""),
        "manifests --enable hosted",
    ),
    (
        "conducted",
        "InPlace",
        {
            "target": NEW,
            "template": {"limit": "-1"},
            "pool": {"annotations": {hosted_key.ROLLOUT_POLICY: "slow"}},
            "conducted": (Condition("Degraded", "False"), make_halted("Updating")),
        },
        ("Updating", False, hosted.SINCE),
        "",
    ),
    (
        "stopped by its policy",
        "InPlace",
        {
            "target": NEW,
            "template": {"limit": "-1"},
            "pool": {"annotations": {hosted_key.ROLLOUT_POLICY: "slow"}},
            "conducted": (make_halted("Updating"), make_halted("Degraded")),
        },
        ("RolloutStopped", True, hosted.SINCE),
        "kubectl describe rolloutpolicy slow",
    ),
    (
        "conducted, and not read",
        "InPlace",
        {
            "target": NEW,
            "template": {"limit": "-1"},
            "pool": {"annotations": {hosted_key.ROLLOUT_POLICY: "slow"}},
            "conducted": None,
        },
        ("Updating", False, ""),
        "",
    ),
    (
        "replace by hand",
        "Replace",
        {"target": NEW, "template": {"strategy": "OnDelete"}},
        ("WaitsForDeletion", True, ""),
        "kubectl -n clusters-one delete machine np-0",
    ),
    (
        "rolling",
        "Replace",
        {"target": NEW, "conditions": [make_condition("UpdatingConfig", "True")]},
        ("Updating", False, hosted.SINCE),
        "",
    ),
    (
        "core config, as it was before",
        "Replace",
        {
            "conditions": [
                make_condition(
                    "ValidMachineConfig",
                    "True",
                    "AsExpected",
                    "expected 3 core ignition configs, found 2",
                )
            ]
        },
        ("", False, ""),
        "",
    ),
    (
        "core config, counted since",
        "Replace",
        {
            "conditions": [
                make_condition(
                    "ValidMachineConfig",
                    "False",
                    "ValidationFailed",
                    "expected 3 core ignition configs, found 2",
                )
            ]
        },
        ("MissingCoreConfig", True, hosted.SINCE),
        "logs",
    ),
    (
        "no pending change",
        "Replace",
        {"conditions": [make_condition("ConfigUpdatePending", "False")]},
        ("", False, ""),
        "",
    ),
    (
        "payload is unknown",
        "Replace",
        {
            **NO_TOKEN,
            "token_name": "",
            "conditions": [make_condition("ValidGeneratedPayload", "True")],
        },
        ("", False, ""),
        "",
    ),
    (
        "token without value",
        "Replace",
        {"token": dataclasses.replace(TOKEN, has_token=False)},
        ("PayloadMissing", False, AGED),
        "logs",
    ),
    (
        "payload not made yet",
        "Replace",
        {"token": dataclasses.replace(TOKEN, reason="", message="")},
        ("PayloadMissing", False, AGED),
        "logs",
    ),
    (
        "token of a time that Go did not write",
        "Replace",
        {"token": dataclasses.replace(TOKEN, rotated_at="yesterday")},
        ("", False, ""),
        "",
    ),
    (
        "drain is over",
        "Replace",
        {"machines": (read_machine("np-0", deleting=AGED, status=DETACHING),)},
        ("Deleting", True, AGED),
        "describe machine np-0",
    ),
    (
        "drain with a limit",
        "Replace",
        {
            "machines": (
                dataclasses.replace(
                    read_machine("np-0", deleting=AGED, status=OLD_DRAINED), drain_timeout_s=60.0
                ),
            )
        },
        ("Draining", True, AGED),
        "exclude-node-draining=",
    ),
    (
        "machine with a failure",
        "Replace",
        {"machines": (dataclasses.replace(read_machine("np-0"), failure="no quota"),)},
        ("MachineFailed", True, AGED),
        "describe machine np-0",
    ),
    (
        "unready for a short time",
        "Replace",
        {"machines": (read_machine("np-0", status=UNREADY),)},
        ("MachineNotReady", False, YOUNG),
        "",
    ),
    (
        "OnDelete, and only new machines",
        "Replace",
        {
            "target": NEW,
            "template": {"strategy": "OnDelete"},
            "machines": (read_machine("np-0", NEW),),
        },
        ("Updating", False, ""),
        "",
    ),
    (
        "many old machines",
        "Replace",
        {"target": NEW, "machines": tuple(read_machine(f"np-{n}") for n in range(9))},
        ("Updating", False, ""),
        "",
    ),
    (
        "one old machine",
        "Replace",
        {"target": NEW, "machines": (read_machine("np-0"), read_machine("np-1", NEW))},
        ("Updating", False, ""),
        "",
    ),
    (
        "drains that are done",
        "InPlace",
        {
            "target": NEW,
            "nodes": {
                "a": read_node("a", desiredDrain="drain-1", lastAppliedDrain="drain-1"),
                "b": read_node("b", desiredDrain="uncordon-1", lastAppliedDrain="drain-1"),
            },
        },
        ("Updating", False, ""),
        "",
    ),
]


TEXTS = {
    "bad pause": "is soon, which HyperShift ignores: it is no RFC 3339 time",
    "upgrade held": "ClusterVersionUpgradeable is false (AdminAckRequired: remove v1beta3)",
    "core config, by the condition": "HyperShift expects 3, and found 2",
    "core config, counted since": "HyperShift expects 3, and found 2; now there are 3",
    "core config for mirrors": "HyperShift expects at least 3, and 2 exist",
    "payload not made yet": "(511): the Ignition server has not made the config yet",
    "token without value": f"(511): token-np-{OLD} has no token",
    "endless drain": "np-0 is drained without a time limit: DrainingNode: Pod ns/db: no budget",
    "drain with a limit": "np-0 is drained: DrainingFailed: pod ns/db",
    "drain is over": "np-0 is deleted: WaitingForVolumeDetach: pvc-1",
    "failed machine": "machine np-0 failed: Failed",
    "machine with a failure": "machine np-0 failed: no quota",
    "unready for a short time": "machine np-0: NodeHealthy is False: NodeNotReady",
    "Ignition not reached": "np-0 has not joined yet; no machine has fetched its config",
    "not conducted yet": "by RolloutPolicy slow: HyperShift selects no node",
    "conducted": "RolloutPolicy slow conducts the rollout: Halted: node a is degraded",
    "stopped by its policy": "RolloutPolicy slow conducts the rollout: Halted: node a is degraded",
    "conducted, and not read": "conducts the rollout: HyperShift selects no node",
    "replace by hand": "replaces a machine when it is deleted; machines np-0, np-1 are old",
    "OnDelete, and only new machines": "the update begins",
    "many old machines": "machines np-0, np-1, np-2 and 6 more are old",
    "one old machine": "machine np-0 is old",
    "drains that are done": "the update begins",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_cause_has_facts_and_upstream_words(name: str) -> None:
    (case,) = (case for case in CASES if case[0] == name)
    found = causes.find_causes(make_facts(case[1], **case[2]), NOW)
    assert TEXTS[name] in found[0].message
    assert not found[0].message.endswith(":")


@pytest.mark.parametrize(
    ("upgrade_type", "changes", "expected", "step"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_first_cause_of_a_pool(
    upgrade_type: str, changes: dict[str, Any], expected: tuple[str, bool, str], step: str
) -> None:
    found = causes.find_causes(make_facts(upgrade_type, **changes), NOW)
    first = found[0] if found else causes.Cause("", "", "", "", is_blocking=False)
    assert (first.kind, first.is_blocking, first.since) == expected
    assert step in first.next_step
    assert bool(step) is bool(first.next_step)
    for cause in found:
        assert cause.message.isprintable()
        assert len(cause.message) <= 400
        assert "eyJ" not in cause.message


PROGRESSING = make_cluster(make_condition("Progressing", "True", "Progressing"))
BLOCKED = make_condition("Progressing", "False", "Blocked", "not upgradeable")


@pytest.mark.parametrize(
    ("upgrade_type", "changes", "expected"),
    [
        (
            "Replace",
            {"conditions": [make_condition(
                "ValidMachineConfig", "False", "ValidationFailed",
                "expected 3 core ignition configs, found 2",
            )]},
            [("MissingCoreConfig", True)],
        ),
        ("Replace", {**NO_TOKEN, "target": NEW}, [("TokenMissing", False), ("Updating", False)]),
        ("InPlace", {**NO_TOKEN, "target": NEW}, [("TokenMissing", True), ("Updating", False)]),
        ("Replace", {"cluster": PROGRESSING}, []),
        ("Replace", {"cluster": make_cluster(BLOCKED)}, [("UpgradeHeld", True)]),
        ("Replace", {"pool": {"replicas": None, "autoScaling": {"max": 3}}}, []),
        ("Replace", {"unread": ("Machines: forbidden",), "core_configs": None}, []),
        ("Replace", {"conditions": [make_condition("ValidArch", "Unknown", "Wait")]}, []),
    ],
)  # fmt: skip
def test_all_causes_of_a_pool(
    upgrade_type: str, changes: dict[str, Any], expected: list[tuple[str, bool]]
) -> None:
    found = causes.find_causes(make_facts(upgrade_type, **changes), NOW)
    assert [(cause.kind, cause.is_blocking) for cause in found] == expected


def test_pause_without_its_condition_has_no_time() -> None:
    active = make_condition("ReconciliationActive", "True")
    found = causes.find_causes(make_facts(pool={"pausedUntil": "true"}, conditions=[active]), NOW)
    assert (found[0].kind, found[0].since) == ("Paused", "")


def test_many_machines_are_counted() -> None:
    machines = tuple(read_machine(f"np-{n}", node="", status=STARTING) for n in range(9))
    found = causes.find_causes(make_facts(machines=machines), NOW)
    assert [cause.message for cause in found][-1] == "and 6 more machines"
    assert len(found) == 4


def test_name_of_a_node_cannot_change_the_command() -> None:
    nodes = {"x; rm -rf /": read_node("x; rm -rf /", state="Degraded")}
    found = causes.find_causes(make_facts("InPlace", target=NEW, nodes=nodes), NOW)
    assert "annotate node 'x; rm -rf /' machineconfiguration" in found[0].next_step


def test_long_text_is_cut() -> None:
    condition = make_condition("ValidMachineConfig", "False", "ValidationFailed", "x" * 100_000)
    found = causes.find_causes(make_facts(conditions=[condition]), NOW)
    assert len(found[0].message) == 400
