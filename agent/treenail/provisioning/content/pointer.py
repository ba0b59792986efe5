"""Pointer configs: user data with which a machine fetches the config of its pool."""

import re
from urllib.parse import quote

from treenail.api.decode import Json
from treenail.api.ignition.model import IgnitionConfig
from treenail.config.ignition.emit import emit_ignition
from treenail.errors import UsageError

HEADERS_SINCE = "3.1.0"
"""The first version whose configs can have HTTP headers; older ones send a token in the URL."""

_SERVER = re.compile(
    r"https://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::0*([0-9]{1,5}))?/?"
)
_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----\n?"
)


def build_pointer(
    server: str, pool: str, version: str, *, authorities: bytes = b"", token: str = ""
) -> Json:
    """Return the pointer config for a pool, in one of the versions served.

    ``server`` is the URL of the config server without a path, as ``https://api-int.example:22623``.
    ``authorities`` are certificates in PEM that sign the server's certificate; without them the
    machine trusts the CAs of its image. From 3.1 the token is a header. Before, it is part of the
    URL, which proxies may log. Raises `UsageError` for an invalid URL or certificate.
    """
    source = f"{check_server_url(server)}/config/{quote(pool, safe='')}"
    reference: Json = {"source": source}
    if token and version >= HEADERS_SINCE:
        header = {"name": "Authorization", "value": f"Bearer {token}"}
        reference["httpHeaders"] = [header]
    elif token:
        reference["source"] = f"{source}?token={quote(token, safe='')}"
    section: Json = {"config": {"merge": [reference]}}
    if authorities:
        trusted = [{"source": f"data:,{quote(text)}"} for text in _list_certificates(authorities)]
        section["security"] = {"tls": {"certificateAuthorities": trusted}}
    return emit_ignition(IgnitionConfig(ignition_section=section), version)


def check_server_url(server: str) -> str:
    """Return the URL without a slash at its end; raise `UsageError` unless it is a server's."""
    match = _SERVER.fullmatch(server)
    if not match or not 1 <= int(match[2] or 443) <= 65535:
        raise UsageError(
            "cannot use the URL of the config server: expected https://HOST:PORT without a path",
            remedy="give the address that new machines reach, such as https://HOST:22623",
        )
    return server.rstrip("/")


def _list_certificates(authorities: bytes) -> list[str]:
    """Return the certificates of a PEM bundle, without the text between them."""
    certificates = [block.decode("ascii") for block in _CERTIFICATE.findall(authorities)]
    if not certificates:
        raise UsageError(
            "cannot read the CA of the config server: expected a certificate in PEM",
            remedy="give the CA's certificate, which begins with -----BEGIN CERTIFICATE-----",
        )
    return list(dict.fromkeys(certificates))
