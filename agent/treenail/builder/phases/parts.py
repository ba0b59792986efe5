"""Runs of buildah for the parts of a composed Containerfile: our own, then the user's.

A ``COPY .`` of the user's text must not copy our own files into the image. An ignore file cannot
hide them, because it applies to our own instructions too. So our own part is built first, with a
context of its own, and the user's text on its result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.builder.build_spec import BuildSpec
from treenail.builder.buildah.classify import BuildFailure, classify_failure, mentions_full_disk
from treenail.builder.buildah.disk_space import DiskWatch
from treenail.builder.buildah.oom import count_oom_kills
from treenail.builder.buildah.output import BuildOutput
from treenail.builder.buildah.program import BindMount, Buildah, TextFiles
from treenail.builder.instructions import find_step_lines
from treenail.clock import Clock
from treenail.errors import CommandTimeoutError, FileError
from treenail.image.build_reason import BuildReason


@dataclass(frozen=True, slots=True)
class BuildPart:
    """A Containerfile that one run of buildah builds. Its lines are those of the composed one."""

    text: str
    context: Path
    image: str
    """Local name of the result."""


def split_containerfile(
    text: str, spec: BuildSpec, buildah: Buildah, context: Path, own_context: Path
) -> Iterator[BuildPart]:
    """Return the parts in the order of their builds; one part without files of our own."""
    has_own_files = any(own_context.iterdir())
    own, user = split_text(text, spec.user_line, buildah.own_image)
    if not own or not has_own_files:
        # Own files without a part of the user: the whole text is our own.
        yield BuildPart(text, own_context if has_own_files else context, buildah.built_image)
        return
    yield BuildPart(own, own_context, buildah.own_image)
    yield BuildPart(user, context, buildah.built_image)


def split_text(text: str, user_line: int, own_image: str) -> tuple[str, str]:
    """Split a composed Containerfile into our own part and the rest.

    The rest finds the result of our own part as ``own_image``. Our own part is empty without a
    FROM before ``user_line``. Each of its instructions is one line.
    """
    lines = text.split("\n")
    own = lines[: max(user_line - 1, 0)]
    begin = next((number for number, line in enumerate(own) if line.startswith("FROM ")), None)
    if begin is None:
        return "", text
    stage = ["FROM", own_image, *own[begin].split()[2:]]
    comments = ["#"] * (len(own) - begin - 1)
    rest = [*own[:begin], " ".join(stage), *comments, *lines[len(own) :]]
    return "\n".join(own) + "\n", "\n".join(rest)


@dataclass(slots=True)
class PartResult:
    """How a run of buildah ended."""

    output: BuildOutput
    failure: BuildFailure | None = None


@dataclass(frozen=True, slots=True)
class PartRunner:
    """Runs buildah for one part after the other, within one time limit."""

    buildah: Buildah
    clock: Clock
    disk: DiskWatch
    mounts: Sequence[BindMount]
    images: Mapping[str, str]
    """Local names of images by their names in the text."""
    architecture: str
    keeps_layers: bool
    timeout_s: float
    show_line: Callable[[str], None]

    def run_parts(self, parts: Iterator[BuildPart], directory: Path) -> PartResult:
        """Build the parts; return the result of the last one, or of the first that fails.

        Writes the Containerfiles into the directory. Raises `CommandError` and `FileError`.
        """
        deadline = self.clock.monotonic() + self.timeout_s
        result = PartResult(BuildOutput({}, self.show_line))
        for number, part in enumerate(parts):
            path = directory / f"Containerfile-{number}"
            try:
                path.write_text(part.text)
            except OSError as error:
                raise FileError(f"cannot write {path}: {error.strerror}") from error
            result = self._run_part(part, path, deadline)
            if result.failure is not None:
                break
        return result

    def _run_part(self, part: BuildPart, path: Path, deadline: float) -> PartResult:
        output = BuildOutput(find_step_lines(part.text), self.show_line)
        kills_before = count_oom_kills()

        def add_line(line: str) -> None:
            if mentions_full_disk(line):
                self.disk.sample()
            output.add_line(line)

        try:
            code = self.buildah.build_image(
                TextFiles(path, part.context),
                part.image,
                images=self.images,
                mounts=self.mounts,
                keeps_layers=self.keeps_layers,
                architecture=self.architecture,
                timeout_s=deadline - self.clock.monotonic(),
                add_line=add_line,
            )
        except CommandTimeoutError:
            cause = f"buildah did not exit within {self.timeout_s:g} s"
            return PartResult(output, BuildFailure(BuildReason.DEADLINE_EXCEEDED, cause))
        if not code:
            return PartResult(output)
        kills = count_oom_kills()
        oom_kills = None if kills is None or kills_before is None else kills - kills_before
        failure = classify_failure(code, output.tail, oom_kills=oom_kills, space=self.disk.lowest)
        return PartResult(output, failure)
