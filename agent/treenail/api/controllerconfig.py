"""What a ControllerConfig hands to every node: certificate authorities and a pull secret."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Fields
from treenail.errors import ConfigError

NAME = "machine-config-controller"
"""The one ControllerConfig of a cluster."""

_REGISTRY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")
_BUNDLES = ("imageRegistryBundleData", "imageRegistryBundleUserData")


@dataclass(frozen=True, slots=True)
class ControllerConfigContents:
    """Each is PEM, and empty when the cluster has none."""

    kubelet_ca: bytes = b""
    """Whom the kubelet trusts as a client: the API server."""
    cloud_ca: bytes = b""
    registry_cas: Mapping[str, bytes] = field(default_factory=dict)
    """By registry, ``host`` or ``host:port``."""
    pull_secret: bytes | None = field(default=None, repr=False)
    """Of the cluster's own registry; None when nothing is said."""

    @classmethod
    def from_json(cls, document: object) -> "ControllerConfigContents":
        """Raises `ConfigError` for what is not of the ControllerConfig's form."""
        spec = Fields.from_json(document, "ControllerConfig").get_object("spec")
        registries = {
            name: content for bundle in _BUNDLES for name, content in _read_bundle(spec, bundle)
        }
        return cls(
            kubelet_ca=_decode_base64(spec, "kubeAPIServerServingCAData"),
            cloud_ca=_decode_base64(spec, "cloudProviderCAData"),
            registry_cas=registries,
            pull_secret=_decode_base64(spec, "internalRegistryPullSecret") or None,
        )


def _read_bundle(spec: Fields, name: str) -> Iterator[tuple[str, bytes]]:
    for each in spec.iter_objects(name):
        # ConfigMap keys can't have a colon in them.
        registry = each.get_required_text("file").replace("..", ":")
        if not _REGISTRY.fullmatch(registry):
            raise each.make_error("file", "a registry, HOST or HOST..PORT")
        yield registry, _decode_base64(each, "data")


def _decode_base64(fields: Fields, name: str) -> bytes:
    text = fields.get_text(name)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        # Whatever is there may be half a secret.
        raise ConfigError(f"{fields.path_of(name)}: expected base64") from error
