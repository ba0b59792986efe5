"""Plans of builds: which objects they read from the API server."""

import base64
import json
from typing import Any

import pytest

from tests.fixtures.controllers import CLOCK
from treenail.api.decode import Json
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.builder.build_spec import BuildSpec
from treenail.config.image_mirrors import NO_MIRRORS
from treenail.controllers.image_build.build_planner import BuildPlanner, BuildRefused
from treenail.controllers.image_build.cluster_reader import ClusterReader, FileObjects
from treenail.controllers.image_build.job_builder import (
    BuildReference,
    JobSettings,
    build_input_configmap,
)
from treenail.errors import ConfigError
from treenail.kube.resources import MACHINECONFIGS, Resource, get_object

BASE = f"registry.example.com/os/base@sha256:{'b' * 64}"
ENTITLEMENTS = ["etc-pki-entitlement-worker", "etc-pki-rpm-gpg", "etc-yum-repos-d"]


class RecordingObjects:
    """Objects of files; records the names that are read."""

    def __init__(self, *documents: dict[str, Any], **rendered: Any) -> None:
        """``rendered`` is part of the rendered config."""
        self._rendered = rendered
        self._objects = FileObjects([("the test", json.dumps(each)) for each in documents])
        self.read: list[str] = []

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json:
        self.read.append(name)
        if resource is MACHINECONFIGS:
            config = {"ignition": {"version": "3.5.0"}}
            return {
                "metadata": {"name": name},
                "spec": {"osImageURL": BASE, "config": config, **self._rendered},
            }
        return self._objects.get(resource, name, namespace=namespace)


def make_objects(text: str, *, name: str = "worker") -> tuple[MachineOSConfig, MachineConfigPool]:
    """Return a MachineOSConfig with this Containerfile, and its pool."""
    config = MachineOSConfig.from_json(
        {
            "metadata": {"name": name},
            "spec": {
                "machineConfigPool": {"name": "worker"},
                "imageBuilder": {"imageBuilderType": "Job"},
                "renderedImagePushSecret": {"name": "push"},
                "renderedImagePushSpec": "registry.example.com/os/node:latest",
                "containerFile": [{"content": text}] if text else [],
            },
        }
    )
    pool = MachineConfigPool.from_json(
        {"metadata": {"name": "worker"}, "spec": {"configuration": {"name": "rendered-worker-0"}}}
    )
    return config, pool


def test_only_a_build_that_has_not_ended_needs_entitlements() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": ENTITLEMENTS[1]}}
    objects = RecordingObjects(secret)
    planner = BuildPlanner(ClusterReader(objects, CLOCK, namespace="builds"))
    config, pool = make_objects("FROM configs AS final\nRUN true\n")
    plan = planner.plan_build(config, pool, frozenset())
    assert [each.name for each in plan.entitlements] == ENTITLEMENTS[1:2]
    assert [each for each in objects.read if each in ENTITLEMENTS] == ENTITLEMENTS
    objects.read.clear()
    ended = planner.plan_build(config, pool, frozenset(), plan.wanted.name.__eq__)
    assert (ended.wanted.name, ended.entitlements) == (plan.wanted.name, ())
    assert objects.read == []


def test_text_without_a_part_of_the_user_has_no_line_of_the_user() -> None:
    objects = RecordingObjects(
        extensions=["usbguard"],
        baseOSExtensionsContainerImage=f"registry.example.com/os/extensions@sha256:{'c' * 64}",
    )
    planner = BuildPlanner(ClusterReader(objects, CLOCK, namespace="builds"))
    (system,) = planner.plan_build(*make_objects(""), frozenset()).systems
    assert "rpm-ostree install" in system.containerfile
    # A failure there must not name a line of a text that the user has not written.
    assert system.user_line == 0


def test_source_that_the_context_lacks_is_refused_before_a_job() -> None:
    planner = BuildPlanner(ClusterReader(RecordingObjects(), CLOCK, namespace="builds"))
    with pytest.raises(BuildRefused, match=r"line 2: COPY app\.conf: the build has no such file"):
        planner.plan_build(*make_objects("FROM configs\nCOPY app.conf /etc/\n"), frozenset())


@pytest.mark.parametrize("bundle", ["abc", "-----BEGIN CERTIFICATE-----\nMIIB\n", "é"])
def test_trust_bundle_that_is_not_base64_is_named(bundle: str) -> None:
    found = {"metadata": {"name": "machine-config-controller"}, "kind": "ControllerConfig"}
    objects = RecordingObjects({**found, "spec": {"additionalTrustBundle": bundle}})
    planner = BuildPlanner(ClusterReader(objects, CLOCK, namespace="builds"))
    with pytest.raises(ConfigError, match=r"spec\.additionalTrustBundle: expected base64"):
        planner.plan_build(*make_objects(""), frozenset())


@pytest.mark.parametrize("text", ["", "FROM configs AS final\nRUN true\n"])
def test_mirrors_of_the_config_reach_the_job_and_change_no_key(text: str) -> None:
    conf = (
        '[[registry]]\nlocation="registry.example.com"\n[[registry.mirror]]\nlocation="m.example"'
    )
    source = f"data:;base64,{base64.b64encode(conf.encode()).decode()}"
    file = {"path": "/etc/containers/registries.conf", "contents": {"source": source}}
    other = {**file, "contents": {"source": "data:,%5b"}}
    ca = base64.b64encode(b"the CA of the mirror").decode()
    controller = {
        "kind": "ControllerConfig",
        "metadata": {"name": "machine-config-controller"},
        "spec": {"imageRegistryBundleUserData": [{"file": "m.example", "data": ca}]},
    }
    plans = [
        BuildPlanner(ClusterReader(objects, CLOCK, namespace="builds")).plan_build(
            *make_objects(text), frozenset()
        )
        for objects in (
            RecordingObjects(
                controller,
                config={"ignition": {"version": "3.5.0"}, "storage": {"files": [each]}},
            )
            for each in (file, other)
        )
    ]
    mirrored, plain = plans
    build = BuildReference("worker-1", "uid", "worker")
    document = build_input_configmap(mirrored, mirrored.systems[0], build, JobSettings())
    spec = BuildSpec.from_json(json.loads(str(get_object(document, "data")["build.json"])))
    assert spec.mirrors.list_places("registry.example.com/os/base", is_digest=True) == (
        "m.example/os/base", "registry.example.com/os/base",
    )  # fmt: skip
    assert mirrored.ca_pem == "the CA of the mirror"
    # A file that is no TOML gives no mirror, and no failure of a build that needs none.
    assert plain.mirrors == NO_MIRRORS
    assert mirrored.wanted.content_key == plain.wanted.content_key
