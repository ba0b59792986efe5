"""Plans builds: validates the inputs, and computes names, keys and the composed Containerfile."""

import hashlib

from treenail.api import annotations as key
from treenail.api.machineconfig import EXTENSIONS, KERNEL_TYPES, MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import ContainerfileArch, MachineOSConfig
from treenail.api.pullspec import parse_pull_spec
from treenail.config.pullsecret import PullSecret
from treenail.controllers.build.cluster_reader import ClusterReader, ContextFiles, RenderedFacts
from treenail.controllers.build.facts import BuildProblem, WantedBuild
from treenail.controllers.build.planning import BuildPlan, BuildRefused, EntitlementMount
from treenail.errors import ConfigError, CredentialError
from treenail.image.build_name import compute_build_name
from treenail.image.config_layer import make_config_layer
from treenail.image.inputs.build_inputs import ARCHITECTURES, BuildInputs
from treenail.image.inputs.compose import CONFIG_FILE, TRUST_FILE, compose_containerfile
from treenail.image.inputs.containerfile_problems import find_containerfile_problems
from treenail.image.inputs.content_key import compute_content_key
from treenail.image.labels import ImageLabels
from treenail.image.push_spec import PushSpec, parse_push_spec
from treenail.kube.resources import CONFIGMAPS, SECRETS, Resource
from treenail.registry.logins import select_login

DEFAULT_ARCHITECTURE = "amd64"
"""For a pool without nodes."""
DEFAULT_DEADLINE_S = 3600
_MAX_DEADLINE_S = 24 * 3600
_MAX_PROBLEMS = 3
_OBJECT_LIMIT = 1024 * 1024 - 64 * 1024
"""Bytes of own files in one ConfigMap, which also holds the Containerfile."""
_ENTITLEMENTS: tuple[tuple[str, str, Resource], ...] = (
    ("etc-pki-entitlement-{pool}", "/etc/pki/entitlement", SECRETS),
    ("etc-pki-rpm-gpg", "/etc/pki/rpm-gpg", SECRETS),
    ("etc-yum-repos-d", "/etc/yum.repos.d", CONFIGMAPS),
)


class Planner:
    """A `treenail.controllers.build.planning.BuildPlanner`. Thread-safe."""

    def __init__(self, reader: ClusterReader) -> None:
        self._reader = reader

    def plan_build(
        self, config: MachineOSConfig, pool: MachineConfigPool, architectures: frozenset[str]
    ) -> BuildPlan:
        """Plan the build of the pool's rendered config; raise `BuildRefused`."""
        rendered = self._reader.read_rendered_facts(pool.configuration.name)
        architecture = _choose_architecture(config, architectures)
        try:
            push_spec = parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
        except ConfigError as error:
            raise _refuse("PushSpecInvalid", error) from error
        text = _find_containerfile(config, architecture)
        base_image = _check_base(config, rendered)
        _check_packages(rendered)
        context = self._read_context(config)
        entitlements = self._find_entitlements(config.pool) if text else ()
        own_files: dict[str, bytes] = {}
        if config.sees_config and text:
            own_files[CONFIG_FILE] = self._make_config_file(rendered.name)
        bundle = self._reader.read_trust().bundle
        inputs = BuildInputs(
            base_image=base_image,
            architecture=architecture,
            containerfile=text,
            extensions=rendered.extensions,
            extensions_image=rendered.extensions_image,
            kernel_type=rendered.kernel_type,
            trust_bundle=bundle,
            config_digest=_compute_digest(own_files.get(CONFIG_FILE)),
            context_digest=context.digest,
            mounts=tuple(each.path for each in entitlements),
        )
        content_key = compute_content_key(inputs)
        name = compute_build_name(config, pool, rendered.config)
        composed = compose_containerfile(inputs)
        if TRUST_FILE in composed.files:
            own_files[TRUST_FILE] = bundle.encode()
        repository = f"{push_spec.registry}/{push_spec.repository}"
        wanted = WantedBuild(
            name=name,
            config=rendered.name,
            push_spec=f"{repository}:{name}",
            content_key=content_key,
            share_key=compute_share_key(content_key, repository, config.push_secret),
            needs_job=inputs.needs_job,
            base_image=base_image,
            system_push_spec=f"{repository}:system-{content_key}",
            push_secret=config.push_secret,
        )
        return BuildPlan(
            wanted=wanted,
            architecture=architecture,
            containerfile=composed.text,
            user_line=composed.user_line or 1,
            context=config.context_name,
            context_files=context.names,
            entitlements=entitlements,
            own_files=own_files if inputs.needs_job else {},
            ca_pem=self._read_all_cas(push_spec, base_image),
            labels=ImageLabels(
                machine_config=rendered.name,
                pool=config.pool,
                base_image=base_image,
                release=rendered.config.metadata.annotations.get(key.RELEASE_VERSION, ""),
                content_key=content_key,
            ).to_map(),
            deadline_s=_parse_deadline(config),
        )

    def check_secrets(self, config: MachineOSConfig) -> BuildProblem | None:
        """Return why the present Secrets cannot be used."""
        try:
            login = self.read_push_login(config)
            self.read_base_login(config)
        except CredentialError as error:
            return BuildProblem("SecretInvalid", _format_error(error))
        push_spec = parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
        found = select_login(login.credentials, push_spec.registry, push_spec.repository)
        if found is None:
            return BuildProblem(
                "SecretInvalid",
                f"Secret {config.push_secret} has no login for {push_spec.registry}/"
                f"{push_spec.repository}, which spec.renderedImagePushSpec names; add one with: "
                f"kubectl create secret docker-registry {config.push_secret} "
                f"--docker-server={push_spec.registry}",
            )
        return None

    def read_push_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for pushes."""
        return self._reader.read_login(
            config.push_secret, where="spec.renderedImagePushSecret.name"
        )

    def read_base_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for the base image."""
        return self._reader.read_base_login(config.base_pull_secret)

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry."""
        trust = self._reader.read_trust()
        return "\n".join(filter(None, (trust.registry_cas.get(registry, ""), trust.bundle)))

    def read_rendered(self, name: str) -> MachineConfig:
        """Read a rendered config with its files."""
        return self._reader.read_rendered(name)

    def read_trust_bundle(self) -> bytes:
        """Return the additional trust bundle of the cluster."""
        return self._reader.read_trust().bundle.encode()

    def _read_context(self, config: MachineOSConfig) -> ContextFiles:
        if not config.context_name:
            return ContextFiles()
        try:
            return self._reader.read_context(config.context_name)
        except ConfigError as error:
            raise _refuse("ContextMissing", error) from error

    def _find_entitlements(self, pool: str) -> tuple[EntitlementMount, ...]:
        names = ((name.format(pool=pool), path, kind) for name, path, kind in _ENTITLEMENTS)
        return tuple(
            EntitlementMount(name, path, is_secret=kind is SECRETS)
            for name, path, kind in names
            if self._reader.has_object(kind, name)
        )

    def _make_config_file(self, name: str) -> bytes:
        layer = make_config_layer(self._reader.read_rendered(name))
        if layer.size > _OBJECT_LIMIT:
            raise BuildRefused(
                BuildProblem(
                    "ConfigTooLarge",
                    f"{name} has {layer.size} bytes of files, and a Containerfile sees at most "
                    f"{_OBJECT_LIMIT}; remove the annotation {key.BUILD_SEES_CONFIG}, or files",
                )
            )
        return layer.tar_gz

    def _read_all_cas(self, push_spec: PushSpec, base_image: str) -> str:
        registries = {push_spec.registry, base_image.partition("/")[0]}
        return "\n".join(sorted(filter(None, map(self.read_ca, registries))))


def compute_share_key(content_key: str, repository: str, push_secret: str) -> str:
    """Return the label of builds that share a Job."""
    text = "\0".join((content_key, repository, push_secret))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _choose_architecture(config: MachineOSConfig, found: frozenset[str]) -> str:
    if len(found) > 1:
        raise BuildRefused(
            BuildProblem(
                "ArchitecturesMixed",
                f"pool {config.pool} has nodes of {', '.join(sorted(found))}; expected nodes of "
                "one architecture: move the others to a pool of their own",
            )
        )
    architecture = next(iter(found), DEFAULT_ARCHITECTURE)
    if architecture not in ARCHITECTURES:
        raise BuildRefused(
            BuildProblem(
                "ArchitectureUnknown",
                f"pool {config.pool} has nodes of {architecture}, expected "
                f"{', '.join(ARCHITECTURES)}",
            )
        )
    return architecture


def _find_containerfile(config: MachineOSConfig, architecture: str) -> str:
    names = [each.architecture for each in config.containerfiles]
    if len(names) != len(set(names)):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise BuildRefused(
            BuildProblem(
                "ContainerfileInvalid",
                f"spec.containerFile has two entries for {duplicate}; remove one of them",
            )
        )
    entry = config.find_containerfile(ARCHITECTURES[architecture])
    if entry is None:
        if not config.containerfiles:
            return ""
        raise BuildRefused(
            BuildProblem(
                "ContainerfileInvalid",
                f"spec.containerFile has no entry for {ARCHITECTURES[architecture].value}, the "
                f"architecture of the pool's nodes, and none for {ContainerfileArch.NO_ARCH.value}"
                "; add one",
            )
        )
    problems = find_containerfile_problems(entry.content)
    if problems:
        shown = "; ".join(f"{each}; {each.remedy}" for each in problems[:_MAX_PROBLEMS])
        raise BuildRefused(BuildProblem("ContainerfileInvalid", f"spec.containerFile: {shown}"))
    return entry.content


def _check_base(config: MachineOSConfig, rendered: RenderedFacts) -> str:
    image = config.base_image or rendered.base_image
    where = f"osImageURL of {rendered.name}"
    if config.base_image:
        where = f"annotation {key.BASE_IMAGE}"
    try:
        return str(parse_pull_spec(image, where=where))
    except ConfigError as error:
        raise _refuse("BaseImageInvalid", error) from error


def _check_packages(rendered: RenderedFacts) -> None:
    unknown = [name for name in rendered.extensions if name not in EXTENSIONS]
    if unknown:
        raise BuildRefused(
            BuildProblem(
                "ExtensionUnsupported",
                f"extensions of {rendered.name}: expected {', '.join(sorted(EXTENSIONS))}, found "
                f"{', '.join(unknown)}",
            )
        )
    if rendered.kernel_type not in ("", *KERNEL_TYPES):
        raise BuildRefused(
            BuildProblem(
                "KernelTypeUnsupported",
                f"kernelType of {rendered.name}: expected {', '.join(KERNEL_TYPES)}, found "
                f"{rendered.kernel_type:.60}",
            )
        )


def _parse_deadline(config: MachineOSConfig) -> int:
    text = config.metadata.annotations.get(key.BUILD_DEADLINE, "")
    if not text:
        return DEFAULT_DEADLINE_S
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= _MAX_DEADLINE_S):
        raise BuildRefused(
            BuildProblem(
                "DeadlineInvalid",
                f"annotation {key.BUILD_DEADLINE}: expected 1 to {_MAX_DEADLINE_S} seconds, found "
                f"{text!r:.40}",
            )
        )
    return int(text)


def _compute_digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _refuse(reason: str, error: ConfigError) -> BuildRefused:
    return BuildRefused(BuildProblem(reason, _format_error(error)))


def _format_error(error: ConfigError | CredentialError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)
