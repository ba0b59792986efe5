"""Everything that machines are made of, made once and kept: loader, base, images, disk."""

import base64
import hashlib
import json
import os
import secrets
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmlab import registry
from vmlab.image import disk, initramfs, layers, oci, rootfs
from vmlab.image.layers import Entry, Layer
from vmlab.image.programs import Program, read_programs
from vmlab.registry import Registry
from vmlab.tools import REPOSITORY, cache, given_image, say

NAME = "os/node"


@dataclass(frozen=True, slots=True)
class Built:
    """A disk installed from the image ``pull_spec``, and a directory for what is made of it."""

    directory: Path
    disk: Path
    pull_spec: str
    key: str
    """Differs between any two disks, also of the same content."""
    disk_format: str = "raw"
    ignition: Path | None = None
    """The settings of a machine's first boot, which must lead to that image."""


class Builder:
    """Makes what is missing of a disk and of images; ``store`` must be serving."""

    def __init__(self, store: Registry) -> None:
        self._store = store
        self._programs = read_programs(os.environ)
        # Each choice of programs has a place of its own, so that changing it makes nothing again.
        self._cache = cache().joinpath(*sorted(each.name for each in self._programs))
        self._cache.mkdir(parents=True, exist_ok=True)

    @property
    def certificate(self) -> Path:
        """The certificate of the registry, PEM."""
        return self._store.certificate

    def chosen(self) -> Built:
        """The disk that machines start from: ours, or the one that TREENAIL_VM_IMAGE names."""
        image = given_image()
        if image is None:
            return self.disk()
        ignition = os.environ.get("TREENAIL_VM_IGNITION")
        return self.given(image, Path(ignition) if ignition else None)

    def disk(self) -> Built:
        """The disk of version 1, with the agent as it is in this clone."""
        loader = self._kept("loader", (disk.GRUB_SUITE,), disk.make_loader)
        packages = self._packages()
        base = self._base(packages)
        place = self._cache / "disk"
        place.mkdir(exist_ok=True)
        agent = layers.agent("1", emulated=not self._programs)
        agent = layers.compiled(agent, packages / "tree")
        own = layers.of_entries(agent | self._trust(), place / "agent.tar.gz")
        parts = (self._layer(base), own)
        stamp = place / "stamp.json"
        key = _hash(parts[0].digest, own.digest, _text(disk))
        known = json.loads(stamp.read_text()) if stamp.exists() else {}
        if known.get("key") != key or not (place / "disk.img").exists():
            stamp.unlink(missing_ok=True)
            image = oci.push(parts, "1", self._named("1"), self._store)
            pull_spec = f"{registry.ADDRESS}/{NAME}@{image.digest}"
            disk.make(
                place / "disk.img",
                repository=base / "repository",
                layers=parts,
                pull_spec=pull_spec,
                image=image,
                loader=loader,
            )
            # Another disk of the same content has other blocks, to which no snapshot fits.
            known = {"key": key, "pull_spec": pull_spec, "disk": secrets.token_hex(8)}
            # A stamp that is half written would be an error in the next run.
            new = stamp.with_suffix(".new")
            new.write_text(json.dumps(known))
            new.rename(stamp)
        return Built(place, place / "disk.img", known["pull_spec"], _hash(key, known["disk"]))

    def given(self, image: Path, ignition: Path | None) -> Built:
        """Return the disk that the user provides, of the registry's image of version 1."""
        key = _hash(str(image), str(image.stat().st_mtime_ns))
        place = self._cache / f"given-{key[:12]}"
        place.mkdir(exist_ok=True)
        pull_spec = f"{registry.ADDRESS}/{NAME}@{oci.digest(self._named('1'), self._store)}"
        if ignition is None:
            return Built(place, image, pull_spec, key, disk_format="qcow2")
        values = {
            "pull_spec": pull_spec,
            "registry": registry.ADDRESS,
            "certificate": base64.b64encode(self._store.certificate.read_bytes()).decode(),
            "login": base64.b64encode(registry.pull_secret().encode()).decode(),
        }
        text = string.Template(ignition.read_text()).substitute(values)
        (place / ignition.name).write_text(text)
        key = _hash(key, text)
        return Built(place, image, pull_spec, key, "qcow2", place / ignition.name)

    def variant(
        self,
        built: Built,
        version: str,
        entries: Mapping[str, Entry],
        *,
        has_whole_history: bool = True,
    ) -> str:
        """An image like the disk's with other content on top; returns its pull spec."""
        top = built.directory / f"{version}.tar.gz"
        layer = layers.of_entries({**layers.release(version), **entries}, top)
        base = f"{self._store.local}/{NAME}@{built.pull_spec.partition('@')[2]}"
        digest = oci.extend(
            base, layer, self._named(version), self._store, has_whole_history=has_whole_history
        )
        return f"{registry.ADDRESS}/{NAME}@{digest}"

    def agent(self, source: Path) -> dict[str, Entry]:
        """Return the content of an image whose services run the agent of a source tree."""
        return layers.compiled(layers.other_agent(source), self._packages() / "tree")

    def broken(self, built: Built) -> str:
        """An image of which the registry has a layer that is not what its digest says."""
        pull_spec = self.variant(built, "broken", {})
        with self._store.blob(layers.digest(built.directory / "broken.tar.gz")).open("r+b") as blob:
            blob.write(b"spoilt")
        return pull_spec

    def insane(self, built: Built) -> str:
        """Publish an image in which /usr/bin/true fails; empty if no program would notice."""
        if not self._programs:
            return ""
        return self.variant(built, "insane", {"usr/bin/true": Entry(link="false")})

    def listed(self, pull_spec: str) -> str:
        """Publish a manifest list with the image, which the registry has; returns its pull spec."""
        image = oci.manifest(
            f"{self._store.local}/{NAME}@{pull_spec.partition('@')[2]}", self._store
        )
        digest = oci.push_list(image, self._named("listed"), self._store)
        return f"{registry.ADDRESS}/{NAME}@{digest}"

    def _named(self, version: str) -> str:
        return f"{self._store.local}/{NAME}:{version}"

    def _packages(self) -> Path:
        wanted = (*rootfs.PACKAGES, *(name for each in self._programs for name in each.packages))
        return self._kept(
            "packages",
            (rootfs.SUITE, *wanted, *rootfs.EXCLUDED),
            lambda at: rootfs.bootstrap(at / "tree", rootfs.SUITE, wanted, "minbase"),
        )

    def _base(self, packages: Path) -> Path:
        return self._kept(
            "base",
            (
                packages.name,
                _text(rootfs),
                _text(initramfs),
                *(each.fingerprint() for each in self._programs),
            ),
            lambda at: _shape(packages, at, self._programs),
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
        """Return the directory that ``make`` fills, again when an ingredient changed."""
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


def _shape(packages: Path, place: Path, programs: Sequence[Program]) -> None:
    tree = place / "tree"
    rootfs.make(packages / "tree", tree, programs)
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
