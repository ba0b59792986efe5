"""``treenail-controller build``: show the builds of files, and run them on this host.

Tags of base images are resolved without a cluster.
"""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from treenail import clocks, errors
from treenail.api import machineosconfig, node, pullspec
from treenail.builder import append_config, build_layout, build_spec, local, registries
from treenail.builder.buildah.program import choose_own_id_maps
from treenail.cli import output_format, terminal
from treenail.cli.files import read_documents
from treenail.config.pullsecret import PullSecret
from treenail.controllers.image_build import build_planner, cluster_reader
from treenail.image import build_inputs, build_result
from treenail.kube.resources import SECRETS
from treenail.registry.images import resolve_digest
from treenail.registry.names import Manifest

SystemImages = Mapping[str, str | None]
"""System part in the registry by architecture: empty if the registry lacks it, None if it was not
asked."""


@dataclass(frozen=True, slots=True)
class LocalBuildResult:
    """An image that was built on this host."""

    digest: str
    pull_spec: str = ""
    """Empty unless it was pushed."""


_LAYOUT_PREFIX = "oci:"
_FETCHED_IMAGE = "image-0"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the command."""
    parser = commands.add_parser(
        "build",
        help="show the image builds of files, or run them on this host",
        description="Show the image build of each MachineOSConfig in files: the composed "
        "Containerfile, the content key, and whether the build needs a Job. With --local, build "
        "the image on this host. Without --local, change nothing, and read a registry only to "
        "resolve the tag of a base image, or with --push-secret. "
        "With --push-secret, look for the system part of the image in its registry; --local then "
        "adds the config to it instead of building it again.",
        epilog=terminal.format_examples(
            ("show what would be built", "treenail-controller build -f manifests/"),
            (
                "build on this host, and keep the image",
                "treenail-controller build -f manifests/ --pool worker --local --output oci:image",
            ),
            (
                "build on this host, and push",
                "treenail-controller build -f manifests/ --local --push --push-secret push.json",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "-f",
        "--filename",
        metavar="FILE",
        action="append",
        required=True,
        help="read the MachineOSConfigs, MachineConfigPools, MachineConfigs, the ControllerConfig, "
        "ConfigMaps and Secrets in this file, this directory, or - for the standard input; "
        "repeatable",
    )
    parser.add_argument(
        "--pool", metavar="NAME", help="build the image of this pool only (default: all pools)"
    )
    parser.add_argument(
        "--architecture",
        dest="architectures",
        action="append",
        choices=tuple(build_inputs.ARCHITECTURES),
        help="architecture of the pool's nodes; repeat it for a pool with several ones, whose "
        "image is a list of manifests (default: that of this host)",
    )
    parser.add_argument("--local", action="store_true", help="build the image on this host")
    parser.add_argument(
        "--push", action="store_true", help="with --local: push the image as the cluster would"
    )
    parser.add_argument(
        "--output",
        dest="destination",
        metavar="oci:DIR",
        help="with --local: write the image to an OCI layout in this directory",
    )
    parser.add_argument(
        "--pull-secret",
        "--authfile",
        metavar="FILE",
        type=Path,
        help="log in to registries of base images with this .dockerconfigjson (default: that in "
        "the files for the tag of a base image, else no login)",
    )
    parser.add_argument(
        "--push-secret",
        metavar="FILE",
        type=Path,
        help="log in to the registry of built images with this .dockerconfigjson (default: no "
        "login)",
    )
    parser.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help="trust the CAs in this PEM file for registries, "
        "beside those of the system (default: those of the ControllerConfig)",
    )
    parser.add_argument(
        "--work-dir",
        metavar="DIR",
        type=Path,
        default=_get_work_directory(),
        help="keep the files of a running build here; it needs space for the base image, unpacked "
        "(default: /var/cache/treenail/builds for root, else ~/.cache/treenail/builds)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        help="stop the build after this time (default: that of the MachineOSConfig, or 3600)",
    )
    parser.add_argument(
        "--build-cache",
        metavar="REPOSITORY",
        default="",
        help="take layers of single instructions from this repository, and with --push write them; "
        "the key is that of a controller with the same option (default: no cache)",
    )
    parser.add_argument(
        "--storage-driver",
        choices=build_spec.STORAGE_DRIVERS,
        default=build_spec.STORAGE_DRIVERS[0],
        help="storage driver of buildah (default: %(default)s)",
    )
    output_format.add_format_arguments(parser, output_format.TEXT_FORMATS, options=("-o",))
    parser.set_defaults(run=run_builds)


def run_builds(arguments: argparse.Namespace) -> int:
    """Show the builds, and run them with ``--local``."""
    arguments.architectures = sorted(set(arguments.architectures or [_get_architecture()]))
    _check_arguments(arguments)
    clock = clocks.SystemClock()
    builds = build_planner.plan_builds(
        read_documents(arguments.filename),
        clock,
        architectures=frozenset(arguments.architectures),
        only=arguments.pool,
        options=build_inputs.list_builder_options(
            driver=arguments.storage_driver, has_cache=bool(arguments.build_cache)
        ),
        resolve_tag=make_tag_resolver(arguments, clock),
        warn=_show_line,
    )
    if arguments.destination and len(builds) > 1:
        raise errors.UsageError(
            f"cannot write {arguments.destination}: the input has {len(builds)} images",
            remedy="choose one with --pool",
        )
    for build in builds:
        if build.layer.problems:
            problem = build.layer.problems[0]
            raise errors.ConfigError(
                f"cannot build the image of pool {build.pool}: {problem.path}: {problem.why}"
            )
    systems = {build.pool: _find_system_images(build, arguments) for build in builds}
    results: dict[str, LocalBuildResult] = {}
    if arguments.local:
        for build in builds:
            # There is one: this host has one architecture.
            system = next(iter(systems[build.pool].values()), None) or ""
            # The system part is in the repository of the push Secret.
            pull_secret = arguments.push_secret if system else arguments.pull_secret
            builder = _create_builder(arguments, pull_secret)
            results[build.pool] = _build_locally(build, builder, arguments, system)
    output_format.print_output(
        arguments.output,
        kind="ImageBuildList",
        content=lambda: {"builds": convert_to_json(builds, systems, results)},
        lines=lambda: format_builds(builds, systems, results),
    )
    sys.stdout.flush()
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    for option, value in (("--push", arguments.push), ("--output", arguments.destination)):
        if value and not arguments.local:
            raise errors.UsageError(
                f"cannot use {option} without --local: nothing is built", remedy="add --local"
            )
    destination = arguments.destination
    if destination is not None and not destination.removeprefix(_LAYOUT_PREFIX):
        destination = ""
    if destination is not None and not destination.startswith(_LAYOUT_PREFIX):
        raise errors.UsageError(
            f"cannot write to {arguments.destination!r:.100}: expected oci:DIR",
            remedy="name a directory: --output oci:image",
        )
    own = _get_architecture()
    if arguments.local and arguments.architectures != [own]:
        raise errors.UsageError(
            f"cannot build for {', '.join(arguments.architectures)} on this host, which is {own}",
            remedy=f"try the build with --architecture {own} alone, or leave out --local: the "
            "cluster builds for each architecture on a node that has it",
        )
    if arguments.timeout is not None and not 0 < arguments.timeout < float("inf"):
        raise errors.UsageError(f"--timeout: expected seconds above 0, found {arguments.timeout:g}")


def _find_system_images(
    build: build_planner.OfflineBuild, arguments: argparse.Namespace
) -> dict[str, str | None]:
    """Return the system part of each architecture in the registry, by digest.

    Empty if the registry lacks it; None if it was not asked.
    """
    images: dict[str, str | None] = {}
    for system in build.plan.systems:
        is_asked = system.wanted.needs_job and arguments.push_secret is not None
        images[system.architecture] = (
            _find_system_image(build, system, arguments) if is_asked else None
        )
    return images


def _find_system_image(
    build: build_planner.OfflineBuild,
    system: build_planner.SystemPlan,
    arguments: argparse.Namespace,
) -> str:
    spec = pullspec.parse_push_spec(system.wanted.push_spec, where="the push spec")
    settings = registries.RegistrySettings.read(arguments.push_secret, arguments.ca, os.environ)
    if build.plan.ca_pem and arguments.ca is None:
        settings = replace(settings, tls=replace(settings.tls, ca_pem=build.plan.ca_pem))
    with settings.open_client(spec.registry, spec.repository, clocks.SystemClock()) as client:
        manifest = client.head_manifest(spec.repository, spec.tag)
    return "" if manifest is None else spec.make_pull_spec(manifest.digest)


def _create_builder(arguments: argparse.Namespace, pull_secret: Path | None) -> local.LocalBuilder:
    if shutil.which("buildah") is None:
        raise errors.HostError(
            "cannot build: buildah is not installed",
            remedy="run: apt-get install buildah, or: dnf install buildah",
        )
    settings = local.LocalSettings(
        arguments.work_dir.absolute(),
        pull_secret=pull_secret,
        push_secret=arguments.push_secret,
        ca=arguments.ca,
        driver=arguments.storage_driver,
    )
    return local.LocalBuilder(
        settings, os.environ, clocks.SystemClock(), choose_own_id_maps(), _show_line
    )


def _build_locally(
    build: build_planner.OfflineBuild,
    builder: local.LocalBuilder,
    arguments: argparse.Namespace,
    reused: str,
) -> LocalBuildResult:
    """Build and push; ``reused`` is a system part to reuse, empty for none."""
    plan, system = build.plan, build.plan.systems[0]
    runs_text = plan.wanted.needs_job and not reused
    text = system.containerfile if runs_text else f"FROM {reused or plan.wanted.base_image}\n"
    spec = build_spec.BuildSpec(
        push_spec=plan.wanted.push_spec,
        architecture=system.architecture,
        user_line=system.user_line,
        cache_repository=arguments.build_cache and f"{arguments.build_cache}/{build.config}",
        mirrors=plan.mirrors,
        labels=system.labels,
    )
    ca_pem = "" if arguments.ca is not None else plan.ca_pem
    timeout_s = arguments.timeout or float(plan.deadline_s)
    files = local.BuildFiles(build.context, build.entitlements, ca_pem)
    with builder.open_build(text, spec, files, timeout_s=timeout_s) as opened:
        _run_phase(opened, build_result.BuildPhase.FETCH)
        if runs_text:
            _run_phase(opened, build_result.BuildPhase.BUILD)
        layout = build_layout.ImageLayout(opened.directories.layout)
        source = build_spec.BUILT_IMAGE if runs_text else _FETCHED_IMAGE
        image = append_config.append_config_layer(
            layout, source, build_spec.BUILT_IMAGE, build.layer, plan.labels
        )
        if arguments.destination:
            target = Path(arguments.destination.removeprefix(_LAYOUT_PREFIX))
            append_config.copy_to_layout(
                layout, image, build_layout.ImageLayout(target), plan.wanted.name
            )
        if arguments.push:
            _check_pushed(_run_phase(opened, build_result.BuildPhase.PUSH), image)
    pushed = pullspec.parse_push_spec(plan.wanted.push_spec, where="the push spec")
    return LocalBuildResult(
        image.digest, pushed.make_pull_spec(image.digest) if arguments.push else ""
    )


def _run_phase(build: local.LocalBuild, phase: build_result.BuildPhase) -> build_result.BuildResult:
    result = build.run_phase(phase)
    if not result.has_succeeded:
        raise BuildFailedError(result)
    return result


def _check_pushed(result: build_result.BuildResult, image: Manifest) -> None:
    if result.digest != image.digest:
        raise errors.HostError(f"cannot push {image.digest}: the registry has {result.digest}")


class BuildFailedError(errors.TreenailError):
    """A phase of a local build failed."""

    def __init__(self, result: build_result.BuildResult) -> None:
        reason = result.reason
        place = f"line {result.line}: " if result.line else ""
        cause = place + result.message.partition("\n")[0]
        super().__init__(
            f"cannot {result.phase} the image: {reason}: {cause}",
            remedy=build_result.REMEDIES[reason] if reason else "",
        )


def _show_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _get_architecture() -> str:
    return node.convert_machine_name(platform.machine())


def _get_work_directory() -> Path:
    if os.geteuid() == 0:
        return Path("/var/cache/treenail/builds")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "treenail/builds"


class TagUnresolvedError(errors.TreenailError):
    """The tag of a base image cannot be resolved."""


def make_tag_resolver(
    arguments: argparse.Namespace, clock: clocks.Clock
) -> build_planner.ResolveTag:
    """Make a resolver with the login and the CA of the arguments, otherwise of the input."""

    def resolve(
        config: machineosconfig.MachineOSConfig, reader: cluster_reader.ClusterReader
    ) -> str:
        spec = pullspec.parse_push_spec(config.base_image, where="the base image")
        settings = registries.RegistrySettings.read(arguments.pull_secret, arguments.ca, os.environ)
        if arguments.pull_secret is None:
            settings = replace(settings, secret=_read_login(config, reader))
        if arguments.ca is None:
            ca_pem = reader.read_ca(spec.registry)
            settings = replace(settings, tls=replace(settings.tls, ca_pem=ca_pem))
        try:
            with settings.open_client(spec.registry, spec.repository, clock) as client:
                digest = resolve_digest(client, spec.repository, spec.tag, arguments.architectures)
        except errors.TreenailError as error:
            raise TagUnresolvedError(
                f"cannot resolve the base image {config.base_image}: {error}",
                remedy="name a login with --pull-secret FILE and a CA with --ca FILE, or name the "
                "base by digest",
            ) from error
        return spec.make_pull_spec(digest)

    return resolve


def _read_login(
    config: machineosconfig.MachineOSConfig, reader: cluster_reader.ClusterReader
) -> PullSecret:
    """Read the login of the input; files without the Secret mean anonymous access."""
    name = config.base_pull_secret
    if name and reader.find_object(SECRETS, name) is None:
        return PullSecret()
    try:
        return reader.read_base_login(name)
    except errors.CredentialError as error:
        remedy = "correct it in the input, or name a login with --pull-secret FILE"
        raise errors.CredentialError(str(error), remedy=remedy) from error


def format_builds(
    builds: Iterable[build_planner.OfflineBuild],
    systems: Mapping[str, SystemImages],
    results: Mapping[str, LocalBuildResult],
) -> Iterator[str]:
    """Format the builds for people; ``systems`` and ``results`` are by pool."""
    for number, build in enumerate(builds):
        if number:
            yield ""
        yield from _format_build(build, systems[build.pool], results.get(build.pool))


def convert_to_json(
    builds: Iterable[build_planner.OfflineBuild],
    systems: Mapping[str, SystemImages],
    results: Mapping[str, LocalBuildResult],
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
            "systems": [
                _convert_system(system, systems[build.pool]) for system in build.plan.systems
            ],
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


def _convert_system(system: build_planner.SystemPlan, images: SystemImages) -> dict[str, object]:
    image = images[system.architecture]
    return {
        "architecture": system.architecture,
        "contentKey": system.wanted.content_key,
        "needsJob": system.wanted.needs_job,
        "image": system.wanted.push_spec,
        "imageExists": None if image is None else bool(image),
        "containerfile": system.containerfile,
    }


def _describe_system(system: str | None, result: LocalBuildResult | None) -> str:
    if system is None:
        return "unknown: name --push-secret FILE to look into the registry"
    if result is not None:
        return f"reused {system}" if system else "built on this host"
    if system:
        return "found in the registry: --local reuses it, the cluster if a build has the key"
    return "not in the registry: a Job builds it"


def _convert_result(result: LocalBuildResult | None) -> dict[str, object]:
    if result is None:
        return {}
    return {"image": {"digest": result.digest, "pullSpec": result.pull_spec or None}}


def _format_build(
    build: build_planner.OfflineBuild, images: SystemImages, result: LocalBuildResult | None
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
    system: build_planner.SystemPlan, images: SystemImages, result: LocalBuildResult | None
) -> Iterator[str]:
    yield f"  architecture: {system.architecture}"
    yield f"  content key:  {system.wanted.content_key}"
    if system.wanted.needs_job:
        yield f"  system image: {system.wanted.push_spec}"
        yield f"                {_describe_system(images[system.architecture], result)}"
    else:
        yield "  system image: the base image; the build needs no Job"


def _format_containerfile(system: build_planner.SystemPlan) -> Iterator[str]:
    if system.wanted.needs_job:
        yield "  Containerfile:"
        for line in system.containerfile.splitlines():
            yield f"    {line}".rstrip()
