"""Containers as processes: their isolation, volumes, privileges and reports."""

import base64
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.fixtures.processes import find_processes
from tests.lab.kubelet.cluster import NAMESPACE, ContainerCluster
from tests.waiting import wait_until
from treenail.errors import NotFoundError
from treenail.kube.resources import CONFIGMAPS, PODS, SECRETS

pytestmark = pytest.mark.integration


def test_container_reports_exit_code_and_message(containers: ContainerCluster) -> None:
    ended = containers.run("a", "echo '{\"phase\": 1}' > /dev/termination-log; echo log; exit 64")
    assert (ended["exitCode"], ended["reason"]) == (64, "Error")
    assert ended["message"] == '{"phase": 1}\n'
    status = containers.read_status("a")
    assert status["phase"] == "Failed"
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "PodScheduled": "True",
        "PodReadyToStartContainers": "False",
        "Initialized": "True",
        "ContainersReady": "False",
        "Ready": "False",
    }
    assert containers.read_log("a") == "log\n"


def test_message_has_4096_bytes_at_most(containers: ContainerCluster) -> None:
    ended = containers.run("long", "head -c 5000 /dev/zero | tr '\\0' x > /dev/termination-log")
    assert (ended["exitCode"], len(ended["message"])) == (0, 4096)


def test_container_has_namespaces_of_its_own(containers: ContainerCluster) -> None:
    script = "echo $$ $(hostname) $(ls /sys/class/net | wc -l); ls /proc/*/comm | wc -l"
    assert containers.run("ns", script)["exitCode"] == 0
    first, second = containers.read_log("ns").splitlines()
    assert first == "1 ns 1"
    assert int(second) < 10


def test_only_the_registry_is_reachable(containers: ContainerCluster) -> None:
    api = containers.server.url.rpartition(":")[2]
    script = f"""
import socket
print(socket.create_connection(("127.0.0.1", {containers.port})).makefile().readline(), end="")
for address in (("127.0.0.1", {api}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 2)
    except OSError as error:
        print(type(error).__name__)
"""
    command = {"command": ["python3", "-c", script]}
    assert containers.run("net", "", command)["exitCode"] == 0
    assert containers.read_log("net").splitlines() == [
        "hello",
        "ConnectionRefusedError",
        "OSError",
    ]


def test_root_is_an_overlay_and_hides_the_lab(containers: ContainerCluster) -> None:
    place = containers.directory
    script = f"touch /usr/written && cat /etc/treenail-image && ls -A /tmp && ls {place}/api"
    assert containers.run("root", script)["exitCode"] != 0
    assert not Path("/usr/written").exists()
    assert containers.read_log("root").startswith("lab")
    assert "kubeconfig" not in containers.read_log("root")


def test_image_has_this_python_with_treenail(containers: ContainerCluster) -> None:
    command = {"command": ["python", "-c", "import treenail.encoding.codec, yaml; print('ok')"]}
    containers.run("py", "", command)
    assert containers.read_log("py") == "ok\n"


def test_containers_have_the_volumes_of_their_pod(containers: ContainerCluster) -> None:
    secret = {"metadata": {"name": "s"}, "data": {"key": base64.b64encode(b"secret").decode()}}
    files = {"metadata": {"name": "c"}, "data": {"a": "one", "b": "two"}}
    containers.client.create(SECRETS, secret, namespace=NAMESPACE)
    containers.client.create(CONFIGMAPS, files, namespace=NAMESPACE)
    volumes = [
        {"name": "work", "emptyDir": {}},
        {"name": "s", "secret": {"secretName": "s", "defaultMode": 0o400}},
        {"name": "c", "configMap": {"name": "c", "items": [{"key": "b", "path": "x/y"}]}},
    ]
    mounts = [{"name": "work", "mountPath": "/work-dir"}]
    inputs = [
        {"name": "s", "mountPath": "/inputs/s", "readOnly": True},
        {"name": "c", "mountPath": "/inputs/c/y", "subPath": "x/y", "readOnly": True},
    ]
    read = "stat -c %a /inputs/s/key; cat /inputs/s/key /inputs/c/y > /work-dir/out"
    forbid = "touch /inputs/s/new || echo refused"
    init = {
        "name": "init", "image": "i", "command": ["sh", "-c", f"{read}; {forbid}"],
        "volumeMounts": [*mounts, *inputs],
        "env": [
            {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
            {"name": "TWO", "value": "$(ONE)$$"},
        ],
    }  # fmt: skip
    main = {
        "name": "main", "image": "i", "volumeMounts": mounts,
        "command": ["sh", "-c", "cat /work-dir/out; ls /inputs"],
    }  # fmt: skip
    containers.create("vol", [main], initContainers=[init], volumes=volumes)
    status = containers.wait_end("vol")
    assert status["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 0
    assert containers.read_log("vol", "init").splitlines()[0] == "400"
    assert containers.read_log("vol", "init").splitlines()[-1] == "refused"
    # The second container has neither Secret nor ConfigMap.
    assert containers.read_log("vol").splitlines()[0].startswith("secrettwo")
    assert status["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 2


def test_failed_init_container_ends_the_pod(containers: ContainerCluster) -> None:
    init = {"name": "init", "image": "i", "command": ["false"]}
    main = {"name": "main", "image": "i", "command": ["true"]}
    containers.create("init", [main], initContainers=[init])
    status = containers.wait_end("init")
    assert status["phase"] == "Failed"
    assert "waiting" in status["containerStatuses"][0]["state"]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({}, "00000000a80425fb 0 0"),
        ({"capabilities": {"drop": ["ALL"]}}, "0000000000000000 0 0"),
        ({"capabilities": {"drop": ["ALL"], "add": ["SETUID"]}}, "0000000000000080 0 0"),
        ({"runAsUser": 1234, "allowPrivilegeEscalation": False}, "0000000000000000 1 1234"),
    ],
)
def test_container_has_exactly_the_privileges_of_its_manifest(
    containers: ContainerCluster, context: object, expected: str
) -> None:
    name = f"caps-{abs(hash(str(context)))}"
    script = (
        "set -- $(grep -h -e CapEff -e NoNewPrivs /proc/self/status | cut -f2); echo $1 $2 $(id -u)"
    )
    containers.run(name, script, {"securityContext": context})
    assert containers.read_log(name).strip() == expected


def test_read_only_root_cannot_be_written(containers: ContainerCluster) -> None:
    context = {"securityContext": {"readOnlyRootFilesystem": True}}
    assert containers.run("ro", "touch /etc/x", context)["exitCode"] == 1


def test_unknown_command_cannot_be_started(containers: ContainerCluster) -> None:
    ended = containers.run("none", "", {"command": ["/no/such/program"]})
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert "No such file" in ended["message"]


def test_deleted_pod_gets_its_grace_period(containers: ContainerCluster) -> None:
    script = "trap 'exit 7' TERM; echo started; while :; do sleep 0.05; done"
    containers.create_pod("slow", script, terminationGracePeriodSeconds=20)
    containers.wait_log("slow", "started")
    hold = {"metadata": {"finalizers": ["example.com/hold"]}}
    containers.client.patch(PODS, "slow", hold, namespace=NAMESPACE)
    containers.client.delete(PODS, "slow", namespace=NAMESPACE)
    ended = containers.wait_end("slow")["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 7
    containers.client.patch(PODS, "slow", {"metadata": {"finalizers": None}}, namespace=NAMESPACE)
    wait_until(lambda: _is_gone(containers, "slow"), limit_s=20)


def test_pod_that_ignores_sigterm_is_killed(containers: ContainerCluster) -> None:
    script = "trap '' TERM; echo started; sleep 7654327 & wait"
    containers.create_pod("deaf", script, terminationGracePeriodSeconds=1)
    containers.wait_log("deaf", "started")
    containers.client.delete(PODS, "deaf", namespace=NAMESPACE)
    wait_until(lambda: _is_gone(containers, "deaf"), limit_s=20)
    assert not find_processes("7654327")


def test_pod_over_its_storage_limit_is_evicted(containers: ContainerCluster) -> None:
    volumes = [{"name": "work", "emptyDir": {"sizeLimit": "1Mi"}}]
    mounts = {"volumeMounts": [{"name": "work", "mountPath": "/w"}]}
    script = "head -c 3000000 /dev/zero > /w/big; sleep 60"
    containers.create_pod("big", script, mounts, volumes=volumes)
    status = containers.wait_end("big")
    assert (status["phase"], status["reason"]) == ("Failed", "Evicted")
    assert ("DisruptionTarget", "True") in {
        (each["type"], each["status"]) for each in status["conditions"]
    }


def test_container_over_its_memory_limit_is_killed(containers: ContainerCluster) -> None:
    limits = {"resources": {"limits": {"memory": "32Mi"}}}
    command = {"command": ["python3", "-c", "x = b'x' * 200_000_000"]} | limits
    ended = containers.run("oom", "", command)
    if ended["exitCode"] == 0:
        pytest.skip("this host has no memory cgroup that the lab may create")
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")


def test_pod_that_cannot_be_enforced_is_refused(containers: ContainerCluster) -> None:
    containers.create_pod("host", "true", hostNetwork=True)
    status = containers.wait_end("host")
    assert status["phase"] == "Failed"
    assert "hostNetwork is not emulated" in status["message"]


def test_pod_waits_for_a_missing_secret(containers: ContainerCluster) -> None:
    volumes = [{"name": "s", "secret": {"secretName": "later"}}]
    mounts = {"volumeMounts": [{"name": "s", "mountPath": "/s"}]}
    containers.create_pod("wait", "cat /s/key", mounts, volumes=volumes)
    wait_until(lambda: containers.read_status("wait")["conditions"])
    later = {"metadata": {"name": "later"}, "stringData": {"key": "now"}}
    containers.client.create(SECRETS, later, namespace=NAMESPACE)
    containers.wait_end("wait")
    assert containers.read_log("wait") == "now"


def _is_gone(containers: ContainerCluster, name: str) -> bool:
    try:
        containers.read_status(name)
    except NotFoundError:
        return True
    return False


def test_log_is_read_and_followed_through_the_api_server(containers: ContainerCluster) -> None:
    containers.create_pod("log", "echo one; echo two; sleep 0.3; echo three")
    admin = Cluster.of_kubeconfig(containers.server.admin_kubeconfig)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/log/log"
    assert admin.get(path, follow=True).body["text"] == "one\ntwo\nthree\n"
    assert admin.get(path, tailLines=1).body["text"] == "three\n"
    assert admin.get(path, container="other").verdict == (400, "BadRequest")
    assert admin.get(path.replace("pods/log", "pods/absent")).verdict == (404, "NotFound")
