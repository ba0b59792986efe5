"""The catalogue of OS images."""

import stat
from dataclasses import replace
from pathlib import Path

from treenail.api import pullspec
from treenail_lab import images
from treenail_lab.images import Credential, Image, ImageCatalogue, make_image


def image(version: str = "41.1", **changes: object) -> Image:
    made = make_image("os/node", version, 1_000_003, labels={"config": "rendered-worker-a"})
    return replace(made, **changes)  # type: ignore[arg-type]


def test_same_arguments_make_the_same_image() -> None:
    assert image() == image()
    assert image().digest != image("41.2").digest


def test_labels_are_part_of_the_digest() -> None:
    other = make_image("os/node", "41.1", 1_000_003, labels={"config": "rendered-worker-b"})
    assert other.digest != image().digest


def test_pull_spec_is_one_that_the_agent_accepts() -> None:
    assert str(pullspec.parse_pull_spec(image().pull_spec, where="image")) == image().pull_spec


def test_layer_sizes_sum_to_size_and_last_is_no_chunk() -> None:
    assert image().size_bytes == 1_000_003
    assert [layer.is_chunk for layer in image().layers] == [True, True, True, False]


def test_catalogue_survives_the_file(tmp_path: Path) -> None:
    catalogue = ImageCatalogue(
        (
            image(kernel_arguments=("mitigations=auto",), faults={"pull": "no"}),
            image("41.2", credential=Credential("node", "secret")),
        )
    )
    images.save_catalogue(catalogue, tmp_path / "images.json")
    assert images.load_catalogue(tmp_path / "images.json") == catalogue


def test_catalogue_file_is_readable_by_owner_only(tmp_path: Path) -> None:
    images.save_catalogue(ImageCatalogue(), tmp_path / "images.json")
    assert stat.S_IMODE((tmp_path / "images.json").stat().st_mode) == 0o600


def test_catalogue_without_file_is_empty(tmp_path: Path) -> None:
    assert images.load_catalogue(tmp_path / "images.json") == ImageCatalogue()


def test_registry_requires_credential_for_unknown_image() -> None:
    secret = Credential("node", "secret")
    catalogue = ImageCatalogue((image(credential=secret),))
    unknown = image().pull_spec[:-4] + "0000"
    assert catalogue.find_image(unknown) is None
    assert catalogue.find_credential(unknown) == secret
    assert catalogue.find_credential("elsewhere.example/os@sha256:0") is None


def test_manifest_list_names_the_image_of_this_platform() -> None:
    here, elsewhere = images.make_manifest_list(
        make_image("os/node", "41.1", 1000, architecture=images.ARCHITECTURE),
        make_image("os/node", "41.1", 1000, architecture="s390x"),
    )
    catalogue = ImageCatalogue((elsewhere, here))
    assert here.list_pull_spec == elsewhere.list_pull_spec != here.pull_spec
    assert catalogue.find_image(here.list_pull_spec) == here
    assert catalogue.find_image(elsewhere.pull_spec) == elsewhere
    assert ImageCatalogue((elsewhere,)).find_image(here.list_pull_spec) is None


def test_added_image_replaces_image_with_same_pull_spec() -> None:
    broken = image(faults={"stage": "no"})
    assert ImageCatalogue((image(),)).with_image(broken) == ImageCatalogue((broken,))


def test_password_is_not_in_the_text_of_an_image() -> None:
    assert "hunter2" not in repr(image(credential=Credential("node", "hunter2")))
