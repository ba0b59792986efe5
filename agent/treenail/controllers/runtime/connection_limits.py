"""Limits of connections: in all, of one client's address, and of the block around it. Pure."""

import ipaddress
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

IDLE_GRACE_S = 3.0
"""Time in which a client must send its request while its place is needed for another client."""
RESPONSE_GRACE_S = 10.0
"""Time in which it must receive its response while it holds more places than the other client."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one listener."""

    connections: int = 64
    per_address: int = 8
    """Of an IPv4 address, or of an IPv6 /64: a host chooses its address in that."""
    per_block: int = 48
    """Of an IPv4 /24, or of an IPv6 /48."""
    head_bytes: int = 32 * 1024
    """Of the head of a request; proxies of a page add cookies and tokens."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection that has a thread."""

    address: str
    blocks: tuple[str, str]
    since: float
    """When it was accepted, or when its request was complete; in monotonic seconds."""
    deadline: float
    excess: str = ""
    """The limit that it exceeds: the server refuses its request. Empty without one."""
    is_responding: bool = False
    end_reason: str = ""
    """Why the listener ended it; it has no place any longer. Empty before."""


def find_blocks(address: str) -> tuple[str, str]:
    """Return the narrow and the broad block of an address whose connections are limited."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address, address
    lengths = (32, 24) if parsed.version == 4 else (64, 48)
    if parsed.version == 6 and parsed.is_link_local:
        lengths = (128, 64)  # all hosts of a link are in fe80::/64
    narrow, broad = (str(ipaddress.ip_network((parsed, n), strict=False)) for n in lengths)
    return narrow, broad


def find_excess(
    connections: Collection[Connection], client: Connection, limits: ConnectionLimits
) -> tuple[str, Connection | None]:
    """Return the limit that one more client exceeds, and the connection to end for it, or None.

    Ended is the connection that waits longest for its request, of the address that holds the most
    places. Other clients keep theirs for a while.
    """
    narrow, broad = client.blocks
    of_block = [other for other in connections if other.blocks[1] == broad]
    of_address = [other for other in of_block if other.blocks[0] == narrow]
    for members, limit, scope in (
        (of_address, limits.per_address, " from this address"),
        (of_block, limits.per_block, " from this block of addresses"),
        (connections, limits.connections, ""),
    ):
        if len(members) >= limit:
            # The narrower limits have room, so that one end makes room for all.
            held = Counter(other.blocks[0] for other in members)
            victims = [
                other
                for other in members
                if _may_end(other, client, has_more=held[other.blocks[0]] > held[narrow] + 1)
            ]
            victims.sort(key=lambda other: (other.is_responding, -held[other.blocks[0]]))
            return f"more than {limit} connections{scope}", next(iter(victims), None)
    return "", None


def _may_end(connection: Connection, client: Connection, *, has_more: bool) -> bool:
    waited_s = client.since - connection.since
    if connection.is_responding:
        return has_more and waited_s >= RESPONSE_GRACE_S
    return has_more or waited_s >= IDLE_GRACE_S
