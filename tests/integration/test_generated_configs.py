"""KubeletConfigs and mirror sets on a machine: what they cost it, and that deletion undoes them."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.kinds import GENERATOR_KINDS
from treenail.kube import resources
from treenail_lab.cluster import POOL, Lab, LabPlan
from treenail_lab.controllers import ALL_CONTROLLERS, ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.images import make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.settings import MachineSettings

pytestmark = [pytest.mark.integration]

Json = dict[str, Any]
LIMIT_S = 60.0
NODE = "n1"
KUBELET, REGISTRIES = "/etc/kubernetes/kubelet.conf", "/etc/containers/registries.conf"
KINDS = {resource.kind: resource for resource in resources.GENERATOR_SOURCES}
LABELS = {"pool": POOL}
BASE = {
    KUBELET: "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n",
    REGISTRIES: 'unqualified-search-registries = ["registry.example.com"]\n',
}


class Machine:
    """The first of two nodes of a pool whose MachineConfigs write the files of the base."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.machine = lab.machines[NODE]
        self._seen = 0

    def read_file(self, path: str) -> str:
        file = self.machine.root / path.lstrip("/")
        return file.read_text() if file.exists() else ""

    def list_jobs(self, *units: str) -> list[str]:
        """Return the jobs of these units since the last call."""
        entries = self.machine.read_journal()
        new, self._seen = entries[self._seen :], len(entries)
        return [
            f"{entry['JOB_TYPE']} {entry['UNIT']}"
            for entry in new
            if entry.get("JOB_TYPE") and entry.get("UNIT") in units
        ]

    def find_drain(self) -> str:
        return self.lab.read_annotations(NODE).get(key.LAST_APPLIED_DRAIN, "")

    def settle(self, path: str, text: str, *, is_present: bool = True) -> None:
        """Wait until the file has the text, or no longer, and the node reports it."""

        def is_settled() -> bool:
            notes = self.lab.read_annotations(NODE)
            found: Any = self.lab.client.get(resources.MACHINECONFIGPOOLS, POOL)
            target = found["spec"].get("configuration", {}).get("name")
            is_done = notes.get(key.STATE) == "Done" and notes.get(key.CURRENT_CONFIG) == target
            return is_done and (text in self.read_file(path)) is is_present

        wait_until(is_settled, limit_s=LIMIT_S)

    def create(self, kind: str, name: str, spec: Json) -> None:
        document = {"apiVersion": GENERATOR_KINDS[kind], "kind": kind}
        self.lab.client.create(KINDS[kind], {**document, "metadata": {"name": name}, "spec": spec})


def build_base() -> Json:
    files = [
        {
            "path": path,
            "overwrite": True,
            "contents": {"source": f"data:;base64,{base64.b64encode(text.encode()).decode()}"},
        }
        for path, text in BASE.items()
    ]
    return {"config": {"ignition": {"version": "3.4.0"}, "storage": {"files": files}}}


def build_policy() -> Json:
    restart = {"type": "Restart", "restart": {"serviceName": "kubelet.service"}}
    files = [{"path": KUBELET, "actions": [restart]}]
    return {
        "apiVersion": resources.MACHINECONFIGURATIONS.api_version,
        "kind": resources.MACHINECONFIGURATIONS.kind,
        "metadata": {"name": "cluster"},
        "spec": {"managementState": "Managed", "nodeDisruptionPolicy": {"files": files}},
    }


@pytest.fixture
def machine() -> Iterator[Machine]:
    image = make_image("os", "1", 2_000_000)
    settings = MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02, boot_s=0.2)
    agent = "[limits]\nretry_first_s = 0.1\nretry_max_s = 0.5\n"
    plan = LabPlan((NODE, "n2"), (image,), machine_settings=settings, agent_settings=agent)
    # The sockets' names must stay short.
    with owner.temporary_directory() as folder, Lab(folder, plan) as lab:
        controllers = ControllerReplicas(lab, enable=(*ALL_CONTROLLERS, "generate"))
        try:
            controllers.create_manifests()
            lab.client.create(resources.MACHINECONFIGURATIONS, build_policy())
            lab.add_config(pool.build_config("00-worker", build_base()))
            wanted = pool.build_pool(image.pull_spec)
            wanted["metadata"] = {"name": POOL, "labels": LABELS}
            wanted["spec"]["imageFiles"] = "Write"
            pool.apply_policy(lab, {})
            pool.apply_pool(lab, wanted)
            controllers.start_replica()
            yield Machine(lab)
        finally:
            controllers.stop()


def test_max_pods_cost_a_kubelet_restart_and_mirrors_a_reload_and_no_reboot(
    machine: Machine,
) -> None:
    machine.settle(KUBELET, BASE[KUBELET])
    boots, drained = machine.machine.boot_count, machine.find_drain()
    units = "kubelet.service", "crio.service"
    machine.list_jobs(*units)

    selector = {"matchLabels": LABELS}
    fields = {"maxPods": 50}
    spec = {"machineConfigPoolSelector": selector, "kubeletConfig": fields}
    machine.create("KubeletConfig", "slow-pods", spec)
    machine.settle(KUBELET, "maxPods: 50")
    assert machine.list_jobs(*units) == ["restart kubelet.service"]

    mirrors = [{"source": "registry.example.com/apps", "mirrors": ["mirror.example.com/apps"]}]
    machine.create("ImageDigestMirrorSet", "apps", {"imageDigestMirrors": mirrors})
    machine.settle(REGISTRIES, "mirror.example.com/apps")
    assert machine.list_jobs(*units) == ["reload crio.service"]
    assert machine.find_drain() == drained

    machine.lab.client.delete(KINDS["ImageDigestMirrorSet"], "apps")
    machine.settle(REGISTRIES, "mirror.example.com/apps", is_present=False)
    assert machine.read_file(REGISTRIES) == BASE[REGISTRIES]
    assert machine.list_jobs(*units) == ["reload crio.service"]
    # As under the MCO, a removed mirror costs a drain.
    assert (last := machine.find_drain()) != drained

    machine.lab.client.delete(KINDS["KubeletConfig"], "slow-pods")
    machine.settle(KUBELET, "maxPods", is_present=False)
    assert machine.read_file(KUBELET) == BASE[KUBELET]
    assert machine.list_jobs(*units) == ["restart kubelet.service"]
    assert (machine.find_drain(), machine.machine.boot_count) == (last, boots)
