"""Resolves tags at registries, with the logins and CAs of the cluster."""

from treenail.builder.phases.failures import choose_reason
from treenail.builder.phases.registries import RegistrySettings
from treenail.clock import Clock
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.pools.image_tags import TagAnswer
from treenail.errors import ClusterError, TreenailError
from treenail.image.build_reason import BuildReason
from treenail.image.build_result import BuildPhase
from treenail.image.push_spec import parse_push_spec
from treenail.registry.images import resolve_image
from treenail.registry.proxies import ProxySettings
from treenail.registry.transport import RegistryLimits, TlsSettings


class TagResolver:
    """A `treenail.controllers.pools.image_tags.TagSource`. Thread-safe.

    Logins are read for each question, because they may rotate.
    """

    def __init__(
        self,
        reader: ClusterReader,
        clock: Clock,
        *,
        proxies: ProxySettings | None = None,
        limits: RegistryLimits | None = None,
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._proxies = proxies
        self._limits = limits

    def resolve_tag(self, image: str, architectures: frozenset[str], secret: str) -> TagAnswer:
        """Return the image by digest: that of its list of manifests, if it is one."""
        try:
            found = self._resolve(image, architectures, secret)
        except ClusterError as error:
            # The API server, not the registry: retry as an outage.
            reason = BuildReason.REGISTRY_UNREACHABLE
            return TagAnswer(self._clock.now(), reason=reason, message=str(error))
        except TreenailError as error:
            reason = choose_reason(error, BuildPhase.FETCH)
            return TagAnswer(self._clock.now(), reason=reason, message=str(error))
        return TagAnswer(self._clock.now(), found)

    def compute_access_version(self, secret: str) -> str:
        """Return a text that changes with the login and with the CAs."""
        return self._reader.compute_access_version(secret)

    def _resolve(self, image: str, architectures: frozenset[str], secret: str) -> str:
        spec = parse_push_spec(image, where="tag")
        login = self._reader.read_base_login(secret)
        tls = TlsSettings(ca_pem=self._reader.read_ca(spec.registry))
        settings = RegistrySettings(login, tls, self._proxies, self._limits)
        with settings.open_client(spec.registry, spec.repository, self._clock) as client:
            first, *others = sorted(architectures)
            found = resolve_image(client, spec.repository, spec.tag, first)
            digest = found.index_digest or found.digest
            for each in others:
                # By digest: the tag may move between two requests.
                resolve_image(client, spec.repository, digest, each)
        return spec.make_pull_spec(digest)
