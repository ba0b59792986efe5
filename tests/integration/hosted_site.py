"""A hosted node in the lab: its API server has no kind and no permission of treenail.

The test plays the in-place upgrader. It writes the ConfigMap of the NodePool and the Node's
``desiredConfig``.
"""

import base64
import gzip
import json
from pathlib import Path

from tests.drains import Drains
from tests.fixtures.objects import Json, make_object
from tests.integration.site import (
    DRAINER,
    FAST,
    LAYERS,
    LIMIT_S,
    LOGIN,
    NODE,
    SETTINGS,
    SIZE,
    USER,
    Site,
)
from tests.integration.witness import Sight, Witness
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.hosted.node_mode import PATH, HostedMode
from treenail.clocks import SystemClock
from treenail.config import node_paths
from treenail.encoding.json_text import parse_json
from treenail.errors import AlreadyExistsError
from treenail.kube.api_client import Client
from treenail.kube.resources import CONFIGMAPS, NAMESPACES, NODES, Resource
from treenail_lab.cluster import Lab, LabPlan, build_rendered_config
from treenail_lab.images import make_image
from treenail_lab.lifetime.owner import owner
from treenail_lab.machine.node.machine import KUBELET_CONFIG, LabMachine
from treenail_lab.machine.settings import MachineSettings

_RBAC = "rbac.authorization.k8s.io"
ROLES = Resource(_RBAC, "v1", "roles", "Role", namespaced=True)
ROLEBINDINGS = Resource(_RBAC, "v1", "rolebindings", "RoleBinding", namespaced=True)
POOL, NAMESPACE = "np", "np-upgrade"
MODE = HostedMode(POOL, NAMESPACE)
OLD = "0" * 16


def make_config(name: str, files: dict[str, str]) -> Json:
    """Return a rendered config with these files."""
    entries = [
        {
            "path": path,
            "contents": {"source": f"data:;base64,{base64.b64encode(text.encode()).decode()}"},
        }
        for path, text in files.items()
    ]
    spec = {"config": {"ignition": {"version": "3.5.0"}, "storage": {"files": entries}}}
    return build_rendered_config(name, spec)


def make_payload(config: Json) -> str:
    """Return the payload with this MachineConfig, as HyperShift's Ignition server stores it."""
    content = base64.b64encode(json.dumps(config).encode()).decode()
    served = {
        "path": node_paths.SERVED_CONFIG,
        "contents": {"source": f"data:text/plain;charset=utf-8;base64,{content}"},
    }
    other = {"path": "/etc/kubernetes/kubeconfig", "contents": {"source": "data:,x"}}
    ignition = {"ignition": {"version": "3.2.0"}, "storage": {"files": [other, served]}}
    return base64.b64encode(gzip.compress(json.dumps(ignition).encode(), 9)).decode()


def write_target(client: Client, value: str, rendered: Json, **data: str) -> None:
    """Write the ConfigMap that delivers a config; ``data`` replaces its keys."""
    content = {"config": make_payload(rendered), "hash": value, **data}
    document = make_object(CONFIGMAPS, MODE.config_map, top={"data": content})
    try:
        client.create(CONFIGMAPS, document, namespace=NAMESPACE)
    except AlreadyExistsError:
        found = client.get(CONFIGMAPS, MODE.config_map, namespace=NAMESPACE)
        document = {**found, "data": content}
        client.update(CONFIGMAPS, MODE.config_map, document, namespace=NAMESPACE)


def allow_read(client: Client, user: str = USER) -> None:
    """Let the node read the ConfigMap, as treenail's upgrader does in service mode."""
    rules = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [MODE.config_map],
        "verbs": ["get"],
    }
    role = make_object(ROLES, "upgrade", top={"rules": [rules]})
    client.create(ROLES, role, namespace=NAMESPACE)
    binding = {
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": "upgrade"},
        "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": user}],
    }
    document = make_object(ROLEBINDINGS, "upgrade", top=binding)
    client.create(ROLEBINDINGS, document, namespace=NAMESPACE)


class HostedLab(Lab):
    """A lab of machines that another cluster installed."""

    def __init__(
        self, directory: Path, plan: LabPlan, files: dict[str, str], *, agent: tuple[str, ...]
    ) -> None:
        super().__init__(directory, plan, agent=agent)
        self._files = files

    def _install_kinds(self) -> None:
        """The hosted cluster has no kind of treenail."""

    def _admit_machine(self, machine: LabMachine) -> None:
        super()._admit_machine(machine)
        for path, text in self._files.items():
            place = machine.root / path[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)


class HostedSite(Site):
    """One hosted node at rest, with a drain controller and a witness."""

    def __init__(
        self,
        served: dict[str, str],
        *,
        first: dict[str, str] | None = None,
        mode: HostedMode = MODE,
        agent: tuple[str, ...] = (),
        is_allowed: bool = True,
        files: dict[str, str] | None = None,
        notes: dict[str, str] | None = None,
        has_drainer: bool = True,
    ) -> None:
        """``served`` are the files of the machine's first config, ``first`` its first annotations.

        ``files`` are more files of the machine, ``notes`` annotations that its Node has. Not
        ``is_allowed``: nothing but a pod of the node lets it read the ConfigMap. Not
        ``has_drainer``: another program drains, and makes the namespace.
        """
        self.directory = owner.make_directory()
        self._is_server_stopped = False
        image = make_image("os/node", "1", SIZE, layers=LAYERS, credential=LOGIN)
        plan = LabPlan(
            (NODE,),
            (image,),
            machine_settings=MachineSettings(pull_bytes_per_s=FAST, staging_s=0.02),
            agent_settings=SETTINGS,
            has_machine_config_nodes=False,
        )
        files = {
            **served,
            PATH: json.dumps(mode.to_json()),
            node_paths.SERVED_CONFIG: json.dumps(make_config("rendered-master-1", served)),
            **(files or {}),
        }
        if first is not None:
            files[node_paths.FIRST_BOOT_ANNOTATIONS] = json.dumps(first)
        self.lab = HostedLab(self.directory, plan, files, agent=agent)
        self.lab.start()
        self.server = self.lab.server
        self.machine = self.lab.machines[NODE]
        self.backend = ""
        self.pull_secret = self.machine.root / KUBELET_CONFIG
        self._pull_secret = self.pull_secret.read_text()
        self.witness = Witness(NODE, self.machine)
        self.server.call_api(self.witness.attend)
        if has_drainer:
            self.lab.client.create(NAMESPACES, make_object(NAMESPACES, NAMESPACE))
        if is_allowed:
            allow_read(self.lab.client)
        drainer = self.server.write_kubeconfig(DRAINER, ["system:masters"])
        self.drains = Drains(self.lab.open_client(drainer), SystemClock())
        self._has_drainer = has_drainer
        if has_drainer:
            self.drains.start()
        wait_until(lambda: self.machine.agent.is_ready, limit_s=LIMIT_S)
        self.lab.client.patch(
            NODES, NODE, {"metadata": {"annotations": {"seen": "yes", **(notes or {})}}}
        )
        self.begin()

    def stop(self) -> None:
        if not self._has_drainer:
            self.drains.start()
        super().stop()

    # Requests

    def deliver(self, value: str, files: dict[str, str], **data: str) -> None:
        """Write the ConfigMap of a target; ``data`` replaces its keys."""
        write_target(self.lab.client, value, make_config("rendered-master-2", files), **data)

    def select(self, value: str) -> None:
        """Write the Node's ``desiredConfig``."""
        self.annotate({key.DESIRED_CONFIG: value})

    def update(self, value: str, files: dict[str, str], **data: str) -> None:
        """Deliver a target and select the node."""
        self.deliver(value, files, **data)
        self.select(value)

    def wait_done(self, value: str) -> None:
        """Wait until the upgrader would count the node as updated, and the agent is at rest."""

        def is_done() -> bool:
            notes = self.notes()
            return (
                notes.get(key.CURRENT_CONFIG) == value
                and notes.get(key.STATE) == key.NodeState.DONE
                and self.calm()
            )

        wait_until(is_done, limit_s=LIMIT_S)

    # Observations

    def text(self, path: str) -> str | None:
        """Return the content of a file of the machine; None without it."""
        place = self.machine.root / path[1:]
        return place.read_text() if place.exists() else None

    def list_values(self, name: str) -> list[str]:
        """Return the values that an annotation took in this test, in order."""
        values = [sight.notes.get(name, "") for sight in self.sights()]
        return [value for n, value in enumerate(values) if n == 0 or value != values[n - 1]]

    def find_sight(self, value: str) -> tuple[Sight, Sight]:
        """Return the Node before and after it first showed a current config."""
        sights = self.sights()
        number = next(
            n for n, sight in enumerate(sights) if sight.notes.get(key.CURRENT_CONFIG) == value
        )
        return sights[number - 1], sights[number]


def read_config_name(site: HostedSite, path: str) -> str:
    """Return the name of the MachineConfig in a file of the machine."""
    document = parse_json(site.text(path) or "{}")
    assert isinstance(document, dict)
    return str(document["metadata"]["name"])
