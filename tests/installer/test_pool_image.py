"""Builds of the control plane's image on the bootstrap host, with real registries."""

import gzip
from pathlib import Path

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.installer.pool_builds import FINAL, InstallSite, RecordingContext
from tests.installer.registries import make_registry, open_client
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from treenail.api.machineosbuild import BuildState, MachineOSBuild
from treenail.controllers.pools.image_tags import decode_base_record

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]


def test_image_with_config_alone_is_pushed_under_its_final_name(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.push_base()
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry)
        with open_client(registry, is_push=False) as client:
            found = client.head_manifest("os/node", image.digest)
            assert found is not None
            tagged = client.head_manifest("os/node", image.build_name)
            assert tagged.digest == image.digest
    assert image.pull_spec == f"{FINAL}/os/node@{image.digest}"
    build = MachineOSBuild.from_json(site.read_object())
    assert (build.state, build.condition and build.condition.reason) == (
        BuildState.SUCCEEDED, "BuiltAtInstall",
    )  # fmt: skip
    assert (build.name, build.pull_spec) == (image.build_name, image.pull_spec)
    assert site.read_report()["image"] == image.pull_spec


def test_second_run_with_equal_inputs_builds_nothing(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.push_base()
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry)
    context = RecordingContext()
    with make_registry(tmp_path) as registry:
        assert site.build(registry, context) == image
    assert context.reports == []


@needs_buildah
@needs_busybox
def test_image_with_containerfile_is_built_and_leaves_no_working_files(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.base = push_base(lab_registry, tmp_path)
    site.text = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry)
        with open_client(registry, is_push=False) as client:
            assert client.head_manifest("os/node", image.digest) is not None
            tag = f"system-{image.key}"
            system = client.head_manifest("os/node", tag)
            assert system is not None
    assert image.system_images == (f"{FINAL}/os/node@{system.digest}",)
    logs = site.directory.get_build_logs("master", 1)
    assert "RUN echo built" in (logs / "Containerfile").read_text()
    assert "RUN echo built" in (logs / "output.log").read_text()
    assert list(site.directory.builds.iterdir()) == []


def test_base_by_tag_is_resolved_once_and_recorded_for_the_cluster(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    digest = site.push_base("stable")
    site.base_annotation = f"{lab_registry.host}/os/base:stable"
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry)
        client = make_client(lab_registry)
        push_image(client, "os/base", "stable", layers=[make_layer({"usr/lib/new": b"x"})])
        client.close()
        assert site.build(registry) == image
    build = MachineOSBuild.from_json(site.read_object())
    record = decode_base_record(build.metadata.annotations["treenail.io/resolved-base"])
    assert (record.tag, record.image) == (
        site.base_annotation, f"{lab_registry.host}/os/base@{digest}",
    )  # fmt: skip


def test_layers_and_documents_name_no_bootstrap_registry(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.push_base()
    site.write()
    with make_registry(tmp_path) as registry:
        site.build(registry)
        names = [registry.push_address.encode(), registry.address.encode()]
        secrets = [
            secret.encode()
            for login in (registry.push_login, registry.pull_login)
            for secret in login.list_secrets()
        ]
        blobs = list(registry.storage.rglob("data"))
    assert len(blobs) > 4
    contents = [each.read_bytes() for each in blobs]
    contents += [gzip.decompress(each) for each in contents if each[:2] == b"\x1f\x8b"]
    assert not [word for word in (*names, *secrets) for each in contents if word in each]
