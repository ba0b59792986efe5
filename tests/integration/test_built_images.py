"""From a MachineOSConfig to updated nodes, with controllers as processes and real builds."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.controllers.installed import OPTIONS, denied
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.api_client import PatchType
from treenail.kube.resources import (
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    SECRETS,
)
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.image_builds import LabRegistry, build_login_secret, find_build_refusal
from treenail_lab.lifetime.owner import owner

pytestmark = [pytest.mark.integration]

VERSION = "41.20260101"
AGENT = "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
LIMIT_S = 120.0
Json = dict[str, Any]


class BuiltPool:
    """A pool of two nodes, installed from an image of the registry, and its controllers."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.controllers = ControllerReplicas(
            lab,
            enable=(*ALL_CONTROLLERS, "build"),
            arguments=("--settle=0", "--report-blockers-after=2"),
        )

    @property
    def registry(self) -> LabRegistry:
        assert self.lab.registry is not None
        return self.lab.registry

    def start(self) -> None:
        self.controllers.create_manifests()
        secret = build_login_secret("push", OPTIONS.namespace, self.registry.push_login)
        self.lab.client.create(SECRETS, secret, namespace=OPTIONS.namespace)
        pull = build_login_secret(
            "global-pull-secret-copy", OPTIONS.namespace, self.registry.pull_login
        )
        self.lab.client.create(SECRETS, pull, namespace=OPTIONS.namespace)
        self.add_config("00-worker", {"osImageURL": self.registry.installed.pull_spec})
        manifest = pool.build_pool("")
        spec: Any = manifest["spec"]
        for name in ("osImage", "rolloutPolicy"):
            del spec[name]
        pool.apply_pool(self.lab, manifest)
        self.controllers.start_replica()

    def add_config(self, name: str, spec: Json) -> None:
        self.lab.client.create(MACHINECONFIGS, pool.build_config(name, spec))

    def add_file(self, name: str, path: str, text: str) -> None:
        file = {"path": path, "contents": {"source": f"data:,{text}"}, "mode": 0o644}
        storage: Json = {"files": [file]}
        self.add_config(name, {"config": {"ignition": {"version": "3.5.0"}, "storage": storage}})

    def apply_image_config(self, containerfile: str = "") -> None:
        spec: Json = {
            "machineConfigPool": {"name": POOL},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": f"{self.registry.host}/os/{POOL}:latest",
        }
        if containerfile:
            spec["containerFile"] = [{"containerfileArch": "NoArch", "content": containerfile}]
        document: Json = {
            "apiVersion": MACHINEOSCONFIGS.api_version,
            "kind": MACHINEOSCONFIGS.kind,
            "metadata": {"name": POOL},
            "spec": spec,
        }
        self.lab.client.patch(MACHINEOSCONFIGS, POOL, document, PatchType.APPLY)

    def image(self) -> str:
        found: Json = self.lab.client.get(MACHINEOSCONFIGS, POOL)
        return str(found.get("status", {}).get("currentImagePullSpec", ""))

    def config(self) -> str:
        found: Json = self.lab.client.get(MACHINECONFIGPOOLS, POOL)
        return str(found["spec"].get("configuration", {}).get("name", ""))

    def builds(self) -> list[Json]:
        return list(self.lab.client.list(MACHINEOSBUILDS).items)

    def wait_nodes(self, *, but: str = "") -> str:
        """Wait until all nodes have the image of the pool; return it."""

        def settled() -> bool:
            image = self.image()
            notes = [self.lab.read_annotations(name) for name in self.lab.machines]
            return image not in ("", but) and all(
                (each.get(key.STATE), each.get(key.CURRENT_OS_IMAGE)) == ("Done", image)
                and each.get(key.CURRENT_CONFIG) == self.config()
                for each in notes
            )

        wait_until(settled, limit_s=LIMIT_S)
        return self.image()

    def read_files(self, path: str) -> list[str]:
        return [(each.root / path).read_text("utf-8") for each in self.lab.machines.values()]


@pytest.fixture
def built() -> Iterator[BuiltPool]:
    plan = LabPlan(nodes=("n1", "n2"), images=(), registry_version=VERSION, agent_settings=AGENT)
    with owner.temporary_directory() as directory, Lab(directory, plan) as lab:
        found = BuiltPool(lab)
        try:
            found.start()
            yield found
            assert denied(lab.server) == frozenset()
        finally:
            found.controllers.stop()


def test_pool_without_containerfile_moves_to_images_with_its_config(built: BuiltPool) -> None:
    built.add_file("10-worker", "/etc/built.conf", "one")
    built.apply_image_config()
    first = built.wait_nodes()
    assert built.read_files("etc/built.conf") == ["one", "one"]
    built.add_file("20-worker", "/etc/more.conf", "two")
    second = built.wait_nodes(but=first)
    assert built.read_files("etc/more.conf") == ["two", "two"]
    for name, machine in built.lab.machines.items():
        booted = machine.booted_deployment
        assert booted is not None
        assert second.endswith(booted.digest), name


def test_containerfile_reaches_the_nodes_and_a_bad_one_does_not(built: BuiltPool) -> None:
    why, remedy = find_build_refusal()
    if why:
        pytest.skip(f"{why}: {remedy}")
    built.add_file("10-worker", "/etc/built.conf", "one")
    built.apply_image_config("FROM configs AS final\nRUN echo made > /etc/made\n")
    first = built.wait_nodes()
    assert built.read_files("etc/made") == ["made\n", "made\n"]
    assert built.read_files("etc/built.conf") == ["one", "one"]
    built.apply_image_config("FROM configs AS final\nRUN echo cause >&2; exit 3\n")

    def find_failure() -> str:
        for build in built.builds():
            for each in build.get("status", {}).get("conditions", []):
                if (each["type"], each["status"]) == ("Failed", "True"):
                    return f"{each['reason']}: {each['message']}"
        return ""

    failure = wait_until(find_failure, limit_s=LIMIT_S)
    assert failure.startswith("InstructionFailed: line 2: ")
    assert built.image() == first
