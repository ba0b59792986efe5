"""Finds manifests and configs of images in the storage of a registry and in OCI directories."""

import re
from collections.abc import Iterator
from pathlib import Path

from treenail.api.decode import load_json
from treenail.errors import TreenailError
from treenail.installer.log_bundle.folder import list_files, read_document

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFESTS = 200
# The registry (github.com/distribution/distribution) keeps all blobs below one directory.
_STORAGE = Path("docker/registry/v2")


def read_image_documents(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a name and the file of each manifest and of each config of an image below a folder."""
    for name, path, blobs in _find_manifests(folder):
        yield f"{name}.json", path
        config = _find_config(path, blobs)
        if config is not None:
            yield f"{name}-config.json", config


def _find_manifests(folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield a name, the file and the directory of blobs of each manifest."""
    count = 0
    for path in list_files(folder):
        if count >= _MAX_MANIFESTS:
            return
        parent = path.parent
        if path.name == "link" and parent.parent.parent.name == "revisions":
            # …/v2/repositories/REPOSITORY/_manifests/revisions/sha256/DIGEST/link
            storage = _find_storage(path)
            if storage is None:
                continue
            repository = parent.relative_to(storage / "repositories").parts[:-4]
            blobs = storage / "blobs"
            blob = blobs / "sha256" / parent.name[:2] / parent.name / "data"
            count += 1
            yield f"manifests/{'/'.join(repository)}/{parent.name[:12]}", blob, blobs
        elif path.name == "index.json" and (parent / "oci-layout").is_file():
            yield from _find_layout_manifests(folder, parent)
            count += 1


def _find_layout_manifests(folder: Path, layout: Path) -> Iterator[tuple[str, Path, Path]]:
    name = str(layout.relative_to(folder))
    yield f"{name}/index", layout / "index.json", layout / "blobs"
    for digest in _find_digests(layout / "index.json", "manifests")[:_MAX_MANIFESTS]:
        blobs = layout / "blobs"
        yield f"{name}/{digest[:12]}", blobs / "sha256" / digest, blobs


def _find_storage(path: Path) -> Path | None:
    for each in path.parents:
        if each.parts[-3:] == _STORAGE.parts:
            return each
    return None


def _find_config(manifest: Path, blobs: Path) -> Path | None:
    """Find the config of an image in blobs of a registry or of an OCI directory."""
    for digest in _find_digests(manifest, "config"):
        for path in (blobs / "sha256" / digest[:2] / digest / "data", blobs / "sha256" / digest):
            if path.is_file():
                return path
    return None


def _find_digests(path: Path, field: str) -> list[str]:
    """Return the digests of the descriptors in a field of a document; none if it is damaged."""
    try:
        document = load_json(read_document(path), where=path.name)
    except TreenailError:
        return []
    value = document.get(field) if isinstance(document, dict) else None
    descriptors = value if isinstance(value, list) else [value]
    digests = (each.get("digest") for each in descriptors if isinstance(each, dict))
    matches = (_DIGEST.fullmatch(each) for each in digests if isinstance(each, str))
    return [match[1] for match in matches if match]
