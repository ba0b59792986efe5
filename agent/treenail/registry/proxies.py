"""Proxies of HTTPS_PROXY and NO_PROXY."""

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from treenail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy for CONNECT requests."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)
    """The value of Proxy-Authorization; empty without a login."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The proxy of HTTPS requests, and the hosts that are reached without it."""

    proxy: Proxy | None = None
    exceptions: tuple[str, ...] = ()

    def find_proxy(self, host: str, port: int) -> Proxy | None:
        """Return the proxy for a host; None for a direct connection."""
        if self.proxy is None or any(
            _matches(exception, host, port) for exception in self.exceptions
        ):
            return None
        return self.proxy


def read_proxy_settings(environment: Mapping[str, str]) -> ProxySettings:
    """Read the variables, lower case first, as curl(1) and Go's net/http do."""
    url = environment.get("https_proxy") or environment.get("HTTPS_PROXY") or ""
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    exceptions = tuple(part.strip().lower() for part in listed.split(",") if part.strip())
    return ProxySettings(_parse_proxy(url) if url else None, exceptions)


def _parse_proxy(url: str) -> Proxy:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        # 80 is the default of Go's net/http; curl takes 1080.
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        parts, host, port = None, None, 0
    # The message must not contain the URL, which may have a password.
    if parts is None or not host or parts.scheme != "http":
        raise ConfigError(
            "cannot use HTTPS_PROXY: expected http://HOST:PORT",
            remedy="set HTTPS_PROXY to http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
        )
    if parts.username is None:
        return Proxy(host, port)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return Proxy(host, port, f"Basic {base64.b64encode(login).decode()}")


def _matches(exception: str, host: str, port: int) -> bool:
    """Return whether an entry of NO_PROXY names the host: a domain, an address or a network."""
    if exception == "*":
        return True
    # An entry may have a port, as in Go (golang.org/x/net/http/httpproxy); an IPv6 address has
    # colons of its own.
    name, colon, listed_port = exception.rpartition(":")
    if colon and listed_port.isdigit() and "]" not in listed_port and name.count(":") == 0:
        if int(listed_port) != port:
            return False
        exception = name
    host = host.lower()
    try:
        network = ipaddress.ip_network(exception, strict=False)
        return ipaddress.ip_address(host) in network
    except ValueError:
        pass
    domain = exception.removeprefix("*").removeprefix(".")
    return host == domain or host.endswith(f".{domain}")
