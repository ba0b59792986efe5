"""What a registry answers instead of an image, in words for people."""

_CREDENTIAL_REMEDY = (
    "see that the cluster's pull secret has a login for {registry}; 'treenail status' shows what "
    "is wrong with the pull secrets"
)
_NETWORK_REMEDY = "see that this node can reach {registry}, and its proxy settings"
_CLOCK_OR_CERTIFICATE_REMEDY = "set the clock, or renew the registry's certificate"
REGISTRY_PROBLEM_TEXTS: dict[str, tuple[str, str]] = {
    "RegistryNameUnknown": (
        "the name {registry} can't be resolved",
        "see that this node's DNS servers know {registry}",
    ),
    "RegistryUnreachable": ("{registry} can't be reached", _NETWORK_REMEDY),
    "RegistryUntrusted": (
        "the certificate of {registry} is not trusted",
        "put the registry's CA into /etc/docker/certs.d/{registry}/ca.crt",
    ),
    "RegistryCertificateExpired": (
        "the certificate of {registry} has expired",
        _CLOCK_OR_CERTIFICATE_REMEDY,
    ),
    "ClockBehindCertificate": (
        "the certificate of {registry} is not valid yet",
        _CLOCK_OR_CERTIFICATE_REMEDY,
    ),
    "RegistryUnauthorized": ("{registry} wants another login", _CREDENTIAL_REMEDY),
    "RegistryForbidden": ("{registry} does not give {image} to this login", _CREDENTIAL_REMEDY),
    "ImageNotFound": (
        "{registry} has no {image}",
        "ask for an image that exists, or push this one again",
    ),
    "RegistryTimeout": ("{registry} does not answer in time", _NETWORK_REMEDY),
    "WrongArchitecture": (
        "{image} is not built for this machine",
        "ask for an image of this architecture, or for one that has several",
    ),
    "RegistryFailed": (
        "{registry} did not say what {image} is",
        "see the state of {registry}; it is tried again",
    ),
}
"""By reason: a sentence, and a remedy, about ``registry`` and ``image``."""
