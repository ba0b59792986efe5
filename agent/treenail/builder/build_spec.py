"""Inputs of a build: ``build.json``, the directories, and the facts of the Containerfile.

The controller writes ``Containerfile``, ``build.json`` and ``context/`` into the directory of
inputs, which no container of the Job can write. A user who may write ConfigMaps can change the
files at any time, so each phase uses a copy in its memory that has the digest of the Job. The
containers share one work directory::

    WORK/fetched.json   images that `fetch` wrote, for `build` and `push`
    WORK/layout         an OCI layout: the images of `fetch`, and the one of `build`
    WORK/buildah        buildah's storage, which a RUN may change; `push` reads nothing of it
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_FILE_LIMIT, _FILES_LIMIT = memory.MIB, 8 * memory.MIB  # bytes of one input file, and of all
_COUNT_LIMIT = 1000  # files


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
    labels: Annotated[Mapping[str, str], codec.Key(omit=True)] = field(default_factory=dict)
    """Labels that the built image gets in place of those of the Containerfile."""

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


def compute_inputs_digest(digests: Mapping[str, str]) -> str:
    """Return one digest over those of all input files by path."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class InputFiles:
    """The inputs of a build in memory."""

    files: Mapping[str, bytes] = field(repr=False)
    """By path below the directory of inputs."""

    @property
    def spec(self) -> BuildSpec:
        document = decode.load_json(self.files["build.json"], where="build.json")
        return BuildSpec.from_json(document)

    @property
    def containerfile(self) -> str:
        try:
            return self.files["Containerfile"].decode()
        except UnicodeDecodeError as error:
            raise errors.ConfigError(
                f"cannot read the Containerfile: expected UTF-8, found another encoding at byte "
                f"{error.start}"
            ) from error

    @property
    def context(self) -> dict[str, bytes]:
        """Files for COPY by name."""
        paths = [path for path in self.files if path.startswith("context/")]
        return {path.removeprefix("context/"): self.files[path] for path in paths}


@dataclass(frozen=True, slots=True)
class BuildDirectories:
    """The directory of inputs and the work directory of one build."""

    inputs: Path
    work: Path
    digest: str = ""
    """Expected digest of the inputs; empty where only this user can write them."""

    @property
    def layout(self) -> Path:
        return self.work / "layout"

    def read_inputs(self) -> InputFiles:
        """Copy the inputs into memory; raise `HostError` unless the copy has the digest."""
        files = {name: read_file(self.inputs / name) for name in ("Containerfile", "build.json")}
        files |= read_files(self.inputs)
        if (context := self.inputs / "context").is_dir():
            files |= {f"context/{name}": content for name, content in read_files(context).items()}
        hashes = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
        actual = compute_inputs_digest(hashes)
        if self.digest not in ("", actual):
            raise errors.HostError(
                f"cannot build: expected inputs with the digest {self.digest:.80}, found "
                f"{actual}: a ConfigMap with inputs was changed after the Job was created",
                remedy="leave it as it is: the controller starts another Job",
            )
        return InputFiles(files)

    def read_fetched(self) -> FetchOutput:
        content = read_file(self.work / "fetched.json")
        return FetchOutput.from_json(decode.load_json(content, where="fetched.json"))

    def write_fetched(self, fetched: FetchOutput) -> None:
        path = self.work / "fetched.json"
        try:
            path.write_text(json.dumps(fetched.to_json()))
        except OSError as error:
            raise errors.FileError(f"cannot write {path}: {error.strerror}") from error


def read_file(path: Path) -> bytes:
    """Read an input file of at most 1 MiB; raise `FileError`."""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_LIMIT + 1)
    except OSError as error:
        raise errors.FileError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _FILE_LIMIT:
        raise errors.FileError(f"cannot read {path}: it is longer than {_FILE_LIMIT} bytes")
    return content


def read_files(directory: Path) -> dict[str, bytes]:
    """Read the files of a directory, without subdirectories, by name; raise `FileError`.

    The kubelet shows a volume as links to a hidden directory with a time in its name: `COPY .`
    would put both into the image, and no two builds would be equal.
    """
    files: dict[str, bytes] = {}
    try:
        names = sorted(path.name for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise errors.FileError(f"cannot read {directory}: {error.strerror}") from error
    for name in names:
        if not name.startswith(".."):
            files[name] = read_file(directory / name)
        if sum(map(len, files.values())) > _FILES_LIMIT or len(files) > _COUNT_LIMIT:
            raise errors.FileError(
                f"cannot read {directory}: it has more than {_COUNT_LIMIT} files or "
                f"{_FILES_LIMIT} bytes"
            )
    return files


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
