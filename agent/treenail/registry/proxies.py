"""Proxies of HTTPS_PROXY and NO_PROXY."""

import base64
import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from treenail.errors import ConfigError

_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_NETWORK = re.compile(r"[0-9a-f.:]+/[0-9]{1,3}")
_WITH_PORT = re.compile(r"([^:]+|\[[^]]*\]):([0-9]{1,5})")


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
        """Return the proxy for a host; None for a direct connection.

        The rules are those of Go's golang.org/x/net/http/httpproxy, which skopeo and buildah use.
        """
        host = host.lower()
        address = _parse_address(host)
        if self.proxy is None or host == "localhost" or (address and address.is_loopback):
            return None
        if any(_matches(exception, host, port, address) for exception in self.exceptions):
            return None
        return self.proxy


def make_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables under both their names; none if there is no proxy.

    As in Go, the upper-case name comes first. curl reads `http_proxy` in lower case only.
    """
    values = {name: environment.get(name) or environment.get(name.lower(), "") for name in _NAMES}
    if not (values["HTTP_PROXY"] or values["HTTPS_PROXY"]):
        return {}
    both = {name: value for name, value in values.items() if value}
    return {**both, **{name.lower(): value for name, value in both.items()}}


def read_proxy_settings(environment: Mapping[str, str]) -> ProxySettings:
    """Read the variables; raise `ConfigError` for a proxy that cannot be used."""
    variables = make_variables(environment)
    url = variables.get("HTTPS_PROXY", "")
    listed = variables.get("NO_PROXY", "").lower().split(",")
    exceptions = tuple(part.strip() for part in listed if part.strip())
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
            "cannot use the proxy of HTTPS_PROXY, or of spec.proxy.httpsProxy in the "
            "ControllerConfig: expected http://HOST:PORT",
            remedy="name it as http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
        )
    if parts.username is None:
        return Proxy(host, port)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return Proxy(host, port, f"Basic {base64.b64encode(login).decode()}")


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _matches(
    exception: str,
    host: str,
    port: int,
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None,
) -> bool:
    """Return whether an entry of NO_PROXY names the host: a domain, an address or a network."""
    if exception == "*":
        return True
    if _NETWORK.fullmatch(exception):
        with suppress(ValueError):
            return address is not None and address in ipaddress.ip_network(exception, strict=False)
    if with_port := _WITH_PORT.fullmatch(exception):
        exception = with_port[1].removeprefix("[").removesuffix("]")
        if int(with_port[2]) != port:
            return False
    if address is not None:
        return _parse_address(exception) == address
    domain = exception.removeprefix("*") if exception.startswith("*.") else exception
    # `.example.com` does not name example.com itself.
    return host == domain or host.endswith(f".{domain.removeprefix('.')}")
