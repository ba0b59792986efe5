"""Proxy of the node, which programs use that pull images."""

import logging
from collections.abc import Mapping

from treenail.errors import FileError
from treenail.host.filesystem.atomic_files import HostFiles

log = logging.getLogger(__name__)

PROXY_FILE = "/etc/mco/proxy.env"
"""The Machine Config Operator writes it; on other clusters a MachineConfig may."""
_LIMIT = 64 * 1024
_NAMES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"})


def read_proxies(files: HostFiles) -> Mapping[str, str]:
    """Return the proxy variables of `PROXY_FILE`; none without the file.

    Read it before each program: an update may write the file while the agent runs.
    """
    try:
        text = (files.read_file(PROXY_FILE, limit=_LIMIT) or b"").decode("utf-8", "replace")
    except FileError as error:
        log.warning("cannot read the proxy of this node: %s", error)
        return {}
    return parse_proxies(text)


def parse_proxies(text: str) -> Mapping[str, str]:
    """Return the proxy variables of an environment file of systemd (systemd.exec(5))."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, is_set, value = line.strip().partition("=")
        if is_set and name.upper() in _NAMES:
            value = value.strip()
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            values[name] = value[1:-1] if is_quoted else value
    return values
