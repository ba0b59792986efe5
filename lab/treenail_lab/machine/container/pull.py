"""Fetching an OS image: the credential, the manifest, then layer after layer.

Messages and errors are worded as a real container import words them, because that is what people
search for.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from gi.repository import GLib

from treenail_lab import images
from treenail_lab.images import Credential, Image, Layer
from treenail_lab.machine.ostree.steps import (
    Emit,
    OperationFailed,
    Pause,
    message,
    task_begin,
    task_end,
)
from treenail_lab.machine.ostree.sysroot import Deployment, Sysroot, deployment_of
from treenail_lab.machine.settings import Settings

AUTH_FILES = ("run/ostree/auth.json", "etc/ostree/auth.json", "usr/lib/ostree/auth.json")
_SCHEMES = re.compile(
    r"(?:ostree-unverified-registry:"
    r"|ostree-unverified-image:(?:docker://|registry:)"
    r"|ostree-image-signed:(?:docker://|registry:)"
    r"|ostree-remote-registry:[^:]+:"
    r"|ostree-remote-image:[^:]+:(?:docker://|registry:))(?P<image>.+)"
)
_OPEN_IMAGE = "Creating importer: failed to invoke method OpenImage: "
_SYMLINKS_MAX = 40


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a pull: the deployment to make, and why staging it is to fail, if it is."""

    deployment: Deployment
    fault: str = ""


def canonical(refspec: str) -> str:
    """The refspec as rpm-ostree shows it; raises `OperationFailed` if it names no image."""
    if not _SCHEMES.fullmatch(refspec):
        remote = refspec.partition(":")[0]
        raise OperationFailed(f'While pulling {refspec}: Remote "{remote}" not found')
    for plain in ("ostree-unverified-image:docker://", "ostree-unverified-image:registry:"):
        if refspec.startswith(plain):
            return "ostree-unverified-registry:" + refspec.removeprefix(plain)
    return refspec


def image_of(refspec: str) -> str:
    """The pull spec in a container refspec."""
    match = _SCHEMES.fullmatch(refspec)
    return match["image"] if match else ""


def pull(
    refspec: str,
    *,
    root: Path,
    sysroot: Sysroot,
    catalogue: Path,
    settings: Callable[[], Settings],
) -> Generator[Emit | Pause, None, Image]:
    """Fetch what ``refspec`` names; layers that are here already cost nothing."""
    yield message(f"Pulling manifest: {refspec}")
    image = open_image(image_of(refspec), images.load(catalogue), root)
    yield message(f"Importing: {refspec} (digest: {image.digest})")
    have = sysroot.imported_layers()
    needed = [layer for layer in image.layers if layer.digest not in have]
    yield from _counted("ostree chunk layers", [x for x in image.layers if x.chunk], needed)
    yield from _counted("custom layers", [x for x in image.layers if not x.chunk], needed)
    for number, layer in enumerate(needed, start=1):
        kind = "ostree chunk" if layer.chunk else "layer"
        name = layer.digest[: len("sha256:") + 12]
        yield task_begin(f"[{number}/{len(needed)}] Fetching {kind} {name} ({_size(layer)})")
        failure = settings().pull_error or image.faults.get("pull", "")
        if failure:
            yield Pause(_seconds(layer, settings()) / 2)
            raise OperationFailed(f"Importing: {failure}")
        yield Pause(_seconds(layer, settings()))
        sysroot.import_layer(layer.digest)
        yield task_end()
    return image


def pulled(
    source: str,
    refspec: str,
    kernel_arguments: tuple[str, ...],
    *,
    root: Path,
    sysroot: Sysroot,
    catalogue: Path,
    settings: Callable[[], Settings],
) -> Generator[Emit | Pause, None, Pulled]:
    """`pull` what ``source`` names, to be deployed under the name ``refspec``."""
    image = yield from pull(
        source, root=root, sysroot=sysroot, catalogue=catalogue, settings=settings
    )
    deployment = deployment_of(image, refspec, kernel_arguments)
    return Pulled(deployment, fault=image.faults.get("stage", ""))


def open_image(pull_spec: str, catalogue: images.Catalogue, root: Path) -> Image:
    """The image of that name, if the registry gives it to this machine."""
    name, _, reference = pull_spec.partition("@")
    reading = f"{_OPEN_IMAGE}reading manifest {reference or 'latest'} in {name}: "
    wanted = catalogue.credential(pull_spec)
    offered = credential_for(name, root)
    if wanted is not None and offered is None:
        raise OperationFailed(f"{reading}unauthorized: authentication required")
    if wanted is not None and offered != wanted:
        raise OperationFailed(
            f"{_OPEN_IMAGE}unable to retrieve auth token: invalid username/password: "
            "unauthorized: authentication required"
        )
    image = catalogue.find(pull_spec)
    if image is None:
        raise OperationFailed(f"{reading}manifest unknown")
    return image


def credential_for(name: str, root: Path) -> Credential | None:
    """What the first credential file there is says of the registry or a part of it."""
    for place in AUTH_FILES:
        path = inside(root, place)
        if path is None or not path.exists():
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8")).get("auths", {})
        except (ValueError, AttributeError) as error:
            raise OperationFailed(
                f"{_OPEN_IMAGE}getting username and password: 1 error occurred:\n\t* "
                f'unmarshaling JSON at "/{place}": {error}\n'
            ) from error
        return _entry(entries, name)
    return None


def inside(root: Path, path: str) -> Path | None:
    """The path below the root that ``path`` means for a program whose / is the root."""
    todo, at, links = [*reversed(Path(path).parts)], root, 0
    while todo:
        part = todo.pop()
        if part == "/":
            at = root
        elif part == "..":
            at = at if at == root else at.parent
        elif (at / part).is_symlink():
            links += 1
            if links > _SYMLINKS_MAX:
                return None
            todo.extend(reversed((at / part).readlink().parts))
        else:
            at /= part
    return at


def _entry(entries: dict[str, dict[str, str]], name: str) -> Credential | None:
    parts = name.split("/")
    for length in range(len(parts), 0, -1):
        entry = entries.get("/".join(parts[:length]))
        if entry is None:
            continue
        try:
            decoded = base64.b64decode(entry.get("auth", ""), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise OperationFailed(f"{_OPEN_IMAGE}getting username and password: {error}") from error
        username, _, password = decoded.partition(":")
        return Credential(username, password)
    return None


def _counted(kind: str, layers: list[Layer], needed: list[Layer]) -> Generator[Emit, None, None]:
    missing = [layer for layer in layers if layer in needed]
    if len(layers) > len(missing):
        yield message(f"{kind} already present: {len(layers) - len(missing)}")
    if missing:
        size = GLib.format_size(sum(layer.size_bytes for layer in missing))
        yield message(f"{kind} needed: {len(missing)} ({size})")


def _seconds(layer: Layer, settings: Settings) -> float:
    return layer.size_bytes / settings.pull_bytes_per_s


def _size(layer: Layer) -> str:
    return str(GLib.format_size(layer.size_bytes))
