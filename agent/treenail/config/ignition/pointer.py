"""The user data of a new machine: a config that points to the one that it fetches. Pure."""

import re
from collections.abc import Mapping

from treenail.api import decode
from treenail.api.ignition import model
from treenail.config.ignition import emit
from treenail.errors import UsageError

_RESERVED = re.compile(r"[^A-Za-z0-9/._~-]")
_SERVER = re.compile(
    r"https://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::0*([0-9]{1,5}))?/?"
)
_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----\n?"
)


def point_to(
    source: str, version: str, headers: Mapping[str, str], *, authorities: bytes = b""
) -> decode.Json:
    """Return a config that points to a URL."""
    reference: decode.Json = {"source": source}
    if headers:
        pairs = headers.items()
        reference["httpHeaders"] = [{"name": name, "value": value} for name, value in pairs]
    section: decode.Json = {"config": {"merge": [reference]}}
    if authorities:
        certificates = map(_escape_text, _split_bundle(authorities))
        trusted = [{"source": f"data:,{text}"} for text in certificates]
        section["security"] = {"tls": {"certificateAuthorities": trusted}}
    return emit.emit_ignition(model.IgnitionConfig(ignition_section=section), version)


def check_server_url(server: str) -> str:
    """Return the URL without a slash at its end; raise `UsageError` unless it is a server's."""
    match = _SERVER.fullmatch(server)
    if not match or not 1 <= int(match[2] or 443) <= 65535:
        raise UsageError(
            "cannot use the URL of the config server: expected https://HOST:PORT without a path",
            remedy="give the address that new machines reach, such as https://HOST:22623",
        )
    return server.rstrip("/")


def _split_bundle(authorities: bytes) -> list[str]:
    """Return the certificates of a PEM bundle, without the text between them."""
    certificates = [block.decode("ascii") for block in _CERTIFICATE.findall(authorities)]
    if not certificates:
        raise UsageError(
            "cannot read the CA of the config server: expected a certificate in PEM",
            remedy="give the CA's certificate, which begins with -----BEGIN CERTIFICATE-----",
        )
    return list(dict.fromkeys(certificates))


def _escape_text(text: str) -> str:
    """Escape ASCII text for a data URL; this package imports no urllib."""
    return _RESERVED.sub(lambda match: f"%{ord(match[0]):02X}", text)
