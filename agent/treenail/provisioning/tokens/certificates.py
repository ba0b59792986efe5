"""Certificates of kubelets by the name of their Node, for as long as each one can be valid.

A cluster has one table, in the Secret of the access tokens: one write decides about a name and a
use. It has a key of its own there, which earlier versions keep as it is.
"""

import base64
import json
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from treenail.errors import ConfigError
from treenail.provisioning.tokens import tokens

LIFETIME_S = 365 * 86_400.0
"""Default of --cluster-signing-duration of kube-controller-manager, for a certificate that is not
signed yet, and for those that the kubelet of a Node may have renewed."""
MAX_CERTIFICATES = 16_000
_FORMAT, _MAX_TIME = 1, 1e12
_MAX_BYTES = 512 * 1024
_PARSED_BYTES = 8 * 1024 * 1024
_ROW = re.compile(
    r"([a-z0-9.-]{1,253}) ([a-z0-9./-]{0,507}) ([a-z0-9]{0,20}) ([A-Za-z0-9_-]{0,12}) ([0-9]{1,12})"
)
CertificateID = tuple[str, str, str]  # node, identity, key


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate that was approved: who has it holds the identity of the Node."""

    node: str
    identity: str = ""
    """ID of the bootstrap token, or POOL/NODE for a token with --machine; empty without a token."""
    token: str = ""
    key: str = ""
    """Digest of the public key; empty if it is unknown."""
    expires: float = 0.0
    """Seconds since the epoch."""

    @property
    def id(self) -> CertificateID:
        return self.node, self.identity, self.key


@dataclass(frozen=True, slots=True)
class CertificateTable:
    """The certificates that can be valid, by the name of their Node."""

    since: float = 0.0
    """Time from which on the table has the name of each Node; 0 before the first write."""
    rows: tuple[IssuedCertificate, ...] = ()

    def put(self, row: IssuedCertificate) -> "CertificateTable":
        """Return the table with a certificate added or replaced; raise `ConfigError` if full."""
        others = tuple(old for old in self.rows if old.id != row.id)
        if len(others) >= MAX_CERTIFICATES:
            raise ConfigError(
                f"cannot record the certificate of node {row.node}: {len(others)} are valid",
                remedy="shorten --cluster-signing-duration of kube-controller-manager",
            )
        return replace(self, rows=(*others, row))

    def note_nodes(
        self, nodes: Collection[str], now: float, deleted: Collection[str] = ()
    ) -> "CertificateTable":
        """Return the table with the names of Nodes that exist, or were ``deleted`` just now.

        Kubelets renew their certificates: the name stays taken after the deletion of the Node.
        """
        until = now + LIFETIME_S
        # One write for a Node in half a year.
        old = {row.node for row in self.rows if row.expires < now + LIFETIME_S / 2}
        due = {*deleted} | (old & {*nodes})
        rows = [
            replace(row, expires=max(row.expires, until)) if row.node in due else row
            for row in self.rows
        ]
        new = {*nodes, *deleted} - {row.node for row in rows}
        rows += [IssuedCertificate(name, expires=until) for name in sorted(new)]
        return CertificateTable(self.since or now, tuple(rows[:MAX_CERTIFICATES]))


def read_certificates(table: tokens.TokenTable, now: float) -> CertificateTable:
    """Return the certificates that can be valid; raise `ConfigError`, without any content."""
    found = _parse_table(table.certificates) if table.certificates else CertificateTable()
    rows = [row for row in found.rows if row.expires > now]
    known = {row.node for row in rows}
    # Earlier versions recorded only names, in the access tokens.
    rows += [
        IssuedCertificate(node, record.name, record.name, expires=now + LIFETIME_S)
        for record in table.tokens.values()
        for node in record.nodes
        if node not in known
    ]
    return replace(found, rows=tuple(rows))


def store_certificates(table: tokens.TokenTable, found: CertificateTable) -> tokens.TokenTable:
    """Return the token table with these certificates; raise `ConfigError` if they are too large."""
    rows = [
        f"{row.node} {row.identity} {row.token} {row.key} {int(row.expires)}" for row in found.rows
    ]
    document = {"format": _FORMAT, "since": int(found.since), "certificates": rows}
    content = zlib.compress(json.dumps(document).encode(), 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"cannot record {len(rows)} certificates: their names are too long")
    return replace(table, certificates=base64.b64encode(content).decode("ascii"))


def record_nodes(
    table: tokens.TokenTable, nodes: Collection[str] | None, now: float
) -> tokens.TokenTable:
    """Return the table with the names of Nodes; ``nodes`` is None while they are unknown.

    A server records them before it issues a credential: no request for a certificate is older than
    the table. The approval reports an unreadable table.
    """
    try:
        found = read_certificates(table, now)
        noted = found if nodes is None else found.note_nodes(nodes, now)
        return table if noted == found else store_certificates(table, noted)
    except ConfigError:
        return table


# Each claim, and each decision about a request, needs the table; most of them leave it as it is.
@lru_cache(maxsize=2)
def _parse_table(text: str) -> CertificateTable:
    try:
        content = base64.b64decode(text, validate=True)
        document = json.loads(zlib.decompressobj().decompress(content, _PARSED_BYTES))
        rows = tuple(map(_parse_row, document["certificates"]))
        found = CertificateTable(float(int(document["since"])), rows)
        is_valid = (
            document.keys() == {"format", "since", "certificates"} and found.since < _MAX_TIME
        )
        is_valid = is_valid and document["format"] == _FORMAT
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, zlib.error):
        found, is_valid = CertificateTable(), False
    if not is_valid or len(found.rows) > MAX_CERTIFICATES:
        raise ConfigError(
            f"cannot read the certificates in the Secret of access tokens: not of format {_FORMAT}",
            remedy="restore the Secret from a backup",
        )
    return found


def _parse_row(text: str) -> IssuedCertificate:
    match = _ROW.fullmatch(text)
    if match is None:
        raise ValueError
    node, identity, token, key, expires = match.groups()
    return IssuedCertificate(node, identity, token, key, float(expires))
