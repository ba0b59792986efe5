"""Checks of the MachineOSConfigs of an install directory, with their pools and Secrets. Pure.

A Containerfile may copy only files of the ConfigMap that its MachineOSConfig names: the directory
of the Containerfile is no context.

A pre-built image is an annotation of the Machine Config Operator on a MachineOSConfig. The operator
accepts ``NAME:TAG@DIGEST`` at the bootstrap, and fails on it when the cluster runs: the API accepts
no tag beside a digest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api import (
    component_names,
    decode,
    machineconfigpool,
    machineosconfig,
    node,
    pullspec,
)
from treenail.controllers.handover import image_mode
from treenail.controllers.image_build import cluster_reader
from treenail.controllers.render import render
from treenail.errors import ConfigError, NotFoundError
from treenail.image import containerfile, input_checks
from treenail.image.oci.documents import BASE_IMAGE
from treenail.installer.directory import install_manifests, prepared_manifests, problems
from treenail.kube import resources


@dataclass(frozen=True, slots=True)
class PrebuiltImage:
    """The image of the annotation, by digest."""

    spec: pullspec.PullSpec
    text: str
    """The value of the annotation."""

    @property
    def has_tag(self) -> bool:
        """True when the annotation has a tag beside the digest."""
        return str(self.spec) != self.text


def parse_prebuilt_image(text: str) -> PrebuiltImage:
    """Parse the annotation without its tag; raise `ConfigError` that names it."""
    name, at, digest = text.partition("@")
    if at and "/" in name:
        name = pullspec.strip_tag(name)
    return PrebuiltImage(
        pullspec.parse_pull_spec(f"{name}{at}{digest}", where=f"annotation {key.PRE_BUILT_IMAGE}"),
        text,
    )


@dataclass(frozen=True, slots=True)
class PrebuiltFinding:
    """Why a pre-built image is unfit, or may be; ``is_certain`` says which."""

    text: str
    remedy: str
    is_certain: bool = True


def find_prebuilt_findings(
    image: pullspec.PullSpec, labels: Mapping[str, str], *, base_image: str
) -> list[PrebuiltFinding]:
    """Compare the labels of an image with what nodes need.

    ``base_image`` is the OS image of the release; empty if that is unknown.
    """
    findings = []
    if not any(labels.get(label) for label in pullspec.BOOTABLE_LABELS):
        findings.append(
            PrebuiltFinding(
                f"{image} is no bootable image: it has none of the labels "
                f"{' and '.join(pullspec.BOOTABLE_LABELS)}",
                "build it FROM the OS image of the release",
            )
        )
    base = labels.get(BASE_IMAGE, "")
    if not base:
        findings.append(
            PrebuiltFinding(
                f"{image} does not say which base it was built from: it has no label {BASE_IMAGE}",
                f"add LABEL {BASE_IMAGE}=IMAGE@DIGEST to its Containerfile",
                is_certain=False,
            )
        )
    elif not base_image:
        findings.append(
            PrebuiltFinding(
                f"cannot compare the base of {image} with the release: the manifests have no "
                "ControllerConfig",
                "name the OS image of the release: --base-image IMAGE@DIGEST",
                is_certain=False,
            )
        )
    # Only the digest: mirrors have other names for an image.
    elif base.rpartition("@")[2] != base_image.rpartition("@")[2]:
        findings.append(
            PrebuiltFinding(
                f"{image} was built from {base:.300}, and the release has {base_image}",
                f"build it again FROM {base_image}",
            )
        )
    return findings


NAMESPACES = (component_names.NAMESPACE, component_names.MCO_NAMESPACE)
"""Namespaces in which builds look for Secrets, the first one first."""
_CLUSTER_SUFFIXES = (".svc", ".svc.cluster.local")


def find_manifest_problems(
    manifests: install_manifests.InstallManifests,
    architectures: Mapping[str, str],
    *,
    is_complete: bool = False,
) -> Iterator[problems.InstallProblem]:
    """Yield what is wrong with the objects of image mode; ``architectures`` are those of pools.

    The manifests of a complete directory have the MachineConfigs and the base image of each pool.
    """
    for manifest in manifests.list_kind(machineosconfig.KIND):
        config = manifests.image_configs[manifest.name]
        if (
            config.pool
            and config.pool not in manifests.pools
            and config.pool not in prepared_manifests.BUILT_IN_POOLS
        ):
            known = ", ".join(sorted({*manifests.pools, *prepared_manifests.BUILT_IN_POOLS}))
            yield manifest.make_problem(
                f"unknown pool {config.pool:.60}, expected one of {known}",
                "add a MachineConfigPool of this name to the manifests, or correct the name",
            )
        architecture = architectures.get(config.pool, node.DEFAULT_ARCHITECTURE)
        for finding in input_checks.find_config_findings(config):
            yield _convert_finding(manifest, finding)
        for finding in input_checks.find_architecture_findings(config, [architecture]):
            yield _convert_finding(manifest, finding)
        yield from _check_prebuilt(manifest, config)
        yield from _check_context(manifests, manifest, config)
        yield from _check_secrets(manifests, manifest, config)
    yield from _check_rendering(manifests, is_complete=is_complete)


def find_namespaced(
    manifests: install_manifests.InstallManifests, kind: str, name: str
) -> install_manifests.ManifestObject | None:
    """Return an object in one of the namespaces of builds."""
    places = (manifests.find(kind, name, namespace) for namespace in NAMESPACES)
    return next((manifest for manifest in places if manifest is not None), None)


def is_cluster_registry(push_spec: str) -> bool:
    """Return whether the registry is a Service of the cluster: its logins exist with it."""
    host = push_spec.partition("/")[0].partition(":")[0]
    return host.endswith(_CLUSTER_SUFFIXES)


def is_prebuilt(config: machineosconfig.MachineOSConfig) -> bool:
    """Return whether the pool gets a pre-built image: nothing is built during the installation."""
    return key.PRE_BUILT_IMAGE in config.metadata.annotations


def _check_prebuilt(
    manifest: install_manifests.ManifestObject, config: machineosconfig.MachineOSConfig
) -> Iterator[problems.InstallProblem]:
    if is_prebuilt(config):
        try:
            parse_prebuilt_image(config.metadata.annotations[key.PRE_BUILT_IMAGE])
        except ConfigError as error:
            yield manifest.make_problem(str(error), error.remedy)


def _check_context(
    manifests: install_manifests.InstallManifests,
    manifest: install_manifests.ManifestObject,
    config: machineosconfig.MachineOSConfig,
) -> Iterator[problems.InstallProblem]:
    document = None
    if config.context_name:
        context = find_namespaced(manifests, "ConfigMap", config.context_name)
        document = context.document if context else None
        findings = [
            *input_checks.find_context_findings(document, f"ConfigMap {config.context_name}")
        ]
        yield from (_convert_finding(context or manifest, finding) for finding in findings)
        if findings:
            return
    names = (
        input_checks.read_context(document, config.context_name).files
        if config.context_name
        else ()
    )
    # Of a written MachineOSConfig, the problems of the Containerfile's own file are reported.
    for entry in (
        config.containerfiles if manifest.file != prepared_manifests.GENERATED_FILE else ()
    ):
        for problem in containerfile.find_source_problems(entry.content, names):
            where = f"spec.containerFile, {entry.architecture}"
            yield manifest.make_problem(f"{where}, {problem}", problem.remedy)


def _check_secrets(
    manifests: install_manifests.InstallManifests,
    manifest: install_manifests.ManifestObject,
    config: machineosconfig.MachineOSConfig,
) -> Iterator[problems.InstallProblem]:
    where = "spec.renderedImagePushSecret"
    if not config.push_secret:
        yield manifest.make_problem(
            f"{where} has no name", "name a Secret with a login for the registry of the push spec"
        )
    for name, field_name in (
        (config.push_secret, where),
        (config.base_pull_secret, "spec.baseImagePullSecret"),
    ):
        # The cluster needs the Secrets of a pre-built image later, for its first own build.
        if not name or is_prebuilt(config):
            continue
        secret = find_namespaced(manifests, "Secret", name)
        if secret is None:
            yield from _describe_missing(manifests, manifest, config, name, field_name)
            continue
        try:
            document = cluster_reader.encode_strings(secret.document)
        except ConfigError as error:
            yield secret.make_problem(str(error), "correct it")
            continue
        findings = (
            input_checks.find_push_secret_findings(document, secret.title, config.push_spec)
            if field_name == where and not is_cluster_registry(config.push_spec)
            else input_checks.find_pull_secret_findings(document, secret.title)
        )
        for finding in findings:
            yield _convert_finding(secret, finding)


def _describe_missing(
    manifests: install_manifests.InstallManifests,
    manifest: install_manifests.ManifestObject,
    config: machineosconfig.MachineOSConfig,
    name: str,
    field_name: str,
) -> Iterator[problems.InstallProblem]:
    others = [secret for secret in manifests.list_kind("Secret") if secret.name == name]
    if others:
        namespace = others[0].namespace or "none"
        yield others[0].make_problem(
            f"expected namespace {' or '.join(NAMESPACES)}, where {manifest.title} looks for it, "
            f"found {namespace:.60}",
            f"set metadata.namespace: {component_names.NAMESPACE}",
        )
    elif not is_cluster_registry(config.push_spec):
        yield manifest.make_problem(
            f"{field_name} names Secret {name:.60}, which no manifest has",
            f"add it: kubectl create secret docker-registry {name:.60} -n "
            f"{component_names.NAMESPACE} --docker-server=REGISTRY --docker-username=USER "
            f"--docker-password=PASSWORD --dry-run=client -o yaml > manifests/{name:.60}.yaml",
        )


def _check_rendering(
    manifests: install_manifests.InstallManifests, *, is_complete: bool
) -> Iterator[problems.InstallProblem]:
    """Render the pools with MachineConfigs; installers add those of the others later."""
    inputs = manifests.to_input()
    for name, pool in sorted(manifests.pools.items()):
        selector = pool.machine_config_selector
        if selector is None or selector.is_empty:
            manifest = manifests.objects["MachineConfigPool", "", name]
            yield manifest.make_problem(
                "it has no machineConfigSelector, or one that selects all MachineConfigs",
                "write a machineConfigSelector with at least one requirement",
            )
            continue
        has_configs = any(
            selector.matches(config.metadata.labels) and not render.is_rendered(config)
            for config in manifests.configs.values()
        )
        if not has_configs and not is_complete:
            continue
        try:
            rendered, errors = render.render_pools(inputs, name)
        except ConfigError as error:
            rendered, errors = [], [error]
        if rendered:
            base = rendered[0].config.os_image_url
            yield from _check_base(manifests, name, base, is_complete=is_complete)
        for render_error in errors:
            place, _, text = str(render_error).partition(": ")
            file, _, line = place.partition(", line ")
            remedy = render_error.remedy or "correct the MachineConfigs of the pool"
            if line.isdecimal() and text:
                yield problems.InstallProblem(file, text, remedy, int(line))
            else:
                yield problems.InstallProblem("manifests", str(render_error), remedy)


def _check_base(
    manifests: install_manifests.InstallManifests,
    pool: str,
    rendered_base: str,
    *,
    is_complete: bool,
) -> Iterator[problems.InstallProblem]:
    for manifest in manifests.list_kind(machineosconfig.KIND):
        config = manifests.image_configs[manifest.name]
        base = config.base_image or rendered_base
        if config.pool != pool or is_prebuilt(config):
            continue
        if not base and is_complete:
            yield manifest.make_problem(
                f"pool {pool} has no base image",
                "set spec.osImageURL to REGISTRY/REPOSITORY@sha256:DIGEST in a MachineConfig of "
                "the pool",
            )
        # The bootstrap registry takes the place of this repository, and lacks the base.
        is_replaced = pool in machineconfigpool.CONTROL_PLANE_POOLS and (
            manifests.settings is None
            or manifests.settings.registry is image_mode.RegistryType.BOOTSTRAP
        )
        if is_replaced and pullspec.strip_tag(base) == pullspec.strip_tag(config.push_spec):
            yield manifest.make_problem(
                f"spec.renderedImagePushSpec: the base image {base} is in this repository, which "
                "the bootstrap registry replaces during the installation",
                "choose another repository for the push spec, or registry.type: External",
            )


def _convert_finding(
    manifest: install_manifests.ManifestObject, finding: input_checks.InputFinding
) -> problems.InstallProblem:
    remedy = finding.remedy
    if finding.reason is input_checks.InputReason.CONTEXT_INVALID and remedy.endswith(
        "to the files"
    ):
        remedy = "add the ConfigMap to the manifests"
    where = "" if finding.field.startswith("Secret ") else f"{finding.field}: "
    return manifest.make_problem(
        f"{where}expected {finding.expected}, found {finding.found}", remedy
    )


_INSTALLER_PULL_SECRET = ("openshift-config", "pull-secret")
"""Namespace and name of the cluster's pull secret among the manifests of the installer."""


class InstallObjects:
    """A `treenail.controllers.image_build.cluster_reader.ObjectGetter` over manifests.

    Objects of builds may be in the namespace of treenail or in that of the Machine Config Operator.
    One without a namespace is in every namespace: ``kubectl apply -n`` chooses it.
    """

    def __init__(
        self, manifests: install_manifests.InstallManifests, rendered: Mapping[str, decode.Json]
    ) -> None:
        """``rendered`` are the rendered MachineConfigs by name."""
        self._manifests = manifests
        self._rendered = rendered

    def get(self, resource: resources.Resource, name: str, *, namespace: str = "") -> decode.Json:
        """Return an object; raise `NotFoundError`."""
        if resource is resources.MACHINECONFIGS and name in self._rendered:
            return self._rendered[name]
        places = [(candidate, name) for candidate in dict.fromkeys((namespace, *NAMESPACES, ""))]
        if (resource, name) == (resources.SECRETS, cluster_reader.GLOBAL_PULL_SECRET):
            places.append(_INSTALLER_PULL_SECRET)
        for where, object_name in places:
            manifest = self._manifests.find(resource.kind, object_name, where)
            if manifest is not None:
                return cluster_reader.encode_strings(manifest.document)
        place = f"{namespace}/" if namespace else ""
        raise NotFoundError(f"the manifests have no {resource.kind} {place}{name}")


def is_based_on_system(text: str) -> bool:
    """Return whether the last stage has the system of the pool as base, also through others."""
    stages = containerfile.parse_containerfile(text).stages
    if not stages:
        return True
    earlier = {stage.name: stage for stage in stages[:-1] if stage.name}
    image, seen = stages[-1].image, {stages[-1].name}
    while image in earlier and image not in seen:
        seen.add(image)
        image = earlier[image].image
    return image == containerfile.CONFIGS_STAGE
