"""CA certificates in PEM: which of the anchors of a machine its programs trust."""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping

_PEM = re.compile(
    rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----([A-Za-z0-9+/=\s]+)"
    rb"-----END (?:TRUSTED |X509 )?CERTIFICATE-----"
)


def find_certificates(content: bytes) -> frozenset[str]:
    """Return the SHA-256 digests of the certificates in PEM; text that is none counts as none."""
    digests = set()
    for body in _PEM.findall(content):
        try:
            digests.add(hashlib.sha256(base64.b64decode(body)).hexdigest())
        except binascii.Error:
            continue
    return frozenset(digests)


def find_untrusted(anchors: Mapping[str, bytes], bundle: bytes) -> dict[str, int]:
    """Return how many certificates of each anchor file the bundle lacks; none for a complete one.

    ``bundle`` is the extracted bundle of CA certificates.
    """
    trusted = find_certificates(bundle)
    counts = {path: len(find_certificates(content) - trusted) for path, content in anchors.items()}
    return {path: count for path, count in counts.items() if count}


def compute_sources_digest(sources: Iterable[tuple[str, bytes]]) -> str:
    """Return a digest of the files, paths included, that a trust store is extracted from."""
    digest = hashlib.sha256()
    for path, content in sorted(sources):
        digest.update(f"{path}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()
