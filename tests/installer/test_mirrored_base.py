"""Base images that only a mirror has: of the objects of OpenShift, and of the nodes' own files."""

import base64
from pathlib import Path

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.fakes.clock import FakeClock
from tests.installer.directories import make_config
from tests.installer.pool_builds import InstallSite, RecordingContext
from tests.installer.registries import make_registry
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from treenail.api.component_names import NAMESPACE
from treenail.builder.registries import RegistrySettings
from treenail.installer.directory.install_manifests import read_install_manifests
from treenail.installer.directory.online_checks import OnlineChecks, RegistryChecker
from treenail.installer.images.pool_image import PoolBuildError

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
SOURCE = "127.0.0.1:9"
"""The registry of the release, which a disconnected network does not reach."""


def make_mirror_set(registry: RegistryService, kind: str, *, path: str = "os") -> dict[str, object]:
    name = "imageTagMirrors" if kind == "ImageTagMirrorSet" else "imageDigestMirrors"
    return {
        "apiVersion": "config.openshift.io/v1",
        "kind": kind,
        "metadata": {"name": "release"},
        "spec": {name: [{"source": f"{SOURCE}/up", "mirrors": [f"{registry.host}/{path}"]}]},
    }


def make_node_mirror(registry: RegistryService) -> dict[str, object]:
    """Return a MachineConfig whose file tells nodes, and builds for them, where to pull."""
    text = (
        f'[[registry]]\nlocation="{SOURCE}/up"\n'
        f'[[registry.mirror]]\nlocation="{registry.host}/os"\n'
    )
    source = f"data:;base64,{base64.b64encode(text.encode()).decode()}"
    file = {"path": "/etc/containers/registries.conf", "contents": {"source": source}}
    ignition = {"ignition": {"version": "3.5.0"}, "storage": {"files": [file]}}
    return make_config("50-mirrors", "master", config=ignition)


def move_base(site: InstallSite) -> None:
    """Name the base as in a release: by a registry that is not reachable."""
    site.base = f"{SOURCE}/up/{site.base.rpartition('/')[2]}"


@pytest.mark.parametrize("place", ["set", "config"])
def test_layer_is_added_to_a_base_of_a_mirror(
    place: str, tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.push_base()
    move_base(site)
    site.extra = [
        make_node_mirror(lab_registry)
        if place == "config"
        else make_mirror_set(lab_registry, "ImageDigestMirrorSet")
    ]
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry, RecordingContext(limit_s=60.0))
    # The cluster and the nodes know the base by its name in the release.
    assert lab_registry.host not in str(site.read_object())
    assert SOURCE not in image.pull_spec


@needs_buildah
@needs_busybox
def test_containerfile_is_built_on_a_base_of_a_mirror(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.base = push_base(lab_registry, tmp_path)
    move_base(site)
    site.text = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"
    site.extra = [make_mirror_set(lab_registry, "ImageDigestMirrorSet")]
    site.write()
    with make_registry(tmp_path) as registry:
        site.build(registry, RecordingContext(limit_s=60.0))
    log = site.directory.get_build_logs("master", 1) / "output.log"
    assert f"from {lab_registry.host}/os/base" in log.read_text()


def test_tag_of_a_base_is_resolved_at_its_mirror(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    digest = site.push_base("stable")
    site.base_annotation = f"{SOURCE}/up/base:stable"
    site.extra = [
        make_mirror_set(lab_registry, "ImageTagMirrorSet"),
        make_node_mirror(lab_registry),
    ]
    site.write()
    with make_registry(tmp_path) as registry:
        site.build(registry, RecordingContext(limit_s=60.0))
    assert f"{SOURCE}/up/base@{digest}" in str(site.read_object())


def test_image_that_the_mirror_lacks_is_named_with_both_places(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.push_base()
    move_base(site)
    site.extra = [make_mirror_set(lab_registry, "ImageDigestMirrorSet", path="empty")]
    site.write()
    with make_registry(tmp_path) as registry, pytest.raises(PoolBuildError) as caught:
        site.build(registry, RecordingContext(limit_s=60.0))
    text = str(caught.value)
    assert "BaseNotFound" in text
    assert f"{lab_registry.host}/empty/base@" in text
    assert f"also cannot read the manifest {SOURCE}/up/base@" in text


@pytest.mark.parametrize(("path", "count"), [("os", 0), ("empty", 1)])
def test_checks_before_the_installation_ask_the_mirror(
    path: str, count: int, tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, namespace=NAMESPACE)
    site.push_base()
    move_base(site)
    site.extra = [make_mirror_set(lab_registry, "ImageDigestMirrorSet", path=path)]
    site.write()
    checks = OnlineChecks(RegistryChecker(RegistrySettings(), FakeClock()))
    manifests = read_install_manifests(tmp_path)
    problems, _ = checks.find_problems(manifests, {"master": "amd64"})
    found = [str(each) for each in problems if "base image" in str(each)]
    assert len(found) == count, problems
    assert all(f"{lab_registry.host}/empty/base" in each for each in found)
