"""buildah: its storage, and the commands of a build."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.builder.buildah.classify import find_error
from treenail.builder.buildah.mount_points import create_mount_points
from treenail.builder.buildah.process import SandboxedProgram
from treenail.errors import CommandError, FileError

_STORE_TIMEOUT_S = 1800.0
_IMAGE_ID = re.compile(r"[0-9a-f]{64}")
_LOCAL_PREFIX = "localhost/treenail-"
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}\n'
_REGISTRIES = 'unqualified-search-registries = []\nshort-name-mode = "enforcing"\n'


@dataclass(frozen=True, slots=True)
class BindMount:
    """A directory of the builder that instructions see read-only at ``target``."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files of one run of ``buildah bud``."""

    containerfile: Path
    context: Path


class Buildah:
    """Runs buildah with storage in the work directory, which is its working directory."""

    def __init__(self, program: SandboxedProgram, work: Path, driver: str) -> None:
        self._program = program
        self._work = work
        self.driver = driver

    def prepare_work(self) -> None:
        """Create the directories and the configuration; nothing of /etc/containers counts."""
        try:
            for name in ("home/containers", "tmp", "run", "storage"):
                (self._work / name).mkdir(parents=True, exist_ok=True)
            (self._work / "home/storage.conf").write_text(
                f'[storage]\ndriver = "{self.driver}"\n'
                f'graphroot = "{self._work}/storage"\nrunroot = "{self._work}/run"\n'
            )
            # The images come from the layout only, where `fetch` verified each digest.
            (self._work / "home/policy.json").write_text(_POLICY)
            (self._work / "home/registries.conf").write_text(_REGISTRIES)
        except OSError as error:
            raise FileError(f"cannot write {error.filename}: {error.strerror}") from error

    def load_image(self, layout: Path, name: str) -> str:
        """Load an image of the layout, which is in the work directory; return its ID."""
        image_id = ""
        # buildah derives a name for the image from this path, and rejects a path that no image
        # can have as name, so it is relative to the working directory.
        place = os.path.relpath(layout, self._work)

        def read_id(line: str) -> None:
            nonlocal image_id
            if _IMAGE_ID.fullmatch(line):
                image_id = line

        self._run_store_command(
            ["pull", "--quiet", f"--signature-policy={self._work}/home/policy.json",
             f"oci:{place}:{name}"],
            read_id,
        )  # fmt: skip
        if not image_id:
            raise CommandError("cannot load an image: buildah pull printed no image ID")
        create_mount_points(self._work / "storage", self.driver, image_id)
        return image_id

    def tag_image(self, image_id: str, name: str) -> None:
        """Name an image: buildah writes names of bases, such as the layout's path, into images."""
        self._run_store_command(["tag", image_id, f"{_LOCAL_PREFIX}{name}"])

    def list_image_ids(self) -> list[str]:
        """List the IDs of all images of the storage, those of single instructions too."""
        found: list[str] = []
        self._run_store_command(
            ["images", "--all", "--quiet", "--no-trunc"],
            lambda line: found.append(line.removeprefix("sha256:")),
        )
        return list(dict.fromkeys(each for each in found if _IMAGE_ID.fullmatch(each)))

    def save_image(self, image: str, layout: Path, name: str) -> None:
        """Write an image of the storage into the layout; blobs that the layout has stay."""
        self._run_store_command(
            ["push", "--quiet", f"--signature-policy={self._work}/home/policy.json",
             "--format=oci", image, f"oci:{os.path.relpath(layout, self._work)}:{name}"],
        )  # fmt: skip

    def build_image(
        self,
        files: TextFiles,
        image: str,
        *,
        images: Mapping[str, str],
        mounts: Sequence[BindMount],
        keeps_layers: bool,
        architecture: str,
        timeout_s: float,
        add_line: Callable[[str], None],
    ) -> int:
        """Build the Containerfile as the local image ``image``; return buildah's exit code.

        ``images`` maps image names of the text to names of `tag_image`. Raises
        `CommandTimeoutError` after ``timeout_s``.
        """
        contexts = [
            f"--build-context={reference}=container-image://{_LOCAL_PREFIX}{name}"
            for reference, name in images.items()
        ]
        volumes = [f"--volume={mount.source}:{mount.target}:ro" for mount in mounts]
        return self._program.run_program(
            [*self._make_command("bud"), "--isolation=chroot", "--timestamp=0", "--pull=never",
             "--format=oci", f"--signature-policy={self._work}/home/policy.json",
             f"--layers={str(keeps_layers).lower()}", f"--arch={architecture}",
             *contexts, *volumes, f"--tag={image}",
             f"--file={files.containerfile}", str(files.context)],
            timeout_s=timeout_s,
            add_line=add_line,
        )  # fmt: skip

    @property
    def built_image(self) -> str:
        """Local name of the complete image."""
        return f"{_LOCAL_PREFIX}built"

    @property
    def own_image(self) -> str:
        """Local name of the image of our own part of the Containerfile."""
        return f"{_LOCAL_PREFIX}configs"

    def _make_command(self, command: str) -> list[str]:
        return [
            "buildah",
            f"--root={self._work}/storage",
            f"--runroot={self._work}/run",
            f"--storage-driver={self.driver}",
            f"--registries-conf={self._work}/home/registries.conf",
            command,
        ]

    def _run_store_command(
        self, arguments: Sequence[str], add_line: Callable[[str], None] = lambda _: None
    ) -> None:
        lines: list[str] = []

        def collect_line(line: str) -> None:
            del lines[:-20]
            lines.append(line)
            add_line(line)

        command, *rest = arguments
        argv = [*self._make_command(command), *rest]
        code = self._program.run_program(argv, timeout_s=_STORE_TIMEOUT_S, add_line=collect_line)
        if code:
            cause = find_error(lines) or "\n".join(lines[-3:]) or f"exit code {code}"
            raise CommandError(f"buildah {command} failed: {cause}", stderr="\n".join(lines))
