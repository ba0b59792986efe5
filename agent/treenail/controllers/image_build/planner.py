"""Plans builds: validates the inputs, and computes names, keys and the composed Containerfile."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from treenail.api import annotations as key
from treenail.api.decode import Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.api.machineosconfig import MachineOSConfig
from treenail.config.image_mirrors import ImageMirrors, MirrorRule
from treenail.config.pullsecret import PullSecret
from treenail.controllers.image_build.base_image import pin_base_image
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.facts import BuildProblem, WantedBuild, WantedSystem
from treenail.controllers.image_build.planning import (
    BuildPlan,
    BuildRefused,
    EntitlementMount,
    IsEnded,
    SystemPlan,
    never_ended,
)
from treenail.controllers.image_build.pushed_images import make_system_tag
from treenail.controllers.image_build.views import REPOSITORIES
from treenail.errors import CredentialError
from treenail.image.build_name import compute_build_name
from treenail.image.config_layer import make_config_layer
from treenail.image.inputs.build_inputs import BuildInputs, describe_hidden_files
from treenail.image.inputs.check_config import (
    find_architecture_findings,
    find_config_findings,
    read_deadline,
)
from treenail.image.inputs.check_objects import (
    BuildContext,
    find_context_findings,
    find_pull_secret_findings,
    find_push_secret_findings,
    find_rendered_findings,
    find_size_findings,
    read_context,
)
from treenail.image.inputs.compose import CONFIG_FILE, TRUST_FILE, compose_containerfile
from treenail.image.inputs.content_key import compute_content_key
from treenail.image.inputs.findings import InputFinding, InputReason
from treenail.image.labels import ImageLabels
from treenail.image.push_spec import PushSpec, parse_push_spec
from treenail.kube.resources import CONFIGMAPS, SECRETS, Resource

DEFAULT_ARCHITECTURE = "amd64"
"""For a pool without nodes."""
_MAX_PROBLEMS = 3
_OBJECT_LIMIT = 1024 * 1024 - 64 * 1024
"""Bytes of own files in one ConfigMap, which also holds the Containerfile."""
_ENTITLEMENTS: tuple[tuple[str, str, Resource], ...] = (
    ("etc-pki-entitlement-{pool}", "/etc/pki/entitlement", SECRETS),
    ("etc-pki-rpm-gpg", "/etc/pki/rpm-gpg", SECRETS),
    (REPOSITORIES, "/etc/yum.repos.d", CONFIGMAPS),
)


class Planner:
    """A `treenail.controllers.image_build.planning.BuildPlanner`. Thread-safe."""

    def __init__(
        self,
        reader: ClusterReader,
        *,
        options: tuple[str, ...] = (),
        mirror_rules: tuple[MirrorRule, ...] = (),
    ) -> None:
        """``options`` are those of the builder that change images.

        ``mirror_rules`` are added to those of the rendered config.
        """
        self._reader = reader
        self._options = options
        self._mirror_rules = mirror_rules

    def plan_build(
        self,
        config: MachineOSConfig,
        pool: MachineConfigPool,
        architectures: frozenset[str],
        is_ended: IsEnded = never_ended,
    ) -> BuildPlan:
        """Plan the build of the pool's rendered config; raise `BuildRefused`."""
        config = pin_base_image(config)
        rendered = self._reader.read_rendered_facts(pool.configuration.name)
        names = choose_architectures(architectures)
        document, where = self._find_context(config)
        rendered_findings = (
            finding
            for name in names
            for finding in find_rendered_findings(
                rendered.config, base_image=config.base_image, architecture=name
            )
        )
        _refuse_findings(
            *find_config_findings(config),
            *find_architecture_findings(config, names),
            *dict.fromkeys(rendered_findings),
            *(find_context_findings(document, where) if where else ()),
        )
        context = read_context(document, where) if where else BuildContext()
        push_spec = parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
        systems = [BuildInputs.from_objects(config, rendered.config, each) for each in names]
        has_text = any(each.user_text for each in systems)
        base_image = systems[0].base_image
        name = compute_build_name(config, pool, rendered.config, context_digest=context.digest)
        # They matter to Jobs alone, and each costs requests to the API server.
        has_mounts = has_text and not is_ended(name)
        entitlements = self._find_entitlements(config.pool) if has_mounts else ()
        own_files = {TRUST_FILE: self.read_trust_bundle()}
        if config.sees_config and has_text:
            own_files[CONFIG_FILE] = self._make_config_file(rendered.name)
        config_digest = _compute_digest(own_files.get(CONFIG_FILE))
        inputs = [
            replace(
                each,
                trust_bundle=self._reader.read_trust().bundle,
                config_digest=config_digest if each.user_text else "",
                context_digest=context.digest,
                mounts=tuple(mount.path for mount in entitlements) if each.user_text else (),
                options=self._options if each.needs_job else (),
            )
            for each in systems
        ]
        content_key = compute_content_key(*inputs)
        repository = f"{push_spec.registry}/{push_spec.repository}"
        mirrors = self.read_mirrors(rendered.name)
        plans = tuple(
            _plan_system(each, own_files, repository, config.push_secret, is_only=len(inputs) == 1)
            for each in inputs
        )
        wanted = WantedBuild(
            name=name,
            config=rendered.name,
            push_spec=f"{repository}:{name}",
            content_key=content_key,
            share_key=compute_share_key(content_key, repository, config.push_secret),
            systems=tuple(each.wanted for each in plans),
            base_image=base_image,
            push_secret=config.push_secret,
            instruction_remedy=describe_hidden_files(config, rendered.build_paths),
        )
        return BuildPlan(
            wanted=wanted,
            systems=plans,
            context=config.context_name,
            context_files=tuple(sorted(context.files)),
            entitlements=entitlements,
            ca_pem=self._read_all_cas(push_spec, base_image, mirrors),
            mirrors=mirrors,
            labels=ImageLabels(
                machine_config=rendered.name,
                pool=config.pool,
                base_image=base_image,
                release=rendered.config.metadata.annotations.get(key.RELEASE_VERSION, ""),
                content_key=content_key,
            ).to_map(),
            deadline_s=read_deadline(config),
        )

    def check_secrets(self, config: MachineOSConfig) -> BuildProblem | None:
        """Return why the present Secrets cannot be used."""
        push, base = config.push_secret, config.base_pull_secret
        findings = list(
            find_push_secret_findings(
                self._reader.find_object(SECRETS, push),
                self._reader.describe_object(SECRETS, push),
                config.push_spec,
            )
        )
        if base:
            findings += find_pull_secret_findings(
                self._reader.find_object(SECRETS, base), self._reader.describe_object(SECRETS, base)
            )
        if findings:
            return _describe_findings(*findings)
        try:
            self.read_base_login(config)
        except CredentialError as error:
            # The cluster's pull secret, which the object does not name.
            return BuildProblem(InputReason.SECRET_INVALID, f"{error}; {error.remedy}")
        return None

    def read_push_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for pushes."""
        return self._reader.read_login(config.push_secret)

    def read_base_login(self, config: MachineOSConfig) -> PullSecret:
        """Read the login for the base image."""
        return self._reader.read_base_login(config.base_pull_secret)

    def compute_base_access_version(self, config: MachineOSConfig) -> str:
        """Return a text that changes with the login for the base image."""
        return self._reader.compute_access_version(config.base_pull_secret)

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry."""
        return self._reader.read_ca(registry)

    def read_rendered(self, name: str) -> MachineConfig:
        """Read a rendered config with its files."""
        return self._reader.read_rendered(name)

    def read_mirrors(self, name: str) -> ImageMirrors:
        """Return where builds for nodes with a rendered config pull images from."""
        return self._reader.read_rendered_facts(name).mirrors.add_rules(self._mirror_rules)

    def read_trust_bundle(self) -> bytes:
        """Return the additional trust bundle of the cluster."""
        return self._reader.read_trust().bundle.encode()

    def _find_context(self, config: MachineOSConfig) -> tuple[Json | None, str]:
        """Return the ConfigMap with files for COPY, and its name; empty without one."""
        if not (name := config.context_name):
            return None, ""
        found = self._reader.find_object(CONFIGMAPS, name)
        return found, self._reader.describe_object(CONFIGMAPS, name)

    def _find_entitlements(self, pool: str) -> tuple[EntitlementMount, ...]:
        names = ((name.format(pool=pool), path, kind) for name, path, kind in _ENTITLEMENTS)
        return tuple(
            EntitlementMount(name, path, is_secret=kind is SECRETS)
            for name, path, kind in names
            if self._reader.find_object(kind, name) is not None
        )

    def _make_config_file(self, name: str) -> bytes:
        layer = make_config_layer(self._reader.read_rendered(name))
        _refuse_findings(*find_size_findings(name, layer.size, _OBJECT_LIMIT))
        return layer.tar_gz

    def _read_all_cas(self, push_spec: PushSpec, base_image: str, mirrors: ImageMirrors) -> str:
        base = base_image.partition("/")[0]
        registries = {push_spec.registry, base, *mirrors.list_registries()}
        return "\n".join(sorted(filter(None, map(self.read_ca, registries))))


def compute_share_key(content_key: str, repository: str, push_secret: str) -> str:
    """Return the label of builds that share a Job."""
    text = "\0".join((content_key, repository, push_secret))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_architectures(found: frozenset[str]) -> tuple[str, ...]:
    """Return the architectures of an image for nodes with these ones, in a fixed order."""
    return tuple(sorted(found)) or (DEFAULT_ARCHITECTURE,)


def _plan_system(
    inputs: BuildInputs,
    files: Mapping[str, bytes],
    repository: str,
    push_secret: str,
    *,
    is_only: bool,
) -> SystemPlan:
    """Plan the system part for one architecture; ``files`` are those it may need."""
    content_key, composed = compute_content_key(inputs), compose_containerfile(inputs)
    wanted = WantedSystem(
        architecture=inputs.architecture,
        name="" if is_only else inputs.architecture,
        content_key=content_key,
        share_key=compute_share_key(content_key, repository, push_secret),
        needs_job=inputs.needs_job,
        push_spec=f"{repository}:{make_system_tag(content_key)}",
    )
    return SystemPlan(
        wanted=wanted,
        containerfile=composed.text,
        user_line=composed.user_line,
        own_files={name: files[name] for name in composed.files} if inputs.needs_job else {},
    )


def _compute_digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _refuse_findings(*findings: InputFinding) -> None:
    if findings:
        raise BuildRefused(_describe_findings(*findings))


def _describe_findings(*findings: InputFinding) -> BuildProblem:
    """Return the first findings as one problem with the reason of the first one."""
    shown = "; ".join(map(str, findings[:_MAX_PROBLEMS]))
    more = len(findings) - _MAX_PROBLEMS
    return BuildProblem(findings[0].reason, f"{shown}; and {more} more" if more > 0 else shown)
