"""The config layer added in a layout and in a registry: one image, one digest."""

from pathlib import Path

import pytest

from tests.builder.base_image import ARCHITECTURE, needs_busybox
from tests.builder.builds import BASE_REPOSITORY, open_client, push_base
from treenail.api.machineconfig import MachineConfig
from treenail.builder.append_config import (
    ImageDestination,
    ImageSource,
    append_config,
    append_config_layer,
    copy_to_layout,
)
from treenail.builder.build_layout import ImageLayout
from treenail.builder.build_spec import BuildSpec
from treenail.builder.phases.transfers import fetch_image
from treenail.builder.registries import RegistrySettings
from treenail.clocks import SystemClock
from treenail.config.pullsecret import parse_pull_secret
from treenail.errors import FileError
from treenail.image.config_layer import make_config_layer
from treenail.registry.images import resolve_image
from treenail.registry.transport import TlsSettings
from treenail_lab.registry.service import PULLER, RegistryService

pytestmark = [needs_busybox, pytest.mark.process]


def test_config_layer_in_layout_and_in_registry_gives_one_digest(tmp_path: Path) -> None:
    config = MachineConfig(
        config={
            "ignition": {"version": "3.4.0"},
            "storage": {"files": [{"path": "/etc/app.conf", "contents": {"source": "data:,x"}}]},
        }
    )
    layer, labels = make_config_layer(config), {"machineconfig": "rendered-worker-1"}
    with RegistryService() as registry:
        base = push_base(registry, tmp_path, sizes=(1000, 2000))
        settings = RegistrySettings(
            parse_pull_secret(registry.make_auth_json(PULLER), where="the Secret"),
            TlsSettings(ca_pem=registry.ca_file.read_text()),
        )
        layout = ImageLayout(tmp_path / "layout")
        layout.create()
        spec = BuildSpec(f"{registry.host}/os/node:1", ARCHITECTURE)
        fetch_image(layout, base, "base", spec, settings, SystemClock())
        image = append_config_layer(layout, "base", "built", layer, labels)
        with open_client(registry) as client:
            found = resolve_image(client, BASE_REPOSITORY, base.partition("@")[2], ARCHITECTURE)
            destination = ImageDestination(client, "os/node", "1")
            appended = append_config(ImageSource(client, found), layer, labels, destination)
    assert image.digest == appended.digest
    again = append_config_layer(layout, "built", "again", layer, labels)
    assert again.digest == image.digest


def test_copy_of_an_image_without_a_blob_fails_and_names_it(tmp_path: Path) -> None:
    with RegistryService() as registry:
        push_base(registry, tmp_path)
    source, target = ImageLayout(tmp_path / "base-layout"), ImageLayout(tmp_path / "copy")
    image = source.read_named("base")
    assert image is not None
    copy_to_layout(source, image, target, "copied")
    copied = target.read_named("copied")
    assert copied.digest == image.digest
    blobs = sorted((target.path / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    lost = blobs[-1].name
    (source.path / "blobs/sha256" / lost).unlink()
    with pytest.raises(FileError, match=lost):
        copy_to_layout(source, image, ImageLayout(tmp_path / "other"), "copied")
