"""Builds with the real buildah, from a layout into a layout."""

import json
from pathlib import Path

import pytest

from tests.builder.base_image import (
    ARCHITECTURE,
    needs_busybox,
    read_layer_files,
    write_base_image,
)
from tests.builder.sandboxing import make_program, needs_buildah
from treenail.builder.build_layout import ImageLayout
from treenail.builder.buildah.program import BindMount, Buildah, TextFiles
from treenail.builder.phases.build import save_image
from treenail.errors import CommandError
from treenail.registry.names import Manifest

pytestmark = [needs_buildah, needs_busybox, pytest.mark.process]

BASE = "registry.example.com/os/base@sha256:" + 64 * "a"
TEXT = f"""FROM {BASE} AS configs
RUN echo configs > /etc/configs
FROM configs AS final
COPY motd /etc/motd
RUN cat /etc/motd && mkdir /usr/share && echo built > /usr/share/built
"""


def build_once(
    work: Path,
    text: str = TEXT,
    *,
    mounts: tuple[BindMount, ...] = (),
    keeps_layers: bool = False,
    driver: str = "overlay",
) -> tuple[ImageLayout, Manifest, list[str]]:
    """Build with empty storage; return the layout, the image and the output."""
    layout = ImageLayout(work / "layout")
    layout.create()
    write_base_image(layout, "base", sizes=(100_000, 100_000))
    buildah = Buildah(make_program(work), work, driver)
    buildah.prepare_work()
    context = buildah.given / "context"
    context.mkdir(exist_ok=True)
    (context / "motd").write_text("welcome\n")
    containerfile = buildah.given / "Containerfile"
    containerfile.write_text(text)
    buildah.tag_image(buildah.load_image(layout.path, "base"), "base")
    lines: list[str] = []
    code = buildah.build_image(
        TextFiles(containerfile, context),
        buildah.built_image,
        images={BASE: "base"},
        mounts=mounts,
        keeps_layers=keeps_layers,
        architecture=ARCHITECTURE,
        timeout_s=50,
        add_line=lines.append,
    )
    assert code == 0, lines
    save_image(buildah, layout, ["base"], {}, name="built")
    return layout, layout.read_named("built"), lines


def list_layers(image: Manifest | None) -> list[dict[str, object]]:
    return json.loads(image.content)["layers"]


def test_two_builds_with_empty_storage_give_one_digest(tmp_path: Path) -> None:
    # No image may have the name of the second directory.
    for name in ("first", "Second_"):
        (tmp_path / name).mkdir()
    _, first, _ = build_once(tmp_path / "first")
    _, second, _ = build_once(tmp_path / "Second_")
    assert first.digest == second.digest
    assert first.content == second.content
    assert b"localhost" not in first.content


def test_built_image_keeps_the_layers_of_its_base(tmp_path: Path) -> None:
    layout, built, _ = build_once(tmp_path)
    base = list_layers(layout.read_named("base"))
    layers = list_layers(built)
    assert layers[: len(base)] == base
    assert len(layers) > len(base)
    for layer in layers:
        path = layout.find_blob(str(layer["digest"]))
        assert path.stat().st_size == layer["size"]
    files = {}
    for layer in layers[len(base) :]:
        files.update(read_layer_files(layout, str(layer["digest"])))
    assert files["etc/motd"] == b"welcome\n"
    assert files["usr/share/built"] == b"built\n"


@pytest.mark.parametrize("driver", ["overlay", "vfs"])
def test_instruction_leaves_no_mount_points_of_buildah(tmp_path: Path, driver: str) -> None:
    text = f"FROM {BASE} AS configs\nRUN cat /etc/hosts /etc/resolv.conf; touch /etc/own\n"
    layout, built, _ = build_once(tmp_path, text, driver=driver)
    base = list_layers(layout.read_named("base"))
    files: dict[str, bytes] = {}
    for layer in list_layers(built)[len(base) :]:
        files.update(read_layer_files(layout, str(layer["digest"])))
    assert set(files) == {"etc/own"}


def test_mounted_entitlement_is_seen_and_in_no_blob(tmp_path: Path) -> None:
    work = tmp_path / "work"
    secret = work / "given/secret"
    secret.mkdir(parents=True)
    (secret / "entitlement.pem").write_text("ENTITLEMENT-4711")
    text = f"FROM {BASE} AS configs\nRUN cat /etc/pki/entitlement/entitlement.pem\n"
    mount = BindMount(secret, "/etc/pki/entitlement")
    layout, built, lines = build_once(work, text, mounts=(mount,))
    assert "ENTITLEMENT-4711" in "".join(lines)
    for layer in list_layers(built):
        found = read_layer_files(layout, str(layer["digest"]))
        assert not any("entitlement" in path for path in found)
        assert not any(b"ENTITLEMENT-4711" in content for content in found.values())
    for path in (layout.path / "blobs/sha256").iterdir():
        assert b"ENTITLEMENT-4711" not in path.read_bytes()


def test_load_of_an_unknown_image_raises_with_the_cause(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "layout")
    layout.create()
    buildah = Buildah(make_program(tmp_path), tmp_path, "overlay")
    buildah.prepare_work()
    with pytest.raises(CommandError, match="buildah pull failed"):
        buildah.load_image(layout.path, "absent")
