"""Uploads of a base while its build runs."""

import socket
from pathlib import Path

import pytest

from tests.builder.base_image import write_base_image
from tests.fakes.clock import FakeClock
from tests.installer.registries import make_registry, open_client
from tests.registry.real_registry import needs_docker_registry
from treenail.builder.build_layout import ImageLayout
from treenail.builder.build_spec import BuildDirectories, FetchedImage, FetchOutput
from treenail.installer.images.build_attempt import upload_base
from treenail.registry.client import RegistryClient
from treenail.registry.images import has_complete_image
from treenail.registry.transport import RegistryLimits, TlsSettings

BASE = f"registry.example.com/os/base@sha256:{64 * '0'}"


@pytest.fixture
def directories(tmp_path: Path) -> BuildDirectories:
    """The directories of a build after its phase ``fetch``."""
    found = BuildDirectories(tmp_path / "inputs", tmp_path / "work")
    layout = ImageLayout(found.layout)
    layout.create()
    write_base_image(layout, "image-0", sizes=(1000, 200_000))
    image = FetchedImage(BASE, "image-0", "registry.example.com/os/base", BASE.partition("@")[2])
    found.write_fetched(FetchOutput((image,)))
    return found


def make_client(address: str) -> RegistryClient:
    limits = RegistryLimits(attempts=1, connect_s=0.5)
    return RegistryClient(address, FakeClock(), tls=TlsSettings(is_plain=True), limits=limits)


@needs_docker_registry
@pytest.mark.integration
def test_push_after_the_upload_finds_all_blobs(
    directories: BuildDirectories, tmp_path: Path
) -> None:
    image = ImageLayout(directories.layout).read_named("image-0")
    with make_registry(tmp_path / "cluster") as registry:
        with (
            open_client(registry, is_push=True) as client,
            upload_base(client, "os/node", directories, BASE),
        ):
            pass
        with open_client(registry, is_push=True) as client:
            client.put_manifest("os/node", image.digest, image.media_type, image.content)
            assert has_complete_image(client, "os/node", image.digest)


@pytest.mark.parametrize("base", [BASE, "registry.example.com/os/other:1"])
def test_registry_that_does_not_answer_is_no_failure_of_the_build(
    directories: BuildDirectories, base: str
) -> None:
    with upload_base(make_client("127.0.0.1:9"), "os/node", directories, base):
        pass
    (directories.work / "fetched.json").unlink()
    with upload_base(make_client("127.0.0.1:9"), "os/node", directories, base):
        pass


def test_signal_during_the_build_does_not_wait_for_the_upload(
    directories: BuildDirectories,
) -> None:
    # It accepts connections, and answers nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = make_client(f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(KeyboardInterrupt), upload_base(client, "os/node", directories, BASE):
            raise KeyboardInterrupt
