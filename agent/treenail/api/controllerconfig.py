"""Data of a ControllerConfig: certificate authorities, a pull secret, and the proxy."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from treenail.encoding import codec, json_values

NAME = "machine-config-controller"
"""Name of the only ControllerConfig of a cluster."""

_REGISTRY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")


def _decode_base64(text: str) -> bytes:
    try:
        # The API server accepts base64 of several lines.
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        # The message omits the value: it may be a part of a secret.
        raise json_values.Mismatch(problem="expected base64") from error


def _read_registry(name: str) -> str:
    # ConfigMap keys allow no colon, so the MCO writes host..port.
    registry = name.replace("..", ":")
    if not _REGISTRY.fullmatch(registry):
        raise json_values.Mismatch("a registry, HOST or HOST..PORT", name)
    return registry


_Base64 = Annotated[bytes, codec.Via(_decode_base64, wire=str)]


class _RegistryBundle(codec.Shape):
    registry: Annotated[str, codec.Key("file"), codec.Via(_read_registry)]
    data: _Base64


class _RegistryBundles(codec.Shape):
    image_registry_bundle_data: tuple[_RegistryBundle, ...] = ()
    image_registry_bundle_user_data: tuple[_RegistryBundle, ...] = ()


def _merge_bundles(bundles: _RegistryBundles) -> dict[str, bytes]:
    both = (*bundles.image_registry_bundle_data, *bundles.image_registry_bundle_user_data)
    return {bundle.registry: bundle.data for bundle in both}


@dataclass(frozen=True, slots=True)
class ControllerConfigContents(codec.JsonObject, where="ControllerConfig"):
    """CAs in PEM, empty when the cluster has none, and the pull secret of its registry."""

    kubelet_ca: Annotated[_Base64, codec.Key("spec.kubeAPIServerServingCAData")] = b""
    """CA of the API server's client certificate, for the kubelet."""
    cloud_ca: Annotated[_Base64, codec.Key("spec.cloudProviderCAData")] = b""
    registry_cas: Annotated[
        Mapping[str, bytes], codec.Key("spec"), codec.Via(_merge_bundles, wire=_RegistryBundles)
    ] = field(default_factory=dict)
    """CAs by registry, ``host`` or ``host:port``."""
    pull_secret: Annotated[
        _Base64 | None,
        codec.Key("spec.internalRegistryPullSecret"),
        codec.Via(lambda content: content or None),
    ] = field(default=None, repr=False)
    """Pull secret of the cluster's registry; None when unset."""
    trust_bundle: Annotated[_Base64, codec.Key("spec.additionalTrustBundle")] = b""
    """CAs of all registries."""


@dataclass(frozen=True, slots=True)
class ClusterProxy(codec.JsonObject, where="ControllerConfig"):
    """The proxy of the cluster; a URL may have a login."""

    http: Annotated[str, codec.Key("spec.proxy.httpProxy")] = field(default="", repr=False)
    https: Annotated[str, codec.Key("spec.proxy.httpsProxy")] = field(default="", repr=False)
    exceptions: Annotated[str, codec.Key("spec.proxy.noProxy")] = ""

    @property
    def variables(self) -> dict[str, str]:
        """The values as variables of an environment."""
        return {"HTTP_PROXY": self.http, "HTTPS_PROXY": self.https, "NO_PROXY": self.exceptions}
