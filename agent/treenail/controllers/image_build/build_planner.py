"""Plans of builds: validated inputs, names, keys and the composed Containerfile.

The build controller plans from a cluster, `plan_builds` from files. A plan may use the system parts
of earlier builds again.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from treenail import clocks, memory
from treenail.api import annotations as key
from treenail.api import decode, machineconfig, machineconfigpool, machineosconfig, node, pullspec
from treenail.config import image_mirrors, pullsecret
from treenail.controllers.image_build import build_facts, build_objects, cluster_reader
from treenail.controllers.pools import image_tags, os_image
from treenail.controllers.render import render
from treenail.errors import ConfigError, CredentialError, UsageError
from treenail.image import build_inputs, config_layer, input_checks
from treenail.image.oci import documents
from treenail.kube import resources
from treenail.registry.proxies import ProxySettings

IsEnded = Callable[[str], bool]
_MAX_PROBLEMS = 3
_OBJECT_LIMIT = memory.MIB - 64 * 1024
"""Bytes of own files in one ConfigMap, which also holds the Containerfile."""
_ENTITLEMENTS: tuple[tuple[str, str, resources.Resource], ...] = (
    ("etc-pki-entitlement-{pool}", "/etc/pki/entitlement", resources.SECRETS),
    ("etc-pki-rpm-gpg", "/etc/pki/rpm-gpg", resources.SECRETS),
    (cluster_reader.REPOSITORIES, "/etc/yum.repos.d", resources.CONFIGMAPS),
)
ResolveTag = Callable[[machineosconfig.MachineOSConfig, cluster_reader.ClusterReader], str]
"""Returns what the tag of a base image stands for, by digest; raises `TreenailError`."""


@dataclass(frozen=True, slots=True)
class EntitlementMount:
    """A Secret or ConfigMap that only the user's instructions see."""

    name: str
    path: str
    """Where the instructions see its files."""
    is_secret: bool = True


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """The system part for one architecture, and what its Job needs to know."""

    wanted: build_facts.WantedSystem
    containerfile: str = field(default="", repr=False)
    """The composed Containerfile."""
    user_line: int = 1
    """First line of the user's text in it; 0 without one."""
    own_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files of the composed Containerfile beside those of the ConfigMap, by name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the system part: pruning deletes no image without them."""

    @property
    def architecture(self) -> str:
        return self.wanted.architecture


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A wanted build, and what its Jobs and the registries need to know."""

    wanted: build_facts.WantedBuild
    systems: tuple[SystemPlan, ...]
    """One for each architecture, as in the wanted build."""
    base_pull_secret: str = ""
    """Secret in the namespace of builds; empty for anonymous access."""
    context: str = ""
    """ConfigMap with files for COPY; empty for none."""
    context_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of these files by name: the Job accepts no others."""
    entitlements: tuple[EntitlementMount, ...] = ()
    ca_pem: str = field(default="", repr=False)
    """CAs of registries beside those of the system."""
    mirrors: image_mirrors.ImageMirrors = image_mirrors.NO_MIRRORS
    """Where images are pulled from; no part of any key, because the content is equal."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the complete image."""
    deadline_s: int = 3600
    can_use_control_plane: bool = False
    """Jobs tolerate the taints of control-plane nodes: the cluster has no other nodes."""

    def get_system(self, name: str) -> SystemPlan:
        """Return the system part with this name; raises `KeyError`."""
        return {system.wanted.name: system for system in self.systems}[name]

    def find_containerfiles(self, architectures: Sequence[str]) -> list[str]:
        """Return the composed Containerfiles that Jobs build for these architectures."""
        return [
            system.containerfile
            for system in self.systems
            if system.wanted.needs_job and system.architecture in architectures
        ]


class BuildRefused(Exception):
    """The inputs cannot be built; ``problem`` names field, found and expected value."""

    def __init__(self, problem: image_tags.ImageProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def never_ended(_name: str) -> bool:
    """Plan every build as a new one."""
    return False


class BuildPlanner:
    """Computes plans. Reads what is not watched: rendered configs, ConfigMaps and Secrets.

    Thread-safe.
    """

    def __init__(
        self,
        reader: cluster_reader.ClusterReader,
        *,
        options: tuple[str, ...] = (),
        mirror_rules: tuple[image_mirrors.MirrorRule, ...] = (),
    ) -> None:
        """``options`` are those of the builder that change images.

        ``mirror_rules`` are added to those of the rendered config.
        """
        self._reader = reader
        self._options = options
        self._mirror_rules = mirror_rules

    def plan_build(
        self,
        config: machineosconfig.MachineOSConfig,
        pool: machineconfigpool.MachineConfigPool,
        architectures: frozenset[str],
        is_ended: IsEnded = never_ended,
    ) -> BuildPlan:
        """Plan the build of the pool's rendered config.

        ``is_ended`` says of a name whether its build has ended. The plan of such a build has no
        entitlements, and its keys are not those of a new build. Raises `BuildRefused` for invalid
        inputs, and `ClusterError`.
        """
        config = image_tags.pin_base_image(config)
        rendered = self._reader.read_rendered_facts(pool.configuration.name)
        names = choose_architectures(architectures)
        document, where = self._find_context(config)
        rendered_findings = (
            finding
            for name in names
            for finding in input_checks.find_rendered_findings(
                rendered.config, base_image=config.base_image, architecture=name
            )
        )
        _refuse_findings(
            *input_checks.find_config_findings(config),
            *input_checks.find_architecture_findings(config, names),
            *dict.fromkeys(rendered_findings),
            *(input_checks.find_context_findings(document, where) if where else ()),
        )
        context = (
            input_checks.read_context(document, where) if where else input_checks.BuildContext()
        )
        _refuse_findings(*input_checks.find_source_findings(config, context))
        push_spec = pullspec.parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
        systems = [
            build_inputs.BuildInputs.from_objects(config, rendered.config, architecture)
            for architecture in names
        ]
        has_text = any(system.user_text for system in systems)
        base_image = systems[0].base_image
        name = build_inputs.compute_build_name(
            config, pool, rendered.config, context_digest=context.digest
        )
        # They matter to Jobs alone, and each costs requests to the API server.
        has_mounts = has_text and not is_ended(name)
        entitlements = self._find_entitlements(config.pool) if has_mounts else ()
        own_files = {build_inputs.TRUST_FILE: self.read_trust_bundle()}
        if config.sees_config and has_text:
            own_files[build_inputs.CONFIG_FILE] = self._make_config_file(rendered.name)
        config_digest = _compute_digest(own_files.get(build_inputs.CONFIG_FILE))
        # With a cache, what instructions of one MachineOSConfig wrote is never part of another's.
        options = tuple(
            f"{option}={config.name}" if option == build_inputs.LAYERS else option
            for option in self._options
        )
        inputs = [
            replace(
                system,
                trust_bundle=self._reader.read_trust().bundle,
                config_digest=config_digest if system.user_text else "",
                context_digest=context.digest,
                mounts=tuple(mount.path for mount in entitlements) if system.user_text else (),
                options=options if system.needs_job else (),
            )
            for system in systems
        ]
        content_key = build_inputs.compute_content_key(*inputs)
        repository = f"{push_spec.registry}/{push_spec.repository}"
        mirrors = self.read_mirrors(rendered.name)
        plans = tuple(
            _plan_system(system, own_files, repository, config, is_only=len(inputs) == 1)
            for system in inputs
        )
        wanted = build_facts.WantedBuild(
            name=name,
            config=rendered.name,
            push_spec=f"{repository}:{name}",
            content_key=content_key,
            share_key=compute_share_key(content_key, repository, config.push_secret),
            systems=tuple(system.wanted for system in plans),
            base_image=base_image,
            push_secret=config.push_secret,
            instruction_remedy=build_inputs.describe_hidden_files(config, rendered.build_paths),
        )
        return BuildPlan(
            wanted=wanted,
            systems=plans,
            context=config.context_name,
            context_files={
                name: hashlib.sha256(context.files[name]).hexdigest()
                for name in sorted(context.files)
            },
            entitlements=entitlements,
            ca_pem=self._read_all_cas(push_spec, base_image, mirrors),
            mirrors=mirrors,
            labels=documents.ImageLabels(
                machine_config=rendered.name,
                pool=config.pool,
                base_image=base_image,
                release=rendered.config.metadata.annotations.get(key.RELEASE_VERSION, ""),
                content_key=content_key,
                image_config=config.name,
                build=name,
            ).to_map(),
            deadline_s=input_checks.read_deadline(config),
        )

    def check_secrets(
        self, config: machineosconfig.MachineOSConfig
    ) -> image_tags.ImageProblem | None:
        """Return why the present Secrets cannot be used; raise `ClusterError`."""
        push, base = config.push_secret, config.base_pull_secret
        findings = list(
            input_checks.find_push_secret_findings(
                self._reader.find_object(resources.SECRETS, push),
                self._reader.describe_object(resources.SECRETS, push),
                config.push_spec,
            )
        )
        if base:
            findings += input_checks.find_pull_secret_findings(
                self._reader.find_object(resources.SECRETS, base),
                self._reader.describe_object(resources.SECRETS, base),
            )
        if findings:
            return _describe_findings(*findings)
        try:
            self.read_base_login(config)
        except CredentialError as error:
            # The cluster's pull secret, which the object does not name.
            return image_tags.ImageProblem(
                input_checks.InputReason.SECRET_INVALID, f"{error}; {error.remedy}"
            )
        return None

    def read_push_login(self, config: machineosconfig.MachineOSConfig) -> pullsecret.PullSecret:
        """Read the login for pushes."""
        return self._reader.read_login(config.push_secret)

    def read_base_login(self, config: machineosconfig.MachineOSConfig) -> pullsecret.PullSecret:
        """Read the login for the base image; raise `CredentialError` or `ClusterError`."""
        return self._reader.read_base_login(config.base_pull_secret)

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry beside those of the system, in PEM."""
        return self._reader.read_ca(registry)

    def read_proxies(self) -> dict[str, str]:
        """Return the variables of the proxy for Jobs."""
        return self._reader.read_proxies()

    def read_proxy_settings(self) -> ProxySettings:
        """Return the proxy of requests to registries."""
        return self._reader.read_proxy_settings()

    def read_rendered(self, name: str) -> machineconfig.MachineConfig:
        """Read a rendered config with its files; raise `ConfigError` or `ClusterError`."""
        return self._reader.read_rendered(name)

    def read_mirrors(self, name: str) -> image_mirrors.ImageMirrors:
        """Return where builds for nodes with a rendered config pull images from."""
        return self._reader.read_rendered_facts(name).mirrors.add_rules(self._mirror_rules)

    def read_trust_bundle(self) -> bytes:
        """Return the additional trust bundle of the cluster."""
        return self._reader.read_trust().bundle.encode()

    def _find_context(
        self, config: machineosconfig.MachineOSConfig
    ) -> tuple[decode.Json | None, str]:
        """Return the ConfigMap with files for COPY, and its name; empty without one."""
        if not (name := config.context_name):
            return None, ""
        configmap = self._reader.find_object(resources.CONFIGMAPS, name)
        return configmap, self._reader.describe_object(resources.CONFIGMAPS, name)

    def _find_entitlements(self, pool: str) -> tuple[EntitlementMount, ...]:
        names = ((name.format(pool=pool), path, kind) for name, path, kind in _ENTITLEMENTS)
        return tuple(
            EntitlementMount(name, path, is_secret=kind is resources.SECRETS)
            for name, path, kind in names
            if self._reader.find_object(kind, name) is not None
        )

    def _make_config_file(self, name: str) -> bytes:
        layer = config_layer.make_config_layer(self._reader.read_rendered(name))
        _refuse_findings(*input_checks.find_size_findings(name, layer.size, _OBJECT_LIMIT))
        return layer.tar_gz

    def _read_all_cas(
        self, push_spec: pullspec.PushSpec, base_image: str, mirrors: image_mirrors.ImageMirrors
    ) -> str:
        base = base_image.partition("/")[0]
        registries = {push_spec.registry, base, *mirrors.list_registries()}
        return "\n".join(sorted(filter(None, map(self.read_ca, registries))))


def compute_share_key(content_key: str, repository: str, push_secret: str) -> str:
    """Return the label of builds that share a Job."""
    text = "\0".join((content_key, repository, push_secret))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_architectures(present: frozenset[str]) -> tuple[str, ...]:
    """Return the architectures of an image for nodes with these ones, in a fixed order."""
    return tuple(sorted(present)) or (node.DEFAULT_ARCHITECTURE,)


def _plan_system(
    inputs: build_inputs.BuildInputs,
    files: Mapping[str, bytes],
    repository: str,
    config: machineosconfig.MachineOSConfig,
    *,
    is_only: bool,
) -> SystemPlan:
    """Plan the system part for one architecture; ``files`` are those it may need."""
    content_key, composed = (
        build_inputs.compute_content_key(inputs),
        build_inputs.compose_containerfile(inputs),
    )
    wanted = build_facts.WantedSystem(
        architecture=inputs.architecture,
        name="" if is_only else inputs.architecture,
        content_key=content_key,
        share_key=compute_share_key(content_key, repository, config.push_secret),
        needs_job=inputs.needs_job,
        push_spec=f"{repository}:{documents.make_system_tag(content_key)}",
    )
    return SystemPlan(
        wanted=wanted,
        containerfile=composed.text,
        user_line=composed.user_line,
        own_files={name: files[name] for name in composed.files} if inputs.needs_job else {},
        labels={documents.IMAGE_CONFIG: config.name, documents.CONTENT_KEY: content_key},
    )


def _compute_digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _refuse_findings(*findings: input_checks.InputFinding) -> None:
    if findings:
        raise BuildRefused(_describe_findings(*findings))


def _describe_findings(*findings: input_checks.InputFinding) -> image_tags.ImageProblem:
    """Return the first findings as one problem with the reason of the first one."""
    shown = "; ".join(map(str, findings[:_MAX_PROBLEMS]))
    more = len(findings) - _MAX_PROBLEMS
    return image_tags.ImageProblem(
        findings[0].reason, f"{shown}; and {more} more" if more > 0 else shown
    )


@dataclass(frozen=True, slots=True)
class OfflineBuild:
    """The build of one MachineOSConfig, and the files that its Job would mount."""

    config: str
    """Name of the MachineOSConfig."""
    pool: str
    plan: BuildPlan
    layer: config_layer.ConfigLayer
    context: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    entitlements: Mapping[str, tuple[str, Mapping[str, bytes]]] = field(
        default_factory=dict, repr=False
    )
    """By name: where instructions see them, and their files."""
    base_tag: str = ""
    """The tag that was resolved to the base image; empty for a base by digest."""


def plan_builds(
    texts: Iterable[tuple[str, str | bytes]],
    clock: clocks.Clock,
    *,
    architectures: frozenset[str],
    only: str | None,
    resolve_tag: ResolveTag,
    options: tuple[str, ...] = (),
    warn: Callable[[str], object] = str,
) -> list[OfflineBuild]:
    """Render the pools that have a MachineOSConfig, and plan their builds.

    ``architectures`` are those of the nodes. A base by tag is resolved, unless the input says what
    a cluster has resolved it to.
    ``options`` are those of the builder that change images. ``warn`` receives what has no effect.
    Raises `UsageError` when no pool has one, and `ConfigError` for invalid input.
    """
    inputs = list(texts)
    manifests, objects = render.read_manifests(inputs), cluster_reader.FileObjects(inputs)
    manifests.add_generated_configs()
    for warning in manifests.warnings:
        warn(f"warning: {warning}")
    configs = [config for config in objects.list_image_configs() if only in (None, config.pool)]
    if not configs:
        place = f"pool {only}" if only else "any pool"
        raise UsageError(
            f"cannot plan a build: the input has no MachineOSConfig for {place}",
            remedy="add a MachineOSConfig whose spec.machineConfigPool.name is a pool of the input",
        )
    reader = cluster_reader.ClusterReader(objects, clock, namespace="")
    planner = BuildPlanner(reader, options=options)
    builds = []
    for image_config in configs:
        config = _pin_tag(image_config, reader, resolve_tag)
        build = _plan_build(config, manifests, objects, reader, planner, architectures)
        tag = image_config.base_image if image_config.base_image != config.base_image else ""
        builds.append(dataclasses.replace(build, base_tag=tag))
    return builds


def _pin_tag(
    config: machineosconfig.MachineOSConfig,
    reader: cluster_reader.ClusterReader,
    resolve_tag: ResolveTag,
) -> machineosconfig.MachineOSConfig:
    """Return the MachineOSConfig with its base by digest."""
    config = image_tags.pin_base_image(config)
    if not image_tags.is_tag(config.base_image):
        return config
    meta = config.metadata
    notes = {**meta.annotations, key.BASE_IMAGE: resolve_tag(config, reader)}
    # A schedule needs a tag, and is of no use here.
    notes.pop(key.REBUILD_SCHEDULE, None)
    return dataclasses.replace(config, metadata=dataclasses.replace(meta, annotations=notes))


def _plan_build(
    config: machineosconfig.MachineOSConfig,
    manifests: render.InputManifests,
    objects: cluster_reader.FileObjects,
    reader: cluster_reader.ClusterReader,
    planner: BuildPlanner,
    architectures: frozenset[str],
) -> OfflineBuild:
    if config.pool not in manifests.pools:
        known = ", ".join(sorted(manifests.pools)) or "none"
        raise UsageError(
            f"cannot plan the build of MachineOSConfig {config.name}: the input has no "
            f"MachineConfigPool {config.pool}, found: {known}",
            remedy=f"add it with: kubectl get machineconfigpool {config.pool} -o yaml | "
            "treenail-controller build -f DIR -f -",
        )
    owner = os_image.find_pool_owner(config.pool, objects.list_image_configs())
    for finding in input_checks.find_pool_findings(config, manifests.pools[config.pool], owner):
        if finding.reason is input_checks.InputReason.POOL_TAKEN:
            raise ConfigError(f"MachineOSConfig {config.name}: {finding}")
    configs, errors = render.render_pools(manifests, config.pool)
    if errors:
        raise errors[0]
    rendered = configs[0]
    objects.add_rendered(rendered)
    pool = _set_configuration(manifests.pools[config.pool], rendered)
    try:
        plan = planner.plan_build(config, pool, architectures)
    except BuildRefused as error:
        raise ConfigError(f"MachineOSConfig {config.name}: {error.problem.message}") from error
    layer = config_layer.make_config_layer(
        rendered.config, trust_bundle=planner.read_trust_bundle()
    )
    # Equal for all architectures that need such files.
    own = {name: file for system in plan.systems for name, file in system.own_files.items()}
    context, entitlements = read_build_files(reader, plan)
    context = own | context
    return OfflineBuild(config.name, config.pool, plan, layer, context, entitlements)


def _set_configuration(
    pool: machineconfigpool.MachineConfigPool, rendered: render.RenderedConfig
) -> machineconfigpool.MachineConfigPool:
    """Return the pool as the render controller writes it."""
    reference = machineconfigpool.MachineConfigPool.from_json(
        {
            "metadata": {"name": pool.name},
            "spec": {"configuration": rendered.to_pool_configuration()},
        }
    )
    return dataclasses.replace(pool, configuration=reference.configuration)


def read_build_files(
    reader: cluster_reader.ClusterReader, plan: BuildPlan
) -> tuple[dict[str, bytes], dict[str, tuple[str, Mapping[str, bytes]]]]:
    """Return the user's files for COPY, and the entitlements of `OfflineBuild`."""
    context = dict(_read_files(reader, resources.CONFIGMAPS, plan.context)) if plan.context else {}
    entitlements: dict[str, tuple[str, Mapping[str, bytes]]] = {
        entitlement.name: (
            entitlement.path,
            _read_files(
                reader,
                resources.SECRETS if entitlement.is_secret else resources.CONFIGMAPS,
                entitlement.name,
            ),
        )
        for entitlement in plan.entitlements
    }
    return context, entitlements


def _read_files(
    reader: cluster_reader.ClusterReader, resource: resources.Resource, name: str
) -> Mapping[str, bytes]:
    """Return the files that the kubelet shows of a ConfigMap or Secret."""
    document = reader.find_object(resource, name) or {}
    where = f"{resource.kind} {name}"
    is_secret = resource is resources.SECRETS
    return input_checks.read_context(document, where, is_secret=is_secret).files


def find_system_images(
    builds: Iterable[build_facts.BuildFacts],
    share_keys: frozenset[str],
    pushed: Iterable[build_facts.SystemFacts] = (),
) -> dict[str, tuple[str, ...]]:
    """Return the system parts with these share keys, newest first.

    ``pushed`` are those of deleted builds, which come last: the registry may not have them.
    """
    images_by_key: dict[str, dict[str, None]] = {
        share_key: {} for share_key in share_keys if share_key
    }
    ordered = sorted(builds, key=lambda build: build.created, reverse=True)
    for system in chain(*(build.systems.values() for build in ordered), pushed):
        if system.image and system.share_key in images_by_key:
            images_by_key[system.share_key].setdefault(system.image)
    return {share_key: tuple(images) for share_key, images in images_by_key.items()}


def find_pushed_systems(
    config: machineosconfig.MachineOSConfig, plan: BuildPlan | None
) -> Iterator[build_facts.SystemFacts]:
    """Yield the system parts of deleted builds that the wanted build could use again.

    Pruning spares them, because the wanted build may use their tag.
    """
    pushed = build_objects.read_pushed_images(config)[::-1]
    for system in () if plan is None else (planned.wanted for planned in plan.systems):
        repository, _, tag = system.push_spec.rpartition(":")
        for image in pushed:
            if image.tag == tag and image.image.startswith(f"{repository}@"):
                yield replace(system.initial, image=image.image)
