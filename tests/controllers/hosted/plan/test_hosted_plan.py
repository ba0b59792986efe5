"""Plans of NodePools: inputs of the hash, pace, effects in place, bad input, the command."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi
from treenail.api.machineconfig import MachineConfig
from treenail.cli.controller import main as command
from treenail.controllers.hosted.plan import hosted_plan
from treenail.controllers.hosted.plan.hosted_plan import HostedPlan
from treenail.errors import ConfigError
from treenail.kube.resources import (
    CONFIGMAPS,
    CUSTOMRESOURCEDEFINITIONS,
    HOSTEDCLUSTERS,
    MACHINES,
    NODEPOOLS,
)
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
NOW = 1795860000.0  # 2026-11-28T10:00:00Z
OLD_MACHINES = dataclasses.replace(MACHINES, version="v1beta1")
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
TRUST_BUNDLE = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"


def machine_config(name: str = "50-a", path: str = "/etc/a", text: str = "x", **spec: Any) -> Json:
    files = [{"path": path, "contents": {"source": f"data:,{text}"}}]
    config = {"ignition": {"version": "3.2.0"}, "storage": {"files": files}}
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": name},
        "spec": {"config": config, **spec},
    }


def config_map(*found: Json | str, name: str = "a") -> Json:
    texts = [each if isinstance(each, str) else yaml.safe_dump(each) for each in found]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "clusters"},
        "data": {"config": "---\n".join(texts)},
    }


KUBELET = {
    "apiVersion": "machineconfiguration.openshift.io/v1",
    "kind": "KubeletConfig",
    "metadata": {"name": "pods"},
    "spec": {"kubeletConfig": {"maxPods": 100}},
}
MIRRORS = {
    "apiVersion": "config.openshift.io/v1",
    "kind": "ImageDigestMirrorSet",
    "metadata": {"name": "mirrors"},
    "spec": {"imageDigestMirrors": [{"source": "quay.io/a", "mirrors": ["example.com/a"]}]},
}
NO_CONFIG = machine_config()


def make_pool(upgrade_type: str = "Replace", **spec: Any) -> Json:
    return hosted.make_node_pool("np", upgrade_type, **{"config": [{"name": "a"}], **spec})


def list_objects(*found: Json) -> dict[hosted_plan.Key, Json]:
    names = [(each["kind"], each["metadata"]) for each in found]
    keys = [(kind, meta["namespace"], meta["name"]) for kind, meta in names]
    return dict(zip(keys, found, strict=True))


def make_machines(count: int = 2) -> hosted_plan.Machines:
    found = [hosted.make_machine(f"m-{number}") for number in range(count)]
    return {"clusters/np": [clusterapi.ClusterMachine.from_json(each) for each in found]}


def plan_change(*changes: Json, present: tuple[Json, ...] = (), count: int = 2) -> HostedPlan:
    """Plan a change of the pool, the cluster and the ConfigMap, or of those that are present."""
    upgrade_type = next(
        (e["spec"]["management"]["upgradeType"] for e in changes if e["kind"] == "NodePool"),
        "Replace",
    )
    before = list_objects(
        make_pool(upgrade_type), hosted.make_hosted_cluster(), config_map(NO_CONFIG), *present
    )
    (planned,) = hosted_plan.plan_pools(
        before, list_objects(*changes), make_machines(count), now=NOW
    )
    return planned


def format_text(planned: HostedPlan) -> str:
    return "\n".join(hosted_plan.format_plan(planned))


PROXY: Json = {"configuration": {"proxy": {"httpsProxy": "http://proxy.example.com"}}}
TLS: Json = {"configuration": {"apiServer": {"tlsSecurityProfile": {"type": "Modern"}}}}


@pytest.mark.parametrize(
    ("change", "causes", "uncertain"),
    [
        (make_pool(), [], []),
        (make_pool(replicas=5), [], []),
        (make_pool(nodeLabels={"a": "b"}, taints=[], nodeDrainTimeout="5m"), [], []),
        (make_pool(release={"image": "quay.io/new:4.23.0"}), ["spec.release.image"], []),
        (make_pool(osImageStream={"name": "rhel-9"}), [], []),
        (make_pool(osImageStream={"name": "rhel-10"}), ["spec.osImageStream"], []),
        (make_pool(platform={"type": "AWS"}), [], ["spec.platform"]),
        (make_pool(tuningConfig=[{"name": "t"}]), [], ["spec.tuningConfig"]),
        (make_pool(newField=1), [], ["spec.newField"]),
        (make_pool("InPlace"), [], ["spec.management.upgradeType"]),
        (
            make_pool(annotations={"hypershift.openshift.io/haproxy-image": "x"}),
            [],
            ["annotation hypershift.openshift.io/haproxy-image"],
        ),
        (make_pool(annotations={"example.com/note": "x"}), [], []),
        (hosted.make_hosted_cluster(), [], []),
        (hosted.make_hosted_cluster(release={"image": "quay.io/example/release:5"}), [], []),
        (hosted.make_hosted_cluster(etcd={"x": 1}, channel="fast"), [], []),
        (
            hosted.make_hosted_cluster(pullSecret={"name": "other"}),
            ["HostedCluster spec.pullSecret"],
            [],
        ),
        (
            hosted.make_hosted_cluster(additionalTrustBundle={"name": "ca"}),
            ["HostedCluster spec.additionalTrustBundle"],
            [],
        ),
        (hosted.make_hosted_cluster(sshKey={"name": "new"}), ["HostedCluster spec.sshKey"], []),
        (
            hosted.make_hosted_cluster(imageContentSources=[{"source": "quay.io"}]),
            ["HostedCluster spec.imageContentSources"],
            [],
        ),
        (hosted.make_hosted_cluster(**PROXY), ["HostedCluster spec.configuration.proxy"], []),
        (
            hosted.make_hosted_cluster(configuration={"image": {"registrySources": {}}}),
            ["HostedCluster spec.configuration.image"],
            [],
        ),
        (hosted.make_hosted_cluster(configuration={"oauth": {"x": 1}}), [], []),
        (hosted.make_hosted_cluster(**TLS), [], []),
        (hosted.make_hosted_cluster(platform={"type": "AWS"}), [], ["HostedCluster spec.platform"]),
        (config_map(NO_CONFIG), [], []),
        (config_map(yaml.safe_dump(NO_CONFIG, indent=4) + "# comment\n"), [], []),
        (
            config_map(machine_config(text="y")),
            ["MachineConfig 50-a (ConfigMap a, document 1)"],
            [],
        ),
        (
            config_map(NO_CONFIG, KUBELET),
            ["KubeletConfig pods (ConfigMap a, document 2)"],
            [],
        ),
        (config_map(""), ["MachineConfig 50-a (ConfigMap a, document 1)"], []),
        (make_pool(config=[{"name": "a"}, {"name": "a"}]), ["spec.config"], []),
    ],
)  # fmt: skip
def test_only_inputs_of_the_hash_replace_machines(
    change: Json, causes: list[str], uncertain: list[str]
) -> None:
    planned = plan_change(change, present=(make_pool(),))
    assert (list(planned.causes), list(planned.uncertain)) == (causes, uncertain)
    is_replaced = bool(causes or uncertain)
    assert planned.effect in (("Replace", "UpdateInPlace") if is_replaced else ("Nothing",))
    assert planned.machine_count == (2 if is_replaced else 0)
    assert planned.problems == ()
    text = format_text(planned)
    if is_replaced:
        assert ("assume that 2 machines are" in text) is (not causes)
    else:
        assert text == (
            "NodePool clusters/np (Replace): no machine is replaced or rebooted: the input of its "
            "hash is the same"
        )


@pytest.mark.parametrize("name", ["release", "controlPlaneRelease"])
def test_release_of_the_cluster_may_replace_machines_with_a_proxy(name: str) -> None:
    change = hosted.make_hosted_cluster(**{**PROXY, name: {"image": "new"}})
    planned = plan_change(change, present=(hosted.make_hosted_cluster(**PROXY),))
    assert planned.causes == ()
    assert planned.uncertain == ("HostedCluster spec.release, because of its proxy",)


@pytest.mark.parametrize(
    ("version", "stream", "is_rolled"),
    [
        ("4.22.0", "rhel-9", False),
        ("5.0.1", "rhel-9", True),
        ("5.0.1", "rhel-10", False),
        ("5.1.0-rc.1", "rhel-10", False),
        ("", "rhel-9", True),
    ],
)
def test_default_stream_of_the_version_replaces_nothing(
    version: str, stream: str, *, is_rolled: bool
) -> None:
    change = make_pool(osImageStream={"name": stream})
    planned = plan_change(change, present=(hosted.with_status(make_pool(), version=version),))
    assert (planned.effect == "Replace") is is_rolled


@pytest.mark.parametrize(
    ("version", "is_rolled"), [("4.22.9", False), ("4.23.0", True), ("", True)]
)
def test_tls_profile_is_an_input_from_4_23_on(version: str, *, is_rolled: bool) -> None:
    pool = hosted.with_status(make_pool(), version=version)
    planned = plan_change(hosted.make_hosted_cluster(**TLS), present=(pool,))
    assert (planned.effect == "Replace") is is_rolled


def test_applied_file_removes_what_it_had_and_keeps_defaults_of_the_server() -> None:
    last = {"spec": {"config": [{"name": "a"}], "arch": "amd64"}}
    live = make_pool(arch="amd64", annotations={LAST_APPLIED: json.dumps(last)})
    written = make_pool(arch="amd64")
    del written["spec"]["config"]
    planned = plan_change(written, present=(live,))
    assert planned.causes == ("MachineConfig 50-a (ConfigMap a, document 1)",)
    # Without the annotation the list stays, as it does on the API server.
    assert plan_change(written, present=(make_pool(arch="amd64"),)).effect == "Nothing"
    del written["spec"]["platform"], written["spec"]["arch"]
    assert plan_change(written, present=(make_pool(arch="amd64"),)).effect == "Nothing"


def limits(surge: int | str | None, unavailable: int | str | None) -> Json:
    found = {"maxSurge": surge, "maxUnavailable": unavailable}
    rolling = {name: value for name, value in found.items() if value is not None}
    return {"replace": {"strategy": "RollingUpdate", "rollingUpdate": rolling}}


ROLLED: Json = {"release": {"image": "new"}}
ON_DELETE = {"replace": {"strategy": "OnDelete"}}
CONDUCTED = {hosted_key.ROLLOUT_POLICY: "slow"}


@pytest.mark.parametrize(
    ("management", "more", "pace"),
    [
        ({}, {}, "at most 1 more and 0 fewer machines at a time (maxSurge 1, maxUnavailable 0)"),
        (limits("25%", "25%"), {"replicas": 5}, "at most 2 more and 1 fewer machines"),
        (limits("0%", "10%"), {"replicas": 5}, "at most 0 more and 1 fewer machines"),
        (limits(0, 0), {}, "at most 0 more and 1 fewer machines"),
        (limits(None, "200%"), {"replicas": 5}, "at most 1 more and 10 fewer machines"),
        (limits("50%", 0), {"replicas": None, "autoScaling": {"min": 1, "max": 9}},
         "at most 1 more and 0 fewer"),
        (ON_DELETE, {}, "OnDelete: nothing happens until a user deletes a Machine; the pool"),
        (ON_DELETE, {"annotations": CONDUCTED},
         "until treenail, by RolloutPolicy slow, deletes a Machine"),
    ],
)  # fmt: skip
def test_pace_of_replace(management: Json, more: Json, pace: str) -> None:
    present = make_pool(**{name: value for name, value in more.items() if name != "annotations"})
    changed = make_pool(management=management, **ROLLED, **more)
    planned = plan_change(changed, present=(present,))
    assert planned.effect == "Replace"
    assert pace in planned.pace


@pytest.mark.parametrize(
    ("limit", "replicas", "pace"),
    [
        # HyperShift's TestInPlaceUpgradeMaxUnavailable, and values beside it.
        (None, 4, "1 at a time, selected by HyperShift (maxUnavailable 1)"),
        (1, 4, "1 at a time"),
        ("50%", 4, "2 at a time"),
        ("30%", 6, "1 at a time"),
        ("10%", 4, "1 at a time"),
        ("75%", 9, "6 at a time"),
        (0, 4, "1 at a time"),
        ("0%", 4, "1 at a time"),
        ("200%", 3, "6 at a time"),
        ("50%", None, "1 at a time"),
        (-1, 4, "maxUnavailable -1: HyperShift selects no node; nothing else selects nodes"),
        ("-10%", 4, "maxUnavailable -10%: HyperShift selects no node; nothing else"),
    ],
)
def test_pace_in_place(limit: int | str | None, replicas: int | None, pace: str) -> None:
    management = {} if limit is None else {"inPlace": {"maxUnavailable": limit}}
    found: Json = {"replicas": replicas, "management": management}
    planned = plan_change(make_pool("InPlace", **ROLLED, **found))
    assert planned.pace.startswith(pace)
    conducted = make_pool("InPlace", annotations=CONDUCTED, **ROLLED, **found)
    policy = "treenail, by RolloutPolicy slow, selects nodes"
    assert (policy in plan_change(conducted).pace) is pace.startswith("maxUnavailable")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"management": limits("many", 0)}, "found 'many'; correct the field"),
        ({"management": limits(1, "1")}, "spec.management: expected a count or a percentage"),
        ({"autoScaling": {"min": 1, "max": 2}}, "spec: expected replicas or autoScaling, "),
        ({"clusterName": "two"}, "HostedCluster clusters two does not exist; correct spec."),
        ({"replicas": "2"}, "spec.replicas: expected an integer, found a string; "),
        ({"config": [{"name": "gone"}]}, "ConfigMap gone does not exist; create it, or correct"),
        ({"config": [{"name": f"c-{n}"} for n in range(11)]}, "expected at most 10 ConfigMaps, "),
    ],
)  # fmt: skip
def test_invalid_pool_is_blocked_with_one_sentence(spec: Json, problem: str) -> None:
    planned = plan_change(make_pool(**spec))
    assert planned.effect == "Blocked"
    (actual,) = planned.problems
    assert problem in actual
    assert "HyperShift changes nothing until the problems are corrected" in format_text(planned)


def test_missing_config_map_that_is_created_rolls_by_assumption() -> None:
    pool = make_pool(config=[{"name": "new"}])
    before = list_objects(pool, hosted.make_hosted_cluster())
    changes = list_objects(config_map(NO_CONFIG, name="new"))
    (planned,) = hosted_plan.plan_pools(before, changes, make_machines(), now=NOW)
    assert planned.effect == "Replace"
    assert planned.uncertain == ("the present documents, which HyperShift refuses",)


def test_cluster_may_come_with_the_change() -> None:
    before = list_objects(make_pool(), config_map(NO_CONFIG))
    changes = list_objects(hosted.make_hosted_cluster())
    (planned,) = hosted_plan.plan_pools(before, changes, make_machines(), now=NOW)
    assert (planned.effect, planned.problems) == ("Nothing", ())


def test_status_in_a_file_has_no_effect() -> None:
    change = hosted.with_status(make_pool(osImageStream={"name": "rhel-10"}), version="5.0.0")
    assert plan_change(change, present=(make_pool(),)).causes == ("spec.osImageStream",)


def test_null_removes_a_field() -> None:
    change = {**config_map(), "data": {"config": None}}
    planned = plan_change(change)
    assert planned.causes == ("MachineConfig 50-a (ConfigMap a, document 1)",)
    assert "ConfigMap a: expected data.config, found none; " in planned.problems[0]


def test_reads_of_config_maps_are_bounded() -> None:
    names = [{"name": f"c-{number}"} for number in range(1000)]
    objects = list_objects(make_pool(config=names))
    (references,) = hosted_plan.find_pools(objects, objects).values()
    assert len(references) == 11


def test_unknown_field_is_a_problem_and_does_not_roll() -> None:
    planned = plan_change(config_map(machine_config(kernelArgs=["quiet"])))
    assert planned.effect == "Nothing"
    (problem,) = planned.problems
    assert problem.startswith("ConfigMap a, document 1, MachineConfig 50-a: spec.kernelArgs: ")


def test_problems_are_bounded() -> None:
    found = [machine_config(f"c-{number}", kernelArgs=["x"]) for number in range(50)]
    planned = plan_change(config_map(*found))
    assert (len(planned.problems), len(planned.causes)) == (20, 20)


def test_new_pool_creates_machines() -> None:
    pool = hosted.make_node_pool("other", replicas=3)
    (planned,) = hosted_plan.plan_pools(
        list_objects(hosted.make_hosted_cluster()), list_objects(pool), {}, now=NOW
    )
    assert (
        format_text(planned) == "NodePool clusters/other (Replace): is new: 3 machines are created"
    )


@pytest.mark.parametrize(
    ("kind", "until", "is_noted"),
    [
        ("NodePool", "true", True),
        ("NodePool", "2026-11-28T11:00:00Z", True),
        ("NodePool", "2026-11-28T09:00:00Z", False),
        ("HostedCluster", "true", True),
    ],
)
def test_pause_is_noted(kind: str, until: str, *, is_noted: bool) -> None:
    make = make_pool if kind == "NodePool" else hosted.make_hosted_cluster
    planned = plan_change(make(pausedUntil=until))
    note = f"paused: HyperShift changes nothing while the {kind} has spec.pausedUntil {until}"
    assert planned.notes == ((note,) if is_noted else ())


def plan_in_place(*documents: Json | str, present: tuple[Json | str, ...] = (NO_CONFIG,)) -> str:
    before = (make_pool("InPlace"), config_map(*present))
    change = config_map(*documents)
    return format_text(plan_change(change, present=before))


def test_plan_in_place_names_nodes_action_and_cause() -> None:
    assert plan_in_place(machine_config(text="y"), KUBELET) == (
        "NodePool clusters/np (InPlace): 2 machines are updated in place\n"
        "  because of KubeletConfig pods (ConfigMap a, document 2)\n"
        "  because of MachineConfig 50-a (ConfigMap a, document 1)\n"
        "  2 nodes from 0a0a0a0a:\n"
        "    drain and reboot\n"
        "      because file /etc/kubernetes/kubelet.conf changed (no policy for this path), from "
        "KubeletConfig pods: maxPods\n"
        "      because file /etc/a changed (no policy for this path), from MachineConfig 50-a\n"
        "  1 at a time, selected by HyperShift (maxUnavailable 1)"
    )


REBOOT, RELOAD = ["drain and reboot"], ["reload crio.service"]


@pytest.mark.parametrize(
    ("path", "actions"),
    [
        ("/etc/a", REBOOT),
        ("/etc/kubernetes/kubelet-ca.crt", []),
        ("/var/lib/kubelet/config.json", []),
        ("/etc/nmstate/openshift/cluster.yml", []),
        ("/etc/nmstate/openshift/sub/cluster.yml", REBOOT),
        (TRUST_BUNDLE, []),
        ("/etc/machine-config-daemon/no-reboot/containers-gpg.pub", RELOAD),
        ("/etc/containers/policy.json", RELOAD),
        ("/etc/containers/registries.d/a.yaml", RELOAD),
        ("/etc/containers/registries.d/sub/a.yaml", REBOOT),
        # These are rules of treenail's default policy, and HyperShift has no such rule.
        ("/etc/crio/policies/a.json", REBOOT),
        ("/etc/kubernetes/credential-providers/a.yaml", REBOOT),
    ],
)
def test_actions_are_those_of_the_daemon_in_hosted_clusters(path: str, actions: list[str]) -> None:
    change = config_map(machine_config(path=path))
    planned = plan_change(change, present=(make_pool("InPlace"), config_map("")))
    assert planned.change is not None
    assert [step.action for step in planned.change.steps] == actions
    assert planned.change.needs_drain is planned.change.needs_reboot is (actions == REBOOT)


def test_mirror_added_reloads_and_mirror_removed_drains() -> None:
    added = plan_in_place(NO_CONFIG, MIRRORS)
    assert "    reload crio.service\n" in added
    assert "drain" not in added
    assert "from ImageDigestMirrorSet mirrors: quay.io/a" in added
    removed = plan_in_place(NO_CONFIG, present=(NO_CONFIG, MIRRORS))
    assert "    reload crio.service\n" in removed
    assert "    drain\n" in removed


def test_unit_reboots_and_ssh_key_needs_nothing() -> None:
    config = machine_config()
    config["spec"]["config"]["systemd"] = {"units": [{"name": "kubelet.service", "enabled": True}]}
    assert "    drain and reboot\n" in plan_in_place(config)
    config = machine_config()
    users = [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA"]}]
    config["spec"]["config"]["passwd"] = {"users": users}
    assert "    no disruption: files are written in place\n" in plan_in_place(config)


def test_only_the_changed_mirror_set_is_named() -> None:
    other = {**MIRRORS, "metadata": {"name": "other"}}
    source = [{"source": "quay.io/b", "mirrors": ["example.com/b"]}]
    changed = {**MIRRORS, "spec": {"imageDigestMirrors": source}}
    text = plan_in_place(other, changed, present=(other, MIRRORS))
    assert "from ImageDigestMirrorSet mirrors: quay.io/b" in text
    assert "ImageDigestMirrorSet other" not in text


def test_comment_of_a_mirror_set_updates_nodes_without_disruption() -> None:
    text = yaml.safe_dump(MIRRORS)
    found = plan_in_place(NO_CONFIG, "# why\n" + text, present=(NO_CONFIG, text))
    assert "2 machines are updated in place" in found
    assert "no disruption" in found


@pytest.mark.parametrize(
    "change",
    [
        make_pool("InPlace", release={"image": "new"}),
        hosted.make_hosted_cluster(pullSecret={"name": "other"}),
        make_pool("InPlace", tuningConfig=[{"name": "t"}]),
    ],
)
def test_change_that_is_not_computed_assumes_drain_and_reboot(change: Json) -> None:
    planned = plan_change(change, present=(make_pool("InPlace"),))
    assert planned.effect == "UpdateInPlace"
    assert planned.change is not None
    assert planned.change.needs_drain
    assert planned.change.needs_reboot
    assert "    impact unknown, assuming drain and reboot: files of the release" in format_text(
        planned
    )


def test_platform_of_a_pool_in_place_changes_no_machine() -> None:
    change = make_pool("InPlace", platform={"type": "AWS"})
    assert plan_change(change, present=(make_pool("InPlace"),)).effect == "Nothing"


def test_change_that_the_daemon_refuses_is_a_problem() -> None:
    config = machine_config()
    config["spec"]["config"]["passwd"] = {"users": [{"name": "admin", "sshAuthorizedKeys": ["a"]}]}
    planned = plan_change(config_map(config), present=(make_pool("InPlace"),))
    (problem,) = planned.problems
    assert problem.startswith(
        "the daemon refuses it, and HyperShift stops the pool: invalid passwd"
    )


def test_machine_that_is_deleted_does_not_count_and_one_without_node_does() -> None:
    found = [hosted.make_machine("m-0"), hosted.make_machine("m-1", node="")]
    found.append(hosted.make_machine("m-2"))
    found[2]["metadata"]["deletionTimestamp"] = hosted.SINCE
    machines = {"clusters/np": [clusterapi.ClusterMachine.from_json(each) for each in found]}
    before = list_objects(make_pool("InPlace"), hosted.make_hosted_cluster(), config_map(NO_CONFIG))
    changes = list_objects(config_map(machine_config(text="y")))
    (planned,) = hosted_plan.plan_pools(before, changes, machines, now=NOW)
    assert planned.change is not None
    assert planned.change.nodes == ("m-0", "m-1 (no node)")


def test_pools_of_one_name_in_two_namespaces_are_planned_apart() -> None:
    other = copy.deepcopy(make_pool())
    other["metadata"]["namespace"] = "more"
    before = list_objects(make_pool(), other, hosted.make_hosted_cluster(), config_map(NO_CONFIG))
    changes = list_objects(config_map(machine_config(text="y")))
    plans = hosted_plan.plan_pools(before, changes, make_machines(), now=NOW)
    assert [(one.pool, one.machine_count) for one in plans] == [("clusters/np", 2)]


def test_objects_that_no_pool_names_are_listed() -> None:
    before = list_objects(make_pool(), hosted.make_hosted_cluster(), config_map(NO_CONFIG))
    unused = [config_map(name="loose"), hosted.make_hosted_cluster("two"), config_map(NO_CONFIG)]
    changes = list_objects(*unused)
    after = hosted_plan.apply_objects(before, changes)
    assert hosted_plan.list_unused(after, changes) == [
        "ConfigMap clusters/loose changes no node: no NodePool of the namespace names it",
        "HostedCluster clusters/two changes no node: no NodePool of the namespace names it",
    ]


@pytest.mark.parametrize(
    ("document", "message", "remedy"),
    [
        ({"kind": "Deployment", "apiVersion": "apps/v1"}, "found Deployment of apps/v1", "plan"),
        ({"kind": "NodePool", "apiVersion": "v1"}, "found NodePool of v1", "plan other kinds"),
        ({"kind": "Secret", "apiVersion": "v1"}, "found Secret of v1", "remove it: new "),
        (
            {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a"}},
            "a, document 1.metadata.namespace: expected a string, found nothing",
            "",
        ),
        ({"kind": "List", "apiVersion": "v1", "items": []}, "found no object", ""),
    ],
)  # fmt: skip
def test_other_objects_are_refused_with_their_place(
    document: Json, message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        hosted_plan.read_objects([("a", json.dumps(document))])
    assert message in str(caught.value)
    assert remedy in (caught.value.remedy or "")


def test_objects_of_a_list_are_read_and_duplicates_are_refused() -> None:
    both = {"kind": "List", "apiVersion": "v1", "items": [make_pool(), config_map()]}
    found = hosted_plan.read_objects([("a", json.dumps(both))])
    assert list(found) == [("NodePool", "clusters", "np"), ("ConfigMap", "clusters", "a")]
    texts = [("a", json.dumps(both)), ("b", json.dumps(make_pool()))]
    with pytest.raises(ConfigError, match="b, document 1: NodePool/clusters/np is a duplicate"):
        hosted_plan.read_objects(texts)


def test_daemon_policy_has_a_rule_for_each_known_path() -> None:
    config = MachineConfig.from_json(machine_config(path="/etc/containers/registries.d/a.yaml"))
    (rule,) = hosted_plan.build_daemon_policy(config).files
    assert rule.path == "/etc/containers/registries.d/a.yaml"


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_command_plans_a_change_on_a_management_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    def run(document: Json | str, *more: str) -> tuple[int, str, str]:
        path = tmp_path / "change.yaml"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        code = command.main(["plan", "--hosted", "-f", str(path), *arguments, *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    with LabServer(tmp_path / "api") as server, open_client(server.admin_kubeconfig) as client:
        arguments = ["--kubeconfig", str(server.admin_kubeconfig)]
        code, _, problem = run(make_pool())
        assert code == 1
        assert "the cluster has no NodePools" in problem
        assert "connect to the management cluster of HyperShift" in problem

        hosted.install_hosted_kinds(client, version)
        hosted.add_object(client, NODEPOOLS, make_pool("InPlace"))
        hosted.add_object(client, HOSTEDCLUSTERS, hosted.make_hosted_cluster())
        hosted.add_object(client, CONFIGMAPS, config_map(NO_CONFIG))
        machine = {**hosted.make_machine("m-0"), "apiVersion": f"cluster.x-k8s.io/{version}"}
        hosted.add_object(client, MACHINES if version == "v1beta2" else OLD_MACHINES, machine)
        before = client.list(CUSTOMRESOURCEDEFINITIONS).resource_version

        code, text, _ = run(config_map(machine_config(text="y")))
        assert code == 0
        assert text.startswith("NodePool clusters/np (InPlace): 1 machine is updated in place\n")
        assert "1 node from 0a0a0a0a:\n    drain and reboot\n" in text
        code, text, _ = run(config_map(machine_config(text="y")), "-o", "json")
        (found,) = json.loads(text)["nodePools"]
        assert (found["effect"], found["change"]["nodes"]) == ("UpdateInPlace", ["m-0"])
        assert found["change"]["needsDrain"] is True

        code, text, _ = run(make_pool("InPlace", config=[]))
        assert code == 0
        assert "  because of MachineConfig 50-a (ConfigMap a, document 1)\n" in text

        code, text, warning = run(config_map(name="loose"))
        assert (code, text) == (0, "")
        assert "ConfigMap clusters/loose changes no node" in warning
        code, text, _ = run(config_map("not: [yaml"))
        assert code == 1
        assert "problem: ConfigMap a, document 1, line " in text
        code, text, _ = run(config_map("x" * 2 * 1024 * 1024))
        assert code == 1
        assert "expected at most 1048576 bytes of data, found 2097152; divide" in text
        code, text, _ = run(make_pool("InPlace", config=[{"name": "gone"}]))
        assert code == 1
        assert "problem: ConfigMap gone does not exist" in text
        code, text, problem = run({"kind": "Secret", "apiVersion": "v1"})
        assert (code, text) == (1, "")
        assert "expected one of NodePool of " in problem
        for more in (["--live"], ["--pool", "np"]):
            assert run(make_pool(), *more)[0] == 64
        assert client.list(CUSTOMRESOURCEDEFINITIONS).resource_version == before
