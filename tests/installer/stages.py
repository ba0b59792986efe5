"""The stage ``bootstrap`` in this process: what outlives a process, and a process that may die."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.clock import FakeClock
from tests.installer.dying import DyingFiles, Fuse
from tests.installer.joined_nodes import make_node
from treenail.api.decode import Json
from treenail.api.ignition.model import IgnitionFile
from treenail.api.pullspec import parse_push_spec
from treenail.config.bootstrap_registry import list_node_files
from treenail.controllers.handover.handover_objects import (
    HANDOVER_SECRET,
    RESULT_CONFIGMAP,
    Handover,
    HandoverImage,
    HandoverResult,
    build_result_configmap,
    make_node_record,
    read_handover_secret,
)
from treenail.errors import AlreadyExistsError, NotFoundError, TreenailError
from treenail.installer.bootstrap.bootstrap import (
    BootstrapSettings,
    BootstrapSource,
    BootstrapStage,
)
from treenail.installer.bootstrap.image_steps import PoolImage
from treenail.installer.directory.install_files import InstallDirectory, InstallFiles
from treenail.installer.directory.install_manifests import InstallManifests, RenderedPool
from treenail.installer.directory.install_state import compute_checksum
from treenail.installer.install_steps import StepContext
from treenail.kube.api_client import Client, Listing
from treenail.kube.resources import NODES, Resource
from treenail.provisioning.content.source import SourceUnreadyError

PUSH_SPEC = "registry.example.com/os/{pool}:latest"
REGISTRY = "bootstrap.example.com:22625"


@dataclass(slots=True)
class Outside:
    """The registry and the cluster, which no death of the process changes."""

    pushed: dict[str, str] = field(default_factory=dict)
    """Digest by content key."""
    builds: list[str] = field(default_factory=list)
    """Content keys in the order of their builds."""
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)
    served: list[tuple[str, str]] = field(default_factory=list)
    """Rendered config and image of each config that a machine got."""

    def read_result(self) -> Mapping[str, object]:
        """Return everything that counts at the end."""
        return {
            "pushed": self.pushed,
            "objects": {name: json.dumps(each, sort_keys=True) for name, each in
                        sorted(self.objects.items())},
            "served": sorted(set(self.served)),
        }  # fmt: skip


class OutsideCluster(Client):
    """A cluster whose controller ``install`` answers at once."""

    def __init__(self, outside: Outside, fuse: Fuse) -> None:
        self._objects = outside.objects
        self._fuse = fuse

    def get(self, resource: Resource, name: str, **_: object) -> Json:
        if (resource.kind, name) == ("Namespace", "default"):
            return {}
        if name == RESULT_CONFIGMAP:
            found = self._objects.get(("Secret", HANDOVER_SECRET))
            if found is None:
                raise NotFoundError("not found")
            handover = read_handover_secret(found)
            digests = {each.pool: each.digest for each in handover.images}
            return build_result_configmap(HandoverResult(digests, handover.registry, ""))
        raise NotFoundError("not found")

    def list(self, resource: Resource, **_: object) -> Listing:
        return Listing((make_node("master-0"),) if resource is NODES else (), "1")

    def create(self, resource: Resource, body: Json, **_: object) -> Json:
        name = self._get_name(body)
        if (resource.kind, name) in self._objects:
            raise AlreadyExistsError("exists")
        return self._write(resource, name, body)

    def update(self, resource: Resource, name: str, body: Json, **_: object) -> Json:
        return self._write(resource, name, body)

    def _write(self, resource: Resource, name: str, body: Json) -> Json:
        self._fuse.pass_point()
        self._objects[resource.kind, name] = body
        self._fuse.pass_point()
        return body

    def _get_name(self, body: Json) -> str:
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        return str(metadata["name"])


class OutsideImages:
    """Builds into the registry outside; the process may die before and after each push."""

    def __init__(self, outside: Outside, fuse: Fuse, failure: TreenailError | None = None) -> None:
        self._outside = outside
        self._fuse = fuse
        self._failure = failure

    def find_provider(self, pool: RenderedPool) -> "OutsideImages | None":
        return self

    def compute_inputs(self, pool: RenderedPool) -> Mapping[str, str]:
        return {f"content of pool {pool.pool.name}": self._compute_key(pool)}

    def has_image(self, image: PoolImage) -> bool:
        return image.digest in self._outside.pushed.values()

    def provide_image(self, pool: RenderedPool, context: StepContext) -> PoolImage:
        context.report("building")
        if self._failure is not None:
            raise self._failure
        key = self._compute_key(pool)
        if key not in self._outside.pushed:
            self._fuse.pass_point()
            self._outside.builds.append(key)
            self._outside.pushed[key] = compute_checksum(key)
            self._fuse.pass_point()
        push_spec = PUSH_SPEC.format(pool=pool.pool.name)
        repository = push_spec.rpartition(":")[0]
        image = f"{repository}@{self._outside.pushed[key]}"
        return PoolImage(pool.pool.name, image, push_spec, f"{pool.pool.name}-1")

    def list_node_files(self, images: Sequence[PoolImage]) -> tuple[IgnitionFile, ...]:
        return list_node_files(make_node_record(self.make_handover(images)), b"CA")

    def make_handover(self, images: Sequence[PoolImage]) -> Handover:
        found = tuple(
            HandoverImage(each.pool, each.digest, parse_push_spec(each.push_spec, where="x"))
            for each in images
        )
        return Handover(found, REGISTRY, "CA", "puller", "password")

    def export_images(self) -> str:
        return "nowhere"

    def _compute_key(self, pool: RenderedPool) -> str:
        return f"{pool.pool.name} {pool.rendered.name}"


class StageServices:
    """A `HostServices` of one process."""

    def __init__(self, outside: Outside, fuse: Fuse, failure: TreenailError | None = None) -> None:
        self._outside = outside
        self._fuse = fuse
        self._failure = failure
        self.source: BootstrapSource | None = None

    def check_host(self) -> None:
        self._fuse.pass_point()

    @contextmanager
    def open_server(
        self, source: BootstrapSource, describe_status: Callable[[], Json]
    ) -> Iterator[None]:
        self.source = source
        yield

    @contextmanager
    def open_images(self, manifests: InstallManifests) -> Iterator[OutsideImages]:
        yield OutsideImages(self._outside, self._fuse, self._failure)

    def connect(self) -> Callable[[], Client]:
        self._fetch_config()
        return lambda: OutsideCluster(self._outside, self._fuse)

    def describe_machines(self, registry: str) -> str:
        return f"no machine has pulled its image from {registry}"

    def notify_ready(self) -> None:
        self._fuse.pass_point()

    def notify_status(self, text: str) -> None:
        self._fetch_config()

    def begin_log(self, install_id: str) -> None:
        pass

    def wait_for_stop(self) -> None:
        raise AssertionError

    def _fetch_config(self) -> None:
        """Request a config as machines do, at any time."""
        if self.source is None:
            return
        try:
            found = self.source.read_inputs("master")
        except SourceUnreadyError:
            return
        self._outside.served.append((found.config.name, found.image.image))


def run_stage(
    root: Path,
    outside: Outside,
    fuse: Fuse | None = None,
    *,
    failure: TreenailError | None = None,
    files: InstallFiles | None = None,
) -> None:
    """Run one process of the stage to its end or its death."""
    fuse = fuse or Fuse()
    services = StageServices(outside, fuse, failure)
    stage = BootstrapStage(
        InstallDirectory(root),
        BootstrapSettings(),
        services,
        files or DyingFiles(fuse),
        FakeClock(),
    )
    stage.run(should_stop=True)
