"""A cluster and its machines on one host, for the command, the demo and the tests."""

import base64
import json
import logging
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from treenail.api import annotations as key
from treenail.api.machineconfigpool import MASTER
from treenail.clocks import SystemClock, format_rfc3339
from treenail.errors import AlreadyExistsError, ClusterError, ConfigError
from treenail.kube.api_client import Client, Json
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    CUSTOMRESOURCEDEFINITIONS,
    MACHINECONFIGNODES,
    MACHINECONFIGS,
    NODES,
    Resource,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail_lab import images
from treenail_lab.apiserver.serving.server import LabServer
from treenail_lab.image_builds import (
    BUILDER,
    BuilderNode,
    LabRegistry,
    build_controller_config,
    merge_logins,
)
from treenail_lab.images import ARCHITECTURE, Image, ImageCatalogue
from treenail_lab.kubelet import bootstrap
from treenail_lab.kubelet.bootstrap import KubeletBootstrap
from treenail_lab.lifetime.interpreter import PYTHON_MODULE
from treenail_lab.machine.node.machine import KUBELET_CONFIG, LabMachine
from treenail_lab.machine.settings import MachineSettings

log = logging.getLogger(__name__)

POOL = "worker"
_READY_POLL_S = 0.2
_FIRST_BOOT_DONE = "var/lib/treenail/firstboot.done"
# Machines of the lab boot in a moment, so the health checks need not wait for them to settle.
_QUICK_HEALTH = "\n[health]\nsettle_s = 0.1\ninterval_s = 0.1\n"


@dataclass(frozen=True, slots=True)
class LabPlan:
    """The parts of a lab; the nodes are installed from the first image."""

    nodes: tuple[str, ...]
    images: tuple[Image, ...]
    machine_settings: MachineSettings = field(default_factory=MachineSettings)
    agent_settings: str = ""
    """The text of each node's agent.toml."""
    has_machine_config_nodes: bool = True
    """Whether the cluster has the MachineConfigNode kind."""
    registry_version: str = ""
    """Version of the OS image in a registry of the lab, from which the nodes are installed then.

    With it the lab has a Node for builds, too. Empty for no registry.
    """
    control_plane: frozenset[str] = frozenset()
    """Nodes of the pool master; all others are of the pool worker."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """What Nodes report in place of this host's architecture. Their machines stay as they are."""


class Lab:
    """The API server, the machines with their agents, and the Nodes' Ready conditions."""

    def __init__(self, directory: Path, plan: LabPlan, *, agent: Sequence[str] = ()) -> None:
        self.plan = plan
        self.directory = directory
        self.server = LabServer(directory / "api")
        self.machines: dict[str, LabMachine] = {}
        self._admitted: set[str] = set()
        """The names of the machines that have a Node."""
        self._bootstraps: dict[str, KubeletBootstrap] = {}
        """Kubelets of machines that join with a bootstrap kubeconfig."""
        self._kubelet_clients: dict[str, Client] = {}
        """Clients of kubelets that joined, with the Node's credential."""
        self._agent_command = tuple(agent) or (*PYTHON_MODULE, "treenail", "run")
        self._transports: list[HttpTransport] = []
        self.registry: LabRegistry | None = None
        self.builder: BuilderNode | None = None
        self._images_file = directory / "images.json"
        self._stop_event = threading.Event()
        self._kubelet_thread = threading.Thread(
            target=self._run_kubelets, name="lab-kubelets", daemon=True
        )

    def start(self) -> None:
        """Start everything; all machines are up and their agents started when this returns."""
        self.start_api()
        catalogue = ImageCatalogue(self.plan.images)
        if self.plan.registry_version:
            catalogue = replace(catalogue, registries=(self._start_builds().host,))
        images.save_catalogue(catalogue, self._images_file)
        for name in self.plan.nodes:
            self._install_node(name)
        for machine in self.machines.values():
            machine.start()
        self.start_kubelets()

    def start_api(self) -> None:
        """Start the API server, and create treenail's kinds."""
        self.server.start()
        self.client = self.open_client(self.server.admin_kubeconfig)
        self._install_kinds()

    def start_kubelets(self) -> None:
        """Begin to report the Ready conditions of Nodes."""
        self._kubelet_thread.start()

    def stop(self) -> None:
        """Stop everything; no process is left when this returns."""
        self._stop_event.set()
        threads = [
            threading.Thread(target=machine.stop, name=f"stop-{name}")
            for name, machine in self.machines.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        if self._kubelet_thread.is_alive():
            self._kubelet_thread.join(10.0)
        if self.builder is not None:
            self.builder.stop()
        if self.registry is not None:
            self.registry.__exit__()
            self.registry = None
        for transport in self._transports:
            transport.close()
        self.server.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def open_client(self, kubeconfig: Path) -> Client:
        """Return a client of the API server; `stop` closes its connections."""
        transport = HttpTransport(read_kubeconfig(str(kubeconfig)), SystemClock())
        self._transports.append(transport)
        return Client(transport)

    @property
    def installed_image(self) -> Image:
        """Return the OS image that the machines were installed from."""
        return self.plan.images[0] if self.registry is None else self.registry.installed

    def _start_builds(self) -> LabRegistry:
        """Start the registry and the Node for builds, and let the cluster trust the registry."""
        registry = LabRegistry(self.directory, self.plan.registry_version).__enter__()
        self.registry = registry
        self.client.create(CONTROLLERCONFIGS, build_controller_config(registry))
        self.builder = BuilderNode(
            self.directory, self.client, registry.host, hidden=(registry.service.directory,)
        )
        self.builder.create_node()
        self.server.api.pod_logs.directories.append(self.builder.log_directory)
        self.builder.start(self.open_client(self.server.write_node_kubeconfig(BUILDER)))
        return registry

    def add_image(self, image: Image) -> None:
        """Add an image to the registry."""
        images.save_catalogue(
            images.load_catalogue(self._images_file).with_image(image), self._images_file
        )

    def add_config(self, document: Json) -> str:
        """Create a MachineConfig; return its name."""
        created = self.client.create(MACHINECONFIGS, document)
        return str(_read_object(created, "metadata").get("name"))

    def request_update(
        self, node: str, config: str, image: str, *, spelling: str = key.DESIRED_OS_IMAGE
    ) -> None:
        """Assign a config and an image to a node, as a rollout controller does."""
        annotations = {key.DESIRED_CONFIG: config, spelling: image}
        self.client.patch(NODES, node, {"metadata": {"annotations": annotations}})

    def read_annotations(self, node: str) -> dict[str, str]:
        """Return the Node's annotations."""
        annotations = _read_object(
            _read_object(self.client.get(NODES, node), "metadata"), "annotations"
        )
        return {name: str(value) for name, value in annotations.items()}

    def read_live_status(self, node: str) -> Json:
        """Return the agent's status file; empty while there is none."""
        try:
            text = (self.machines[node].root / "run/treenail/status.json").read_text("utf-8")
            return _as_object(json.loads(text))
        except (OSError, ValueError):
            return {}

    def _install_kinds(self) -> None:
        for document in installation.load_crds():
            kind = _read_object(_read_object(document, "spec"), "names").get("kind")
            if kind == "MachineConfigNode" and not self.plan.has_machine_config_nodes:
                continue
            self.client.create(CUSTOMRESOURCEDEFINITIONS, document)
        self.create_objects(installation.build_node_access())

    def create_objects(self, documents: Iterable[Json]) -> None:
        """Create objects of the kinds that the server has; existing objects stay unchanged."""
        for document in documents:
            with suppress(AlreadyExistsError):
                self._create_object(document)

    def _create_object(self, document: Json) -> None:
        metadata = _read_object(document, "metadata")
        kind = self.server.call_api(
            lambda api: api.kinds.find_by_name(str(document["apiVersion"]), str(document["kind"]))
        )
        if kind is not None:
            resource = Resource(
                kind.group, kind.version, kind.plural, kind.kind, kind.is_namespaced
            )
            namespace = str(metadata.get("namespace", ""))
            self.client.create(resource, document, namespace=namespace)

    def find_pool(self, name: str) -> str:
        """Return the pool of a node."""
        return MASTER if name in self.plan.control_plane else POOL

    def add_node(self, name: str) -> Path:
        """Create the Node and its MachineConfigNode; return its kubelet's kubeconfig."""
        pool = self.find_pool(name)
        role = f"node-role.kubernetes.io/{pool}"
        node: Json = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, role: ""}},
        }
        if pool == MASTER:
            node["spec"] = {"taints": [{"key": role, "effect": "NoSchedule"}]}
        with suppress(AlreadyExistsError):
            self.client.create(NODES, node)
        if self.plan.has_machine_config_nodes:
            spec: Json = {
                "node": {"name": name},
                "pool": {"name": pool},
                "configVersion": {"desired": "not-yet-set"},
            }
            # The rollout controller may have created it, as soon as it saw the Node.
            with suppress(AlreadyExistsError):
                self.client.create(
                    MACHINECONFIGNODES,
                    {
                        "apiVersion": MACHINECONFIGNODES.api_version,
                        "kind": "MachineConfigNode",
                        "metadata": {"name": name},
                        "spec": spec,
                    },
                )
        return self.server.write_node_kubeconfig(name)

    def _install_node(self, name: str) -> None:
        machine = self.create_machine(
            name, self.installed_image, kubelet_config=self.build_pull_secret()
        )
        self._admit_machine(machine)

    def create_machine(
        self,
        name: str,
        image: Image,
        *,
        kubelet_config: str = "",
        has_first_boot: bool = False,
    ) -> LabMachine:
        """Create a machine, which is off.

        With ``has_first_boot`` its kubelet joins with the machine's bootstrap kubeconfig, when the
        agent's first boot is done. Without it, the caller creates the Node.
        """
        directory = self.directory / name
        root = directory / "root"
        agent = (
            *(*self._agent_command, "--root", str(root), "--node-name", name),
            *("--kubeconfig", f"/{bootstrap.KUBECONFIG}"),
        )
        machine = LabMachine(
            name,
            directory,
            self._images_file,
            image=image,
            agent=_build_first_boot_command(root, agent) if has_first_boot else agent,
            kubelet_config=kubelet_config,
            machine_settings=self.plan.machine_settings,
        )
        if self.registry is not None:
            self.registry.write_certificate(machine.root)
        settings = machine.root / "etc/treenail/agent.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        health = "" if "[health]" in self.plan.agent_settings else _QUICK_HEALTH
        settings.write_text(self.plan.agent_settings + health, "utf-8")
        self.machines[name] = machine
        return machine

    def _admit_machine(self, machine: LabMachine) -> None:
        """Create the Node, and give the machine the credential of its kubelet."""
        credential = self.add_node(machine.name)
        kubeconfig = machine.root / bootstrap.KUBECONFIG
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        new = kubeconfig.with_name("kubeconfig.new")
        new.touch(mode=0o600)
        new.write_bytes(credential.read_bytes())
        new.replace(kubeconfig)
        self._admitted.add(machine.name)

    def build_pull_secret(self) -> str:
        """Return the pull secret of the cluster."""
        pull_secret = build_pull_secret(self.plan.images)
        return (
            pull_secret
            if self.registry is None
            else merge_logins(pull_secret, self.registry.pull_login)
        )

    def _run_kubelets(self) -> None:
        """Report each Node's Ready condition as its kubelet does."""
        reported: dict[str, tuple[bool, str, int]] = {}
        while not self._stop_event.wait(_READY_POLL_S):
            for name, machine in list(self.machines.items()):
                if not self._may_run_kubelet(machine):
                    continue
                ready = machine.is_on and machine.is_kubelet_running
                # A kubelet that does not run reports nothing, so the old boot id stays.
                _, before, _ = reported.get(name, (False, "", 0))
                boot_id = machine.boot_id if ready else before
                now = (ready, boot_id, machine.boot_count)
                if reported.get(name) != now:
                    try:
                        self._report_ready(machine, ready=ready, boot_id=boot_id)
                        reported[name] = now
                    except ClusterError as error:
                        log.debug("cannot report the state of %s: %s", name, error)

    def _may_run_kubelet(self, machine: LabMachine) -> bool:
        """Let the kubelet join when the first boot is done; return whether it has a Node.

        kubelet.service requires treenail-firstboot.service.
        """
        if machine.name in self._admitted:
            return True
        if not self._is_past_first_boot(machine):
            return False
        kubelet = self._bootstraps.get(machine.name)
        if kubelet is None:
            labels = {"kubernetes.io/hostname": machine.name, "kubernetes.io/os": "linux"}
            kubelet = KubeletBootstrap(machine.name, machine.root, labels, self.open_client)
            self._bootstraps[machine.name] = kubelet
        try:
            client = kubelet.run_step()
        except (ClusterError, ConfigError) as error:
            log.debug("kubelet of %s cannot join: %s", machine.name, error)
            return False
        if client is None:
            return False
        self._kubelet_clients[machine.name] = client
        self._admitted.add(machine.name)
        return True

    def _is_past_first_boot(self, machine: LabMachine) -> bool:
        return machine.is_on and (machine.root / _FIRST_BOOT_DONE).exists()

    def _report_ready(self, machine: LabMachine, *, ready: bool, boot_id: str) -> None:
        condition: Json = {
            "type": "Ready",
            "status": "True" if ready else "Unknown",
            "reason": "KubeletReady" if ready else "NodeStatusUnknown",
            "message": "kubelet is posting ready status"
            if ready
            else "Kubelet stopped posting node status.",
            "lastTransitionTime": format_rfc3339(SystemClock().now()),
            "lastHeartbeatTime": format_rfc3339(SystemClock().now()),
        }
        architecture = self.plan.architectures.get(machine.name, ARCHITECTURE)
        info: Json = {"bootID": boot_id, "architecture": architecture}
        if ready and machine.booted_deployment is not None:
            # PRETTY_NAME of /etc/os-release (cadvisor's GetOsVersion).
            info["osImage"] = f"Lab CoreOS {machine.booted_deployment.version}"
        body: Json = {"status": {"conditions": [condition], "nodeInfo": info}}
        client = self._kubelet_clients.get(machine.name, self.client)
        client.patch(NODES, machine.name, body, subresource="status")


def _build_first_boot_command(root: Path, agent: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs the agent's first boot and then the agent, as systemd does."""
    first_boot = shlex.join((*PYTHON_MODULE, "treenail", "firstboot", "--root", str(root)))
    done = shlex.quote(str(root / _FIRST_BOOT_DONE))
    script = f"test -e {done} || {first_boot} || exit; exec {shlex.join(agent)}"
    return ("/bin/sh", "-c", script)


def build_pull_secret(catalogue: Sequence[Image]) -> str:
    """Return a pull secret with the credentials of every registry that requires them."""
    auths: dict[str, Json] = {}
    for image in catalogue:
        if image.credential is not None:
            login = f"{image.credential.username}:{image.credential.password}"
            auths[image.registry] = {"auth": base64.b64encode(login.encode()).decode()}
    return json.dumps({"auths": auths})


def build_login_ignition(pull_secret: str) -> Json:
    """Return the Ignition config that writes the kubelet's pull secret."""
    content = base64.b64encode(pull_secret.encode()).decode()
    file: Json = {
        "path": f"/{KUBELET_CONFIG}",
        "mode": 0o600,
        "overwrite": True,
        "contents": {"source": f"data:;base64,{content}"},
    }
    return {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}


def build_rendered_config(name: str, spec: Mapping[str, object] | None = None) -> Json:
    """Return a rendered MachineConfig."""
    return {
        "apiVersion": MACHINECONFIGS.api_version,
        "kind": "MachineConfig",
        "metadata": {"name": name},
        "spec": {"config": {"ignition": {"version": "3.5.0"}}, **(spec or {})},
    }


def _read_object(document: Json, name: str) -> Json:
    return _as_object(document.get(name))


def _as_object(value: object) -> Json:
    return value if isinstance(value, dict) else {}
