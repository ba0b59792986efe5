"""Checks of a MachineOSConfig alone and beside its pool."""

from collections.abc import Collection, Iterator

from treenail.api import annotations as key
from treenail.api import pullspec
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import ContainerfileArch, MachineOSConfig
from treenail.errors import ConfigError
from treenail.image.inputs.build_inputs import ARCHITECTURES
from treenail.image.inputs.containerfile_problems import find_containerfile_problems
from treenail.image.inputs.findings import InputFinding, InputReason
from treenail.image.push_spec import parse_push_spec

MIN_DEADLINE_S, MAX_DEADLINE_S, DEFAULT_DEADLINE_S = 60, 86400, 3600
_DEADLINE_DIGITS = 5
_JOB = "Job"

BLOCKING_POOL_CONDITIONS = ("RenderDegraded", "PinnedImageSetsDegraded", "PoolSynchronizerDegraded")
"""Conditions of a pool during which nothing is built."""
_NODE_DEGRADED = "NodeDegraded"
"""Blocks the first build only: later another image is often the remedy."""


def find_config_findings(config: MachineOSConfig) -> Iterator[InputFinding]:
    """Yield what is wrong with the spec and the annotations of a MachineOSConfig."""
    if config.builder_type not in ("", _JOB):
        yield InputFinding(
            InputReason.BUILDER_UNSUPPORTED,
            "spec.imageBuilder.imageBuilderType",
            _JOB,
            repr(config.builder_type)[:60],
            f"set it to {_JOB}",
        )
    yield from _check_push_spec(config)
    yield from _check_containerfiles(config)
    yield from _check_annotations(config)


def find_pool_findings(
    config: MachineOSConfig, pool: MachineConfigPool | None, owner: MachineOSConfig | None
) -> Iterator[InputFinding]:
    """Yield why the pool cannot get an image now.

    ``owner`` is the MachineOSConfig that builds for the pool; it never changes to a newer one.
    """
    where = "spec.machineConfigPool.name"
    if owner is not None and owner.name != config.name:
        yield InputFinding(
            InputReason.POOL_TAKEN,
            where,
            "a pool without another MachineOSConfig",
            f"pool {config.pool}, for which MachineOSConfig {owner.name} builds",
            f"delete one of the two: kubectl delete machineosconfig {config.name}",
        )
    if pool is None or pool.is_deleting:
        yield InputFinding(
            InputReason.POOL_NOT_FOUND,
            where,
            "the name of a MachineConfigPool",
            f"{config.pool!r:.260}, which does not exist",
            "create the pool, or delete the MachineOSConfig",
        )
        return
    blocking = (*BLOCKING_POOL_CONDITIONS, *(() if config.pull_spec else (_NODE_DEGRADED,)))
    for condition in pool.conditions:
        if condition.type in blocking and condition.status == "True":
            yield InputFinding(
                InputReason.POOL_DEGRADED,
                f"pool {pool.name}",
                f"{condition.type}=False",
                f"{condition.type}=True ({condition.message or condition.reason})"[:1000],
                "repair the pool first",
            )
    if not pool.configuration.name:
        yield InputFinding(
            InputReason.POOL_NOT_RENDERED,
            f"pool {pool.name}",
            "a rendered MachineConfig in spec.configuration",
            "none",
            "wait for the render controller",
        )


def find_architecture_findings(
    config: MachineOSConfig, architectures: Collection[str]
) -> Iterator[InputFinding]:
    """Yield why no image can be built for one of the architectures of the pool's nodes."""
    if not config.containerfiles:
        return
    entries = ", ".join(entry.architecture for entry in config.containerfiles)
    for architecture in sorted(architectures):
        name = ARCHITECTURES.get(architecture)
        if name is None or config.find_containerfile(name) is None:
            yield InputFinding(
                InputReason.ARCHITECTURE_MISSING,
                "spec.containerFile",
                f"an entry for {repr(str(name or architecture))[:40]}, the architecture of nodes",
                f"entries for {entries}",
                f"add an entry for {ContainerfileArch.NO_ARCH}, or one for each architecture",
            )


def read_deadline(config: MachineOSConfig) -> int:
    """Return the seconds until a Job is ended; the default for an invalid annotation."""
    text = config.metadata.annotations.get(key.BUILD_DEADLINE, "")
    if text.isascii() and text.isdecimal() and len(text) <= _DEADLINE_DIGITS:
        seconds = int(text)
        if MIN_DEADLINE_S <= seconds <= MAX_DEADLINE_S:
            return seconds
    return DEFAULT_DEADLINE_S


def _check_push_spec(config: MachineOSConfig) -> Iterator[InputFinding]:
    where = "spec.renderedImagePushSpec"
    try:
        parse_push_spec(config.push_spec, where=where)
    except ConfigError as error:
        found = str(error).removeprefix(f"{where} is ").replace(", but ", ": ", 1)
        yield InputFinding(
            InputReason.PUSH_SPEC_INVALID, where, "REGISTRY/REPOSITORY:TAG", found, error.remedy
        )


def _check_containerfiles(config: MachineOSConfig) -> Iterator[InputFinding]:
    seen: set[str] = set()
    for index, entry in enumerate(config.containerfiles):
        where = f"spec.containerFile[{index}]"
        if entry.architecture not in tuple(ContainerfileArch):
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.containerfileArch",
                " or ".join(ContainerfileArch),
                repr(entry.architecture)[:60],
                "correct it",
            )
        if entry.architecture in seen:
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.containerfileArch",
                "at most one entry for each architecture",
                f"two for {entry.architecture:.60}",
                "remove one of them",
            )
        seen.add(entry.architecture)
        for problem in find_containerfile_problems(entry.content):
            yield InputFinding(
                InputReason.CONTAINERFILE_INVALID,
                f"{where}.content",
                "a valid Containerfile",
                str(problem),
                problem.remedy,
            )


def _check_annotations(config: MachineOSConfig) -> Iterator[InputFinding]:
    notes = config.metadata.annotations
    sees = notes.get(key.BUILD_SEES_CONFIG)
    if sees not in (None, "true", "false"):
        yield _describe_annotation(key.BUILD_SEES_CONFIG, '"true" or "false"', sees)
    deadline = notes.get(key.BUILD_DEADLINE)
    if deadline is not None and str(read_deadline(config)) != deadline:
        expected = f"{MIN_DEADLINE_S} to {MAX_DEADLINE_S} seconds"
        yield _describe_annotation(key.BUILD_DEADLINE, expected, deadline)
    if config.base_image:
        yield from _check_base_annotation(config.base_image)


def _check_base_annotation(image: str) -> Iterator[InputFinding]:
    try:
        if "@" in image:
            pullspec.parse_pull_spec(image, where=key.BASE_IMAGE)
        else:
            # A tag: only this annotation may name one, and the controller resolves it.
            parse_push_spec(image, where=key.BASE_IMAGE)
    except ConfigError:
        expected = "REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:DIGEST"
        yield _describe_annotation(key.BASE_IMAGE, expected, image)


def _describe_annotation(name: str, expected: str, found: str) -> InputFinding:
    return InputFinding(
        InputReason.ANNOTATION_INVALID,
        f"annotation {name}",
        expected,
        repr(found[:100]),
        "correct it, or remove the annotation",
    )
