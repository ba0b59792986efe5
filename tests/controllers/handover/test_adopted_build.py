"""A cluster adopts what the bootstrap host built: the build controller builds nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.controllers.image_build.site import BuildSite, Kubelet, open_site
from tests.installer.adoption import adopt_build, create_image_config, create_rendered_pool
from tests.installer.pool_builds import InstallSite
from tests.installer.registries import (
    make_registry,
    needs_skopeo,
    run_skopeo,
    write_auth_file,
    write_certificates,
)
from tests.registry.real_registry import (
    PUSHER,
    RegistryService,
    lab_registry,
    needs_docker_registry,
)
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistry
from treenail.installer.images.built_image import BuiltPoolImage

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]
TEXT = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"
Json = dict[str, Any]


@pytest.fixture
def cluster(tmp_path: Path, lab_registry: RegistryService) -> Iterator[BuildSite]:
    with open_site(tmp_path, lab_registry) as site:
        yield site


@pytest.fixture
def install(tmp_path: Path, lab_registry: RegistryService) -> InstallSite:
    return InstallSite(tmp_path / "install", lab_registry, final=lab_registry.host)


def build_image(install: InstallSite) -> BuiltPoolImage:
    install.write()
    with make_registry(install.root) as registry:
        return install.build(registry)


def create_pool(cluster: BuildSite, install: InstallSite) -> None:
    create_rendered_pool(cluster.client, install)
    cluster.put_secret("pull")


def copy_image(
    source: BootstrapRegistry, target: RegistryService, image: str, directory: Path
) -> None:
    """Copy an image by digest from the bootstrap registry to the final one."""
    name, _, digest = image.partition("@")
    path = name.partition("/")[2]
    pull = write_auth_file(directory / "pull.json", source.address, source.pull_login)
    push = directory / "push.json"
    push.write_bytes(target.make_auth_json(PUSHER))
    done = run_skopeo(
        "copy", "--preserve-digests", f"--src-authfile={pull}", f"--dest-authfile={push}",
        f"--src-cert-dir={write_certificates(directory / 'certs', source)}",
        f"--dest-cert-dir={target.ca_file.parent}",
        f"docker://{source.address}/{path}@{digest}", f"docker://{target.host}/{path}:copied",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def describe_build(build: Json) -> Json:
    """Return the parts of a MachineOSBuild that no server adds and no clock changes."""
    metadata = build["metadata"]
    notes = {
        name: text for name, text in metadata["annotations"].items() if name != key.BUILD_REPORT
    }
    return {
        "name": metadata["name"],
        "labels": metadata["labels"],
        "annotations": notes,
        "spec": build["spec"],
        "image": build["status"]["digestedImagePushSpec"],
    }


def test_image_with_config_alone_equals_that_of_the_build_controller(
    cluster: BuildSite, install: InstallSite
) -> None:
    install.push_base()
    image = build_image(install)
    create_pool(cluster, install)
    create_image_config(cluster.client, install)
    with cluster.controller():
        assert cluster.wait_image("master") == image.pull_spec
    (build,) = cluster.builds()
    assert describe_build(build) == describe_build(install.read_object())


@needs_buildah
@needs_busybox
@needs_skopeo
def test_image_with_containerfile_equals_that_of_the_build_controller(
    cluster: BuildSite, install: InstallSite, tmp_path: Path, lab_registry: RegistryService
) -> None:
    install.base, install.text = push_base(lab_registry, tmp_path), TEXT
    install.write()
    with make_registry(install.root) as registry:
        image = install.build(registry)
        (system,) = image.system_images
        copy_image(registry, lab_registry, system, tmp_path)
    create_pool(cluster, install)
    create_image_config(cluster.client, install)
    kubelet = Kubelet(cluster)
    with cluster.controller():
        # The Job builds the same system part.
        kubelet.succeed(kubelet.wait_pod(), digest=system.partition("@")[2])
        assert cluster.wait_image("master") == image.pull_spec
    (build,) = cluster.builds()
    assert describe_build(build) == describe_build(install.read_object())


@pytest.mark.parametrize("text", ["", pytest.param(TEXT, marks=[needs_buildah, needs_busybox])])
def test_adopted_build_is_served_and_nothing_is_built(
    cluster: BuildSite,
    install: InstallSite,
    tmp_path: Path,
    lab_registry: RegistryService,
    text: str,
) -> None:
    install.base, install.text = "", text
    if text:
        install.base = push_base(lab_registry, tmp_path)
    else:
        install.push_base()
    image = build_image(install)
    create_pool(cluster, install)
    adopt_build(cluster.client, install)
    with cluster.controller():
        wait_until(lambda: cluster.image("master"))
        (build,) = cluster.builds()
        assert build["metadata"]["name"] == image.build_name
        assert cluster.build_state() == (
            "Succeeded", "BuiltAtInstall", "The image was built on the bootstrap host",
        )  # fmt: skip
        assert cluster.image("master") == image.pull_spec
        assert cluster.jobs() == []
