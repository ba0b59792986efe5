"""The layer-only builder on a real registry."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.image.test_config_layer import FULL, make_config, make_file
from tests.registry.images import make_client, make_layer, push_image, push_index
from tests.registry.real_registry import (
    PULLER,
    PUSHER,
    FaultKind,
    RegistryFault,
    RegistryService,
    any_registry,
    lab_registry,
    real_registry,
)
from treenail.builder.append_config import (
    AppendedImage,
    ImageDestination,
    ImageSource,
    append_config,
    append_config_to_list,
)
from treenail.builder.images.prune import ImageCache, delete_images
from treenail.config.image_content import compare_with_image
from treenail.config.wanted_state import read_wanted_state
from treenail.controllers.image_build.pruner import read_candidates
from treenail.daemon.configuration.image_content import read_image_content
from treenail.host.filesystem.root_directory import Root
from treenail.image.config_layer import make_config_layer
from treenail.image.oci.documents import BUILD, IMAGE_CONFIG, ImageLabels, read_labels
from treenail.image.oci.prune import PrunePlan, plan_pruning
from treenail.registry.client import RegistryClient
from treenail.registry.errors import Denied, DigestMismatch, LoginRefused
from treenail.registry.images import has_complete_image, resolve_image
from treenail.registry.referrers import attach, get_referrers

__all__ = ["any_registry", "lab_registry", "real_registry"]

LAYER = make_config_layer(make_config(files=[make_file("/etc/app.conf")]))
LABELS = ImageLabels("rendered-worker-a", "worker", "quay.io/os@sha256:1").to_map()


def append(client: RegistryClient, reference: str, tag: str, repository: str = "os/node") -> str:
    image = resolve_image(client, "os/base", reference, "amd64")
    destination = ImageDestination(client, repository, tag)
    return append_config(ImageSource(client, image), LAYER, LABELS, destination).digest


@pytest.mark.parametrize("is_docker", [False, True])
def test_config_is_appended_without_a_pull(any_registry: RegistryService, is_docker: bool) -> None:
    client = make_client(any_registry)
    base = push_image(client, "os/base", is_docker=is_docker)
    layers = json.loads(client.get_manifest("os/base", "base").content)["layers"]
    before = len(any_registry.front.requests)
    digest = append(client, base.digest, "build-1")
    requests = any_registry.front.requests[before:]
    assert not any(method == "GET" and layers[0]["digest"] in path for method, path, _ in requests)
    found = resolve_image(make_client(any_registry, PULLER), "os/node", "build-1", "amd64")
    assert found.digest == digest
    assert found.layers[-1].digest == LAYER.digest
    assert read_labels(found.config)["machineconfig"] == "rendered-worker-a"
    assert append(client, base.digest, "build-2") == digest


def test_list_of_manifests_gets_the_layer_in_each_image(any_registry: RegistryService) -> None:
    client = make_client(any_registry)
    names = ("amd64", "arm64")
    bases = {
        name: push_image(
            client, "os/base", name, architecture=name, layers=[make_layer({name: b"x"})]
        )
        for name in names
    }
    listed = push_index(client, bases, "os/base")
    images = [ImageSource(client, resolve_image(client, "os/base", listed, name)) for name in names]
    destination = ImageDestination(client, "os/node", "build-1")
    pushed = append_config_to_list(images, LAYER, LABELS, destination)
    for name, instance in zip(names, pushed.instances, strict=True):
        found = resolve_image(client, "os/node", "build-1", name)
        assert (found.index_digest, found.digest) == (pushed.digest, instance)
        assert found.layers[-1].digest == LAYER.digest


def append_two_architectures(client: RegistryClient, tag: str, content: bytes) -> AppendedImage:
    """Push a list of two images with the config layer, for the MachineOSConfig worker."""
    sources = []
    for name in ("amd64", "arm64"):
        layers = [make_layer({name: content})]
        base = push_image(client, "os/base", name, architecture=name, layers=layers)
        sources.append(ImageSource(client, resolve_image(client, "os/base", base.digest, name)))
    labels = {**LABELS, IMAGE_CONFIG: "worker", BUILD: tag}
    return append_config_to_list(sources, LAYER, labels, ImageDestination(client, "os/node", tag))


def test_images_survive_a_garbage_collection_of_untagged_manifests(
    real_registry: RegistryService,
) -> None:
    client = make_client(real_registry)
    before = append_two_architectures(client, "build-1", b"before the rebuild")
    after = append_two_architectures(client, "build-1", b"after the rebuild")
    base = push_image(client, "os/base")
    alone = [append(client, base.digest, "build-2")]
    alone.append(append(client, push_image(client, "os/base", is_docker=True).digest, "build-2"))
    subject = client.head_manifest("os/node", after.instances[0])
    assert subject is not None
    note = attach(
        client, "os/node", subject, artifact_type="a/b", media_type="a/b", content=b"note"
    )
    real_registry.collect_garbage()
    for digest in (before.digest, after.digest, *alone):
        assert has_complete_image(client, "os/node", digest)
    assert get_referrers(client, "os/node", subject.digest) == (note,)
    assert client.get_manifest("os/node", note.digest)


def test_list_is_pruned_with_the_tags_of_its_digests(real_registry: RegistryService) -> None:
    client = make_client(real_registry)
    listed = append_two_architectures(client, "build-1", b"")
    cache: ImageCache = {}

    def plan() -> PrunePlan:
        stored = read_candidates(client, "os/node", "worker", [listed.digest], cache)
        return plan_pruning(stored, {}, [])

    # A pass may end after the list: its instances have tags of their own.
    first = plan()
    assert [image.digest for image in first.deleted][:1] == [listed.digest]
    delete_images(client, "os/node", PrunePlan(first.deleted[:1], first.kept))
    assert {image.digest for image in plan().deleted} == {listed.digest, *listed.instances}
    delete_images(client, "os/node", plan())
    assert client.list_tags("os/node") == ()


def test_base_of_another_registry_is_streamed(lab_registry: RegistryService) -> None:
    with RegistryService(is_real=False) as other:
        source = make_client(other)
        push_image(source, "os/base")
        image = resolve_image(source, "os/base", "base", "amd64")
        destination = ImageDestination(make_client(lab_registry), "os/node", "build-1")
        pushed = append_config(ImageSource(source, image), LAYER, LABELS, destination)
        assert pushed.moved_bytes == image.layers[0].size
    assert resolve_image(make_client(lab_registry), "os/node", "build-1", "amd64")


@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.DROP, FaultKind.LOSE])
def test_each_request_may_fail_once(lab_registry: RegistryService, kind: FaultKind) -> None:
    client = make_client(lab_registry)
    base = push_image(client, "os/base")
    expected = append(client, base.digest, "build-0", "os/other")
    for method in ("GET", "HEAD", "POST", "PUT"):
        lab_registry.faults.add(RegistryFault(kind, method=method, status=503))
    assert append(client, base.digest, "build-1") == expected


def test_tag_of_another_image_is_no_success(lab_registry: RegistryService) -> None:
    client = make_client(lab_registry)
    base = push_image(client, "os/base")
    lab_registry.faults.add(
        RegistryFault(FaultKind.WRONG_DIGEST, method="HEAD", path="/manifests/build-1")
    )
    with pytest.raises(DigestMismatch, match="cannot verify"):
        append(client, base.digest, "build-1")


def test_login_without_the_permission_leaves_no_tag(lab_registry: RegistryService) -> None:
    base = push_image(make_client(lab_registry), "os/base")
    with pytest.raises(Denied):
        append(make_client(lab_registry, PULLER), base.digest, "build-1")
    lab_registry.passwords[PUSHER] = "wrong"
    with pytest.raises(LoginRefused):
        append(make_client(lab_registry, PUSHER), base.digest, "build-1")
    client = make_client(lab_registry, PULLER)
    assert client.head_manifest("os/node", "build-1") is None


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_shows_the_labels_and_the_layers(real_registry: RegistryService) -> None:
    client = make_client(real_registry)
    base = push_image(client, "os/base")
    digest = append(client, base.digest, "build-1")
    auth = real_registry.directory / "auth.json"
    auth.write_bytes(real_registry.make_auth_json(PULLER))
    spec = f"docker://{real_registry.host}/os/node@{digest}"
    words = ["skopeo", "inspect", "--authfile", str(auth), "--cert-dir"]
    done = subprocess.run(
        [*words, str(real_registry.ca_file.parent), spec],
        capture_output=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["Labels"]["machineconfigpool"] == "worker"
    assert found["Layers"][-1] == LAYER.digest


@pytest.mark.skipif(
    shutil.which("buildah") is None or os.geteuid() != 0, reason="needs buildah and root"
)
def test_agent_accepts_the_tree_that_buildah_unpacks(
    real_registry: RegistryService, tmp_path: Path
) -> None:
    client = make_client(real_registry)
    layer = make_layer(
        {
            "usr/lib/systemd/system/base.service": b"[Install]\nWantedBy=multi-user.target\n",
            "etc/systemd/system/kubelet.service.d/20-b.conf": b"[Unit]\n",
        },
        {"usr/local": "../var/usrlocal", "opt": "var/opt"},
    )
    push_image(client, "os/base", layers=[layer])
    image = resolve_image(client, "os/base", "base", "amd64")
    config_layer = make_config_layer(FULL)
    destination = ImageDestination(client, "os/node", "build-1")
    source = ImageSource(client, image)
    digest = append_config(source, config_layer, LABELS, destination).digest
    auth = tmp_path / "auth.json"
    auth.write_bytes(real_registry.make_auth_json(PULLER))
    options = ["--authfile", str(auth), "--cert-dir", str(real_registry.ca_file.parent)]

    def run_buildah(*words: str) -> str:
        done = subprocess.run(
            [
                "buildah",
                "--root",
                str(tmp_path / "root"),
                "--runroot",
                str(tmp_path / "run"),
                *words,
            ],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"},
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    container = run_buildah("from", *options, f"docker://{real_registry.host}/os/node@{digest}")
    try:
        tree = Path(run_buildah("mount", container))
        # Parents that the layer does not have.
        assert stat.S_IMODE((tree / "etc/deep/er").stat().st_mode) == 0o755
        wanted = read_wanted_state(FULL)
        split = compare_with_image(wanted, read_image_content(Root(tree), wanted))
    finally:
        run_buildah("rm", container)
    assert split.missing == ()
    omitted = {each.partition(": ")[0] for each in config_layer.omitted}
    subjects = {*wanted.files, *wanted.directories, *wanted.links, *wanted.units}
    assert subjects - split.provided == omitted
