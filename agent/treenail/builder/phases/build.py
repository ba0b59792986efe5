"""Phase ``build``: run the user's Containerfile. It has no login; its Secrets are mounts."""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treenail.api.image_labels import BOOTABLE_LABELS
from treenail.builder import assemble
from treenail.builder.build_spec import (
    BUILT_IMAGE,
    CACHE_PREFIX,
    BuildDirectories,
    BuildSpec,
    FetchedImages,
)
from treenail.builder.buildah.classify import BuildFailure, classify_failure
from treenail.builder.buildah.disk_space import DiskWatch
from treenail.builder.buildah.output import BuildOutput
from treenail.builder.buildah.program import BindMount, Buildah
from treenail.builder.images.package_file import write_packages
from treenail.builder.layout import ImageLayout
from treenail.builder.phases.parts import PartRunner, split_containerfile
from treenail.clock import Clock
from treenail.errors import CommandError, FileError
from treenail.image.build_reason import BuildReason
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.image.inputs.own_files import OWN_PREFIX

log = logging.getLogger(__name__)

_CONTEXT_LIMIT = 10_000  # files
_CACHE_LIMIT = 64  # images of single instructions
_NO_SYSTEM = (
    "the built image is no operating system: it has no label "
    f"{' or '.join(BOOTABLE_LABELS)}, and the base image has one; begin the last stage with: "
    "FROM configs AS final"
)


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Flags of the phase."""

    mounts: tuple[BindMount, ...] = ()
    """Entitlements that instructions see."""
    timeout_s: float = 3600.0
    keeps_layers: bool = False
    """Whether single instructions are kept for the cache."""


def build_image(
    directories: BuildDirectories,
    buildah: Buildah,
    settings: BuildSettings,
    clock: Clock,
    show_line: Callable[[str], None],
) -> BuildResult:
    """Build the image into the layout, from the images that `fetch` wrote there.

    Raises `ConfigError`, `FileError` and `CommandError` when the build cannot start.
    """
    begin = clock.monotonic()
    spec, fetched = directories.read_spec(), directories.read_fetched()
    text = directories.read_containerfile()
    layout = ImageLayout(directories.layout)
    context, own_context = directories.work / "context", directories.work / "own"
    copy_context(directories.inputs / "context", context, own_context)
    buildah.prepare_work()
    references, loaded_ids = _load_images(buildah, fetched, directories.layout)
    loaded = clock.monotonic()
    keeps_layers = settings.keeps_layers or bool(spec.cache_repository)
    with DiskWatch(directories.work) as disk:
        runner = PartRunner(
            buildah,
            clock,
            disk,
            settings.mounts,
            references,
            spec.architecture,
            keeps_layers,
            settings.timeout_s,
            show_line,
        )
        parts = split_containerfile(text, spec, buildah, context, own_context)
        result = runner.run_parts(parts, directories.work)
    output = result.output
    if result.failure is not None:
        return _make_failure(result.failure, output, spec)
    built = clock.monotonic()
    try:
        digest = _save_image(buildah, layout, fetched)
        if keeps_layers:
            _save_cache(buildah, layout, fetched, loaded_ids)
    except CommandError as error:
        lines = ("Error: " + str(error),)
        return _make_failure(classify_failure(1, lines), output, spec)
    if not assemble.is_bootable(layout, BUILT_IMAGE) and any(
        assemble.is_bootable(layout, each.name) for each in fetched.images
    ):
        return BuildResult(
            BuildPhase.BUILD, reason=BuildReason.CONTAINERFILE_INVALID, message=_NO_SYSTEM
        )
    write_packages(directories.work, buildah.driver, buildah.built_image)
    log.info("built %s", digest)
    return BuildResult(
        BuildPhase.BUILD,
        message="\n".join(output.tail),
        seconds={
            "load": loaded - begin,
            "build": built - loaded,
            "save": clock.monotonic() - built,
        },
    )


def copy_context(source: Path, target: Path, own_target: Path) -> None:
    """Copy the context: the user's files to one directory, and our own ones to another.

    The kubelet shows a ConfigMap as links to a hidden directory with a time in its name. `COPY .`
    would put both into the image, and no two builds would be equal.
    """
    try:
        for directory in (target, own_target):
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir(mode=0o755, parents=True)
        if not source.is_dir():
            return
        count = 0
        for path in sorted(source.iterdir()):
            if path.name.startswith(".."):
                continue
            count += 1
            if count > _CONTEXT_LIMIT:
                raise FileError(f"cannot copy {source}: it has more than {_CONTEXT_LIMIT} files")
            is_own = path.name.startswith(OWN_PREFIX)
            copy = (own_target if is_own else target) / path.name
            if path.is_dir() and not path.is_symlink():
                shutil.copytree(path, copy, symlinks=True)
            elif path.is_file():
                shutil.copyfile(path, copy)
                copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    except OSError as error:
        raise FileError(f"cannot copy {error.filename}: {error.strerror}") from error


def _load_images(
    buildah: Buildah, fetched: FetchedImages, layout: Path
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


def _save_image(buildah: Buildah, layout: ImageLayout, fetched: FetchedImages) -> str:
    """Write the built image to the layout; return its digest."""
    layers = assemble.collect_layers(layout, [image.name for image in fetched.images])
    with assemble.hide_layers(layout, layers):
        buildah.save_image(buildah.built_image, layout.path, BUILT_IMAGE)
        return assemble.restore_layers(layout, BUILT_IMAGE, layers).digest


def _save_cache(
    buildah: Buildah, layout: ImageLayout, fetched: FetchedImages, loaded_ids: frozenset[str]
) -> None:
    """Write the images of single instructions that did not come from the cache."""
    names = [BUILT_IMAGE, *(image.name for image in fetched.images)]
    new_ids = [each for each in buildah.list_image_ids() if each not in loaded_ids]
    for number, image_id in enumerate(new_ids[:_CACHE_LIMIT], len(fetched.images)):
        name = f"{CACHE_PREFIX}{number}"
        layers = assemble.collect_layers(layout, names)
        with assemble.hide_layers(layout, layers):
            buildah.save_image(image_id, layout.path, name)
            assemble.restore_layers(layout, name, layers)
        names.append(name)


def _make_failure(failure: BuildFailure, output: BuildOutput, spec: BuildSpec) -> BuildResult:
    return BuildResult(
        BuildPhase.BUILD,
        reason=failure.reason,
        line=spec.convert_line(output.line),
        message="\n".join([failure.cause, *_drop_last(output.tail)]),
    )


def _drop_last(tail: Sequence[str]) -> Sequence[str]:
    """Leave out buildah's own error, which the cause repeats."""
    return tail[:-1] if tail and "Error: " in tail[-1] else tail
