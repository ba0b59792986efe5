"""Files of images in buildah's storage, in the form in which containers/storage keeps them."""

import json
import os
from pathlib import Path

import pytest

from treenail.builder.buildah.stored_tree import StoredTree
from treenail.errors import ConfigError, FileError

STATUS = "var/lib/dpkg/status"


class Storage:
    """A storage with one image of two layers."""

    def __init__(self, place: Path, driver: str) -> None:
        self.place, self.driver = place, driver
        image = {"id": "i", "names": ["localhost/treenail-built:latest"], "layer": "upper"}
        layers = [{"id": "lower"}, {"id": "upper", "parent": "lower"}]
        self._write(f"{driver}-images/images.json", json.dumps([image]))
        self._write(f"{driver}-layers/layers.json", json.dumps(layers))
        for layer in ("lower", "upper"):
            self.find_root(layer).mkdir(parents=True)

    def _write(self, path: str, text: str) -> None:
        place = self.place / path
        place.parent.mkdir(parents=True)
        place.write_text(text)

    def find_root(self, layer: str) -> Path:
        if self.driver == "vfs":
            return self.place / "vfs/dir" / layer
        return self.place / self.driver / layer / "diff"

    def add(self, layer: str, path: str, text: str) -> Path:
        place = self.find_root(layer) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def read(self, path: str) -> bytes | None:
        return StoredTree(self.place, self.driver, "localhost/treenail-built").read_file(path)


@pytest.fixture(params=["overlay", "vfs"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(tmp_path, request.param)


def test_file_of_the_upper_layer_counts(storage: Storage) -> None:
    storage.add("lower", STATUS, "old")
    storage.add("upper", STATUS, "new")
    assert storage.read(f"/{STATUS}") == b"new"
    assert storage.read("/var/lib/dpkg/absent") is None


def test_file_of_a_lower_layer_is_found_with_overlay_only(storage: Storage) -> None:
    storage.add("lower", STATUS, "old")
    (storage.find_root("upper") / "var").mkdir()
    # A directory of vfs is a whole tree.
    assert storage.read(f"/{STATUS}") == (b"old" if storage.driver == "overlay" else None)


@pytest.mark.parametrize("link", [STATUS, "var/lib/dpkg", "var"])
def test_links_of_the_tree_are_not_followed(storage: Storage, tmp_path: Path, link: str) -> None:
    secret = tmp_path / "outside"
    (secret / "lib/dpkg").mkdir(parents=True)
    for name in ("status", "lib/dpkg/status"):
        (secret / name).write_text("secret")
    storage.add("lower", STATUS, "old")
    place = storage.find_root("upper") / link
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(secret / "status" if link == STATUS else secret)
    assert storage.read(f"/{STATUS}") is None


def test_pipe_is_no_file(storage: Storage) -> None:
    place = storage.add("upper", STATUS, "")
    place.unlink()
    os.mkfifo(place)
    assert storage.read(f"/{STATUS}") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
@pytest.mark.parametrize("path", [STATUS, "var/lib"])
def test_removed_entry_hides_those_below(tmp_path: Path, path: str) -> None:
    storage = Storage(tmp_path, "overlay")
    storage.add("lower", STATUS, "old")
    place = storage.find_root("upper") / path
    place.parent.mkdir(parents=True)
    # overlayfs marks a removed entry by the device 0:0 (kernel, filesystems/overlayfs.rst).
    try:
        os.mknod(place, 0o020000, os.makedev(0, 0))
    except PermissionError:
        pytest.skip("this host permits no devices")
    assert storage.read(f"/{STATUS}") is None


def test_storage_without_lists_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read"):
        StoredTree(tmp_path, "overlay", "built")


def test_image_is_found_by_its_id_too(storage: Storage) -> None:
    storage.add("upper", STATUS, "new")
    assert StoredTree(storage.place, storage.driver, "i").read_file(STATUS) == b"new"
    assert StoredTree(storage.place, storage.driver, "other").read_file(STATUS) is None


@pytest.mark.parametrize("attack", ["storage", "layer", "list", "pipe"])
def test_storage_that_an_instruction_changed_shows_no_file_of_the_host(
    storage: Storage, tmp_path: Path, attack: str
) -> None:
    outside = tmp_path / "outside"
    place = outside / "diff" / STATUS
    place.parent.mkdir(parents=True)
    place.write_text("secret")
    (outside / "var").symlink_to("diff/var")
    lists = storage.place / f"{storage.driver}-layers/layers.json"
    if attack == "storage":
        layers = storage.place / ("vfs/dir" if storage.driver == "vfs" else "overlay")
        layers.rename(tmp_path / "moved")
        layers.symlink_to(tmp_path)
        lists.write_text('[{"id": "upper"}]')
        (tmp_path / "upper").symlink_to(outside)
    elif attack == "layer":
        name = "../../outside" if storage.driver == "vfs" else "../outside"
        lists.write_text(json.dumps([{"id": name}]))
        images = storage.place / f"{storage.driver}-images/images.json"
        images.write_text(images.read_text().replace("upper", name))
    else:
        lists.rename(tmp_path / "list")
        if attack == "list":
            lists.symlink_to(tmp_path / "list")
        else:
            os.mkfifo(lists)
    try:
        assert storage.read(STATUS) is None
    except (ConfigError, FileError):
        assert attack != "layer"
