"""The CA certificates that programs of this machine trust, extracted from its anchors.

An image brings anchors in /etc, and OSTree's merge keeps the bundles in /etc that the machine
extracted before. At a boot nothing extracts them again: coreos-update-ca-trust.service has
ConditionFirstBoot=true (fedora-coreos-config).
"""

import logging
from collections.abc import Iterator

from treenail import errors
from treenail.config import trust_anchors
from treenail.host.machine import Machine

log = logging.getLogger(__name__)

UPDATE_UNIT = "coreos-update-ca-trust.service"
PROGRAM = "/usr/bin/update-ca-trust"
ANCHORS = "/etc/pki/ca-trust/source/anchors"
BUNDLE = "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"
MARKER = "/var/lib/treenail/trust-store"
"""The digest of the sources that were extracted last."""
# update-ca-trust(8). A new OS image brings other certificates of the vendor.
_SOURCES = (
    ANCHORS,
    "/etc/pki/ca-trust/source",
    "/etc/pki/ca-trust/source/blocklist",
    "/usr/share/pki/ca-trust-source",
    "/usr/share/pki/ca-trust-source/anchors",
    "/usr/share/pki/ca-trust-source/blocklist",
)
_SUBDIRECTORIES = frozenset(path.rpartition("/")[2] for path in _SOURCES)
_LIMIT = 8 * 1024 * 1024
_TIMEOUT_S = 60.0
CHECK_INTERVAL_S = 600.0


class TrustStore:
    """Extracts the trust store when its sources changed. For one thread.

    A machine that never had an anchor is left alone.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._files = machine.files
        self._next_check = float("-inf")
        self._problems: tuple[str, ...] = ()
        self._extracted = ""
        """The digest of the sources that this process extracted."""

    def sync_store(self) -> tuple[str, ...]:
        """Check the store every `CHECK_INTERVAL_S` seconds, and update it if it is outdated.

        Returns one sentence for each problem of the last check.
        """
        now = self._machine.clock.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            try:
                self._problems = self.update_store()
            except errors.HostError as error:
                self._problems = (str(error),)
        return self._problems

    def update_store(self) -> tuple[str, ...]:
        """Update the store if it is outdated; return a sentence for each anchor that it rejects.

        Raises `HostError`.
        """
        known = self._read_marker()
        if not known and not self._files.list_directory(ANCHORS):
            return ()
        sources = dict(self._iter_sources())
        digest = trust_anchors.compute_sources_digest(sources.items())
        is_current = known in ("", digest) and not self._find_untrusted(sources)
        # A certificate that the program rejects would be extracted at each check.
        if not is_current and self._extracted != digest:
            self._extract_store()
            self._extracted = digest
        if known != digest:
            self._files.write_file(MARKER, f"{digest}\n".encode(), mode=0o600)
        return tuple(
            f"the trust store lacks {count} certificates of {path}: update-ca-trust rejects them"
            for path, count in self._find_untrusted(sources).items()
        )

    def _extract_store(self) -> None:
        if not self._files.has_entry(PROGRAM):
            raise errors.CommandError(
                f"cannot update the trust store: this machine has no {PROGRAM}",
                remedy="add the package ca-certificates to the image",
            )
        program = str(self._machine.root.resolve_path(PROGRAM))
        try:
            # Outside the sandbox of the agent's unit: the program sets owners and labels.
            self._machine.unsandboxed.run_command((program, "extract"), timeout_s=_TIMEOUT_S)
        except errors.HostError as error:
            raise errors.CommandError(
                f"cannot update the trust store: {error}", remedy=f"run: {PROGRAM} extract"
            ) from error
        log.info("updated the trust store from the anchors in %s", ANCHORS)

    def _find_untrusted(self, sources: dict[str, bytes]) -> dict[str, int]:
        bundle = self._files.read_file(BUNDLE, limit=_LIMIT) or b""
        anchors = {
            path: content for path, content in sources.items() if path.startswith(f"{ANCHORS}/")
        }
        return trust_anchors.find_untrusted(anchors, bundle)

    def _iter_sources(self) -> Iterator[tuple[str, bytes]]:
        for directory in _SOURCES:
            for name in self._files.list_directory(directory):
                if name not in _SUBDIRECTORIES:
                    path = f"{directory}/{name}"
                    yield path, self._files.read_file(path, limit=_LIMIT) or b""

    def _read_marker(self) -> str:
        return (self._files.read_file(MARKER) or b"").decode("ascii", "replace").strip()
