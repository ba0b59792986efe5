"""A hosted cluster that treenail owns, with its management cluster, in processes on this host.

The management cluster has treenail's small kinds, those of Cluster API, and no HyperShift. Beside
it run ``treenail-controller run --enable hosted,nodepools`` and ``serve --hosted``, with the
permissions of their manifests.
"""

import base64
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from treenail.api import component_names
from treenail.api.hosted import annotations as hosted_key
from treenail.api.machineconfig import MachineConfig
from treenail.config import merge
from treenail.controllers.hosted.config import release
from treenail.errors import ClusterError
from treenail.kube.resources import (
    CONFIGMAPS,
    CUSTOMRESOURCEDEFINITIONS,
    HOSTEDCLUSTERS,
    MACHINEDEPLOYMENTS,
    MACHINEHEALTHCHECKS,
    MACHINES,
    MACHINESETS,
    NAMESPACES,
    NODEPOOLS,
    SECRETS,
    Resource,
)
from treenail.manifests import installation
from treenail.manifests.installation import InstallOptions
from treenail_lab.cluster import Lab, LabPlan
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.hosted.cluster_api import ClusterApi
from treenail_lab.hosted.guest import GuestLab, GuestMachines
from treenail_lab.images import Image
from treenail_lab.machine.settings import MachineSettings
from treenail_lab.provision import ConfigServer

log = logging.getLogger(__name__)

Json = dict[str, Any]
NAMESPACE, CLUSTER, CONTROL_PLANE = "clusters", "one", "clusters-one"
TEMPLATES = Resource(
    "infrastructure.cluster.x-k8s.io",
    "v1beta1",
    "labmachinetemplates",
    "LabMachineTemplate",
    namespaced=True,
)
_CAPI_KINDS = (MACHINES, MACHINESETS, MACHINEDEPLOYMENTS, MACHINEHEALTHCHECKS)
_PULL_SECRET, _AUTHORITY, _TEMPLATE = "pull-secret", "lab-ignition-ca", "small"
_STEP_S, _STOP_S = 0.2, 10.0


def build_crd(resource: Resource, *versions: str) -> Json:
    """Build a small CRD that accepts every field; the first version is stored."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = versions or (resource.version,)
    return {
        "apiVersion": CUSTOMRESOURCEDEFINITIONS.api_version,
        "kind": CUSTOMRESOURCEDEFINITIONS.kind,
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {
                "kind": resource.kind,
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "listKind": f"{resource.kind}List",
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == served[0],
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
                for version in served
            ],
        },
    }


def build_machine_config(name: str, files: Mapping[str, str]) -> Json:
    """Build a MachineConfig of all nodes with text files by path."""
    entries = [
        {"path": path, "mode": 0o644, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in files.items()
    ]
    config = {"ignition": {"version": "3.2.0"}, "storage": {"files": entries}}
    return {
        "apiVersion": "machineconfiguration.openshift.io/v1",
        "kind": "MachineConfig",
        "metadata": {"name": name, "labels": {merge.ROLE: merge.WORKER}},
        "spec": {"config": config},
    }


class HostedSite:
    """Everything of one hosted cluster; it runs between `start` and `stop`."""

    def __init__(
        self,
        directory: Path,
        images: Sequence[Image],
        *,
        machine_settings: MachineSettings | None = None,
        agent_settings: str = "",
    ) -> None:
        """The machines are installed from the first of ``images``; each is one of a release."""
        self.images = tuple(images)
        self.management = Lab(directory / "management", LabPlan((), self.images[:1]))
        plan = LabPlan(
            (),
            self.images,
            machine_settings=machine_settings or MachineSettings(),
            agent_settings=agent_settings,
            has_machine_config_nodes=False,
        )
        self.guest = GuestLab(directory / "guest", plan)
        self.provider = GuestMachines(self.guest, self.images[0])
        options = InstallOptions(
            ("hosted", "nodepools"),
            control_planes={CONTROL_PLANE: CLUSTER},
            node_pool_namespaces=(NAMESPACE,),
        )
        self.ignition = ConfigServer(
            self.management, arguments=("--hosted", f"--namespace={CONTROL_PLANE}"), hosted=options
        )
        self._options = options
        self.controllers: ControllerReplicas | None = None
        self.capi: ClusterApi | None = None
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run_steps, name="lab-capi", daemon=True)

    def start(self) -> None:
        """Start everything; there is no NodePool yet."""
        self.management.start_api()
        self.guest.start()
        self.client = self.management.client
        self._create_objects()
        self.capi = ClusterApi(
            self.management.open_client(self.management.server.admin_kubeconfig),
            CONTROL_PLANE,
            self.provider,
        )
        self._thread.start()
        self.ignition.start()
        arguments = (
            f"--ignition-url=https://localhost:{self.ignition.port}",
            f"--ignition-ca={_AUTHORITY}",
        )
        self.controllers = ControllerReplicas(
            self.management, arguments=arguments, options=self._options
        )
        self.controllers.create_manifests()
        authority = {"ca.crt": self.ignition.write_authority().read_text("utf-8")}
        self.put_secret(_AUTHORITY, authority, namespace=component_names.NAMESPACE)
        self.controllers.start_replica()

    def stop(self) -> None:
        """Stop everything."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        if self.controllers is not None:
            self.controllers.stop()
        self.ignition.stop()
        self.provider.stop()
        self.guest.stop()
        self.management.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run_steps(self) -> None:
        while not self._stop_event.wait(_STEP_S):
            try:
                assert self.capi is not None
                self.capi.step()
            except ClusterError as error:
                log.debug("Cluster API tries again: %s", error)

    def _create_objects(self) -> None:
        crds = [build_crd(kind) for kind in (*_CAPI_KINDS, TEMPLATES)]
        for document in (*installation.load_crds("crds/hosted"), *crds):
            self.client.create(CUSTOMRESOURCEDEFINITIONS, document)
        for name in (NAMESPACE, CONTROL_PLANE):
            self._create(NAMESPACES, name, {})
        self._create(TEMPLATES, _TEMPLATE, {"spec": {"template": {"spec": {}}}}, CONTROL_PLANE)
        kubeconfig = self.guest.server.admin_kubeconfig.read_text("utf-8")
        self.put_secret(f"{CLUSTER}-kubeconfig", {"value": kubeconfig}, namespace=CONTROL_PLANE)
        self.put_pull_secret(self.guest.build_pull_secret())
        for image in self.images:
            self.add_release(image)
        spec = {
            "release": {"image": name_release(self.images[0])},
            "platform": {"type": "None"},
            "pullSecret": {"name": _PULL_SECRET},
        }
        notes = {hosted_key.SCOPE: hosted_key.OWN_SCOPE}
        self._create(HOSTEDCLUSTERS, CLUSTER, {"spec": spec}, NAMESPACE, annotations=notes)

    def add_release(self, image: Image) -> None:
        """Create the ConfigMaps of a release with this OS image, as its user does."""
        base = build_machine_config("00-worker", {"/etc/release": image.version})
        found = release.Release(
            image.version,
            name_release(image),
            image.pull_spec,
            configs=(MachineConfig.from_json(base),),
        )
        for document in release.build_config_maps(found):
            self.client.create(CONFIGMAPS, document, namespace=NAMESPACE)

    def create_pool(self, name: str, upgrade_type: str, replicas: int, **management: Any) -> None:
        """Create a NodePool whose config is the ConfigMap of the same name."""
        spec = {
            "clusterName": CLUSTER,
            "release": {"image": name_release(self.images[0])},
            "platform": {"type": "None"},
            "replicas": replicas,
            "management": {"upgradeType": upgrade_type, **management},
            "config": [{"name": name}],
        }
        notes = {hosted_key.MACHINE_TEMPLATE: f"{TEMPLATES.kind}/{_TEMPLATE}"}
        self._create(NODEPOOLS, name, {"spec": spec}, NAMESPACE, annotations=notes)

    def patch_pool(self, name: str, spec: Json) -> None:
        """Change fields of a NodePool."""
        self.client.patch(NODEPOOLS, name, {"spec": spec}, namespace=NAMESPACE)

    def put_config(self, pool: str, files: Mapping[str, str]) -> None:
        """Write the ConfigMap of a NodePool with text files by path.

        The controller reads contents again after minutes, and at a change of the NodePool at once.
        """
        text = json.dumps(build_machine_config(f"50-{pool}", files))
        self._put(CONFIGMAPS, pool, {"config": text}, NAMESPACE)
        self._touch_pools()

    def put_pull_secret(self, content: str) -> None:
        """Write the pull secret of the hosted cluster."""
        self.put_secret(_PULL_SECRET, {".dockerconfigjson": content}, namespace=NAMESPACE)
        self._touch_pools()

    def put_secret(self, name: str, values: Mapping[str, str], *, namespace: str) -> None:
        """Write a Secret with texts by key."""
        data = {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}
        self._put(SECRETS, name, data, namespace)

    def list_objects(self, kind: Resource) -> list[Json]:
        """Return the objects of a kind in the namespace of the control plane."""
        return list(self.client.list(kind, namespace=CONTROL_PLANE).items)

    def _touch_pools(self) -> None:
        for found in self.client.list(NODEPOOLS, namespace=NAMESPACE).items:
            meta: Any = found["metadata"]
            notes = {
                "lab.treenail/touched": str(int(meta["generation"]) + hash(str(found)) % 10**9)
            }
            self.client.patch(
                NODEPOOLS, meta["name"], {"metadata": {"annotations": notes}}, namespace=NAMESPACE
            )

    def _put(self, kind: Resource, name: str, data: Mapping[str, str], namespace: str) -> None:
        if self.client.find(kind, name, namespace=namespace) is None:
            self._create(kind, name, {"data": dict(data)}, namespace)
        else:
            self.client.patch(kind, name, {"data": dict(data)}, namespace=namespace)

    def _create(
        self, kind: Resource, name: str, fields: Json, namespace: str = "", **metadata: Any
    ) -> None:
        head = {"apiVersion": kind.api_version, "kind": kind.kind}
        document = {**head, "metadata": {"name": name, **metadata}, **fields}
        self.client.create(kind, document, namespace=namespace)


def name_release(image: Image) -> str:
    """Return the release image of a release with this OS image."""
    return f"quay.io/example/release:{image.version}"
