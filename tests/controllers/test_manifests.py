"""The output of ``treenail-controller manifests``."""

from typing import Any

import pytest

from tests.granted_verbs import iter_granted_verbs
from treenail.api import documents as yaml_documents
from treenail.cli.controller.main import create_parser, main
from treenail.manifests import installation
from treenail.manifests.ignition_server import build_server_documents
from treenail.manifests.installation import InstallOptions, build_documents


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["manifests", *arguments]) == 0
    text = capsys.readouterr().out
    return yaml_documents.load_documents(text, where="manifests")


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def test_printed_manifests_are_all_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == build_documents(InstallOptions())


def test_manifests_follow_the_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(
        capsys, "--enable", "drain", "--namespace", "ops", "--image", "r.example.com/c@sha256:1"
    )
    (deployment,) = of_kind(found, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (role,) = [
        each
        for each in of_kind(found, "ClusterRole")
        if each["metadata"]["name"] == "treenail-controller"
    ]

    assert container["image"] == "r.example.com/c@sha256:1"
    assert container["args"] == ["run", "--enable=drain", "--metrics=:8080"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        "daemonsets",
        "machineconfignodes",
        "machineconfignodes/status",
        "nodes",
        "poddisruptionbudgets",
        "pods",
        "pods/eviction",
    }
    (namespace,) = of_kind(found, "Namespace")
    assert namespace["metadata"]["name"] == "ops"
    placed = {each["metadata"].get("namespace") for each in found}
    assert placed == {None, "default", "ops"}
    subjects = [
        subject
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for each in of_kind(found, kind)
        for subject in each["subjects"]
        if subject["kind"] == "ServiceAccount"
    ]
    assert {subject["namespace"] for subject in subjects} == {"ops"}


def test_only_agent_prints_access_of_nodes_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "--only", "agent")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [
        ("ClusterRole", "treenail-node"),
        ("ClusterRoleBinding", "treenail-node"),
        ("Role", "treenail-node"),
        ("RoleBinding", "treenail-node"),
        ("ValidatingAdmissionPolicy", "treenail-node"),
        ("ValidatingAdmissionPolicyBinding", "treenail-node"),
    ]


def test_node_may_list_no_config_and_get_no_machineconfignode() -> None:
    (role,) = [
        each
        for each in build_documents(InstallOptions())
        if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", "treenail-node")
    ]
    granted = set(iter_granted_verbs(role["rules"]))
    group = "machineconfiguration.openshift.io"
    assert {verb for resource, verb in granted if resource == f"machineconfigs.{group}"} == {"get"}
    assert {entry for entry in granted if entry[0].startswith("machineconfignodes")} == {
        (f"machineconfignodes/status.{group}", "patch")
    }


NO_LABELS = ["Foo_Bar", "", "-a", "a-", "a.b", "a" * 64, "a\n"]
NO_SECRETS = ["Key_1", "a/b", ".a", "a" * 254, "a\n"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        *((f"--enable={names}", "") for names in ("", ",")),
        ("--enable=drain,reboot", "render, rollout, drain"),
        *((f"--namespace={name}", "expected at most 63 lower-case letters, digits and dashes")
          for name in NO_LABELS),
        *((f"--signing-key-secret={name}", "expected the name of a Secret") for name in NO_SECRETS),
    ],
)  # fmt: skip
def test_invalid_argument_is_rejected(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["manifests", argument])
    assert ended.value.code == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--namespace", "--build-namespace"])
def test_install_in_another_namespace_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["manifests", "--enable", "build,install"]
    assert main([*arguments, f"{option}=ops"]) == 64
    found = " ".join(capsys.readouterr().err.split())
    assert f"cannot enable install with {option} ops" in found
    assert f"leave {option} out" in found
    assert main(["manifests", "--enable", "build", f"{option}=ops"]) == 0
    assert main([*arguments, "--build-namespace=openshift-machine-config-operator"]) == 0


def test_replicas_prefer_different_nodes_and_zones() -> None:
    (deployment,) = of_kind(build_documents(InstallOptions()), "Deployment")
    affinity = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    preferred = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(each["weight"], each["podAffinityTerm"]["topologyKey"]) for each in preferred] == [
        (100, "kubernetes.io/hostname"),
        (50, "topology.kubernetes.io/zone"),
    ]


def test_pods_meet_the_restricted_pod_security_standard() -> None:
    (deployment,) = of_kind(build_documents(InstallOptions()), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert deployment["spec"]["replicas"] == 2
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


@pytest.mark.parametrize(
    ("arguments", "namespaces"),
    [
        ((), None),
        (("--monitoring",), ["monitoring"]),
        (("--metrics-from", "openshift-monitoring,ops"), ["openshift-monitoring", "ops"]),
        (("--monitoring", "--metrics-from", "ops"), ["ops"]),
    ],
)
def test_network_policy_admits_only_prometheus_to_the_metrics(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], namespaces: list[str] | None
) -> None:
    found = printed(capsys, *arguments)
    (policy,), (deployment,) = of_kind(found, "NetworkPolicy"), of_kind(found, "Deployment")
    spec = policy["spec"]
    assert spec["podSelector"] == deployment["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress"]
    if namespaces is None:
        assert "ingress" not in spec
        return
    (rule,) = spec["ingress"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (served,) = [each["name"] for each in container["ports"] if each["containerPort"] == 8080]
    assert rule["ports"] == [{"port": served, "protocol": "TCP"}]
    (source,) = rule["from"]
    (label,) = source["namespaceSelector"]["matchExpressions"]
    assert label == {
        "key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces
    }  # fmt: skip


def test_page_is_served_on_the_loopback_interface_of_the_pods(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (deployment,) = of_kind(printed(capsys, "--web"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--web=127.0.0.1:8081"
    assert {"name": "web", "containerPort": 8081} in container["ports"]
    assert main(["manifests", "--only", "agent", "--web"]) == 64
    assert "8081" not in str(printed(capsys))


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        # The pods would refuse the same options at their start.
        (["--enable=render,drain", "--web"], "add rollout to --enable"),
        (["--enable=render,drain", "--signing-key-secret=key"], "add build to --enable"),
        (["--enable=build", "--only=agent", "--signing-key-secret=key"], "add build to --enable"),
    ],
)
def test_option_without_its_controller_is_refused(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", *arguments]) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    assert remedy in captured.err


def test_signing_key_reaches_the_controller_as_a_file_of_its_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "--enable", "rollout,build", "--signing-key-secret", "image-signing")
    (deployment,) = of_kind(found, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    assert volume["secret"]["secretName"] == "image-signing"
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": mount["mountPath"], "readOnly": True}
    file = f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"
    assert f"--signing-key={file}" in pod["containers"][0]["args"]
    # Only root and the group of the process may read it.
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_server_alone_is_installed_in_a_namespace_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, "--enable", "serve", "--image", "r.example.com/c@sha256:1")
    assert of_kind(found, "Deployment") == []
    (namespace,) = of_kind(found, "Namespace")
    assert namespace["metadata"]["name"] == "treenail-ignition"
    (daemonset,) = of_kind(found, "DaemonSet")
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "r.example.com/c@sha256:1"
    assert container["args"][0] == "serve"
    assert pod["nodeSelector"] == {"node-role.kubernetes.io/control-plane": ""}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    (service,) = of_kind(found, "Service")
    assert service["spec"]["selector"] == daemonset["spec"]["selector"]["matchLabels"]


def test_server_of_hosted_clusters_writes_one_object_beside_each_control_plane(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planes = ("--control-plane=clusters-one", "--control-plane=clusters-two")
    found = printed(capsys, "--only=serve", *planes)
    assert [each["metadata"]["namespace"] for each in found if each["kind"] == "Role"] == [
        "clusters-one",
        "clusters-two",
    ]
    assert not [each for each in found if each["kind"].startswith("Cluster")]
    assert of_kind(found, "Role")[0]["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": ["treenail-ignition-reached"],
            "verbs": ["patch"],
        },
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]},
    ]
    (deployment,) = of_kind(found, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--hosted", "--namespace=clusters-one,clusters-two"]


@pytest.mark.parametrize("only", ["serve", "hosted", "nodepools", "hosted,nodepools"])
def test_permissions_for_no_namespace_are_an_error(
    only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manifests", f"--only={only}"]) == 64
    answer = capsys.readouterr()
    assert answer.out == ""
    assert f"cannot use --only {only} without --control-plane" in answer.err


def test_server_is_added_to_the_controllers(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--enable=drain,serve", "--serve-namespace=new-machines")
    (deployment,) = of_kind(found, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--enable=drain" in container["args"]
    (daemonset,) = of_kind(found, "DaemonSet")
    assert daemonset["metadata"]["namespace"] == "new-machines"


def test_server_reads_the_cluster_and_writes_two_objects_of_its_namespace() -> None:
    found = build_server_documents(InstallOptions())
    role, join, events = of_kind(found, "Role")
    assert join["metadata"]["namespace"] == "kube-system"
    assert set(iter_granted_verbs(join["rules"])) == {
        ("secrets", verb) for verb in ("create", "delete", "update")
    }
    assert events["metadata"]["namespace"] == "default"
    assert set(iter_granted_verbs(events["rules"])) == {("events", "create"), ("events", "patch")}
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": [resource],
            "verbs": verbs,
            "resourceNames": [name],
        }
        for resource, name, verbs in (
            ("configmaps", "treenail-ignition-requests", ["get", "update"]),
            ("secrets", "treenail-ignition-tokens", ["get", "list", "patch", "watch"]),
        )
    ]
    (cluster_role,) = of_kind(found, "ClusterRole")
    granted = set(iter_granted_verbs(cluster_role["rules"]))
    assert {verb for _, verb in granted} == {"get", "list", "watch"}
    # The contents of configs are not kept in memory.
    (config,) = (resource for resource, verb in granted if verb == "get")
    assert config.startswith("machineconfigs.")
    assert "secrets" not in {resource for resource, _ in granted}


@pytest.mark.parametrize(
    ("enabled", "is_granted"), [("approve,serve", True), ("serve", True), ("drain,serve", False)]
)
def test_approve_changes_the_tokens_of_the_server(
    capsys: pytest.CaptureFixture[str], enabled: str, *, is_granted: bool
) -> None:
    found = printed(capsys, f"--enable={enabled}", "--serve-namespace=edge", "-n", "core")
    name = "treenail-ignition-approve"
    roles = [each for each in of_kind(found, "Role") if each["metadata"]["name"] == name]
    bindings = [each for each in of_kind(found, "RoleBinding") if each["metadata"]["name"] == name]
    assert bool(roles) == bool(bindings) == is_granted
    for role, binding in zip(roles, bindings, strict=True):
        assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "edge"
        assert set(iter_granted_verbs(role["rules"])) == {("secrets", "get"), ("secrets", "patch")}
        assert role["rules"][0]["resourceNames"] == ["treenail-ignition-tokens"]
        (account,) = binding["subjects"]
        assert (account["name"], account["namespace"]) == (installation.NAME, "core")
    has_argument = "--serve-namespace=edge" in str(of_kind(found, "Deployment"))
    assert has_argument == enabled.startswith("approve")


def test_applied_manifests_keep_the_stored_tokens() -> None:
    found = build_server_documents(InstallOptions())
    for kind in ("Secret", "ConfigMap"):
        (stored,) = of_kind(found, kind)
        assert not stored.keys() & {"data", "stringData", "binaryData"}


def test_monitoring_without_a_controller_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifests", "--enable=serve", "--monitoring"]) == 64
    assert "without a controller" in capsys.readouterr().err


def read_arguments(found: list[dict[str, Any]], kind: str) -> list[str]:
    (workload,) = of_kind(found, kind)
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container["args"]


def test_server_gets_the_options_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(
        capsys, "--enable=rollout,serve", "--tokens=ask", "--image-annotation=desiredImage",
        "--registry-needs-cluster=Registry.svc:5000", "--registry-needs-cluster=r.example.com",
    )  # fmt: skip
    arguments = read_arguments(found, "DaemonSet")
    assert arguments[-4:] == [
        "--tokens=ask",
        "--image-annotation=desiredImage",
        "--registry-needs-cluster=registry.svc:5000",
        "--registry-needs-cluster=r.example.com",
    ]
    # Nodes have one spelling.
    assert "--image-annotation=desiredImage" in read_arguments(found, "Deployment")
    for kind in ("DaemonSet", "Deployment"):
        create_parser().parse_args(read_arguments(found, kind))


def test_server_requires_tokens_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_arguments(printed(capsys, "--enable=serve"), "DaemonSet")[-1] == "--tokens=require"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tokens=off",),
        ("--registry-needs-cluster=r.example.com",),
        ("--enable=serve", "--only=agent", "--tokens=off"),
    ],
)
def test_option_of_the_server_without_it_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(["manifests", *arguments]) == 64
    printed = capsys.readouterr().err
    assert "without the Ignition server" in printed
    assert "add serve to --enable" in printed
