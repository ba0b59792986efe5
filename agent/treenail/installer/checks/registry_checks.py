"""Asks registries about images and logins before an installation starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treenail.api.pullspec import PullSpec, parse_pull_spec
from treenail.builder.phases.registries import ImageName, RegistrySettings, pull_from_places
from treenail.clock import Clock
from treenail.config.image_mirrors import NO_MIRRORS, ImageMirrors
from treenail.config.pullsecret import PullSecret
from treenail.errors import ConfigError, TreenailError
from treenail.image.oci.documents import read_labels
from treenail.image.push_spec import PushSpec
from treenail.registry.errors import CertificateUnknown, Denied, LoginRefused, RegistryError
from treenail.registry.images import resolve_image
from treenail.registry.transport import RegistryLimits
from treenail.registry.uploads import verify_push_access

_LIMITS = RegistryLimits(connect_s=5.0, attempts=2)


@dataclass(frozen=True, slots=True)
class FoundImage:
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

    login: PullSecret = field(default_factory=PullSecret, repr=False)
    ca_pem: str = ""
    """CAs beside those of the system and of the checker."""
    mirrors: ImageMirrors = NO_MIRRORS


class RegistryChecker:
    """Looks up images and logins; every method raises `RegistryError`."""

    def __init__(self, settings: RegistrySettings, clock: Clock) -> None:
        # A user waits for the answer, and can repeat the command.
        self._settings = replace(settings, limits=settings.limits or _LIMITS)
        self._clock = clock

    def find_image(self, image: PullSpec, architecture: str, access: RegistryAccess) -> FoundImage:
        """Return an image; of a list of manifests, that of the architecture."""
        settings = self._add_access(access)

        def find(place: ImageName) -> FoundImage:
            with settings.open_client(place.registry, place.repository, self._clock) as client:
                found = resolve_image(client, place.repository, place.reference, architecture)
            size = sum(each.size for each in found.layers)
            labels = read_labels(found.config)
            return FoundImage(found.digest, labels, size, place.registry, place.repository)

        name = ImageName(image.registry, image.repository, image.digest)
        return pull_from_places(name, access.mirrors, find)

    def check_login(self, target: PushSpec, access: RegistryAccess) -> bool:
        """Return whether the login may push; begins an upload, and cancels it."""
        settings = self._add_access(access)
        with settings.open_client(target.registry, target.repository, self._clock) as client:
            try:
                verify_push_access(client, target.repository)
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
            self._settings, secret=PullSecret(), tls=replace(tls, ca_pem=access.ca_pem)
        )
        with settings.open_client(registry, repository, self._clock) as client:
            try:
                client.head_manifest(repository, "latest")
            except CertificateUnknown:
                return True
            except RegistryError:
                return False
        return False

    def _add_access(self, access: RegistryAccess) -> RegistrySettings:
        tls = self._settings.tls
        ca_pem = "\n".join(filter(None, (tls.ca_pem, access.ca_pem)))
        return replace(self._settings, secret=access.login, tls=replace(tls, ca_pem=ca_pem))


def describe_registry_error(error: TreenailError) -> tuple[str, str]:
    """Return text and remedy of an error of a registry."""
    remedy = error.remedy if isinstance(error, RegistryError | ConfigError) else ""
    return str(error), remedy or "correct it, or leave out the checks of registries: --offline"


def parse_image(text: str) -> PullSpec | None:
    """Return an image by digest; None for another text, which other checks report."""
    try:
        return parse_pull_spec(text, where="the image")
    except ConfigError:
        return None
