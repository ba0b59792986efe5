"""The real machine-config-controller renders, assigns and drains; the agent of a lab node obeys.

TREENAIL_TEST_MCC names the controller, TREENAIL_TEST_MCO_CRDS the kinds. Image builds and the
operator's part of a node disruption policy are written by the tests.
"""

import base64
from pathlib import Path

import pytest

from tests.mco import operator
from tests.mco.operator import (
    MCO,
    POLICY,
    build_file,
    build_ignition,
    write_policy_status,
)
from tests.mco.pool import LIMIT_S, POOL, Pool
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.config.node_paths import KUBELET_CA
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.images import derive_image, make_image

pytestmark = [pytest.mark.integration]

NODE = "n1"
BUILD, BUILD_CONFIG = f"{MCO}/machineosbuilds/build", f"{MCO}/machineosconfigs/{POOL}"


def test_file_is_written_and_pool_is_updated(pool: Pool) -> None:
    boots = pool.machine.boot_count
    pool.add_file("50-file", "/etc/treenail-test/a", "hello\n", 0o600)
    pool.wait_updated()
    found = pool.machine.root / "etc/treenail-test/a"
    assert found.read_text() == "hello\n"
    assert found.stat().st_mode & 0o7777 == 0o600
    assert pool.machine.boot_count == boots + 1
    assert pool.nodes.read_conditions(NODE)["Updated"] == "True"


def test_removed_config_removes_its_file_and_unit(pool: Pool) -> None:
    unit = {
        "name": "app.service",
        "enabled": True,
        "contents": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n",
    }
    files = [build_file("/etc/treenail-test/b", "b\n")]
    pool.add("50-unit", config=build_ignition(storage={"files": files}, systemd={"units": [unit]}))
    pool.wait_updated()
    units = pool.machine.root / "etc/systemd/system"
    assert (units / "multi-user.target.wants/app.service").is_symlink()
    pool.remove("50-unit")
    pool.wait_updated()
    assert not (units / "app.service").exists()
    assert not (units / "multi-user.target.wants/app.service").is_symlink()
    assert not (pool.machine.root / "etc/treenail-test/b").exists()


def test_ssh_key_is_written_without_a_reboot(pool: Pool) -> None:
    boots = pool.machine.boot_count
    users = [{"name": "core", "sshAuthorizedKeys": ["ssh-ed25519 AAAA me"]}]
    pool.add("50-key", config=build_ignition(passwd={"users": users}))
    pool.wait_updated()
    assert "ssh-ed25519 AAAA me" in read_keys(pool)
    assert pool.machine.boot_count == boots


def read_keys(pool: Pool) -> str:
    place = pool.machine.root / "home/core/.ssh/authorized_keys.d/ignition"
    return place.read_text() if place.exists() else ""


def test_kernel_arguments_and_extension_come_in_one_reboot(pool: Pool) -> None:
    boots = pool.machine.boot_count
    pool.add("50-os", kernelArguments=["nosmt", "quiet"], extensions=["usbguard"])
    pool.wait_updated()
    booted = pool.machine.booted_deployment
    assert booted is not None
    assert booted.kernel_arguments[-2:] == ("nosmt", "quiet")
    assert booted.packages == ("usbguard",)
    assert pool.machine.boot_count == boots + 1


def test_os_image_of_a_config_is_booted_and_left(pool: Pool) -> None:
    image = make_image("os/node", "2", 20_000_000)
    pool.nodes.add_image(image)
    pool.add("60-image", osImageURL=image.pull_spec)
    pool.wait_updated()
    assert read_digest(pool) == image.digest
    pool.remove("60-image")
    pool.wait_updated()
    assert read_digest(pool) == pool.image.digest


def read_digest(pool: Pool) -> str:
    booted = pool.machine.booted_deployment
    return booted.digest if booted else ""


def test_layered_pool_boots_built_image_and_returns(pool: Pool) -> None:
    target = pool.wait_updated()
    base = make_image("os/layered", "3", 20_000_000)
    # An image that is built for a config has the files of the config.
    image = derive_image(base, {"/etc/treenail-test/base": "base\n"})
    pool.nodes.add_image(image)
    try:
        create_build(pool, target, image.pull_spec)
        wait_until(
            lambda: pool.nodes.read_notes(NODE).get(key.CURRENT_IMAGE) == image.pull_spec,
            limit_s=LIMIT_S,
        )
        pool.wait_updated()
        assert read_digest(pool) == image.digest
        assert image.pull_spec in pool.read_condition("Updated")["message"]
    finally:
        for path in (BUILD, BUILD_CONFIG):
            pool.cluster.delete(path)
    wait_until(lambda: not pool.nodes.read_notes(NODE).get(key.CURRENT_IMAGE), limit_s=LIMIT_S)
    pool.wait_updated()
    assert read_digest(pool) == pool.image.digest


def create_build(pool: Pool, config: str, image: str) -> None:
    """Create what the build controller leaves after a successful build."""
    secret = {"name": "push"}
    create(
        pool,
        f"{MCO}/machineosconfigs",
        "MachineOSConfig",
        POOL,
        {
            "machineConfigPool": {"name": POOL},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": secret,
            "renderedImagePushSpec": "registry.lab.example/os/layered:latest",
        },
        {
            "observedGeneration": 1,
            "currentImagePullSpec": image,
            "machineOSBuild": {
                "group": operator.GROUP,
                "resource": "machineosbuilds",
                "name": "build",
            },
        },
    )
    moment = "2026-01-01T00:00:00Z"
    create(
        pool,
        f"{MCO}/machineosbuilds",
        "MachineOSBuild",
        "build",
        {
            "machineConfig": {"name": config},
            "machineOSConfig": {"name": POOL},
            "renderedImagePushSpec": "registry.lab.example/os/layered:latest",
        },
        {
            "digestedImagePushSpec": image,
            "buildStart": moment,
            "buildEnd": "2026-01-01T00:01:00Z",
            "builder": {
                "imageBuilderType": "Job",
                "job": {
                    "group": "batch",
                    "resource": "jobs",
                    "name": "build",
                    "namespace": operator.NAMESPACE,
                },
            },
            "conditions": [
                {
                    "type": "Succeeded",
                    "status": "True",
                    "reason": "Ready",
                    "message": "Build Ready",
                    "lastTransitionTime": moment,
                }
            ],
        },
    )


def create(
    pool: Pool, path: str, kind: str, name: str, spec: operator.Json, status: operator.Json
) -> None:
    labels = {f"{operator.GROUP}/machine-os-config": POOL,
              f"{operator.GROUP}/target-machine-config-pool": POOL,
              f"{operator.GROUP}/rendered-machine-config": spec.get("machineConfig", {}).get(
                  "name", "")}  # fmt: skip
    notes = {f"{operator.GROUP}/current-machine-os-build": "build"}
    document = {
        "apiVersion": f"{operator.GROUP}/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels, "annotations": notes},
        "spec": spec,
    }
    pool.cluster.post(path, document).ok()
    pool.cluster.patch(f"{path}/{name}/status", {"status": status}).ok()


def test_failure_is_reported_by_the_pool_and_a_fixed_config_recovers(pool: Pool) -> None:
    (pool.machine.root / "etc/treenail-test/directory").mkdir(parents=True)
    pool.add_file("50-bad", "/etc/treenail-test/directory", "a file\n")
    reason = pool.nodes.wait_degraded(NODE, "/etc/treenail-test/directory")
    wait_until(lambda: pool.read_condition("Degraded")["status"] == "True", limit_s=LIMIT_S)
    message = pool.read_condition("NodeDegraded")["message"]
    assert reason.splitlines()[0][:60] in message
    pool.add_file("50-bad", "/etc/treenail-test/other", "a file\n")
    pool.wait_updated()
    assert pool.nodes.read_conditions(NODE)["NodeDegraded"] == "False"
    (pool.machine.root / "etc/treenail-test/directory").rmdir()


def test_config_that_no_node_can_have_is_not_rendered(pool: Pool) -> None:
    before = pool.read_target()
    pool.add("50-wrong", config={"ignition": {"version": "9.9.9"}})
    wait_until(lambda: pool.read_condition("RenderDegraded")["status"] == "True", limit_s=LIMIT_S)
    assert pool.read_target() == before
    assert pool.nodes.read_notes(NODE)[key.STATE] == "Done"
    pool.remove("50-wrong")
    wait_until(lambda: pool.read_condition("RenderDegraded")["status"] == "False", limit_s=LIMIT_S)


def test_node_disruption_policy_avoids_drain_and_reboot(pool: Pool) -> None:
    path = "/etc/treenail-test/quiet"
    files = [{"path": path, "actions": [{"type": "None"}]}]
    pool.cluster.patch(POLICY, {"spec": {"nodeDisruptionPolicy": {"files": files}}}).ok()
    write_policy_status(pool.cluster, files)
    boots = pool.machine.boot_count
    pool.add_file("50-quiet", path, "one\n")
    pool.wait_updated()
    assert (pool.machine.root / path[1:]).read_text() == "one\n"
    assert pool.machine.boot_count == boots
    pool.remove("50-quiet")
    pool.wait_updated()
    assert pool.machine.boot_count == boots
    pool.cluster.patch(POLICY, {"spec": {"nodeDisruptionPolicy": None}}).ok()
    write_policy_status(pool.cluster, [])


def test_rotated_authority_reaches_the_node_without_an_update(pool: Pool, tmp_path: Path) -> None:
    target, boots = pool.read_target(), pool.machine.boot_count
    found = pool.cluster.get(operator.CONTROLLER_CONFIG).ok()["spec"]
    before = base64.b64decode(found["kubeAPIServerServingCAData"])
    fresh = CertificateAuthority(tmp_path).pem + before
    for authority in (fresh, before):
        encoded = base64.b64encode(authority).decode()
        spec = {"kubeAPIServerServingCAData": encoded}
        pool.cluster.patch(operator.CONTROLLER_CONFIG, {"spec": spec}).ok()
        place = pool.machine.root / KUBELET_CA[1:]
        wait_until(
            lambda place=place, authority=authority: (
                place.exists() and place.read_bytes() == authority
            ),
            limit_s=LIMIT_S,
        )
    assert (pool.read_target(), pool.machine.boot_count) == (target, boots)


def test_paused_pool_waits_until_it_is_resumed(pool: Pool) -> None:
    before = pool.wait_updated()
    pool.patch({"paused": True})
    pool.add_file("50-paused", "/etc/treenail-test/paused", "x\n")
    target = pool.wait_rendered()
    wait_until(
        lambda: "Pool is paused" in pool.read_condition("Updating").get("message", ""),
        limit_s=LIMIT_S,
    )
    assert pool.nodes.is_at(NODE, before)
    pool.patch({"paused": False})
    assert pool.wait_updated() == target


def test_pods_are_evicted_before_the_reboot(pool: Pool) -> None:
    labels = {"app": "web"}
    spec = {
        "nodeName": NODE,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "web", "image": "registry.lab.example/web"}],
    }
    owners = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "1",
               "controller": True}]  # fmt: skip
    pods = "/api/v1/namespaces/default/pods"
    metadata = {"name": "web", "labels": labels, "ownerReferences": owners}
    pool.cluster.post(pods, {"metadata": metadata, "spec": spec}).ok()
    pool.add_file("50-drain", "/etc/treenail-test/drain", "x\n")
    pool.wait_updated()
    assert pool.cluster.get(f"{pods}/web").code == 404
    notes = pool.nodes.read_notes(NODE)
    assert notes[key.LAST_APPLIED_DRAIN].startswith("uncordon-")
