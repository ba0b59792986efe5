"""Phase ``build``: run the user's Containerfile. It has no registry login; its Secrets are mounts.

A ``COPY .`` of the user's text must not copy our own files into the image. An ignore file cannot
hide them, because it applies to our own instructions too. So our own part is built first, with a
context of its own, and the user's text on its result.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail import clocks, errors
from treenail.api.pullspec import BOOTABLE_LABELS
from treenail.builder import build_layout, build_spec, disk_space, failures
from treenail.builder.buildah import program
from treenail.builder.images.packages import write_packages
from treenail.image import build_result, containerfile

log = logging.getLogger(__name__)

_CACHE_LIMIT = 64  # images of single instructions
_NO_SYSTEM = (
    "the built image is no operating system: it has no label "
    f"{' or '.join(BOOTABLE_LABELS)}, and the base image has one; begin the last stage with: "
    "FROM configs AS final"
)


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Flags of the phase."""

    mounts: tuple[program.BindMount, ...] = ()
    """Entitlements that instructions see."""
    timeout_s: float = 3600.0


def build_image(
    directories: build_spec.BuildDirectories,
    buildah: program.Buildah,
    settings: BuildSettings,
    clock: clocks.Clock,
    show_line: Callable[[str], None],
) -> build_result.BuildResult:
    """Build the image into the layout, from the images that `fetch` wrote there.

    Raises `ConfigError`, `FileError` and `CommandError` when the build cannot start.
    """
    begin = clock.monotonic()
    inputs, fetched = directories.read_inputs(), directories.read_fetched()
    spec, text = inputs.spec, inputs.containerfile
    layout = build_layout.ImageLayout(directories.layout)
    buildah.prepare_work()
    context, own_context = buildah.given / "context", buildah.given / "own"
    own = {name for name in inputs.context if name.startswith(containerfile.OWN_PREFIX)}
    for place, is_own in ((context, False), (own_context, True)):
        chosen = {name: text for name, text in inputs.context.items() if (name in own) is is_own}
        write_copies(chosen, place, 0o644)
    mounts = [
        _copy_mount(mount, buildah.given / f"mount-{number}")
        for number, mount in enumerate(settings.mounts)
    ]
    references, loaded_ids = _load_images(buildah, fetched, directories.layout)
    loaded = clock.monotonic()
    keeps_layers = bool(spec.cache_repository)
    with disk_space.DiskSpaceSampler(directories.work) as disk:
        builder = ContainerfileBuilder(
            buildah,
            clock,
            disk,
            mounts,
            references,
            spec.architecture,
            keeps_layers,
            settings.timeout_s,
            show_line,
        )
        parts = split_containerfile(text, spec, buildah, context, own_context)
        result = builder.build_parts(parts, buildah.given)
    output = result.output
    if result.failure is not None:
        return _make_failure(result.failure, output, spec)
    built = clock.monotonic()
    try:
        names = [image.name for image in fetched.images]
        digest = save_image(buildah, layout, names, spec.labels)
        if keeps_layers:
            _save_cache(buildah, layout, fetched, loaded_ids)
    except errors.CommandError as error:
        lines = ("Error: " + str(error),)
        return _make_failure(failures.classify_failure(1, lines), output, spec)
    if not build_layout.is_bootable(layout, build_spec.BUILT_IMAGE) and any(
        build_layout.is_bootable(layout, image.name) for image in fetched.images
    ):
        return build_result.BuildResult(
            build_result.BuildPhase.BUILD,
            reason=build_result.BuildReason.CONTAINERFILE_INVALID,
            message=_NO_SYSTEM,
        )
    write_packages(directories.work, buildah.storage, buildah.driver, buildah.built_image)
    log.info("built %s", digest)
    return build_result.BuildResult(
        build_result.BuildPhase.BUILD,
        message="\n".join(output.tail),
        seconds={
            "load": loaded - begin,
            "build": built - loaded,
            "save": clock.monotonic() - built,
        },
    )


def write_copies(files: Mapping[str, bytes], place: Path, mode: int) -> None:
    """Write files into a new directory; raise `FileError`."""
    try:
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(mode=0o755)
        for name, content in files.items():
            path = place / name
            path.write_bytes(content)
            path.chmod(mode)
    except OSError as error:
        raise errors.FileError(f"cannot write {error.filename}: {error.strerror}") from error


def _copy_mount(mount: program.BindMount, place: Path) -> program.BindMount:
    """Copy files that instructions see, and that only this user may read."""
    write_copies(build_spec.read_files(mount.source), place, 0o444)
    return program.BindMount(place, mount.target)


def _load_images(
    buildah: program.Buildah, fetched: build_spec.FetchOutput, layout: Path
) -> tuple[dict[str, str], frozenset[str]]:
    """Load the images into the storage; return the names by reference, and all IDs."""
    references: dict[str, str] = {}
    image_ids: set[str] = set()
    for image in fetched.images:
        image_id = buildah.load_image(layout, image.name)
        image_ids.add(image_id)
        if image.reference:
            buildah.tag_image(image_id, image.name)
            references[image.reference] = image.name
    return references, frozenset(image_ids)


def save_image(
    buildah: program.Buildah,
    layout: build_layout.ImageLayout,
    names: Sequence[str],
    labels: Mapping[str, str],
    *,
    image: str = "",
    name: str = build_spec.BUILT_IMAGE,
) -> str:
    """Write an image, by default the built one, to the layout; return its digest.

    ``names`` are images of the layout with layers that it may have.
    """
    layers = build_layout.collect_layers(layout, names)
    # buildah gets a layout of its own: what `push` uploads beside the image is out of its reach.
    saved = build_layout.ImageLayout(layout.path.with_name("saved"))
    shutil.rmtree(saved.path, ignore_errors=True)
    try:
        saved.create()
        for diff_id in layers:
            saved.write_placeholder(diff_id)
        buildah.save_image(image or buildah.built_image, saved.path, name)
        return build_layout.adopt_image(layout, saved, name, layers, labels).digest
    finally:
        shutil.rmtree(saved.path, ignore_errors=True)


def _save_cache(
    buildah: program.Buildah,
    layout: build_layout.ImageLayout,
    fetched: build_spec.FetchOutput,
    loaded_ids: frozenset[str],
) -> None:
    """Write the images of single instructions that did not come from the cache."""
    names = [build_spec.BUILT_IMAGE, *(image.name for image in fetched.images)]
    new_ids = [image_id for image_id in buildah.list_image_ids() if image_id not in loaded_ids]
    for number, image_id in enumerate(new_ids[:_CACHE_LIMIT], len(fetched.images)):
        name = f"{build_spec.CACHE_PREFIX}{number}"
        save_image(buildah, layout, names, {}, image=image_id, name=name)
        names.append(name)


def _make_failure(
    failure: failures.BuildFailure, output: program.BuildOutput, spec: build_spec.BuildSpec
) -> build_result.BuildResult:
    # buildah's own error comes last, and the cause repeats it.
    tail = output.tail[:-1] if "Error: " in "".join(output.tail[-1:]) else output.tail
    return build_result.BuildResult(
        build_result.BuildPhase.BUILD,
        reason=failure.reason,
        line=spec.convert_line(output.line),
        message="\n".join([failure.cause, *tail]),
    )


def count_oom_kills(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Read the counter of this process's cgroup; None where it cannot be read."""
    for line in _read_lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        # In a cgroup namespace, as in a container, the own cgroup is the root.
        # cgroup v2 has one line "0::/path", v1 a line for each controller (cgroups(7)).
        if controllers == "":
            file = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        # "oom_kill" is in both files: in v1 since Linux 4.13 (admin-guide/cgroup-v1/memory.rst).
        for entry in _read_lines(file):
            name, _, count = entry.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class ContainerfilePart:
    """A Containerfile that one run of buildah builds. Its lines are those of the composed one."""

    text: str
    context: Path
    image: str
    """Local name of the result."""


def split_containerfile(
    text: str,
    spec: build_spec.BuildSpec,
    buildah: program.Buildah,
    context: Path,
    own_context: Path,
) -> Iterator[ContainerfilePart]:
    """Return the parts in the order of their builds; one part without files of our own."""
    has_own_files = any(own_context.iterdir())
    own, user = split_text(text, spec.user_line, buildah.own_image)
    if not own or not has_own_files:
        # Own files without a part of the user: the whole text is our own.
        yield ContainerfilePart(
            text, own_context if has_own_files else context, buildah.built_image
        )
        return
    yield ContainerfilePart(own, own_context, buildah.own_image)
    yield ContainerfilePart(user, context, buildah.built_image)


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
    # A comment in place of each line keeps the numbers of the lines that follow.
    comments = ["#"] * (len(own) - begin - 1)
    rest = [*own[:begin], " ".join(stage), *comments, *lines[len(own) :]]
    return "\n".join(own) + "\n", "\n".join(rest)


@dataclass(slots=True)
class BuildahResult:
    """How a run of buildah ended."""

    output: program.BuildOutput
    failure: failures.BuildFailure | None = None


@dataclass(frozen=True, slots=True)
class ContainerfileBuilder:
    """Runs buildah for one part after the other, within one time limit."""

    buildah: program.Buildah
    clock: clocks.Clock
    disk: disk_space.DiskSpaceSampler
    mounts: Sequence[program.BindMount]
    images: Mapping[str, str]
    """Local names of images by their names in the text."""
    architecture: str
    keeps_layers: bool
    timeout_s: float
    show_line: Callable[[str], None]

    def build_parts(self, parts: Iterator[ContainerfilePart], directory: Path) -> BuildahResult:
        """Build the parts; return the result of the last one, or of the first that fails.

        Writes the Containerfiles into the directory. Raises `CommandError` and `FileError`.
        """
        deadline = self.clock.monotonic() + self.timeout_s
        result = BuildahResult(program.BuildOutput({}, self.show_line))
        texts = [(directory / f"Containerfile-{number}", part) for number, part in enumerate(parts)]
        # All of them before the first instruction, which might put a link in the place of one.
        for path, part in texts:
            try:
                path.write_text(part.text)
            except OSError as error:
                raise errors.FileError(f"cannot write {path}: {error.strerror}") from error
        for path, part in texts:
            result = self._build_part(part, path, deadline)
            if result.failure is not None:
                break
        return result

    def _build_part(self, part: ContainerfilePart, path: Path, deadline: float) -> BuildahResult:
        output = program.BuildOutput(build_spec.find_step_lines(part.text), self.show_line)
        kills_before = count_oom_kills()

        def add_line(line: str) -> None:
            if failures.mentions_full_disk(line):
                self.disk.sample()
            output.add_line(line)

        try:
            code = self.buildah.build_image(
                program.TextFiles(path, part.context),
                part.image,
                images=self.images,
                mounts=self.mounts,
                keeps_layers=self.keeps_layers,
                architecture=self.architecture,
                timeout_s=deadline - self.clock.monotonic(),
                add_line=add_line,
            )
        except errors.CommandTimeoutError:
            cause = f"buildah did not exit within {self.timeout_s:g} s"
            return BuildahResult(
                output, failures.BuildFailure(build_result.BuildReason.DEADLINE_EXCEEDED, cause)
            )
        if not code:
            return BuildahResult(output)
        kills = count_oom_kills()
        oom_kills = None if kills is None or kills_before is None else kills - kills_before
        failure = failures.classify_failure(
            code, output.tail, oom_kills=oom_kills, space=self.disk.lowest
        )
        return BuildahResult(output, failure)
