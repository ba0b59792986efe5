"""Data of a ControllerConfig for every node: certificate authorities and a pull secret."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Fields
from treenail.errors import ConfigError

NAME = "machine-config-controller"
"""Name of the only ControllerConfig of a cluster."""

_REGISTRY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?")
_BUNDLES = ("imageRegistryBundleData", "imageRegistryBundleUserData")


@dataclass(frozen=True, slots=True)
class ControllerConfigContents:
    """CAs in PEM, empty when the cluster has none, and the pull secret of its registry."""

    kubelet_ca: bytes = b""
    """CA of the API server's client certificate, for the kubelet."""
    cloud_ca: bytes = b""
    registry_cas: Mapping[str, bytes] = field(default_factory=dict)
    """CAs by registry, ``host`` or ``host:port``."""
    pull_secret: bytes | None = field(default=None, repr=False)
    """Pull secret of the cluster's registry; None when unset."""

    @classmethod
    def from_json(cls, document: object) -> "ControllerConfigContents":
        """Read a ControllerConfig; raise `ConfigError` for a malformed one."""
        spec = Fields.from_json(document, "ControllerConfig").get_object("spec")
        registries = {
            name: content for bundle in _BUNDLES for name, content in _read_bundle(spec, bundle)
        }
        return cls(
            kubelet_ca=decode_base64(spec, "kubeAPIServerServingCAData"),
            cloud_ca=decode_base64(spec, "cloudProviderCAData"),
            registry_cas=registries,
            pull_secret=decode_base64(spec, "internalRegistryPullSecret") or None,
        )


def _read_bundle(spec: Fields, name: str) -> Iterator[tuple[str, bytes]]:
    for bundle in spec.iter_objects(name):
        # ConfigMap keys allow no colon, so the MCO writes host..port.
        registry = bundle.get_required_text("file").replace("..", ":")
        if not _REGISTRY.fullmatch(registry):
            raise bundle.make_error("file", "a registry, HOST or HOST..PORT")
        yield registry, decode_base64(bundle, "data")


def decode_base64(fields: Fields, name: str) -> bytes:
    """Decode a field; raise `ConfigError`, which contains no part of its value."""
    text = fields.get_text(name)
    try:
        # The API server accepts base64 of several lines.
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        # The message omits the value: it may be a part of a secret.
        raise ConfigError(f"{fields.path_of(name)}: expected base64") from error
