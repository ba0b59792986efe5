"""Removes tags beside the digests of pre-built images from the user's manifests."""

from pathlib import Path

from treenail.api import annotations as key
from treenail.api import documents, machineosconfig
from treenail.api.decode import Json
from treenail.errors import ConfigError, FileError
from treenail.installer.checks.prebuilt_image import parse_prebuilt_image
from treenail.installer.inputs.install_manifests import InstallManifests
from treenail.installer.inputs.install_problem import InstallDirectoryError


def drop_prebuilt_tags(root: Path, found: InstallManifests) -> dict[str, bytes]:
    """Return the new contents of files by path below the directory; all other bytes stay.

    Raises `InstallDirectoryError` where an annotation is written in a way that no edit can change
    safely, and `FileError`.
    """
    contents: dict[str, bytes] = {}
    for manifest in found.list_kind(machineosconfig.KIND):
        annotations = found.image_configs[manifest.name].metadata.annotations
        if key.PRE_BUILT_IMAGE not in annotations:
            continue
        image = parse_prebuilt_image(annotations[key.PRE_BUILT_IMAGE])
        if not image.has_tag:
            continue
        content = contents.get(manifest.file) or _read_file(root / manifest.file)
        edited = content.replace(image.text.encode(), str(image.spec).encode())
        if not _has_values(edited, content, image.text, str(image.spec)):
            problem = manifest.make_problem(
                f"cannot remove the tag from annotation {key.PRE_BUILT_IMAGE}",
                f"set it to {image.spec}",
            )
            raise InstallDirectoryError(f"cannot prepare {root}", [problem])
        contents[manifest.file] = edited
    return contents


def _has_values(edited: bytes, content: bytes, old: str, new: str) -> bool:
    """Return whether the edit replaced annotations alone, and at least one."""
    try:
        before = documents.load_documents(content, where="")
        after = documents.load_documents(edited, where="")
    except ConfigError:
        return False
    return before != after and [_replace_annotation(each, old, new) for each in before] == after


def _replace_annotation(value: object, old: str, new: str) -> object:
    if isinstance(value, list):
        return [_replace_annotation(each, old, new) for each in value]
    if not isinstance(value, dict):
        return value
    changed: Json = {name: _replace_annotation(each, old, new) for name, each in value.items()}
    if changed.get(key.PRE_BUILT_IMAGE) == old:
        changed[key.PRE_BUILT_IMAGE] = new
    return changed


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
