"""Reads what builds need and no informer caches: Secrets, ConfigMaps, rendered configs, CAs."""

import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from treenail.api.controllerconfig import NAME as CONTROLLER_CONFIG
from treenail.api.controllerconfig import ControllerConfigContents
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.clock import Clock
from treenail.config.pullsecret import PullSecret, parse_pull_secret
from treenail.errors import ConfigError, CredentialError, NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import (
    CONFIGMAPS,
    CONTROLLERCONFIGS,
    MACHINECONFIGS,
    SECRETS,
    Resource,
)

GLOBAL_PULL_SECRET = "global-pull-secret-copy"  # noqa: S105  # the name of a Secret
"""The cluster's pull secret in the namespace of builds, as the MCO names it."""
_LOGIN_KEYS = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}
_CACHED_CONFIGS = 64
_CA_AGE_S = 30.0
CONTEXT_LIMIT = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ContextFiles:
    """A ConfigMap with files for COPY."""

    names: tuple[str, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RenderedFacts:
    """The parts of a rendered config that determine the system part of an image."""

    name: str
    base_image: str
    extensions_image: str
    extensions: tuple[str, ...]
    kernel_type: str
    config: MachineConfig = field(repr=False, compare=False)
    """Without its Ignition config, which is large."""


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """CAs of the cluster in PEM, and the pull secret of its registry."""

    registry_cas: dict[str, str] = field(default_factory=dict)
    bundle: str = ""
    """The additional trust bundle."""
    pull_secret: bytes = field(default=b"", repr=False)


class ClusterReader:
    """Reads objects of builds on demand. Thread-safe. Every method raises `ClusterError`."""

    def __init__(self, client: Client, clock: Clock, *, namespace: str) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._lock = threading.Lock()
        self._rendered: OrderedDict[str, RenderedFacts] = OrderedDict()
        self._trust: tuple[float, ClusterTrust] | None = None

    def read_login(self, name: str, *, where: str) -> PullSecret:
        """Read a pull secret; raise `CredentialError` that names ``where`` and no content."""
        try:
            document = self._client.get(SECRETS, name, namespace=self._namespace)
        except NotFoundError as error:
            raise CredentialError(
                f"{where} is {name}, and no such Secret exists in namespace {self._namespace}",
                remedy=f"create it with: kubectl create secret docker-registry {name} "
                f"-n {self._namespace} --docker-server=REGISTRY --docker-username=USER "
                "--docker-password=PASSWORD",
            ) from error
        kind = str(document.get("type", ""))
        if kind not in _LOGIN_KEYS:
            raise CredentialError(
                f"{where} is {name}: expected a Secret of the type {' or '.join(_LOGIN_KEYS)}, "
                f"found {kind or 'none'!r:.60}",
                remedy="create a Secret of this type with: kubectl create secret docker-registry",
            )
        content = _decode_entry(document, _LOGIN_KEYS[kind], where=f"Secret {name}")
        return parse_pull_secret(content, where=f"Secret {name}")

    def read_base_login(self, name: str) -> PullSecret:
        """Read the login for base images; without a name, the cluster's pull secret."""
        if name:
            return self.read_login(name, where="spec.baseImagePullSecret.name")
        if self.has_object(SECRETS, GLOBAL_PULL_SECRET):
            return self.read_login(GLOBAL_PULL_SECRET, where="the cluster's pull secret")
        content = self.read_trust().pull_secret
        return parse_pull_secret(content, where="internalRegistryPullSecret")

    def has_object(self, resource: Resource, name: str) -> bool:
        """Return whether the namespace of builds has an object."""
        try:
            self._client.get(resource, name, namespace=self._namespace)
        except NotFoundError:
            return False
        return True

    def read_context(self, name: str) -> ContextFiles:
        """Read the files for COPY; raise `ConfigError` when there is no such ConfigMap."""
        try:
            document = self._client.get(CONFIGMAPS, name, namespace=self._namespace)
        except NotFoundError as error:
            raise ConfigError(
                f"annotation treenail.io/context is {name}, and no such ConfigMap exists in "
                f"namespace {self._namespace}",
                remedy=f"create it with: kubectl create configmap {name} -n {self._namespace} "
                "--from-file=DIRECTORY",
            ) from error
        fields = Fields.from_json(document, "ConfigMap")
        texts, encoded = fields.get_text_map("data"), fields.get_text_map("binaryData")
        found = {key: text.encode() for key, text in texts.items()}
        found |= {key: base64.b64decode(text) for key, text in encoded.items()}
        digest = hashlib.sha256()
        for key, content in sorted(found.items()):
            digest.update(f"{key}\0{len(content)}\0".encode() + content)
        return ContextFiles(tuple(sorted(found)), digest.hexdigest())

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
        """Read CAs and the pull secret of the ControllerConfig, at most every 30 s."""
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
            spec = Fields.from_json(document, "ControllerConfig").get_object("spec")
            found = ClusterTrust(
                {name: _decode_pem(pem) for name, pem in contents.registry_cas.items()},
                _decode_pem(base64.b64decode(spec.get_text("additionalTrustBundle"))),
                contents.pull_secret or b"",
            )
        with self._lock:
            self._trust = (now, found)
        return found


def _decode_pem(content: bytes) -> str:
    return content.decode("ascii", "replace")


def _decode_entry(document: Json, name: str, *, where: str) -> bytes:
    text = Fields.from_json(document, where).get_object("data").get_text(name)
    if not text:
        raise CredentialError(f"{where} has no {name}", remedy="create the Secret again")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        # Without its cause, which contains the content.
        raise CredentialError(f"{where}: {name} is not base64") from None
