"""Images of an installation, as the stage ``bootstrap`` uses them."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.installer.pool_builds import FINAL, InstallSite, RecordingContext
from tests.installer.registries import CLOCK
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from treenail.cli.controller.install.bootstrap import parse_size
from treenail.config.bootstrap_registry import MIRROR_FILE, RECORD_FILE
from treenail.controllers.handover.handover_objects import (
    build_handover_secret,
    read_handover_secret,
)
from treenail.controllers.handover.image_mode import ImageMode, RegistryType
from treenail.errors import FileError
from treenail.installer.bootstrap.bootstrap_registry import BootstrapRegistrySettings
from treenail.installer.bootstrap.image_steps import ImageStep, PoolImage
from treenail.installer.bootstrap.install_images import ImageSettings, InstallImages
from treenail.installer.directory.install_manifests import (
    RenderedPool,
    read_install_manifests,
    render_install_pools,
)
from treenail.installer.directory.prepared_manifests import FILE_NAME

__all__ = ["lab_registry"]
NAMESPACE = "treenail"
PRE_BUILT = "machineconfiguration.openshift.io/pre-built-image"
DIGEST = "sha256:" + "ab" * 32


def open_images(site: InstallSite, settings: ImageMode | None = None) -> InstallImages:
    """The images of a directory; not entered."""
    manifests = read_install_manifests(site.root)
    manifests.settings = settings
    registry = BootstrapRegistrySettings("127.0.0.1", "127.0.0.1:0", 100 * 1024 * 1024)
    return InstallImages(site.directory, manifests, ImageSettings(registry), site.files, CLOCK)


def render_pool(site: InstallSite, name: str = "master") -> RenderedPool:
    pools = render_install_pools(read_install_manifests(site.root))
    return next(each for each in pools if each.pool.name == name)


def provide(images: InstallImages, site: InstallSite) -> PoolImage:
    """The image of pool master, by its step."""
    pool = render_pool(site)
    provider = images.find_provider(pool)
    assert provider is not None
    step = ImageStep(pool, provider, None)
    step.compute_inputs()
    step.run(RecordingContext())
    return step.image


@pytest.mark.integration
@needs_docker_registry
def test_built_image_is_resumed_and_handed_over_with_its_objects(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, namespace=NAMESPACE)
    site.push_base()
    site.write()
    with open_images(site) as images:
        assert images.find_provider(render_pool(site, "worker")) is None
        image = provide(images, site)
        files = {each.path for each in images.list_node_files([image])}
        handover = read_handover_secret(build_handover_secret(images.make_handover([image])))
    assert image.image.startswith(f"{FINAL}/os/node@sha256:")
    assert {MIRROR_FILE, RECORD_FILE} < files
    assert len(files) == 3
    kinds = sorted(str(each["kind"]) for each in handover.objects)
    assert kinds == ["MachineOSBuild", "MachineOSConfig", "Secret", "Secret"]
    assert [each.final_image for each in handover.images] == [image.image]
    assert handover.password not in json.dumps(handover.objects)
    # Another process, as after a kill.
    with open_images(site) as images:
        pool = render_pool(site)
        provider = images.find_provider(pool)
        assert provider is not None
        step = ImageStep(pool, provider, None)
        step.compute_inputs()
        result = {"image": image.image, "push_spec": image.push_spec}
        assert step.resume({**result, "build_name": image.build_name})
        assert step.image == image
        assert not step.resume({**result, "image": f"{FINAL}/os/node@{DIGEST}", "build_name": ""})


@pytest.mark.integration
@needs_docker_registry
def test_image_of_external_registry_needs_no_bootstrap_registry(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, final=lab_registry.host, namespace=NAMESPACE)
    site.push_base()
    site.write()
    with open_images(site, ImageMode(registry=RegistryType.EXTERNAL)) as images:
        image = provide(images, site)
        assert images.list_node_files([image]) == ()
        handover = images.make_handover([image])
    assert (handover.registry, len(handover.images)) == ("", 1)
    assert not site.directory.registry.exists()


def write_pre_built(root: Path) -> None:
    """Add the annotation of the Machine Config Operator to the MachineOSConfig."""
    for path in (root / "manifests").iterdir():
        text = path.read_text()
        path.write_text(
            text.replace(
                '"annotations": {}',
                json.dumps({"annotations": {PRE_BUILT: f"quay.example/os:1@{DIGEST}"}})[1:-1],
            )
        )


@pytest.mark.integration
def test_pre_built_image_is_used_without_its_tag_and_without_a_registry(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, namespace=NAMESPACE)
    site.push_base()
    site.write()
    write_pre_built(tmp_path)
    with open_images(site) as images:
        image = provide(images, site)
        assert image == PoolImage("master", f"quay.example/os@{DIGEST}")
        assert images.list_node_files([image]) == ()
    assert not site.directory.registry.exists()


@pytest.mark.integration
def test_hand_over_of_an_image_without_its_build_is_an_error(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, namespace=NAMESPACE)
    site.push_base()
    site.write()
    images = open_images(site, replace(ImageMode(), registry=RegistryType.EXTERNAL))
    with images, pytest.raises(FileError, match="does not exist"):
        images.make_handover(
            [PoolImage("master", f"{FINAL}/os/node@{DIGEST}", f"{FINAL}/os/node:1")]
        )


@pytest.mark.parametrize(("text", "size"), [("500Mi", 500 * 2**20), ("20Gi", 20 * 2**30)])
def test_size_of_storage_is_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0Gi", "10", "10G", "-1Gi", "1.5Gi", "1Gi "])
def test_size_of_storage_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 20Gi"):
        parse_size(text)


@pytest.mark.integration
@needs_docker_registry
def test_private_files_have_names_that_the_installer_never_copies(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry, namespace=NAMESPACE)
    site.push_base()
    site.write()
    with open_images(site):
        pass
    found = [each for each in site.directory.private.rglob("*") if each.is_file()]
    private = [each.relative_to(tmp_path) for each in found if each.stat().st_mode & 0o077 == 0]
    logins = site.directory.registry / "secrets/logins.json"
    texts = [
        text for text in json.dumps(json.loads(logins.read_text())).split('"') if len(text) > 12
    ]
    assert texts
    for path in private:
        # installer-gather.sh removes *secret* and *.key from its copy of the directory.
        if "secret" not in str(path) and path.suffix != ".key":
            content = (tmp_path / path).read_text(errors="replace")
            assert not [text for text in texts if text in content], path
            assert "PRIVATE KEY" not in content
    assert "secret" in FILE_NAME
