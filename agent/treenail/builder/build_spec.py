"""Inputs of a build: ``build.json``, the directories, and the facts of the Containerfile.

The controller writes ``Containerfile``, ``build.json`` and ``context/`` into the directory of
inputs, which no container of the Job can write. The containers share one work directory::

    WORK/fetched.json   images that `fetch` wrote, for `build` and `push`
    WORK/layout         an OCI layout: the images of `fetch`, and the one of `build`
    WORK/storage, run   buildah's storage; `push` needs neither
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from treenail import errors, memory
from treenail.api import decode, node
from treenail.config import image_mirrors
from treenail.encoding import codec
from treenail.image import containerfile

BUILT_IMAGE = "built"
"""Name in the layout of the image that `build` made."""
CACHE_PREFIX = "cache-"
"""Names in the layout of images of single instructions begin with this."""

GO = b"go\n"
"""Line on the standard input that a phase waits for with ``--wait``."""

STORAGE_DRIVERS = ("overlay", "vfs")
"""Of buildah; the first is the default."""
_LIMIT = memory.MIB  # bytes of one input file


@dataclass(frozen=True, slots=True)
class BuildSpec(codec.JsonObject, where="build.json"):
    """Facts that all containers of a build need; holds no credential."""

    push_spec: Annotated[str, codec.require("REGISTRY/REPOSITORY:TAG", bool)]
    """``REGISTRY/REPOSITORY:TAG`` that the image is pushed to."""
    architecture: Annotated[str, codec.Via(lambda name: name or node.DEFAULT_ARCHITECTURE)] = (
        node.DEFAULT_ARCHITECTURE
    )
    """Architecture of the images and of the node, as in image indexes."""
    cache_repository: str = ""
    """``REGISTRY/REPOSITORY`` with the layers of earlier builds; empty without a cache."""
    user_line: int = 1
    """First line of the user's text in the composed Containerfile; 0 without one."""
    push_registry: Annotated[str, codec.Key(omit=True)] = ""
    """``HOST:PORT`` to push to in place of the registry of ``push_spec``; empty for that one."""
    mirrors: Annotated[image_mirrors.MirrorsField, codec.Key(omit=True)] = image_mirrors.NO_MIRRORS
    """Where images of the Containerfile are pulled from."""

    def convert_line(self, line: int) -> int:
        """Convert a line of the composed Containerfile to the user's; 0 before the user's text."""
        is_own = not self.user_line or line < self.user_line
        return 0 if is_own else line - self.user_line + 1


@dataclass(frozen=True, slots=True)
class FetchedImage(codec.JsonObject):
    """An image that `fetch` wrote to the layout."""

    reference: str
    """The image as the Containerfile names it; empty for an image of the cache."""
    name: str
    """Name in the layout."""
    repository: str
    """``REGISTRY/REPOSITORY`` that it came from."""
    digest: str
    """Digest of the architecture's manifest."""


@dataclass(frozen=True, slots=True)
class FetchOutput(codec.JsonObject, where="fetched.json"):
    """Content of ``fetched.json``."""

    images: tuple[FetchedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildDirectories:
    """The directory of inputs and the work directory of one build."""

    inputs: Path
    work: Path

    @property
    def layout(self) -> Path:
        return self.work / "layout"

    def read_containerfile(self) -> str:
        try:
            return self._read_file(self.inputs / "Containerfile").decode()
        except UnicodeDecodeError as error:
            raise errors.ConfigError(
                f"cannot read the Containerfile: expected UTF-8, found another encoding at byte "
                f"{error.start}"
            ) from error

    def read_spec(self) -> BuildSpec:
        return BuildSpec.from_json(self._load_json(self.inputs / "build.json"))

    def read_fetched(self) -> FetchOutput:
        return FetchOutput.from_json(self._load_json(self.work / "fetched.json"))

    def write_fetched(self, fetched: FetchOutput) -> None:
        path = self.work / "fetched.json"
        try:
            path.write_text(json.dumps(fetched.to_json()))
        except OSError as error:
            raise errors.FileError(f"cannot write {path}: {error.strerror}") from error

    def _load_json(self, path: Path) -> object:
        return decode.load_json(self._read_file(path), where=path.name)

    def _read_file(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                content = file.read(_LIMIT + 1)
        except OSError as error:
            raise errors.FileError(f"cannot read {path}: {error.strerror}") from error
        if len(content) > _LIMIT:
            raise errors.FileError(f"cannot read {path}: it is longer than {_LIMIT} bytes")
        return content


def find_step_lines(text: str) -> dict[tuple[int, int], int]:
    """Map stage and step, as buildah counts them, to lines of the Containerfile."""
    step_lines: dict[tuple[int, int], int] = {}
    stage = step = 0
    # buildah counts FROM as step 1 of its stage; an ARG before the first FROM is no step.
    for instruction in containerfile.parse_containerfile(text).instructions:
        if instruction.keyword == "FROM":
            stage, step = stage + 1, 0
        if stage:
            step += 1
            step_lines[stage, step] = instruction.line
    return step_lines


def find_images(text: str, architecture: str) -> tuple[str, ...]:
    """Return the images of registries that the text needs, as buildah resolves their names.

    Earlier stages, by name or number, and ``scratch`` are no images.
    """
    parsed = containerfile.parse_containerfile(text)
    names = {stage.line: stage.name for stage in parsed.stages}
    references: dict[str, None] = {}
    # `FROM scratch` begins with an empty root directory; no registry has this image.
    stages: set[str] = {"scratch", ""}
    for instruction, images in containerfile.list_images(parsed.instructions, architecture):
        references.update(dict.fromkeys(image for image in images if image not in stages))
        if instruction.keyword == "FROM":
            index = sum(line < instruction.line for line in names)
            stages |= {str(index), names[instruction.line]}
    return tuple(references)
