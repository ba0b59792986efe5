"""A hosted cluster that treenail owns, on a lab API server, with actors in the test's own thread.

`OwnedSite` has the controller without its watches: its views read the API server, so that a sync
sees every write. `CapiActor` plays Cluster API and its provider.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from tests.controllers.rollout.world import Killed
from tests.fixtures import hosted
from tests.fixtures.objects import make_object
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, token_secret
from treenail.api.machineconfig import MachineConfig
from treenail.clocks import Clock, SystemClock
from treenail.controllers.hosted.config.generator import ConfigInputs
from treenail.controllers.hosted.config.pool_config import PoolConfig, PoolConfigError
from treenail.controllers.hosted.owning.controller import OwningController, OwningSettings
from treenail.controllers.hosted.owning.token_secrets import (
    SecretFacts,
    SecretPlan,
)
from treenail.controllers.runtime.informer_set import project_object
from treenail.errors import NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.request import ApiRequest, ApiResponse
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

Json = dict[str, Any]
SCOPE = "treenail"
URL = "https://ignition.example.com:22623"
TEMPLATES = Resource(
    "infrastructure.cluster.x-k8s.io", "v1beta1", "agentmachinetemplates", "AgentMachineTemplate",
    namespaced=True,
)  # fmt: skip


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def generate_config(inputs: ConfigInputs) -> PoolConfig:
    """A config whose hashes follow the rules: the pull secret and a proxy roll nothing."""
    for name, found in inputs.config_maps.items():
        if found is None:
            raise PoolConfigError(
                f"ConfigMap {name} does not exist", reason="ConfigMapMissing", remedy="create it"
            )
    data: Any = [found and found.get("data") for found in inputs.config_maps.values()]
    texts = [(found or {})["config"] for found in data]
    document_text, _, proxy = ",".join(texts).partition(";proxy=")
    app, _, keys = document_text.partition(";ssh=")
    contents = {"/etc/sysctl.d/app.conf": app, "/etc/kubernetes/proxy/haproxy.cfg": proxy}
    files = [
        {"path": path, "contents": {"source": f"data:,{quote(text)}"}}
        for path, text in contents.items()
    ]
    ignition: Json = {"ignition": {"version": "3.2.0"}, "storage": {"files": files}}
    if keys:
        ignition["passwd"] = {"users": [{"name": "core", "sshAuthorizedKeys": [keys]}]}
    document = {"metadata": {"name": "np"}, "spec": {"config": ignition}}
    image = inputs.pool.release_image
    return PoolConfig(
        MachineConfig.from_json(document),
        digest(data, image, (inputs.pull_secret or b"").decode()),
        digest(document_text, image),
        image.rpartition(":")[2],
        image,
    )


def plan_secrets(facts: SecretFacts, new_token: Callable[[], str]) -> SecretPlan:
    """Secrets with the names and labels of treenail; a token that nothing uses is deleted."""
    if facts.config is None:
        return SecretPlan()
    target, name = facts.config.target_hash, facts.pool.name
    token, data = f"token-{name}-{target}", f"user-data-{name}-{facts.rolled_hash}"
    wanted = {token: token_secret.TOKEN_LABEL, data: token_secret.USER_DATA_LABEL}
    writes = []
    for secret, label in wanted.items():
        data_wanted = {"value": base64.b64encode(target.encode()).decode()}
        if secret == token:
            key = "payload" if facts.pool.allows_refresh else "config"
            data_wanted[key] = base64.b64encode(facts.packed.encode()).decode()
        found: Any = facts.found.get(secret)
        if found is None or found["data"] != data_wanted:
            notes = {hosted_key.NODE_POOL: facts.pool.full_name, hosted_key.TARGET_CONFIG: target}
            meta: Json = {"labels": {label: ""}, "annotations": notes, "namespace": facts.namespace}
            meta |= {"resourceVersion": found["metadata"]["resourceVersion"]} if found else {}
            body = make_object(SECRETS, secret, top={"data": data_wanted}, **meta)
            writes.append(body)
    used = {each.data_secret for each in facts.machines} | {*facts.templates}
    kept = {*wanted, *used}
    unused = (document for secret, document in facts.found.items() if secret not in kept)
    return SecretPlan(tuple(writes), tuple(unused))


class KillingTransport:
    """Ends the process after a number of writes."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.left: int | None = None
        self.writes: list[str] = []

    def send(self, request: ApiRequest) -> ApiResponse:
        is_write = request.method not in ("GET", "HEAD")
        if is_write and self.left == 0:
            raise Killed
        answer: ApiResponse = self._transport.send(request)
        if is_write and answer.status < 300:
            self.writes.append(f"{request.method} {request.path}")
            self.left = None if self.left is None else self.left - 1
        return answer

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> Any:
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        """The test closes it."""


class DirectView:
    """A view that reads the API server."""

    def __init__(self, site: "OwnedSite", resource: Resource, project: Any) -> None:
        self._site, self._resource, self._project = site, resource, project

    def get_all(self) -> Json:
        is_user_kind = self._resource in (NODEPOOLS, HOSTEDCLUSTERS)
        namespace = self._site.namespace if is_user_kind else self._site.plane
        try:
            items: Any = self._site.client.list(self._resource, namespace=namespace).items
        except NotFoundError:
            return {}
        # A list of a real API server has no kind in its items; the informer adds it.
        head = {"apiVersion": self._resource.api_version, "kind": self._resource.kind}
        found = {
            f"{item['metadata']['namespace']}/{item['metadata']['name']}": project_object(
                self._project, head | item
            )
            for item in items
        }
        return {key: value for key, value in found.items() if value is not None}

    def find(self, key: str) -> Any:
        return self.get_all().get(key)

    def add_handler(self, handler: Callable[..., None]) -> None:
        """Nothing is watched: a test calls the handler for what changed."""
        self._site.handlers[self._resource.plural] = handler


class DirectInformers:
    stale_reason = ""

    def __init__(self, site: "OwnedSite") -> None:
        self._site = site

    def add_view(self, scope: Any, project: Any, **_: object) -> DirectView:
        return DirectView(self._site, scope.resource, project)

    def find_stale_reason(self, _plurals: object = ()) -> str:
        return self.stale_reason


class Events:
    """Records reasons and messages."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def record_warning(self, _regarding: object, reason: str, message: str) -> None:
        self.found.append((reason, message))


def install_kinds(client: Client, *versions: str) -> None:
    hosted.install_hosted_kinds(client, *versions)
    client.create(CUSTOMRESOURCEDEFINITIONS, hosted.build_crd(TEMPLATES, TEMPLATES.version))


class OwnedSite:
    """A HostedCluster in the scope of treenail, with a NodePool ``np``."""

    def __init__(
        self, client: Client, kind: str, *, number: int = 0, version: str = "v1beta2"
    ) -> None:
        self.client, self.version = client, version
        self.namespace = f"clusters{number}"
        self.plane = f"{self.namespace}-one"
        self.transport = KillingTransport(client._transport)
        self.events = Events()
        self.clock: Clock = SystemClock()
        for name in (self.namespace, self.plane):
            client.create(NAMESPACES, make_object(NAMESPACES, name))
        cluster = hosted.make_hosted_cluster()
        cluster["metadata"] |= {
            "namespace": self.namespace, "annotations": {hosted_key.SCOPE: SCOPE}
        }  # fmt: skip
        hosted.add_object(client, HOSTEDCLUSTERS, cluster)
        template: Json = {"template": {"spec": {}}}
        client.create(TEMPLATES, make_object(TEMPLATES, "small", template), namespace=self.plane)
        self.set_secret("one")
        self.set_config("a")
        notes = {hosted_key.MACHINE_TEMPLATE: "AgentMachineTemplate/small"}
        self.pool = hosted.make_node_pool(
            upgrade_type=kind, annotations=notes, config=[{"name": "sysctl"}]
        )
        self.pool["metadata"]["namespace"] = self.namespace
        self.pool.pop("status")
        self.key = f"{self.namespace}/np"
        self.start()

    def start(self) -> None:
        """Start the process of the controller, also after it was killed."""
        self.transport.left = None
        self.informers = DirectInformers(self)
        self.handlers: dict[str, Callable[..., None]] = {}
        self.enqueued: list[str] = []
        self.controller = OwningController(
            Client(self.transport, field_manager="treenail-nodepools"),
            self.clock,
            self.events,  # type: ignore[arg-type]
            OwningSettings(
                SCOPE,
                URL,
                generate=generate_config,
                plan_secrets=plan_secrets,
            ),
        )
        self.controller.register_watches(self.informers, self.enqueued.append)  # type: ignore[arg-type]

    def create_pool(self, **spec: Any) -> None:
        document = json.loads(json.dumps(self.pool))
        document["spec"] |= spec
        document["metadata"]["annotations"] = {
            name: text
            for name, text in document["metadata"]["annotations"].items()
            if name not in (hosted_key.CURRENT_CONFIG, hosted_key.CURRENT_CONFIG_VERSION)
        }
        self.client.create(NODEPOOLS, document, namespace=self.namespace)

    def set_config(self, text: str) -> None:
        body = make_object(CONFIGMAPS, "sysctl", top={"data": {"config": text}})
        self._put(CONFIGMAPS, "sysctl", body, self.namespace)

    def set_secret(self, text: str) -> None:
        value = base64.b64encode(text.encode()).decode()
        body = make_object(SECRETS, "pull-secret", top={"data": {".dockerconfigjson": value}})
        self._put(SECRETS, "pull-secret", body, self.namespace)

    def _put(self, kind: Resource, name: str, body: Json, namespace: str) -> None:
        if self.client.find(kind, name, namespace=namespace) is None:
            self.client.create(kind, body, namespace=namespace)
        else:
            self.client.patch(kind, name, {"data": body["data"]}, namespace=namespace)

    def patch_pool(self, body: Json) -> None:
        self.client.patch(NODEPOOLS, "np", body, namespace=self.namespace)

    def annotate(self, **notes: str | None) -> None:
        self.patch_pool({"metadata": {"annotations": notes}})

    def sync(self) -> float | None:
        return self.controller.sync_key(self.key)

    def read_pool(self) -> Json:
        return self.client.get(NODEPOOLS, "np", namespace=self.namespace)

    def conditions(self) -> dict[str, Json]:
        found = self.read_pool().get("status", {}).get("conditions", [])
        return {condition["type"]: condition for condition in found}

    def read_owner(self) -> Json | None:
        kind = MACHINESETS if self.pool["spec"]["management"]["upgradeType"] == "InPlace" else (
            MACHINEDEPLOYMENTS
        )  # fmt: skip
        return self.client.find(self.serve(kind), "np", namespace=self.plane)

    def serve(self, kind: Resource) -> Resource:
        if kind.group != clusterapi.GROUP:
            return kind
        return Resource(kind.group, self.version, kind.plural, kind.kind, namespaced=True)

    def list(self, kind: Resource) -> list[Json]:
        items: Any = self.client.list(self.serve(kind), namespace=self.plane).items
        return sorted(items, key=lambda item: item["metadata"]["name"])

    def snapshot(self) -> Json:
        """The objects that machines depend on, without versions and times."""
        kinds = (MACHINEDEPLOYMENTS, MACHINEHEALTHCHECKS, MACHINES, SECRETS)
        found: Json = {
            kind.plural: [
                (item["metadata"]["name"], item.get("spec"), item.get("data"),
                 item["metadata"].get("annotations"))
                for item in self.list(kind)
            ]
            for kind in kinds
        }  # fmt: skip
        pool = self.read_pool()
        states = {name: each["status"] for name, each in self.conditions().items()}
        found["pool"] = (
            pool["metadata"]["annotations"], pool["metadata"].get("finalizers"), states,
            pool.get("status", {}).get("version"), pool.get("status", {}).get("replicas"),
        )  # fmt: skip
        text: Json = json.loads(json.dumps(found).replace(self.namespace, "clusters"))
        return text


class CapiActor:
    """Cluster API with its provider for one MachineDeployment or MachineSet, a step at a time.

    A Machine joins in the step after its creation. ``boots`` has, for each Machine, the content of
    the Secret that it booted from.
    """

    def __init__(self, site: OwnedSite) -> None:
        self._site = site
        self.boots: dict[str, str] = {}
        self.replaced: list[str] = []
        self.least_available = 10**6
        self._number = 0

    def step(self) -> None:
        site, owner = self._site, self._site.read_owner()
        machines = site.list(MACHINES)
        for machine in machines:
            if not machine.get("status", {}).get("nodeRef"):
                self._join(machine["metadata"]["name"])
        if owner is None or owner["metadata"].get("deletionTimestamp"):
            return
        key = self._name_set(owner)
        wanted = owner["spec"]["replicas"]
        new = [each for each in machines if each["metadata"]["labels"]["set"] == key]
        old = [each for each in machines if each["metadata"]["labels"]["set"] != key]
        joined = [each for each in machines if each.get("status", {}).get("nodeRef")]
        surge, unavailable = self._read_limits(owner)
        in_place = owner["kind"] == "MachineSet"
        if in_place:
            new, old = machines, []
        room = wanted + (surge if old else 0) - len(machines)
        for _ in range(max(min(room, wanted - len(new)), 0)):
            self._create(owner, key)
        surplus = new[wanted:] if not old else []
        for machine in surplus:
            self._delete(machine)
        spare = len(joined) - (wanted - unavailable)
        for machine in old[: max(spare, 0)]:
            self.replaced.append(machine["metadata"]["name"])
            self._delete(machine)
        left = [each for each in joined if site.client.find(
            site.serve(MACHINES), each["metadata"]["name"], namespace=site.plane
        )]  # fmt: skip
        if old:
            self.least_available = min(self.least_available, len(left))
        self._report(owner, key)

    def _report(self, owner: Json, key: str) -> None:
        site = self._site
        machines = site.list(MACHINES)
        joined = [each for each in machines if each.get("status", {}).get("nodeRef")]
        updated = sum(each["metadata"]["labels"]["set"] == key for each in machines)
        name = "upToDateReplicas" if site.version == "v1beta2" else "updatedReplicas"
        status = {
            "replicas": len(machines), "readyReplicas": len(joined),
            "availableReplicas": len(joined), name: updated,
            "observedGeneration": owner["metadata"]["generation"],
        }  # fmt: skip
        kind = MACHINESETS if owner["kind"] == "MachineSet" else MACHINEDEPLOYMENTS
        site.client.patch(
            site.serve(kind), "np", {"status": status}, namespace=site.plane, subresource="status"
        )

    def _name_set(self, owner: Json) -> str:
        spec = owner["spec"]["template"]["spec"]
        return digest(spec["bootstrap"], spec["version"], spec["infrastructureRef"])

    def _read_limits(self, owner: Json) -> tuple[int, int]:
        spec = owner["spec"]
        strategy = spec.get("strategy") or spec.get("rollout", {}).get("strategy") or {}
        rolling = strategy.get("rollingUpdate") or {}
        return int(rolling.get("maxSurge", 1)), int(rolling.get("maxUnavailable", 0))

    def _create(self, owner: Json, key: str) -> None:
        site, template = self._site, owner["spec"]["template"]
        self._number += 1
        meta = {
            "labels": {**template["metadata"].get("labels", {}), "set": key},
            "annotations": template["metadata"]["annotations"],
        }
        document = make_object(site.serve(MACHINES), f"np-{self._number}", template["spec"], **meta)
        site.client.create(site.serve(MACHINES), document, namespace=site.plane)

    def _join(self, name: str) -> None:
        site = self._site
        machine = site.client.get(site.serve(MACHINES), name, namespace=site.plane)
        secret: Any = machine["spec"]["bootstrap"]["dataSecretName"]  # type: ignore[index]
        found: Any = site.client.get(SECRETS, secret, namespace=site.plane)
        self.boots[name] = base64.b64decode(found["data"]["value"]).decode()
        status = {"phase": "Running", "nodeRef": {"name": name}}
        site.client.patch(
            site.serve(MACHINES), name, {"status": status}, namespace=site.plane,
            subresource="status",
        )  # fmt: skip

    def _delete(self, machine: Json) -> None:
        site = self._site
        site.client.delete(site.serve(MACHINES), machine["metadata"]["name"], namespace=site.plane)


def settle(site: OwnedSite, actor: CapiActor, *, steps: int = 12) -> None:
    """Let both act until neither changes anything."""
    for _ in range(steps):
        site.sync()
        actor.step()
    site.sync()
