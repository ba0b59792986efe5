"""Checks of an install directory that ask registries: images and logins.

An installation fails late on what these find: an image that is missing or of another architecture,
and a login that only the end of the installation would use.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from treenail import clocks
from treenail.api import annotations as key
from treenail.api import component_names, machineosconfig, node, pullspec
from treenail.builder import registries
from treenail.config import image_mirrors, pullsecret
from treenail.controllers.handover import image_mode
from treenail.controllers.image_build import cluster_reader
from treenail.controllers.render.render import render_pools
from treenail.errors import ConfigError, TreenailError
from treenail.image.oci.documents import read_labels
from treenail.installer.directory import install_manifests, manifest_checks, problems
from treenail.registry import images, transport, uploads
from treenail.registry.errors import (
    CertificateUnknown,
    Denied,
    LoginRefused,
    RegistryError,
    Unreachable,
)

_LIMITS = transport.RegistryLimits(connect_s=5.0, attempts=2)


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """An image of one architecture in a registry."""

    digest: str
    """Digest of the manifest, not of the list."""
    labels: Mapping[str, str] = field(default_factory=dict)
    size: int = 0
    """Compressed bytes of its layers."""
    registry: str = ""
    """Registry that has it: that of its name, or a mirror."""
    repository: str = ""


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """Login and CAs of one registry, as the builds of the installation use them."""

    login: pullsecret.PullSecret = field(default_factory=pullsecret.PullSecret, repr=False)
    ca_pem: str = ""
    """CAs beside those of the system and of the checker."""
    mirrors: image_mirrors.ImageMirrors = image_mirrors.NO_MIRRORS


class RegistryChecker:
    """Looks up images and logins; every method raises `RegistryError`."""

    def __init__(self, settings: registries.RegistrySettings, clock: clocks.Clock) -> None:
        # A user waits for the answer, and can repeat the command.
        self._settings = replace(settings, limits=settings.limits or _LIMITS)
        self._clock = clock

    def find_image(
        self, image: pullspec.PullSpec, architecture: str, access: RegistryAccess
    ) -> RegistryImage:
        """Return an image; of a list of manifests, that of the architecture."""
        settings = self._add_access(access)

        def find(place: registries.ImageName) -> RegistryImage:
            with settings.open_client(place.registry, place.repository, self._clock) as client:
                resolved = images.resolve_image(
                    client, place.repository, place.reference, architecture
                )
            size = sum(layer.size for layer in resolved.layers)
            labels = read_labels(resolved.config)
            return RegistryImage(resolved.digest, labels, size, place.registry, place.repository)

        name = registries.ImageName(image.registry, image.repository, image.digest)
        return registries.pull_from_places(name, access.mirrors, find)

    def check_login(self, target: pullspec.PushSpec, access: RegistryAccess) -> bool:
        """Return whether the login may push; begins an upload, and cancels it."""
        settings = self._add_access(access)
        with settings.open_client(target.registry, target.repository, self._clock) as client:
            try:
                uploads.verify_push_access(client, target.repository)
            except (Denied, LoginRefused):
                return False
        return True

    def needs_own_cas(self, registry: str, repository: str, access: RegistryAccess) -> bool:
        """Return whether only the CAs of the checker, of ``--ca``, make the registry trusted."""
        tls = self._settings.tls
        if not tls.ca_pem:
            return False
        # Without a login: its certificate is verified before the registry asks for one.
        settings = replace(
            self._settings, secret=pullsecret.PullSecret(), tls=replace(tls, ca_pem=access.ca_pem)
        )
        with settings.open_client(registry, repository, self._clock) as client:
            try:
                client.head_manifest(repository, "latest")
            except CertificateUnknown:
                return True
            except RegistryError:
                return False
        return False

    def _add_access(self, access: RegistryAccess) -> registries.RegistrySettings:
        tls = self._settings.tls
        ca_pem = "\n".join(filter(None, (tls.ca_pem, access.ca_pem)))
        return replace(self._settings, secret=access.login, tls=replace(tls, ca_pem=ca_pem))


def parse_image(text: str) -> pullspec.PullSpec | None:
    """Return an image by digest; None for another text, which other checks report."""
    try:
        return pullspec.parse_pull_spec(text, where="the image")
    except ConfigError:
        return None


_Answer = TypeVar("_Answer")

_OFFLINE = "or leave out the checks of registries: --offline"


@dataclass(slots=True)
class OnlineChecks:
    """Asks registries with the logins of the manifests; anonymously without one."""

    checker: RegistryChecker
    base_image: str = ""
    """OS image of the release, where the manifests do not say it."""
    base_sizes: dict[str, int] = field(default_factory=dict)
    """Compressed bytes of the base images that were found, by pull spec."""
    _problems: list[problems.InstallProblem] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _unreachable: dict[str, RegistryError] = field(default_factory=dict)
    """By registry and its mirrors: each further request would wait again."""
    _named: set[str] = field(default_factory=set)
    """Unreachable registries that a problem names."""
    _noted: set[str] = field(default_factory=set)
    """Registries of built images that a note names: they do not answer yet."""
    _trusted: set[str] = field(default_factory=set)
    """Registries whose trust without ``--ca`` was checked."""

    def find_problems(
        self, manifests: install_manifests.InstallManifests, architectures: Mapping[str, str]
    ) -> tuple[list[problems.InstallProblem], list[str]]:
        """Return problems and notes; the objects are valid."""
        self._problems, self._notes = [], []
        self._named.clear()
        self._noted.clear()
        self._trusted.clear()
        for manifest in manifests.list_kind(machineosconfig.KIND):
            config = manifests.image_configs[manifest.name]
            architecture = architectures.get(config.pool, node.DEFAULT_ARCHITECTURE)
            if manifest_checks.is_prebuilt(config):
                self._check_prebuilt(manifests, manifest, config, architecture)
            else:
                self._check_base(manifests, manifest, config, architecture)
                self._check_push_login(manifests, manifest, config)
        return self._problems, self._notes

    def _check_prebuilt(
        self,
        manifests: install_manifests.InstallManifests,
        manifest: install_manifests.ManifestObject,
        config: machineosconfig.MachineOSConfig,
        architecture: str,
    ) -> None:
        image = manifest_checks.parse_prebuilt_image(
            config.metadata.annotations[key.PRE_BUILT_IMAGE]
        ).spec
        access = find_access(manifests, config.base_pull_secret, image.registry, config.pool)
        try:
            labels = self._find_image(image, architecture, access).labels
        except RegistryError as error:
            self._report_error(manifest, "pre-built image", error)
            return
        base = self.base_image or find_release_base(manifests)
        for finding in manifest_checks.find_prebuilt_findings(image, labels, base_image=base):
            if finding.is_certain:
                self._problems.append(manifest.make_problem(finding.text, finding.remedy))
            else:
                self._notes.append(f"{manifest.location}: {finding.text}; {finding.remedy}")

    def _check_base(
        self,
        manifests: install_manifests.InstallManifests,
        manifest: install_manifests.ManifestObject,
        config: machineosconfig.MachineOSConfig,
        architecture: str,
    ) -> None:
        image = find_base_image(manifests, config)
        if image is None:
            return
        access = find_access(manifests, config.base_pull_secret, image.registry, config.pool)
        try:
            self.base_sizes[str(image)] = self._find_image(image, architecture, access).size
        except RegistryError as error:
            self._report_error(manifest, "base image", error)

    def _check_push_login(
        self,
        manifests: install_manifests.InstallManifests,
        manifest: install_manifests.ManifestObject,
        config: machineosconfig.MachineOSConfig,
    ) -> None:
        if manifest_checks.is_cluster_registry(config.push_spec):
            return
        target = pullspec.parse_push_spec(config.push_spec, where="spec.renderedImagePushSpec")
        is_needed_now = (
            manifests.settings and manifests.settings.registry is image_mode.RegistryType.EXTERNAL
        )
        try:
            access = find_access(manifests, config.push_secret, target.registry)
            if not self._ask_registry(
                target.registry, lambda: self.checker.check_login(target, access)
            ):
                self._report_problem(
                    manifest,
                    f"{target.registry} refuses the login of Secret {config.push_secret} for "
                    f"{target.repository}",
                    "correct the login",
                )
            self._note_missing_ca(target.registry, target.repository, access)
        except RegistryError as error:
            if is_needed_now:
                self._report_error(manifest, "registry of built images", error)
            elif target.registry not in self._named | self._noted:
                self._noted.add(target.registry)
                self._notes.append(
                    f"{manifest.location}: {target.registry} must be reachable at the hand-over: "
                    f"{error}"
                )

    def _find_image(
        self, image: pullspec.PullSpec, architecture: str, access: RegistryAccess
    ) -> RegistryImage:
        name = f"{image.registry}/{image.repository}"
        places = access.mirrors.list_places(name, is_digest=True)
        registry_image = self._ask_registry(
            " ".join(place.partition("/")[0] for place in places),
            lambda: self.checker.find_image(image, architecture, access),
        )
        self._note_missing_ca(registry_image.registry, registry_image.repository, access)
        return registry_image

    def _note_missing_ca(self, registry: str, repository: str, access: RegistryAccess) -> None:
        if registry in self._trusted:
            return
        self._trusted.add(registry)
        if self.checker.needs_own_cas(registry, repository, access):
            self._notes.append(
                f"{registry} is trusted with --ca alone, which the checks use: for the bootstrap "
                "host and the nodes add its CA to the ControllerConfig, as "
                "spec.additionalTrustBundle or in spec.imageRegistryBundleUserData"
            )

    def _ask_registry(self, registry: str, request: Callable[[], _Answer]) -> _Answer:
        if registry in self._unreachable:
            raise self._unreachable[registry]
        try:
            return request()
        except Unreachable as error:
            self._unreachable[registry] = error
            raise

    def _report_error(
        self, manifest: install_manifests.ManifestObject, what: str, error: RegistryError
    ) -> None:
        """Report an error; of several images in an unreachable registry, that of the first."""
        registry = next(
            (name for name, first_error in self._unreachable.items() if first_error is error), ""
        )
        if registry and registry in self._named:
            return
        self._named.add(registry)
        self._report_problem(manifest, f"{what}: {error}", error.remedy)

    def _report_problem(
        self, manifest: install_manifests.ManifestObject, text: str, remedy: str
    ) -> None:
        remedy = f"{remedy}, {_OFFLINE}" if remedy else f"correct it, {_OFFLINE}"
        self._problems.append(manifest.make_problem(text, remedy))


def find_access(
    manifests: install_manifests.InstallManifests, secret: str, registry: str, pool: str = ""
) -> RegistryAccess:
    """Return the logins of a Secret, and the CAs of the ControllerConfig for a registry.

    With a pool, also its mirrors and their CAs: builds pull images from them.
    """
    reader = cluster_reader.ClusterReader(
        manifest_checks.InstallObjects(manifests, {}),
        clocks.SystemClock(),
        namespace=component_names.NAMESPACE,
    )
    mirrors = find_mirrors(manifests, pool) if pool else image_mirrors.NO_MIRRORS
    try:
        cas = dict.fromkeys(map(reader.read_ca, (registry, *mirrors.list_registries())))
        ca_pem = "\n".join(filter(None, cas))
    except TreenailError:
        ca_pem = ""
    return RegistryAccess(find_login(manifests, secret), ca_pem, mirrors)


def find_mirrors(
    manifests: install_manifests.InstallManifests, pool: str
) -> image_mirrors.ImageMirrors:
    """Return the mirrors of a pool's builds; other checks report what cannot be read."""
    mirrors = image_mirrors.NO_MIRRORS
    with suppress(TreenailError):
        rendered, _ = render_pools(manifests.to_input(), pool)
        if rendered:
            mirrors = image_mirrors.read_config_mirrors(rendered[0].config)
    return mirrors.add_rules(manifests.mirror_rules)


def find_login(manifests: install_manifests.InstallManifests, name: str) -> pullsecret.PullSecret:
    """Return the logins of a Secret among the manifests; none if it is absent or invalid."""
    secret = manifest_checks.find_namespaced(manifests, "Secret", name) if name else None
    if secret is None:
        return pullsecret.PullSecret()
    try:
        return pullsecret.read_login_secret(
            cluster_reader.encode_strings(secret.document), where=secret.title
        )
    except TreenailError:
        return pullsecret.PullSecret()


def find_release_base(manifests: install_manifests.InstallManifests) -> str:
    """Return the OS image of the release; empty if the manifests do not say it."""
    configs = manifests.controller_configs.values()
    return next((config.base_images.os for config in configs), "")


def find_base_image(
    manifests: install_manifests.InstallManifests, config: machineosconfig.MachineOSConfig
) -> pullspec.PullSpec | None:
    """Return the base image of a pool's build; None if the manifests do not say it by digest."""
    if config.base_image:
        return parse_image(config.base_image)
    try:
        rendered, _ = render_pools(manifests.to_input(), config.pool)
    except (ConfigError, TreenailError):
        return parse_image(find_release_base(manifests))
    text = rendered[0].config.os_image_url if rendered else find_release_base(manifests)
    return parse_image(text)
