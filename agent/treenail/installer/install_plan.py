"""Plan of an installation: images, hosts, seconds and first boots of each pool. Pure."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import component_names, machineconfigpool, machineosconfig, node
from treenail.controllers.handover import image_mode
from treenail.controllers.image_build import build_planner, cluster_reader
from treenail.controllers.pools.image_tags import pin_base_image
from treenail.image import config_layer, containerfile
from treenail.installer.directory import install_manifests, manifest_checks
from treenail.installer.images import pool_image

LAYER_S = 2
"""Adding the config layer: it has a few files, and the registry has the base."""
RUN_S = 45
"""One RUN instruction, in most cases an installation of packages."""
_START_S = 10
_BYTES_PER_S = 40_000_000
"""Pull, unpack and push of a compressed base image."""
_USUAL_BASE = 1_200_000_000
_RUN = re.compile(r"^\s*(?:ONBUILD\s+)?RUN\s", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class BuildEstimate:
    """Expected seconds of a build, and the facts that they come from."""

    seconds: int
    why: str


def estimate_build(
    containerfiles: Sequence[str], *, base_size: int | None, measured_s: float | None
) -> BuildEstimate:
    """Estimate the build of these composed Containerfiles; without one, that of a layer.

    ``base_size`` are compressed bytes, None if unknown. ``measured_s`` is the last build of the
    same pool, which counts more than any estimate.
    """
    if measured_s is not None:
        return BuildEstimate(max(round(measured_s), 1), "as the last build")
    if not containerfiles:
        return BuildEstimate(LAYER_S, "one layer")
    count = sum(len(_RUN.findall(text)) for text in containerfiles)
    size = _USUAL_BASE if base_size is None else base_size
    seconds = _START_S + count * RUN_S + 2 * size // _BYTES_PER_S
    origin = "assumed" if base_size is None else "found"
    return BuildEstimate(
        int(seconds),
        f"{count} RUN instruction{'' if count == 1 else 's'}, a base of "
        f"{size / 1e9:.1f} GB ({origin})",
    )


IMAGE_DEADLINE_TEXT = "60 min"
"""Default of ``serve --image-deadline``."""
_MAX_OMITTED = 5


class InstallImageSource(StrEnum):
    """Where the image of a pool comes from."""

    NONE = "none"
    """The pool boots the stock image."""
    PREBUILT = "pre-built"
    LAYER = "layer"
    """The base image with one layer, which has the files of the config."""
    BUILD = "build"
    """Instructions run: a Containerfile, extensions or another kernel."""


@dataclass(frozen=True, slots=True)
class PoolInstallPlan:
    """Actions of the installation for one pool."""

    name: str
    rendered: str = ""
    """Name of the rendered config; empty if that is unknown."""
    source: InstallImageSource = InstallImageSource.NONE
    image: str = ""
    """Push spec, or the pre-built image."""
    base_image: str = ""
    content_key: str = ""
    host: str = ""
    """Where the image is built; empty without a build."""
    estimate: BuildEstimate | None = None
    first_boot: tuple[str, ...] = ()
    reboots: int = 0
    """Reboots of a machine beyond those of an installation without image mode."""
    problems: tuple[str, ...] = ()
    """Why the pool would fail, beside the problems of the directory."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Facts beside the manifests."""

    architectures: Mapping[str, str] = field(default_factory=dict)
    base_sizes: Mapping[str, int] = field(default_factory=dict)
    """Compressed bytes of base images, where a registry was asked."""
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the last build by pool."""


def plan_install(
    manifests: install_manifests.InstallManifests, facts: PlanFacts, clock: clocks.Clock
) -> list[PoolInstallPlan]:
    """Plan all pools: the control plane first, then by name."""
    owners = {config.pool: config for config in manifests.image_configs.values()}
    names = sorted(
        {*manifests.pools, *owners}, key=lambda name: (name != machineconfigpool.MASTER, name)
    )
    return [_plan_pool(manifests, name, owners.get(name), facts, clock) for name in names]


def _plan_pool(
    manifests: install_manifests.InstallManifests,
    name: str,
    config: machineosconfig.MachineOSConfig | None,
    facts: PlanFacts,
    clock: clocks.Clock,
) -> PoolInstallPlan:
    settings = manifests.settings or image_mode.ImageMode()
    pool, problems, notes = _render_pool(manifests, name)
    plan = PoolInstallPlan(
        name,
        rendered=pool.rendered.name if pool else "",
        base_image=pool.rendered.config.os_image_url if pool else "",
        problems=problems,
        notes=notes,
    )
    layer = None
    if config is not None and manifest_checks.is_prebuilt(config):
        image = config.metadata.annotations[key.PRE_BUILT_IMAGE]
        plan = dataclasses.replace(plan, source=InstallImageSource.PREBUILT, image=image)
    elif config is not None:
        plan = dataclasses.replace(
            plan,
            source=InstallImageSource.LAYER,
            image=config.push_spec,
            host="bootstrap host"
            if name in machineconfigpool.CONTROL_PLANE_POOLS
            else "the new control plane",
        )
        if pool is not None and plan.base_image:
            plan, layer = _plan_build(plan, manifests, pool, config, facts, clock)
        elif texts := [
            file.content
            for file in config.containerfiles[:1]
            if containerfile.parse_containerfile(file.content).instructions
        ]:
            measured = facts.measured_s.get(name)
            estimate = estimate_build(texts, base_size=None, measured_s=measured)
            plan = dataclasses.replace(plan, source=InstallImageSource.BUILD, estimate=estimate)
    boot = (
        _describe_worker_boot
        if name not in machineconfigpool.CONTROL_PLANE_POOLS
        else _describe_bootstrap_boot
    )
    lines, reboots = boot(plan, settings)
    if layer is not None and plan.source is not InstallImageSource.NONE:
        lines = (*lines, *_describe_rest(layer))
    return dataclasses.replace(plan, first_boot=lines, reboots=reboots)


def _render_pool(
    manifests: install_manifests.InstallManifests, name: str
) -> tuple[install_manifests.RenderedPool | None, tuple[str, ...], tuple[str, ...]]:
    """Return the rendered pool, problems and notes."""
    pool = manifests.pools.get(name)
    if pool is None or pool.machine_config_selector is None:
        return None, (), ("no manifest has the pool: the installer adds it",)
    if not any(pool.selects(config.metadata.labels) for config in manifests.configs.values()):
        return None, (), ("no manifest has a MachineConfig of the pool: the installer adds them",)
    try:
        (rendered,) = install_manifests.render_install_pools(
            dataclasses.replace(manifests, pools={name: pool})
        )
    except errors.ConfigError as error:
        return None, (f"{error}; {error.remedy}" if error.remedy else str(error),), ()
    if not rendered.rendered.config.os_image_url:
        note = "no manifest names the OS image: the installer adds MachineConfigs, and the name of "
        return rendered, (), (f"{note}the rendered config changes",)
    return rendered, (), ()


def _plan_build(
    plan: PoolInstallPlan,
    manifests: install_manifests.InstallManifests,
    pool: install_manifests.RenderedPool,
    config: machineosconfig.MachineOSConfig,
    facts: PlanFacts,
    clock: clocks.Clock,
) -> tuple[PoolInstallPlan, config_layer.ConfigLayer | None]:
    architecture = facts.architectures.get(plan.name, node.DEFAULT_ARCHITECTURE)
    inputs = pool_image.make_build_inputs(
        manifests,
        (pool,),
        plan.name,
        namespace=component_names.NAMESPACE,
        architecture=architecture,
    )
    planner = build_planner.BuildPlanner(
        cluster_reader.ClusterReader(inputs.objects, clock, namespace=component_names.NAMESPACE)
    )
    try:
        build = planner.plan_build(pin_base_image(config), inputs.pool, frozenset({architecture}))
        layer = config_layer.make_config_layer(
            pool.rendered.config, trust_bundle=planner.read_trust_bundle()
        )
    except build_planner.BuildRefused as error:
        return _add_problem(plan, error.problem.message), None
    except errors.TreenailError as error:
        return _add_problem(plan, f"{error}; {error.remedy}" if error.remedy else str(error)), None
    for problem in layer.problems:
        plan = _add_problem(plan, f"{problem.path}: {problem.why}")
    return _add_build(plan, build, facts), layer


def _add_build(
    plan: PoolInstallPlan, build: build_planner.BuildPlan, facts: PlanFacts
) -> PoolInstallPlan:
    base = build.wanted.base_image
    return dataclasses.replace(
        plan,
        source=InstallImageSource.BUILD if build.wanted.needs_job else InstallImageSource.LAYER,
        base_image=base,
        content_key=build.wanted.content_key,
        estimate=estimate_build(
            [system.containerfile for system in build.systems if system.wanted.needs_job],
            base_size=facts.base_sizes.get(base),
            measured_s=facts.measured_s.get(plan.name),
        ),
    )


def _add_problem(plan: PoolInstallPlan, text: str) -> PoolInstallPlan:
    return dataclasses.replace(plan, problems=(*plan.problems, text))


def _describe_bootstrap_boot(
    plan: PoolInstallPlan, settings: image_mode.ImageMode
) -> tuple[tuple[str, ...], int]:
    """Return the first boot of a machine that the bootstrap host serves, and its reboots."""
    if plan.source is InstallImageSource.NONE:
        return ("boot the stock image, without image mode",), 0
    waiting = (
        "get the config from the bootstrap host; during the build it answers 503, and Ignition "
        "retries"
    )
    is_prebuilt_image = plan.source is InstallImageSource.PREBUILT
    source = f"the registry that {plan.image} names"
    if not is_prebuilt_image and settings.registry is image_mode.RegistryType.BOOTSTRAP:
        source = "the bootstrap registry, a mirror of the push spec by digest"
    first = "get the config from the bootstrap host" if is_prebuilt_image else waiting
    return (first, f"pull the image from {source}", *_SWITCH), 1


def _describe_worker_boot(
    plan: PoolInstallPlan, settings: image_mode.ImageMode
) -> tuple[tuple[str, ...], int]:
    if plan.source is InstallImageSource.NONE:
        return ("boot the stock image, without image mode",), 0
    if plan.source is InstallImageSource.PREBUILT:
        return ("get the config from the cluster", f"pull {plan.image}", *_SWITCH), 1
    later = "the rollout controller moves it to its image with a drain and a reboot"
    if manifest_checks.is_cluster_registry(plan.image):
        registry = plan.image.partition("/")[0]
        return (
            "get the config from the cluster",
            f"boot the stock image: {registry} is not reachable before the machine joins",
            later,
        ), 1
    if settings.workers is image_mode.WorkerMode.FOLLOW:
        return ("get the config from the cluster", "boot the stock image", later), 1
    waiting = (
        "get the config from the cluster; until the image exists, for at most "
        f"{IMAGE_DEADLINE_TEXT}, it answers 503, and Ignition retries"
    )
    return (
        waiting,
        f"pull {plan.image.rpartition(':')[0]} by digest",
        *_SWITCH,
    ), 1


_SWITCH = (
    "switch to it with rpm-ostree rebase or bootc switch, and reboot once",
    "compare the image with the config before the reboot and after it",
)


def _describe_rest(layer: config_layer.ConfigLayer) -> tuple[str, ...]:
    """Return what the agent writes because no image can carry it."""
    if not layer.omitted:
        return ()
    shown = "; ".join(layer.omitted[:_MAX_OMITTED])
    rest = len(layer.omitted) - _MAX_OMITTED
    more = f"; and {rest} more" if rest > 0 else ""
    return (f"write what no image can carry: {shown}{more}",)
