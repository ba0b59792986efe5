"""A cluster of the lab with a registry, and a build controller that can be killed."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.contract.client import Cluster
from tests.controllers.clusters import collection_of, make_build_controller
from tests.registry.images import make_client, make_layer, push_image, push_index
from tests.registry.real_registry import PUSHER, RegistryService
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.builder.images.signatures import SigningKey
from treenail.clocks import Clock, SystemClock
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.controllers.runtime.informer_set import InformerSet
from treenail.controllers.runtime.runtime import ControllerRuntime
from treenail.controllers.runtime.workers import ControllerSettings
from treenail.errors import NotFoundError, UnreachableError
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.image.push_spec import parse_push_spec
from treenail.kube.api_client import Client, Transport
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    JOBS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    get_object,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.registry.transport import RegistryLimits
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
NAMESPACE = "builds"
CLOCK = SystemClock()
CONTAINERFILE = "FROM configs AS final\nRUN true\n"
CONFIG = "rendered-worker-0"


class MortalTransport:
    """Ends the controller before or after one of its writes: nothing is sent afterwards."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self.writes: list[str] = []
        self.die_at: int | None = None
        self.die_on = ""
        """Die at the first write to a path with this end."""
        self.dies_before = True
        self.is_dead = False
        self.hidden = ""
        """Reads of paths with this end fail."""
        self.forbidden = ""
        """Requests with this method and end of the path are forbidden, as ``POST /jobs``."""
        self.edit_job: Callable[[Json], object] | None = None
        """Changes each new Job, as an API server that does not know a field drops it."""

    def send(self, request: ApiRequest) -> ApiResponse:
        if self.hidden and request.method == "GET" and request.path.endswith(self.hidden):
            raise UnreachableError("the API server does not answer")
        method, _, path = self.forbidden.partition(" ")
        if method == request.method and request.path.endswith(path):
            status = {"kind": "Status", "code": 403, "message": "exceeded quota: small"}
            return ApiResponse(403, json.dumps(status).encode())
        if self.edit_job and request.method == "POST" and request.path.endswith("/jobs"):
            job = json.loads(request.body)
            self.edit_job(job)
            request = replace(request, body=json.dumps(job).encode())
        is_write = request.method != "GET" and "/events" not in request.path
        with self._lock:
            if self.is_dead:
                raise UnreachableError("the process is dead")
            is_last = False
            if is_write:
                is_last = self.die_at == len(self.writes) or (
                    bool(self.die_on) and request.path.endswith(self.die_on)
                )
                self.writes.append(f"{request.method} {request.path}")
                self.is_dead = is_last
            if is_last and self.dies_before:
                raise UnreachableError("the process died before the write")
        answer = self._transport.send(request)
        if is_last:
            raise UnreachableError("the process died after the write")
        return answer

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> Any:
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        self._transport.close()


class MovableClock(SystemClock):
    """The system's clock plus the time that a test skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return super().now() + self._skipped_s

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped_s

    def move(self, seconds: float) -> None:
        self._skipped_s += seconds


class RegistryClock(SystemClock):
    """Skips pauses between requests. Time that a test skips ends no request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._skipped_s = 0.0

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped_s

    def sleep(self, seconds: float) -> None:
        self._skipped_s += seconds


class BuildSite:
    """The objects of a pool with image builds, and actions of users."""

    def __init__(
        self, kubeconfig: Path, registry: RegistryService, *, namespace: str = NAMESPACE
    ) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.registry = registry
        self.transport = HttpTransport(read_kubeconfig(str(kubeconfig)), CLOCK)
        self.client = Client(self.transport)
        self.cluster = Cluster.of_kubeconfig(kubeconfig)

    def install(self) -> None:
        for document in installation.load_crds():
            self.cluster.post(collection_of(document), document).ok()
        self.client.create(NAMESPACES, {"metadata": {"name": self.namespace}})
        self.prepare()

    def prepare(self) -> None:
        """Create the logins, the base image and a rendered config, in an installed cluster."""
        ca = base64.b64encode(self.registry.ca_file.read_bytes()).decode()
        bundle = {"file": self.registry.host.replace(":", ".."), "data": ca}
        self.client.create(
            CONTROLLERCONFIGS,
            {
                "apiVersion": CONTROLLERCONFIGS.api_version,
                "kind": CONTROLLERCONFIGS.kind,
                "metadata": {"name": "machine-config-controller"},
                "spec": {"imageRegistryBundleUserData": [bundle]},
            },
        )
        self.put_secret("push")
        self.put_secret("global-pull-secret-copy")
        client = make_client(self.registry)
        base = push_image(client, "os/base")
        client.close()
        self.base = f"{self.registry.host}/os/base@{base.digest}"
        self.add_config(CONFIG)

    def put_secret(self, name: str, user: str = PUSHER, *, host: str = "") -> None:
        content = base64.b64encode(self.registry.make_auth_json(user, host=host)).decode()
        body: Json = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/dockerconfigjson",
            "metadata": {"name": name, "namespace": self.namespace},
            "data": {".dockerconfigjson": content},
        }
        try:
            self.client.update(SECRETS, name, body, namespace=self.namespace)
        except NotFoundError:
            self.client.create(SECRETS, body, namespace=self.namespace)

    def put_context(self, name: str, files: dict[str, str]) -> None:
        """Create or replace a ConfigMap with files for COPY."""
        body: Json = {"metadata": {"name": name, "namespace": self.namespace}, "data": files}
        try:
            self.client.update(CONFIGMAPS, name, body, namespace=self.namespace)
        except NotFoundError:
            self.client.create(CONFIGMAPS, body, namespace=self.namespace)

    def add_config(self, name: str, text: str = "x", **spec: Any) -> None:
        """Create a rendered config with one file."""
        file = {"path": "/etc/motd", "contents": {"source": f"data:,{text}"}, "mode": 0o644}
        self.client.create(
            MACHINECONFIGS,
            {
                "apiVersion": MACHINECONFIGS.api_version,
                "kind": MACHINECONFIGS.kind,
                "metadata": {"name": name},
                "spec": {
                    "osImageURL": self.base,
                    "config": {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}},
                    **spec,
                },
            },
        )

    def add_pool(self, name: str = "worker", config: str = CONFIG) -> None:
        self.client.create(
            MACHINECONFIGPOOLS,
            {
                "apiVersion": MACHINECONFIGPOOLS.api_version,
                "kind": MACHINECONFIGPOOLS.kind,
                "metadata": {"name": name},
                "spec": {
                    "configuration": {"name": config},
                    "nodeSelector": {"matchLabels": {f"node-role.kubernetes.io/{name}": ""}},
                },
            },
        )

    def add_node(self, name: str, architecture: str, pool: str = "worker") -> None:
        """Create a Node of a pool."""
        labels = {f"node-role.kubernetes.io/{pool}": "", "kubernetes.io/arch": architecture}
        self.client.create(
            NODES,
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": labels},
                "status": {"nodeInfo": {"architecture": architecture}},
            },
        )

    def use_base_list(self, *architectures: str) -> None:
        """Replace the base image by a list of manifests, each with a layer of its own."""
        client = make_client(self.registry)
        images = {
            name: push_image(
                client, "os/base", name, architecture=name, layers=[make_layer({name: b"x"})]
            )
            for name in architectures
        }
        self.base = f"{self.registry.host}/os/base@{push_index(client, images, 'os/base', 'list')}"
        client.close()

    def add_image_config(
        self,
        name: str = "worker",
        text: str = "",
        *,
        annotations: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        files = [{"containerfileArch": "NoArch", "content": text}] if text else []
        self.client.create(
            MACHINEOSCONFIGS,
            {
                "apiVersion": MACHINEOSCONFIGS.api_version,
                "kind": MACHINEOSCONFIGS.kind,
                "metadata": {"name": name, "annotations": annotations or {}},
                "spec": {
                    "machineConfigPool": {"name": name},
                    "imageBuilder": {"imageBuilderType": "Job"},
                    "renderedImagePushSecret": {"name": "push"},
                    "renderedImagePushSpec": f"{self.registry.host}/os/{name}:latest",
                    **({"containerFile": files} if files else {}),
                    **spec,
                },
            },
        )

    def set_config(self, pool: str, config: str) -> None:
        body: Json = {"spec": {"configuration": {"name": config}}}
        self.client.patch(MACHINECONFIGPOOLS, pool, body)

    def annotate(self, name: str, notes: dict[str, str]) -> None:
        self.client.patch(MACHINEOSCONFIGS, name, {"metadata": {"annotations": notes}})

    def request_rebuild(self, name: str) -> None:
        self.annotate(name, {key.REBUILD: ""})

    def move_tag(self, tag: str, content: str, repository: str = "os/base") -> str:
        """Push a base image under a tag; return its pull spec by digest."""
        client = make_client(self.registry)
        layer = make_layer({"usr/lib/os-release": content.encode()})
        pushed = push_image(client, repository, tag, layers=[layer])
        client.close()
        return f"{self.registry.host}/{repository}@{pushed.digest}"

    # Observed state

    def owners_of_job(self) -> list[Json]:
        """The builds that wait for the only Job."""
        found = [each["metadata"].get("ownerReferences", []) for each in self.jobs()]
        return list(found[0]) if len(found) == 1 else []

    def image_config(self, name: str = "worker") -> Json:
        found: Json = self.client.get(MACHINEOSCONFIGS, name)
        return found

    def pool_condition(self, kind: str, name: str = "worker") -> tuple[str, str, str]:
        found: Json = self.client.get(MACHINECONFIGPOOLS, name)
        return find_condition(found, kind)

    def image(self, name: str = "worker") -> str:
        return str(self.image_config(name).get("status", {}).get("currentImagePullSpec", ""))

    def condition(self, kind: str, name: str = "worker") -> tuple[str, str, str]:
        return find_condition(self.image_config(name), kind)

    def builds(self) -> list[Json]:
        found: list[Json] = list(self.client.list(MACHINEOSBUILDS).items)
        return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))

    def build_state(self, name: str = "") -> tuple[str, str, str]:
        """Type, reason and message of the condition that is True, of the only or a named build."""
        for each in self.builds():
            if name in ("", each["metadata"]["name"]):
                for found in each.get("status", {}).get("conditions", []):
                    if found["status"] == "True":
                        return found["type"], found["reason"], found["message"]
        return "", "", ""

    def jobs(self) -> list[Json]:
        return list(self.client.list(JOBS, namespace=self.namespace).items)

    def secrets(self) -> set[str]:
        """Names of the Secrets in the namespace of builds."""
        found: list[Json] = list(self.client.list(SECRETS, namespace=self.namespace).items)
        return {str(each["metadata"]["name"]) for each in found}

    def inputs(self) -> list[Json]:
        return list(self.client.list(CONFIGMAPS, namespace=self.namespace).items)

    def wait_image(self, name: str = "worker", *, but: str = "", limit_s: float = 20.0) -> str:
        def built() -> str:
            found = self.image(name)
            return found if found != but else ""

        return wait_until(built, limit_s=limit_s)

    # The controller

    @contextmanager
    def controller(
        self,
        prepare: Callable[[MortalTransport], None] = lambda _: None,
        *,
        signing_key: SigningKey | None = None,
        clock: Clock = CLOCK,
        limits: RegistryLimits | None = None,
        metrics: ControllerMetrics | None = None,
    ) -> Iterator[MortalTransport]:
        """Run the build controller as the only leader."""
        http = HttpTransport(read_kubeconfig(str(self.kubeconfig)), CLOCK, max_kept=16)
        wire = MortalTransport(http)
        prepare(wire)
        client = Client(wire)
        recorder = EventRecorder(client, "treenail-controller", "test", CLOCK)
        controller = make_build_controller(
            client,
            recorder,
            namespace=self.namespace,
            signing_key=signing_key,
            clock=CLOCK if clock is CLOCK else RegistryClock(clock),
            limits=limits,
            metrics=metrics,
        )
        runtime = ControllerRuntime(
            [ControllerSettings(controller, first_retry_s=0.05, max_retry_s=0.5)],
            InformerSet(client, CLOCK),
            clock,
            ControllerMetrics(),
        )
        stop = threading.Event()
        thread = threading.Thread(target=runtime.run, args=(stop,), daemon=True)
        thread.start()
        try:
            yield wire
        finally:
            stop.set()
            thread.join(30)
            wire.close()
            assert not thread.is_alive()


def find_condition(found: Json, kind: str) -> tuple[str, str, str]:
    for each in found.get("status", {}).get("conditions", []):
        if each["type"] == kind:
            return each["status"], each["reason"], each["message"]
    return "", "", ""


@contextmanager
def open_site(directory: Path, registry: RegistryService) -> Iterator[BuildSite]:
    with LabServer(directory / "api") as server:
        # A real Job controller waits 10 seconds before it replaces the first failed pod.
        server.api.controllers.jobs.first_backoff_s = 0.2
        site = BuildSite(server.admin_kubeconfig, registry)
        site.install()
        try:
            yield site
        finally:
            site.transport.close()


class Kubelet:
    """Runs the pods of Jobs: the push container reports an image that it really pushed."""

    def __init__(self, site: BuildSite) -> None:
        self._site = site
        self.finished: list[str] = []
        """The builds whose pods succeeded."""

    def find_pods(self) -> list[Json]:
        found = self._site.client.list(PODS, namespace=self._site.namespace).items
        return [
            each
            for each in found
            if get_object(each, "status").get("phase") in (None, "", "Pending", "Running")
            and "deletionTimestamp" not in get_object(each, "metadata")
        ]

    def wait_pod(self) -> Json:
        return wait_until(self.find_pods, limit_s=20)[0]

    def succeed(self, pod: Json, *, digest: str = "") -> str:
        """Push the system part and report its digest; return the digest."""
        labels = get_object(get_object(pod, "metadata"), "labels")
        build = str(labels[key.IMAGE_BUILD])
        if not digest:
            inputs = read_inputs_name(pod)
            found = self._site.client.get(CONFIGMAPS, inputs, namespace=self._site.namespace)
            spec = json.loads(str(get_object(found, "data")["build.json"]))
            target = parse_push_spec(spec["pushSpec"], where="the test")
            client = make_client(self._site.registry)
            layer = make_layer({"etc/built": build.encode()})
            digest = push_image(
                client,
                target.repository,
                target.tag,
                layers=[layer],
                architecture=spec["architecture"],
            ).digest
            client.close()
        self.finished.append(build)
        self._report(
            pod,
            "Succeeded",
            BuildResult(BuildPhase.FETCH, seconds={"pull": 1.0}),
            BuildResult(BuildPhase.BUILD, seconds={"build": 2.0}),
            BuildResult(BuildPhase.PUSH, digest, seconds={"push": 3.0}),
        )
        return digest

    def fail(self, pod: Json, result: BuildResult) -> None:
        """Report how a container failed."""
        self._report(pod, "Failed", result)

    def evict(self, pod: Json) -> None:
        status: Json = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
        status["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        ]
        self._patch(pod, status)

    def _report(self, pod: Json, phase: str, *results: BuildResult) -> None:
        containers = [_build_container_status(each) for each in results]
        done = [each for each in containers if each["name"] != "push"]
        status: Json = {
            "phase": phase,
            "initContainerStatuses": done,
            "containerStatuses": [each for each in containers if each["name"] == "push"],
        }
        self._patch(pod, status)

    def _patch(self, pod: Json, status: Json) -> None:
        name = str(get_object(pod, "metadata")["name"])
        self._site.client.patch(
            PODS, name, {"status": status}, namespace=self._site.namespace, subresource="status"
        )


def read_inputs_name(pod: Json) -> str:
    """Return the name of the ConfigMap with the Containerfile of a pod."""
    (inputs,) = (each for each in pod["spec"]["volumes"] if each["name"] == "inputs")
    return str(inputs["projected"]["sources"][0]["configMap"]["name"])


def read_architecture(pod: Json) -> str:
    """Return the architecture of the nodes that may run a pod."""
    return str(pod["spec"]["nodeSelector"]["kubernetes.io/arch"])


def _build_container_status(result: BuildResult) -> Json:
    ended = {
        "exitCode": result.exit_code,
        "reason": "Completed" if result.has_succeeded else "Error",
        "message": result.to_json(),
        "finishedAt": "2026-01-01T00:00:00Z",
        "startedAt": "2026-01-01T00:00:00Z",
    }
    return {
        "name": result.phase.value,
        "image": "builder",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
