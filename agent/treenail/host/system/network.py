"""The machine's network, as far as a health check reads it."""

from treenail.errors import FileError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root

_IPV4_ROUTES = "/proc/net/route"
_IPV6_ROUTES = "/proc/net/ipv6_route"
# linux/route.h
_RTF_UP = 0x1
_RTF_REJECT = 0x200


class HostNetwork:
    """Reads the routing tables of the kernel below a root; every call reads again."""

    def __init__(self, root: Root) -> None:
        self._files = HostFiles(root)

    def has_default_route(self) -> bool | None:
        """Return whether a default route is up, of IPv4 or IPv6; None if that is unknown."""
        tables = (self._read_rows(_IPV4_ROUTES), self._read_rows(_IPV6_ROUTES))
        if tables == (None, None):
            return None
        ipv4, ipv6 = tables
        return any(_is_ipv4_default(row) for row in ipv4 or ()) or any(
            _is_ipv6_default(row) for row in ipv6 or ()
        )

    def _read_rows(self, path: str) -> tuple[list[str], ...] | None:
        try:
            content = self._files.read_file(path)
        except FileError:
            return None
        if content is None:
            return None
        return tuple(line.split() for line in content.decode("ascii", "replace").splitlines())


def _is_ipv4_default(row: list[str]) -> bool:
    # Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT (net/ipv4/fib_trie.c)
    return len(row) > 7 and row[1] == row[7] == "0" * 8 and _is_usable(row[3])


def _is_ipv6_default(row: list[str]) -> bool:
    # Destination, prefix length, source, prefix length, next hop, metric, reference count, use
    # count, flags, device (net/ipv6/route.c). The kernel adds a rejecting default route on lo.
    if len(row) < 10 or row[9] == "lo":
        return False
    return row[0] == "0" * 32 and row[1] == "00" and _is_usable(row[8])


def _is_usable(flags: str) -> bool:
    try:
        value = int(flags, 16)
    except ValueError:
        return False
    return bool(value & _RTF_UP) and not value & _RTF_REJECT
