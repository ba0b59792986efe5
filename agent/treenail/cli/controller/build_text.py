"""Texts and documents of ``treenail-controller build``."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from treenail.controllers.image_build.planner import OfflineBuild, SystemPlan

SystemImages = Mapping[str, str | None]
"""System part in the registry by architecture: empty if the registry lacks it, None if it was not
asked."""


@dataclass(frozen=True, slots=True)
class LocalResult:
    """An image that was built on this host."""

    digest: str
    pull_spec: str = ""
    """Empty unless it was pushed."""


def format_builds(
    builds: Iterable[OfflineBuild],
    systems: Mapping[str, SystemImages],
    results: Mapping[str, LocalResult],
) -> Iterator[str]:
    """Format the builds for people; ``systems`` and ``results`` are by pool."""
    for number, build in enumerate(builds):
        if number:
            yield ""
        yield from _format_build(build, systems[build.pool], results.get(build.pool))


def convert_to_json(
    builds: Iterable[OfflineBuild],
    systems: Mapping[str, SystemImages],
    results: Mapping[str, LocalResult],
) -> list[dict[str, object]]:
    """Convert the builds to the items of the document."""
    return [
        {
            "pool": build.pool,
            "machineOSConfig": build.config,
            "machineOSBuild": build.plan.wanted.name,
            "machineConfig": build.plan.wanted.config,
            "baseImage": build.plan.wanted.base_image,
            "baseTag": build.base_tag or None,
            "contentKey": build.plan.wanted.content_key,
            "needsJob": build.plan.wanted.needs_job,
            "systems": [_convert_system(each, systems[build.pool]) for each in build.plan.systems],
            "pushSpec": build.plan.wanted.push_spec,
            "configLayer": {
                "digest": build.layer.digest,
                "sizeBytes": build.layer.size,
                "omitted": list(build.layer.omitted),
            },
            **_convert_result(results.get(build.pool)),
        }
        for build in builds
    ]


def _convert_system(system: SystemPlan, images: SystemImages) -> dict[str, object]:
    image = images[system.architecture]
    return {
        "architecture": system.architecture,
        "contentKey": system.wanted.content_key,
        "needsJob": system.wanted.needs_job,
        "image": system.wanted.push_spec,
        "imageExists": None if image is None else bool(image),
        "containerfile": system.containerfile,
    }


def _describe_system(system: str | None, result: LocalResult | None) -> str:
    if system is None:
        return "unknown: name --push-secret FILE to look into the registry"
    if result is not None:
        return f"reused {system}" if system else "built on this host"
    if system:
        return "found in the registry: --local reuses it, the cluster if a build has the key"
    return "not in the registry: a Job builds it"


def _convert_result(result: LocalResult | None) -> dict[str, object]:
    if result is None:
        return {}
    return {"image": {"digest": result.digest, "pullSpec": result.pull_spec or None}}


def _format_build(
    build: OfflineBuild, images: SystemImages, result: LocalResult | None
) -> Iterator[str]:
    plan = build.plan
    yield f"pool {build.pool}: MachineOSConfig {build.config}"
    yield f"  build:        {plan.wanted.name}"
    yield f"  config:       {plan.wanted.config}"
    yield f"  base image:   {plan.wanted.base_image}"
    if build.base_tag:
        yield f"  base tag:     {build.base_tag}, resolved now; the cluster resolves it again"
    if len(plan.systems) == 1:
        yield from _format_system(plan.systems[0], images, result)
    yield f"  push spec:    {plan.wanted.push_spec}"
    if len(plan.systems) > 1:
        yield "                a list of manifests with an image for each architecture"
    yield f"  config layer: {build.layer.size} bytes, {build.layer.digest}"
    for path in build.layer.omitted:
        yield f"    omitted:    {path}"
    if len(plan.systems) == 1:
        yield from _format_containerfile(plan.systems[0])
    else:
        for system in plan.systems:
            yield from _format_system(system, images, result)
            yield from _format_containerfile(system)
    if result is not None:
        yield f"  built:        {result.digest}"
        if result.pull_spec:
            yield f"  pushed:       {result.pull_spec}"


def _format_system(
    system: SystemPlan, images: SystemImages, result: LocalResult | None
) -> Iterator[str]:
    yield f"  architecture: {system.architecture}"
    yield f"  content key:  {system.wanted.content_key}"
    if system.wanted.needs_job:
        yield f"  system image: {system.wanted.push_spec}"
        yield f"                {_describe_system(images[system.architecture], result)}"
    else:
        yield "  system image: the base image; the build needs no Job"


def _format_containerfile(system: SystemPlan) -> Iterator[str]:
    if system.wanted.needs_job:
        yield "  Containerfile:"
        for line in system.containerfile.splitlines():
            yield f"    {line}".rstrip()
