"""The pull of an OS image: credential, signature policy, manifest, then each layer.

Messages and errors have the words of ostree-rs-ext's container import, which users search for.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treenail_lab import images
from treenail_lab.images import CatalogueLayer, Credential, Image
from treenail_lab.machine.ostree.steps import (
    EmitSignal,
    OperationError,
    PauseWork,
    emit_message,
    emit_task_begin,
    emit_task_end,
)
from treenail_lab.machine.ostree.sysroot import Sysroot, SysrootDeployment, make_deployment
from treenail_lab.machine.settings import MachineSettings

if TYPE_CHECKING:
    from treenail_lab.machine.container.remote import RemoteImages

AUTH_FILES = ("run/ostree/auth.json", "etc/ostree/auth.json", "usr/lib/ostree/auth.json")
_SCHEMES = re.compile(
    r"(?:ostree-unverified-registry:"
    r"|ostree-unverified-image:(?:docker://|registry:)"
    r"|ostree-image-signed:(?:docker://|registry:)"
    r"|ostree-remote-registry:[^:]+:"
    r"|ostree-remote-image:[^:]+:(?:docker://|registry:))(?P<image>.+)"
)
UNSIGNED_FAULT = "unsigned"
"""The fault of an image without a signature."""
PREPARING = "Preparing import: Fetching manifest: "
"""The beginning of an error before the first layer is pulled."""
_OPEN_IMAGE = f"{PREPARING}failed to invoke method OpenImage: "
_SYMLINKS_MAX = 40


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull: the deployment, and the error with which staging it must fail."""

    deployment: SysrootDeployment
    fault: str = ""
    sanity_fault: str = ""
    """The error of the check of the deployment after it was staged."""


def canonicalize_refspec(refspec: str) -> str:
    """Return the refspec as rpm-ostree shows it; raise `OperationError` if it names no image."""
    if not _SCHEMES.fullmatch(refspec):
        remote = refspec.partition(":")[0]
        raise OperationError(f'While pulling {refspec}: Remote "{remote}" not found')
    for plain in ("ostree-unverified-image:docker://", "ostree-unverified-image:registry:"):
        if refspec.startswith(plain):
            return "ostree-unverified-registry:" + refspec.removeprefix(plain)
    return refspec


def parse_pull_spec(refspec: str) -> str:
    """Return the pull spec in a container refspec."""
    match = _SCHEMES.fullmatch(refspec)
    return match["image"] if match else ""


def pull_image(
    refspec: str,
    *,
    root: Path,
    sysroot: Sysroot,
    catalogue: Path,
    settings: Callable[[], MachineSettings],
) -> Generator[EmitSignal | PauseWork, None, Image]:
    """Pull the image of ``refspec``; imported layers cost no time."""
    yield emit_message(f"Pulling manifest: {refspec}")
    pull_spec, known = parse_pull_spec(refspec), images.load_catalogue(catalogue)
    image = open_image(pull_spec, known, root)
    remote = open_remote(image.pull_spec, root) if known.is_in_registry(pull_spec) else None
    yield emit_message(f"Importing: {refspec} (digest: {image.digest})")
    imported = sysroot.list_layers()
    needed = [layer for layer in image.layers if layer.digest not in imported]
    yield from _report_layer_counts(
        "ostree chunk layers", [x for x in image.layers if x.is_chunk], needed
    )
    yield from _report_layer_counts(
        "custom layers", [x for x in image.layers if not x.is_chunk], needed
    )
    for number, layer in enumerate(needed, start=1):
        kind = "ostree chunk" if layer.is_chunk else "layer"
        name = layer.digest[: len("sha256:") + 12]
        yield emit_task_begin(
            f"[{number}/{len(needed)}] Fetching {kind} {name} ({_format_size(layer.size_bytes)})"
        )
        failure = settings().pull_error or image.faults.get("pull", "")
        if failure:
            yield PauseWork(_compute_seconds(layer, settings()) / 2)
            raise OperationError(f"Importing: {failure}")
        if remote is None:
            yield PauseWork(_compute_seconds(layer, settings()))
        else:
            remote.download_layer(layer, sysroot.find_blob(layer.digest))
        sysroot.import_layer(layer.digest)
        yield emit_task_end()
    if remote is not None:
        _unpack_image(image, sysroot)
    return image


def pull_deployment(
    source: str,
    refspec: str,
    kernel_arguments: tuple[str, ...],
    *,
    root: Path,
    sysroot: Sysroot,
    catalogue: Path,
    settings: Callable[[], MachineSettings],
) -> Generator[EmitSignal | PauseWork, None, PullResult]:
    """Pull ``source`` and return a deployment with the origin ``refspec``."""
    image = yield from pull_image(
        source, root=root, sysroot=sysroot, catalogue=catalogue, settings=settings
    )
    deployment = make_deployment(image, refspec, kernel_arguments)
    return PullResult(
        deployment,
        fault=image.faults.get("stage", ""),
        sanity_fault=image.faults.get("sanity", ""),
    )


def open_image(pull_spec: str, catalogue: images.ImageCatalogue, root: Path) -> Image:
    """Return the image, if the registry accepts the machine's credentials."""
    if catalogue.is_in_registry(pull_spec):
        try:
            resolved = open_remote(pull_spec, root).resolve()
        except OperationError as error:
            raise OperationError(
                f"{_OPEN_IMAGE}reading manifest in {pull_spec}: {error}"
            ) from error
        # Nothing in the lab signs what it builds.
        return replace(resolved, faults={UNSIGNED_FAULT: "no signature"})
    name, _, reference = pull_spec.partition("@")
    reading = f"{_OPEN_IMAGE}reading manifest {reference or 'latest'} in {name}: "
    required = catalogue.find_credential(pull_spec)
    offered = find_credential(name, root)
    if required is not None and offered is None:
        raise OperationError(f"{reading}unauthorized: authentication required")
    if required is not None and offered != required:
        raise OperationError(
            f"{_OPEN_IMAGE}unable to retrieve auth token: invalid username/password: "
            "unauthorized: authentication required"
        )
    image = catalogue.find_image(pull_spec)
    if image is None and catalogue.find_listed(pull_spec):
        raise OperationError(
            f"{_OPEN_IMAGE}choosing an image from manifest list docker://{pull_spec}: no image "
            f'found in manifest list for architecture {images.ARCHITECTURE}, variant "", OS linux'
        )
    if image is None:
        raise OperationError(f"{reading}manifest unknown")
    return image


def download_image(image: Image, pull_spec: str, root: Path, sysroot: Sysroot) -> None:
    """Download what a machine lacks of an image of a real registry, unpack and record it."""
    remote = open_remote(image.pull_spec, root)
    for layer in image.layers:
        place = sysroot.find_blob(layer.digest)
        if not place.exists():
            remote.download_layer(layer, place)
    _unpack_image(image, sysroot)
    images.save_image(image, find_record(root, pull_spec))


def find_record(root: Path, pull_spec: str) -> Path:
    """Return the path of the record of an image that a program other than rpm-ostree pulled."""
    name = hashlib.sha256(pull_spec.encode()).hexdigest()[:16]
    return root / "sysroot/ostree" / f"image-{name}.json"


def _unpack_image(image: Image, sysroot: Sysroot) -> None:
    blobs = [sysroot.find_blob(layer.digest) for layer in image.layers]
    sysroot.trees.unpacked.unpack_layers(image.content, blobs)


def open_remote(pull_spec: str, root: Path) -> "RemoteImages":
    """Return the client of a real registry, with the machine's credentials and mirrors."""
    # Not at the top: the emulated programs start often, and most read the catalogue only.
    from treenail_lab.machine.container.remote import RemoteImages

    return RemoteImages(root, pull_spec, lambda name: find_credential(name, root))


def find_credential(name: str, root: Path) -> Credential | None:
    """Return the credential for the registry in the first auth file that exists."""
    for place in AUTH_FILES:
        path = resolve_below(root, place)
        if path is None or not path.exists():
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8")).get("auths", {})
        except (ValueError, AttributeError) as error:
            raise OperationError(
                f"{_OPEN_IMAGE}getting username and password: 1 error occurred:\n\t* "
                f'unmarshaling JSON at "/{place}": {error}\n'
            ) from error
        return _find_auth_entry(entries, name)
    return None


def resolve_below(root: Path, path: str) -> Path | None:
    """Resolve ``path`` below the root, as for a program in a chroot; None for a link loop."""
    parts, at, links = [*reversed(Path(path).parts)], root, 0
    while parts:
        part = parts.pop()
        if part == "/":
            at = root
        elif part == "..":
            at = at if at == root else at.parent
        elif (at / part).is_symlink():
            links += 1
            if links > _SYMLINKS_MAX:
                return None
            parts.extend(reversed((at / part).readlink().parts))
        else:
            at /= part
    return at


def _find_auth_entry(entries: dict[str, dict[str, str]], name: str) -> Credential | None:
    parts = name.split("/")
    for length in range(len(parts), 0, -1):
        entry = entries.get("/".join(parts[:length]))
        if entry is None:
            continue
        try:
            decoded = base64.b64decode(entry.get("auth", ""), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise OperationError(f"{_OPEN_IMAGE}getting username and password: {error}") from error
        username, _, password = decoded.partition(":")
        return Credential(username, password)
    return None


def _report_layer_counts(
    kind: str, layers: list[CatalogueLayer], needed: list[CatalogueLayer]
) -> Generator[EmitSignal, None, None]:
    missing = [layer for layer in layers if layer in needed]
    if len(layers) > len(missing):
        yield emit_message(f"{kind} already present: {len(layers) - len(missing)}")
    if missing:
        size = _format_size(sum(layer.size_bytes for layer in missing))
        yield emit_message(f"{kind} needed: {len(missing)} ({size})")


def _compute_seconds(layer: CatalogueLayer, settings: MachineSettings) -> float:
    return layer.size_bytes / settings.pull_bytes_per_s


def _format_size(size_bytes: int) -> str:
    # Not at the top: the emulated programs start often and print no sizes.
    from gi.repository import GLib

    return str(GLib.format_size(size_bytes))


_POLICY = "etc/containers/policy.json"
_SIGNED = {"signedBy", "sigstoreSigned"}


def find_refusal(root: Path, transport: str, image: Image) -> str:
    """Return why the policy refuses the image from the transport; empty if it accepts it."""
    path = root / _POLICY
    if not path.exists():
        return ""
    policy = json.loads(path.read_text(encoding="utf-8"))
    scopes = policy.get("transports", {}).get(transport, {})
    name = f"{image.registry}/{image.repository}"
    requirements = next(
        (scopes[scope] for scope in (name, image.registry, "") if scope in scopes), None
    )
    types = {requirement["type"] for requirement in requirements or policy["default"]}
    if "reject" in types:
        return f"Running image {transport}:{image.pull_spec} is rejected by policy."
    if types & _SIGNED and UNSIGNED_FAULT in image.faults:
        return "A signature was required, but no signature exists"
    return ""


def is_insecure_by_default(root: Path) -> bool:
    """Return whether the policy's default is ``insecureAcceptAnything``."""
    path = root / _POLICY
    if not path.exists():
        return True
    default = json.loads(path.read_text(encoding="utf-8"))["default"]
    return any(requirement["type"] == "insecureAcceptAnything" for requirement in default)
