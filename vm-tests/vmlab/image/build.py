"""Everything that machines are made of, made once and kept: loader, base, images, disk."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vmlab import registry
from vmlab.image import disk, initramfs, layers, oci, rootfs
from vmlab.image.layers import Entry, Layer
from vmlab.registry import Registry
from vmlab.tools import REPOSITORY, cache, say

REPOSITORY_NAME = "os/node"


@dataclass(frozen=True, slots=True)
class Built:
    """A disk installed from the image ``pull_spec``, and what further images are made of."""

    directory: Path
    disk: Path
    pull_spec: str
    layers: tuple[Layer, ...]


class Builder:
    """Makes what is missing of a disk and of images; ``store`` must be serving."""

    def __init__(self, store: Registry) -> None:
        self._store = store
        self._cache = cache()

    def disk(self) -> Built:
        """The disk of version 1, with the agent as it is in this clone."""
        loader = self._kept("loader", (disk.GRUB_SUITE,), disk.make_loader)
        packages = self._kept("packages", (rootfs.SUITE, *rootfs.PACKAGES), _bootstrap)
        base = self._base(packages)
        place = self._cache / "disk"
        place.mkdir(exist_ok=True)
        agent = layers.compiled(layers.agent("1"), packages / "tree")
        own = layers.of_entries(agent | self._trust(), place / "agent.tar.gz")
        parts = (self._layer(base), own)
        stamp = place / "stamp.json"
        key = _hash(parts[0].digest, own.digest, _text(disk))
        known = json.loads(stamp.read_text()) if stamp.exists() else {}
        if known.get("key") != key:
            stamp.unlink(missing_ok=True)
            for old in place.glob("booted-*.qcow2"):
                old.unlink()
            digest = self.push(parts, "1")
            pull_spec = f"{registry.ADDRESS}/{REPOSITORY_NAME}@{digest}"
            disk.make(
                place / "disk.img",
                repository=base / "repository",
                layers=parts,
                pull_spec=pull_spec,
                loader=loader,
            )
            known = {"key": key, "pull_spec": pull_spec}
            stamp.write_text(json.dumps(known))
        return Built(place, place / "disk.img", known["pull_spec"], parts)

    def variant(self, built: Built, version: str, entries: Mapping[str, Entry]) -> str:
        """An image like the disk's with other content on top; returns its pull spec."""
        top = built.directory / f"{version}.tar.gz"
        layer = layers.of_entries({**layers.release(version), **entries}, top)
        digest = self.push((*built.layers, layer), version)
        return f"{registry.ADDRESS}/{REPOSITORY_NAME}@{digest}"

    def push(self, parts: tuple[Layer, ...], version: str) -> str:
        """Put an image into the registry; returns its digest."""
        aim = f"{self._store.local}/{REPOSITORY_NAME}:{version}"
        return oci.push(parts, version, aim, *self._store.push_options)

    def _base(self, packages: Path) -> Path:
        return self._kept(
            "base",
            (packages.name, _text(rootfs), _text(initramfs)),
            lambda at: _shape(packages, at),
        )

    def _layer(self, base: Path) -> Layer:
        known = json.loads((base / "layer.json").read_text())
        return Layer(base / "base.tar.gz", known["digest"], known["content_digest"])

    def _trust(self) -> dict[str, Entry]:
        """The registry's certificate, where skopeo looks for it."""
        self._store.prepare()
        content = self._store.certificate.read_bytes()
        return {f"usr/etc/containers/certs.d/{registry.ADDRESS}/ca.crt": Entry(content)}

    def _kept(
        self, name: str, ingredients: tuple[object, ...], make: Callable[[Path], None]
    ) -> Path:
        """The directory that ``make`` fills, made anew when an ingredient is another one."""
        place = self._cache / f"{name}-{_hash(*map(str, ingredients))[:12]}"
        if not place.exists():
            for old in self._cache.glob(f"{name}-*"):
                shutil.rmtree(old)
            scratch = self._cache / f"{name}.new"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            make(scratch)
            scratch.rename(place)
        return place


def _bootstrap(place: Path) -> None:
    rootfs.bootstrap(place / "tree", rootfs.SUITE, rootfs.PACKAGES, "minbase")


def _shape(packages: Path, place: Path) -> None:
    tree = place / "tree"
    rootfs.make(packages / "tree", tree)
    say("packing the base layer")
    layer = layers.of_tree(tree, place / "base.tar.gz")
    shutil.rmtree(tree)
    known = {"digest": layer.digest, "content_digest": layer.content_digest}
    (place / "layer.json").write_text(json.dumps(known))
    disk.import_base(layer, place / "repository")


def _text(module: object) -> str:
    return Path(str(getattr(module, "__file__", REPOSITORY))).read_text()


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
