"""A cluster of the lab with a registry, and a build controller that can be killed."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.contract.client import Cluster
from tests.controllers.clusters import make_build_controller
from tests.fixtures.controllers import CLOCK, run_controllers
from tests.fixtures.objects import (
    collection_of,
    find_condition,
    make_config,
    make_file,
    make_node,
    make_object,
    make_pool,
)
from tests.registry.images import (
    compute_diff_id,
    make_client,
    make_layer,
    push_image,
    push_index,
)
from tests.registry.real_registry import PULLER, PUSHER, RegistryService
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.pullspec import parse_pull_spec, parse_push_spec
from treenail.builder.images.attachments import SigningKey
from treenail.clocks import Clock, SystemClock
from treenail.controllers.runtime.controller_metrics import ControllerMetrics
from treenail.errors import NotFoundError, UnreachableError
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.image.oci.documents import SYSTEM_LAYER
from treenail.kube.api_client import Client, Transport
from treenail.kube.event_recorder import EventRecorder
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    EVENTS,
    JOBS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    Resource,
    get_object,
)
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail.kube.transport.native import HttpTransport
from treenail.manifests import installation
from treenail.registry.images import ResolvedImage, resolve_image
from treenail.registry.transport import RegistryLimits
from treenail_lab.apiserver.serving.server import LabServer

Json = dict[str, Any]
NAMESPACE = "builds"
CONTAINERFILE = "FROM configs AS final\nRUN true\n"
CONFIG = "rendered-worker-0"


@dataclass
class MortalTransport:
    """Ends the controller before or after one of its writes: nothing is sent afterwards."""

    transport: Transport
    die_at: int | None = None
    die_on: str = ""
    """Die at the first write to a path with this end."""
    dies_before: bool = True
    hidden: str = ""
    """Reads of paths with this end fail."""
    forbidden: str = ""
    """Requests with this method and end of the path are forbidden, as ``POST /jobs``."""
    edit_job: Callable[[Json], object] | None = None
    """Changes each new Job, as an API server that does not know a field drops it."""
    is_dead: bool = False
    writes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

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
        answer = self.transport.send(request)
        if is_last:
            raise UnreachableError("the process died after the write")
        return answer

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> Any:
        return self.transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        self.transport.close()


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
        spec = {"imageRegistryBundleUserData": [bundle]}
        self.client.create(
            CONTROLLERCONFIGS, make_object(CONTROLLERCONFIGS, "machine-config-controller", spec)
        )
        self.put_secret("push")
        self.put_secret("global-pull-secret-copy")
        client = make_client(self.registry)
        base = push_image(client, "os/base")
        client.close()
        self.base = f"{self.registry.host}/os/base@{base.digest}"
        self.add_config(CONFIG)

    def _put(self, resource: Resource, name: str, **top: Any) -> None:
        """Create or replace an object in the namespace of builds."""
        body = make_object(resource, name, top=top, namespace=self.namespace)
        try:
            self.client.update(resource, name, body, namespace=self.namespace)
        except NotFoundError:
            self.client.create(resource, body, namespace=self.namespace)

    def put_secret(self, name: str, user: str = PUSHER, *, host: str = "") -> None:
        content = base64.b64encode(self.registry.make_auth_json(user, host=host)).decode()
        data = {".dockerconfigjson": content}
        self._put(SECRETS, name, type="kubernetes.io/dockerconfigjson", data=data)

    def put_context(self, name: str, files: dict[str, str]) -> None:
        """Create or replace a ConfigMap with files for COPY."""
        self._put(CONFIGMAPS, name, data=files)

    def add_config(self, name: str, text: str = "x", **spec: Any) -> None:
        """Create a rendered config with one file."""
        spec = {"osImageURL": self.base, **spec}
        file = make_file("/etc/motd", text, mode=0o644)
        self.client.create(MACHINECONFIGS, make_config(name, file, **spec))

    def add_pool(self, name: str = "worker", config: str = CONFIG) -> None:
        self.client.create(MACHINECONFIGPOOLS, make_pool(name, config))

    def add_node(self, name: str, architecture: str, pool: str = "worker") -> None:
        """Create a Node of a pool."""
        node = make_node(name, role=pool, **{"kubernetes.io/arch": architecture})
        status = {"nodeInfo": {"architecture": architecture}}
        self.client.create(NODES, {**node, "status": status})

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
        spec = {
            "machineConfigPool": {"name": name},
            "imageBuilder": {"imageBuilderType": "Job"},
            "renderedImagePushSecret": {"name": "push"},
            "renderedImagePushSpec": f"{self.registry.host}/os/{name}:latest",
            **({"containerFile": files} if files else {}),
            **spec,
        }
        document = make_object(MACHINEOSCONFIGS, name, spec, annotations=annotations or {})
        self.client.create(MACHINEOSCONFIGS, document)

    def start_pool(self, text: str = "", **options: Any) -> "Kubelet":
        """Create the pool worker and its MachineOSConfig; return who runs the pods of its Jobs."""
        self.add_pool()
        self.add_image_config(text=text, **options)
        return Kubelet(self)

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

    def resolve(self, image: str, architecture: str = "amd64") -> ResolvedImage:
        """Read an image of the registry."""
        spec = parse_pull_spec(image, where="the test")
        with closing(make_client(self.registry, PULLER)) as client:
            return resolve_image(client, spec.repository, spec.digest, architecture)

    def read_labels(self, image: str, architecture: str = "amd64") -> dict[str, str]:
        return json.loads(self.resolve(image, architecture).config)["config"]["Labels"]

    def find_events(self, reason: str) -> list[Json]:
        found: list[Json] = list(self.client.list(EVENTS, namespace="default").items)
        return [each for each in found if each.get("reason") == reason]

    # Observed state

    def owners_of_job(self) -> list[Json]:
        """The builds that wait for the only Job."""
        found = [each["metadata"].get("ownerReferences", []) for each in self.jobs()]
        return list(found[0]) if len(found) == 1 else []

    def image_config(self, name: str = "worker") -> Json:
        return self.client.get(MACHINEOSCONFIGS, name)

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
        *,
        signing_key: SigningKey | None = None,
        clock: Clock = CLOCK,
        limits: RegistryLimits | None = None,
        metrics: ControllerMetrics | None = None,
        **wire: Any,
    ) -> Iterator[MortalTransport]:
        """Run the build controller as the only leader; ``wire`` are fields of its transport."""
        http = HttpTransport(read_kubeconfig(str(self.kubeconfig)), CLOCK, max_kept=16)
        transport = MortalTransport(http, **wire)
        client = Client(transport)
        controller = make_build_controller(
            client,
            EventRecorder(client, "treenail-controller", "test", CLOCK),
            namespace=self.namespace,
            signing_key=signing_key,
            clock=CLOCK if clock is CLOCK else RegistryClock(clock),
            limits=limits,
            metrics=metrics,
        )
        with closing(transport), run_controllers(client, controller, clock=clock):
            yield transport


@contextmanager
def open_site(
    directory: Path, registry: RegistryService, *, namespace: str = NAMESPACE
) -> Iterator[BuildSite]:
    with LabServer(directory / "api") as server:
        # A real Job controller waits 10 seconds before it replaces the first failed pod.
        server.api.controllers.jobs.first_backoff_s = 0.2
        site = BuildSite(server.admin_kubeconfig, registry, namespace=namespace)
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
                labels={**spec["labels"], SYSTEM_LAYER: compute_diff_id(layer)},
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
        "message": result.to_text(),
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
