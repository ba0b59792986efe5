"""The proxy of the cluster in Jobs and in requests of the controllers, and where its login is."""

import argparse
import base64
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from tests.controllers.image_build.test_planner import make_objects
from tests.fakes.clock import FakeClock
from tests.registry.test_proxies import TunnelProxy
from treenail.api import machineosconfig, pullspec
from treenail.cli.controller.run import controllers
from treenail.cli.controller.run.rollout import make_tag_source
from treenail.controllers.handover import handover_objects, image_mover
from treenail.controllers.image_build import (
    build_objects,
    build_planner,
    cluster_reader,
    job_builder,
    layer_builder,
    pruner,
    tag_resolver,
    writer,
)
from treenail.errors import ConfigError, NotFoundError
from treenail.kube.api_client import Client
from treenail.kube.resources import CONTROLLERCONFIGS, MACHINECONFIGS, SECRETS, Resource

Json = dict[str, Any]
LOGIN = {"auths": {"registry.example.com": {"auth": base64.b64encode(b"user:pass").decode()}}}
IMAGE = f"registry.example.com/os/node@sha256:{'a' * 64}"
HERE = {"HTTPS_PROXY": "http://here:1", "PATH": "/bin"}
BUILD = job_builder.BuildReference("worker-1", "uid", "worker")
SETTINGS = job_builder.JobSettings(namespace="builds")


class ProxiedCluster:
    """Has a ControllerConfig with this proxy, a rendered config and a push login."""

    def __init__(self, proxy: object) -> None:
        self.proxy = proxy

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:
        del namespace
        if resource is CONTROLLERCONFIGS:
            return {"metadata": {"name": name}, "spec": {"proxy": self.proxy}}
        if resource is MACHINECONFIGS:
            config = {"ignition": {"version": "3.5.0"}}
            return {"metadata": {"name": name}, "spec": {"osImageURL": IMAGE, "config": config}}
        if resource is SECRETS and name == "push":
            data = {".dockerconfigjson": base64.b64encode(json.dumps(LOGIN).encode()).decode()}
            kind = "kubernetes.io/dockerconfigjson"
            return {"metadata": {"name": name}, "type": kind, "data": data}
        raise NotFoundError(name)


def make_reader(
    proxy: object, environ: Mapping[str, str] | None = None
) -> cluster_reader.ClusterReader:
    objects = ProxiedCluster(proxy)
    return cluster_reader.ClusterReader(objects, FakeClock(), namespace="builds", environ=environ)


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        ({"httpsProxy": "http://it:1"}, {"HTTPS_PROXY": "http://it:1"}),
        (
            {"httpProxy": "http://it:1", "noProxy": ".svc"},
            {"HTTP_PROXY": "http://it:1", "NO_PROXY": ".svc"},
        ),
        (None, {"HTTPS_PROXY": "http://here:1"}),
        ({}, {"HTTPS_PROXY": "http://here:1"}),
        ({"noProxy": ".svc"}, {"HTTPS_PROXY": "http://here:1"}),
    ],
)
def test_proxy_is_that_of_the_cluster_or_of_the_environment(
    proxy: object, expected: dict[str, str]
) -> None:
    both = {**expected, **{name.lower(): value for name, value in expected.items()}}
    assert make_reader(proxy, HERE).read_proxies() == both
    assert make_reader(proxy).read_proxies() == ({} if "here" in str(expected) else both)


@pytest.mark.parametrize(
    "proxy", [{"httpsProxy": ["http://user:canary@it:1"]}, "http://user:canary@it:1"]
)
def test_malformed_proxy_is_refused_without_its_login(proxy: object) -> None:
    with pytest.raises(ConfigError, match=r"^ControllerConfig\.spec\.proxy") as raised:
        make_reader(proxy).read_proxies()
    assert "canary" not in str(raised.value)


def test_unusable_proxy_is_refused_before_any_build() -> None:
    url = "https://user:canary@it:1"
    planner = build_planner.BuildPlanner(make_reader({"httpsProxy": url}))
    config, pool = make_objects("FROM configs AS final\nRUN true\n")
    with pytest.raises(ConfigError, match=r"spec\.proxy\.httpsProxy.*expected http") as refused:
        planner.plan_build(config, pool, frozenset())
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as refused_start:
        make_reader(None, {"HTTPS_PROXY": url})
    assert "canary" not in f"{refused.value} {refused_start.value}"


@pytest.mark.parametrize("name", ["build", "install"])
def test_unusable_proxy_of_the_environment_ends_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://user:canary@here:1")
    parser = argparse.ArgumentParser()
    for other in ("build", "install"):
        controllers.load_command(other).add_arguments(parser)
    unused = cast("Any", None)
    context = controllers.ControllerContext(
        unused, unused, unused, FakeClock(), unused, "", unused, lambda: "builds"
    )
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as refused:
        controllers.load_command(name).build(context, parser.parse_args([]))
    assert "canary" not in str(refused.value)


def test_tags_are_resolved_again_with_another_proxy() -> None:
    versions = {
        make_reader({"httpsProxy": url}).compute_access_version("") for url in ("", "a:1", "b:1")
    }
    assert len(versions) == 3


class RecordedWrites:
    """Records what is created and deleted."""

    def __init__(self) -> None:
        self.created: list[tuple[Resource, Json]] = []
        self.deleted: list[tuple[Resource, str]] = []

    def create(self, resource: Resource, body: Json, *, namespace: str) -> Json:
        del namespace
        self.created.append((resource, body))
        return body

    def delete(self, resource: Resource, name: str, **_: object) -> None:
        self.deleted.append((resource, name))

    def list(self, *_: object, **__: object) -> Any:
        return type("Page", (), {"items": ()})


def start_job(proxy: object) -> tuple[Json, dict[str, Json]]:
    """Return the Job and the Secrets by name."""
    planner = build_planner.BuildPlanner(make_reader(proxy))
    config, pool = make_objects("FROM configs AS final\nRUN true\n")
    plan = planner.plan_build(config, pool, frozenset())
    writes = RecordedWrites()
    builder = job_builder.JobBuilder(cast("Any", writes), planner, SETTINGS)
    build = cast("Any", type("Build", (), {"name": "worker-1", "metadata": BUILD}))
    builder.start_attempt(plan, plan.systems[0], config, build, 1)
    *inputs, (_, job) = writes.created
    return job, {body["metadata"]["name"]: body for kind, body in inputs if kind is SECRETS}


def test_containers_of_a_job_have_the_proxy_and_only_a_secret_its_login() -> None:
    url = "http://user:canary@it:1"
    job, secrets = start_job({"httpProxy": url, "httpsProxy": url, "noProxy": ".svc,10.0.0.0/8"})
    pod = job["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    assert [container["envFrom"] for container in containers] == [
        [{"secretRef": {"name": "proxy-worker-1"}}]
    ] * 3
    assert "canary" not in json.dumps(job)
    secret = secrets["proxy-worker-1"]
    values = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert values == {
        "HTTP_PROXY": url,
        "HTTPS_PROXY": url,
        "NO_PROXY": ".svc,10.0.0.0/8",
        "http_proxy": url,
        "https_proxy": url,
        "no_proxy": ".svc,10.0.0.0/8",
    }
    assert [owner["name"] for owner in secret["metadata"]["ownerReferences"]] == ["worker-1"]


def test_end_of_a_job_deletes_its_proxy() -> None:
    writes = RecordedWrites()
    builder = job_builder.JobBuilder(cast("Any", writes), cast("Any", None), SETTINGS)
    job, _ = start_job({"httpProxy": "http://it:1"})
    builder.end_attempt(build_objects.ObservedJob.from_json(job).facts, has_inputs=True)
    assert (SECRETS, "proxy-worker-1") in writes.deleted


def test_job_without_a_proxy_has_no_variables() -> None:
    job, secrets = start_job(None)
    assert "envFrom" not in json.dumps(job)
    assert list(secrets) == ["final-worker-1"]


Config = machineosconfig.MachineOSConfig
Request = Callable[[cluster_reader.ClusterReader, Config], str]


def resolve(reader: cluster_reader.ClusterReader, _: Config) -> str:
    resolver = tag_resolver.TagResolver(reader, FakeClock())
    failure = resolver.resolve_tag(
        "registry.example.com/os/base:1", frozenset({"amd64"}), "push"
    ).failure
    return failure.message if failure else ""


def resolve_for_pool(reader: cluster_reader.ClusterReader, _: Config) -> str:
    """Resolve the tag of a pool in a cluster without a proxy, as the rollout controller does."""
    variables = reader.read_proxies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTPS_PROXY", variables["HTTPS_PROXY"])
        client = cast("Client", ProxiedCluster(None))
        tags = make_tag_source(client, FakeClock(), lambda: "builds")
        answer = tags.resolve_tag("registry.example.com/os/base:1", frozenset({"amd64"}), "push")
    return answer.failure.message if answer.failure else ""


def find_system(reader: cluster_reader.ClusterReader, config: Config) -> str:
    layers = layer_builder.LayerBuilder(build_planner.BuildPlanner(reader), FakeClock())
    failure = layers.find_system_image("registry.example.com/os/node:1", config).failure
    return failure.message if failure else ""


def prune(reader: cluster_reader.ClusterReader, config: Config) -> str:
    images = pruner.ImagePruner(
        build_planner.BuildPlanner(reader),
        cast("pruner.ReferenceReader", None),
        cast("writer.BuildEvents", None),
        FakeClock(),
        layer_builder.RepositoryLock(),
    )
    with ThreadPoolExecutor(1) as executor:
        images.start(executor, lambda _: None)
        images.consider(config, [build_objects.PushedImage(IMAGE, "1")])
    return ""


def move(reader: cluster_reader.ClusterReader, config: Config) -> str:
    spec = pullspec.parse_push_spec("registry.example.com/os/node:1", where="")
    image = handover_objects.HandoverImage("worker", f"sha256:{'a' * 64}", spec)
    handover = handover_objects.Handover((image,))
    mover = image_mover.ImageMover(reader, FakeClock())
    with pytest.raises(image_mover.MoveFailed) as raised:
        mover.move_image(image_mover.ImageMove(handover, image, config, "rendered"), lambda: False)
    return str(raised.value)


@pytest.fixture
def closed_proxy() -> Iterator[TunnelProxy]:
    with TunnelProxy(407) as proxy:
        yield proxy


@pytest.mark.parametrize("request_registry", [resolve, resolve_for_pool, find_system, prune, move])
def test_requests_to_registries_go_through_the_proxy_of_the_cluster(
    request_registry: Request, closed_proxy: TunnelProxy, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = make_objects("")
    reader = make_reader({"httpsProxy": f"http://user:canary@{closed_proxy.address}"}, HERE)
    text = request_registry(reader, config) + caplog.text
    assert closed_proxy.heads[0].startswith("CONNECT registry.example.com:443 ")
    assert f"the proxy {closed_proxy.address} answered 407" in text
    assert "canary" not in text
