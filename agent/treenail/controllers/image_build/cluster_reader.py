"""Reads what builds need and no informer caches: Secrets, ConfigMaps, rendered configs, CAs."""

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.controllerconfig import ControllerConfigContents, decode_base64
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config.image_mirrors import NO_MIRRORS, ImageMirrors, read_config_mirrors
from treenail.config.pullsecret import PullSecret, parse_pull_secret, read_login_secret
from treenail.errors import ConfigError, CredentialError, NotFoundError
from treenail.image.inputs.build_inputs import find_build_paths
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGS,
    SECRETS,
    Resource,
)

log = logging.getLogger(__name__)

GLOBAL_PULL_SECRET = "global-pull-secret-copy"  # noqa: S105  # the name of a Secret
"""The cluster's pull secret in the namespace of builds, as the MCO names it."""
_CACHED_CONFIGS = 64
_CA_AGE_S = 30.0


@dataclass(frozen=True, slots=True)
class RenderedFacts:
    """The parts of a rendered config that determine the system part of an image."""

    name: str
    base_image: str
    extensions_image: str
    extensions: tuple[str, ...]
    kernel_type: str
    build_paths: tuple[str, ...]
    """Files of the config that package managers and registry clients read."""
    mirrors: ImageMirrors
    """Where its nodes, and builds for them, pull images from."""
    config: MachineConfig = field(repr=False, compare=False)
    """Without its Ignition config, which is large."""


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """CAs of the cluster in PEM, and the pull secret of its registry."""

    registry_cas: dict[str, str] = field(default_factory=dict)
    bundle: str = ""
    """The additional trust bundle."""
    pull_secret: bytes = field(default=b"", repr=False)


class ObjectGetter(Protocol):
    """Reads one object; raises `ClusterError`."""

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> Json: ...


class ClusterReader:
    """Reads objects of builds on demand. Thread-safe. Every method raises `ClusterError`."""

    def __init__(self, client: ObjectGetter, clock: Clock, *, namespace: str) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._lock = threading.Lock()
        self._rendered: OrderedDict[str, RenderedFacts] = OrderedDict()
        self._trust: tuple[float, ClusterTrust] | None = None

    def find_object(self, resource: Resource, name: str) -> Json | None:
        """Return an object of the namespace of builds; None when it does not exist."""
        try:
            return self._client.get(resource, name, namespace=self._namespace)
        except NotFoundError:
            return None

    def describe_object(self, resource: Resource, name: str) -> str:
        """Return the words for an object of the namespace of builds; of files, without one."""
        return f"{resource.kind} {f'{self._namespace}/' if self._namespace else ''}{name}"

    def read_login(self, name: str) -> PullSecret:
        """Read a login; raise `CredentialError`, which contains no part of it."""
        where = self.describe_object(SECRETS, name)
        document = self.find_object(SECRETS, name)
        if document is None:
            raise CredentialError(f"{where} does not exist", remedy="create it")
        return read_login_secret(document, where=where)

    def read_base_login(self, name: str) -> PullSecret:
        """Read the login for base images; without a name, the cluster's pull secret."""
        if name:
            return self.read_login(name)
        if self.find_object(SECRETS, GLOBAL_PULL_SECRET) is not None:
            return self.read_login(GLOBAL_PULL_SECRET)
        content = self.read_trust().pull_secret
        return parse_pull_secret(content, where="internalRegistryPullSecret")

    def read_ca(self, registry: str) -> str:
        """Return the CAs of a registry beside those of the system, in PEM."""
        trust = self.read_trust()
        return "\n".join(filter(None, (trust.registry_cas.get(registry, ""), trust.bundle)))

    def compute_access_version(self, name: str) -> str:
        """Return a text that changes with the login for base images, and with the CAs."""
        trust = self.read_trust()
        secret = self.find_object(SECRETS, name or GLOBAL_PULL_SECRET)
        meta = Fields.from_json(secret or {}, "Secret").get_object("metadata")
        parts = (
            meta.get_text("uid"),
            meta.get_text("resourceVersion"),
            hashlib.sha256(trust.pull_secret).hexdigest(),
            *sorted(trust.registry_cas.values()),
            trust.bundle,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def read_rendered_facts(self, name: str) -> RenderedFacts:
        """Read a rendered config once; its name contains the hash of its content."""
        with self._lock:
            if (known := self._rendered.get(name)) is not None:
                self._rendered.move_to_end(name)
                return known
        config = self.read_rendered(name)
        slim = MachineConfig(
            metadata=config.metadata,
            os_image_url=config.os_image_url,
            extensions_image=config.extensions_image,
            kernel_type=config.kernel_type,
            extensions=config.extensions,
        )
        found = RenderedFacts(
            name,
            config.os_image_url,
            config.extensions_image,
            config.extensions,
            config.kernel_type,
            find_build_paths(config),
            _read_mirrors(config),
            slim,
        )
        with self._lock:
            self._rendered[name] = found
            while len(self._rendered) > _CACHED_CONFIGS:
                self._rendered.popitem(last=False)
        return found

    def read_rendered(self, name: str) -> MachineConfig:
        """Read a rendered config with its files; raise `ConfigError`."""
        return MachineConfig.from_json(self._client.get(MACHINECONFIGS, name))

    def read_trust(self) -> ClusterTrust:
        """Read CAs and the pull secret of the ControllerConfig, at most every 30 s.

        Raises `ConfigError` for a ControllerConfig that cannot be read.
        """
        now = self._clock.monotonic()
        with self._lock:
            if self._trust is not None and now - self._trust[0] < _CA_AGE_S:
                return self._trust[1]
        try:
            document = self._client.get(CONTROLLERCONFIGS, CONTROLLER_CONFIG)
        except NotFoundError:
            found = ClusterTrust()
        else:
            contents = ControllerConfigContents.from_json(document)
            spec = Fields.from_json(document, CONTROLLERCONFIGS.kind).get_object("spec")
            found = ClusterTrust(
                {name: _decode_pem(pem) for name, pem in contents.registry_cas.items()},
                _decode_pem(decode_base64(spec, "additionalTrustBundle")),
                contents.pull_secret or b"",
            )
        with self._lock:
            self._trust = (now, found)
        return found


def _read_mirrors(config: MachineConfig) -> ImageMirrors:
    try:
        return read_config_mirrors(config)
    except ConfigError as error:
        # Not a reason to refuse a build that needs no mirror.
        log.warning("%s: ignoring the mirrors of registries: %s", config.name, error)
        return NO_MIRRORS


def _decode_pem(content: bytes) -> str:
    return content.decode("ascii", "replace")
