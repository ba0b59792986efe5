"""Find in registries which images tags stand for."""

from treenail import clocks, errors
from treenail.api import pullspec
from treenail.builder import failures, registries
from treenail.config import image_mirrors
from treenail.controllers.image_build import cluster_reader
from treenail.controllers.pools.image_tags import ImageAnswer
from treenail.image import build_result
from treenail.registry import images, transport
from treenail.registry.proxies import ProxySettings


class TagResolver:
    """A `treenail.controllers.pools.registry_requests.TagSource`. Thread-safe.

    Logins are read for each question, because they may rotate.
    """

    def __init__(
        self,
        reader: cluster_reader.ClusterReader,
        clock: clocks.Clock,
        *,
        proxies: ProxySettings | None = None,
        limits: transport.RegistryLimits | None = None,
        mirrors: image_mirrors.ImageMirrors = image_mirrors.NO_MIRRORS,
    ) -> None:
        """``proxies`` replace those of the reader."""
        self._reader = reader
        self._clock = clock
        self._proxies = proxies
        self._limits = limits
        self._mirrors = mirrors

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> ImageAnswer:
        """Return the image by digest: that of its list of manifests, if it is one."""
        try:
            pull_spec = self._resolve_digest(image, architectures, secret)
        except errors.TreenailError as error:
            reason = (
                # The API server, not the registry: retry as an outage.
                build_result.BuildReason.REGISTRY_UNREACHABLE
                if isinstance(error, errors.ClusterError)
                else failures.choose_reason(error, build_result.BuildPhase.FETCH)
            )
            failure = build_result.AttemptFailure(reason, str(error))
            return ImageAnswer(self._clock.now(), failure)
        return ImageAnswer(self._clock.now(), pull_spec=pull_spec)

    def compute_access_version(self, secret: str) -> str:
        """Return a text that changes with the login and with the CAs."""
        return self._reader.compute_access_version(secret)

    def _resolve_digest(self, image: str, architectures: frozenset[str], secret: str) -> str:
        spec = pullspec.parse_push_spec(image, where="tag")
        login = self._reader.read_base_login(secret)

        def resolve(place: registries.ImageName) -> str:
            tls = transport.TlsSettings(ca_pem=self._reader.read_ca(place.registry))
            proxies = self._proxies or self._reader.read_proxy_settings()
            settings = registries.RegistrySettings(login, tls, proxies, self._limits)
            with settings.open_client(place.registry, place.repository, self._clock) as client:
                return images.resolve_digest(
                    client, place.repository, place.reference, architectures
                )

        name = registries.ImageName(spec.registry, spec.repository, spec.tag)
        return spec.make_pull_spec(registries.pull_from_places(name, self._mirrors, resolve))
