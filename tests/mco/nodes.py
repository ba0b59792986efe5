"""Machines of the lab whose agents use a real API server."""

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contract.client import STRATEGIC, Cluster
from tests.mco.operator import BASE_FILE, BASE_TEXT, GROUP, MCO
from tests.realcluster import RealCluster
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.clocks import SystemClock, format_rfc3339
from treenail.daemon.configuration.mcd_state import FIRST_BOOT_ANNOTATIONS
from treenail.manifests import installation
from treenail_lab import images
from treenail_lab.cluster import build_pull_secret
from treenail_lab.image_builds import LabRegistry, merge_logins
from treenail_lab.images import Image, ImageCatalogue
from treenail_lab.machine.node.machine import LabMachine
from treenail_lab.machine.settings import MachineSettings

Json = dict[str, Any]

SETTINGS = (
    "[limits]\nretry_first_s = 0.2\nretry_max_s = 2\n"
    "[health]\ndeadline_s = 30\nsettle_s = 0.1\ninterval_s = 0.1\n"
)
_POLL_S = 0.2
_LIMIT_S = 120.0


class LabNodes:
    """Nodes of one pool with their machines, which are installed from the first image."""

    def __init__(
        self,
        directory: Path,
        server: RealCluster,
        catalogue: Sequence[Image],
        names: Sequence[str],
        *,
        registry: LabRegistry | None = None,
    ) -> None:
        self._directory, self._server = directory, server
        self._registry = registry
        self._catalogue = catalogue
        self._images_file = directory / "images.json"
        self.cluster = Cluster.of_kubeconfig(server.kubeconfig)
        self.machines: dict[str, LabMachine] = {}
        self._names = names
        self._is_stopping = threading.Event()
        self._kubelets = threading.Thread(target=self._run_kubelets, daemon=True)

    def start(self, pool: str, config: str, *, settings: str = SETTINGS) -> None:
        """Create the Nodes and start their machines, which were provisioned with the config."""
        hosts = () if self._registry is None else (self._registry.host,)
        catalogue = ImageCatalogue(tuple(self._catalogue), registries=hosts)
        images.save_catalogue(catalogue, self._images_file)
        for name in self._names:
            create_node(self.cluster, name, pool)
            self._install_machine(name, config, settings)
        for machine in self.machines.values():
            machine.start()
        self._kubelets.start()

    def stop(self) -> None:
        self._is_stopping.set()
        for machine in self.machines.values():
            machine.stop()
        if self._kubelets.is_alive():
            self._kubelets.join(10.0)
        # Another module may have nodes of the same names on the same API server.
        for name in self._names:
            self.cluster.delete(f"{MCO}/machineconfignodes/{name}")
            self.cluster.delete(f"/api/v1/nodes/{name}")

    def add_image(self, image: Image) -> None:
        """Add an image to the registry."""
        catalogue = images.load_catalogue(self._images_file).with_image(image)
        images.save_catalogue(catalogue, self._images_file)

    # Observations

    def read_node(self, name: str) -> Json:
        return self.cluster.get(f"/api/v1/nodes/{name}").ok()

    def read_notes(self, name: str) -> dict[str, str]:
        """Return the annotations of a Node."""
        found: dict[str, str] = self.read_node(name)["metadata"].get("annotations") or {}
        return found

    def is_at(self, name: str, config: str) -> bool:
        """Return whether the Node reports that it is at the config and in service."""
        node = self.read_node(name)
        notes = node["metadata"].get("annotations") or {}
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == config == notes.get(key.DESIRED_CONFIG)
            and notes.get(key.DESIRED_DRAIN) == notes.get(key.LAST_APPLIED_DRAIN)
            and not node["spec"].get("unschedulable")
        )

    def wait_degraded(self, name: str, *words: str) -> str:
        """Wait until the Node is Degraded with a reason that has these words; return it."""

        def find_reason() -> str:
            notes = self.read_notes(name)
            reason = notes.get(key.REASON, "")
            is_found = notes.get(key.STATE) == "Degraded" and all(each in reason for each in words)
            return reason if is_found else ""

        return wait_until(find_reason, limit_s=_LIMIT_S)

    def read_conditions(self, name: str) -> dict[str, str]:
        """Return the status of each condition of the node's MachineConfigNode."""
        found = self.cluster.get(f"{MCO}/machineconfignodes/{name}").ok().get("status") or {}
        return {each["type"]: each["status"] for each in found.get("conditions") or []}

    def read_story(self) -> str:
        """Return what the agents logged, for the output of a failed test."""
        lines: list[str] = []
        for name, machine in self.machines.items():
            report = self.cluster.get(f"{MCO}/machineconfignodes/{name}").body.get("status")
            lines += [f"== {name} {self.read_notes(name)}", str(report)]
            for entry in machine.read_journal():
                if entry.get("SYSLOG_IDENTIFIER") == "treenail":
                    lines.append(f"{entry.get('TREENAIL_PHASE', '')} {entry['MESSAGE']}")
            log = machine.agent_log
            lines += [log.read_text("utf-8")[-4000:] if log.exists() else ""]
        return "\n".join(lines)

    # Installation

    def _install_machine(self, name: str, config: str, settings: str) -> None:
        directory = self._directory / name
        command = (
            *(sys.executable, "-P", "-m", "treenail", "run"),
            *("--root", str(directory / "root")),
            *("--node-name", name),
            *("--kubeconfig", "/var/lib/kubelet/kubeconfig"),
        )
        machine = LabMachine(
            name,
            directory,
            self._images_file,
            image=self._catalogue[0],
            agent=command,
            kubelet_config=self._build_pull_secret(),
            machine_settings=MachineSettings(pull_bytes_per_s=1e9, staging_s=0.02),
        )
        if self._registry is not None:
            self._registry.write_certificate(machine.root)
        kubeconfig = machine.root / "var/lib/kubelet/kubeconfig"
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_bytes(self._server.write_node_kubeconfig(name).read_bytes())
        place = machine.root / "etc/treenail/agent.toml"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(settings, "utf-8")
        (machine.root / "etc/passwd").write_text(
            f"core:x:{os.getuid()}:{os.getgid()}::/home/core:/bin/sh\n"
        )
        (machine.root / "etc/group").write_text(f"core:x:{os.getgid()}:\n")
        (machine.root / "home/core").mkdir(parents=True)
        notes = machine.root / FIRST_BOOT_ANNOTATIONS[1:]
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text(
            json.dumps({key.CURRENT_CONFIG: config, key.DESIRED_CONFIG: config, key.STATE: "Done"})
        )
        base = machine.root / BASE_FILE[1:]
        base.parent.mkdir(parents=True, exist_ok=True)
        base.write_text(BASE_TEXT)
        self.machines[name] = machine

    def _build_pull_secret(self) -> str:
        found = build_pull_secret(self._catalogue)
        return found if self._registry is None else merge_logins(found, self._registry.pull_login)

    def _run_kubelets(self) -> None:
        """Report each Node's Ready condition as its kubelet does."""
        reported: dict[str, tuple[bool, int]] = {}
        while not self._is_stopping.wait(_POLL_S):
            for name, machine in self.machines.items():
                now = (machine.is_on and machine.is_kubelet_running, machine.boot_count)
                if reported.get(name) == now:
                    continue
                boot_id = machine.boot_id if now[0] else ""
                if report_ready(self.cluster, name, is_ready=now[0], boot_id=boot_id):
                    reported[name] = now


def create_node(cluster: Cluster, name: str, pool: str) -> None:
    """Create a Node of a pool and its MachineConfigNode, as kubelet and operator do."""
    labels = {"kubernetes.io/hostname": name, f"node-role.kubernetes.io/{pool}": ""}
    # The kubelet sets this one; the MCO does not expect a Node without annotations.
    notes = {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}
    metadata = {"name": name, "labels": labels, "annotations": notes}
    created = cluster.post("/api/v1/nodes", {"metadata": metadata}).ok()
    reference = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": name,
        "uid": created["metadata"]["uid"],
    }
    answer = cluster.post(
        f"{MCO}/machineconfignodes",
        {
            "apiVersion": f"{GROUP}/v1",
            "kind": "MachineConfigNode",
            "metadata": {"name": name, "ownerReferences": [reference]},
            "spec": {
                "node": {"name": name},
                "pool": {"name": pool},
                "configVersion": {"desired": "not-yet-set"},
            },
        },
    )
    # treenail's rollout controller may have been faster.
    assert answer.code in {201, 409}, answer.body


def report_ready(cluster: Cluster, name: str, *, is_ready: bool, boot_id: str) -> bool:
    """Write the Ready condition of a Node; return whether the server accepted it."""
    moment = format_rfc3339(SystemClock().now())
    condition = {
        "type": "Ready",
        "status": "True" if is_ready else "Unknown",
        "reason": "KubeletReady" if is_ready else "NodeStatusUnknown",
        "message": "",
        "lastTransitionTime": moment,
        "lastHeartbeatTime": moment,
    }
    status: Json = {"conditions": [condition]}
    if boot_id:
        status["nodeInfo"] = {"bootID": boot_id}
    return cluster.patch(f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC).code == 200


def allow_agents(cluster: Cluster) -> None:
    """Create the permissions of `treenail-controller manifests --only agent`."""
    for document in installation.build_node_access():
        cluster.post(find_collection(document), document).ok()


def find_collection(document: Mapping[str, Any]) -> str:
    """Return the path of the collection of a document whose group is not the core."""
    plural = document["kind"].lower()
    plural = f"{plural[:-1]}ies" if plural.endswith("y") else f"{plural}s"
    namespace = document["metadata"].get("namespace", "")
    middle = f"namespaces/{namespace}/" if namespace else ""
    return f"/apis/{document['apiVersion']}/{middle}{plural}"
