"""Which machines got their config and their image from the bootstrap host.

A machine that gets its config and no image never joins, and cannot say why. Only the bootstrap host
sees what it did last.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from threading import Lock

from treenail.provisioning.server.access import RequestOutcome, RequestRow

_PULL = re.compile(
    rb'^(\S+) \S+ \S+ \[[^\]]*\] "GET /v2/\S+/manifests/sha256:[0-9a-f]{64} \S+" 200 ',
    re.MULTILINE,
)
"""A line of docker-registry's access log, in the format of Apache."""
_CHUNK = 1024 * 1024
_NAMES_LIMIT = 5


@dataclass(slots=True)
class RegistryPulls:
    """Reads the access log of docker-registry as it grows."""

    log: Path
    addresses: set[str] = field(default_factory=set)
    _offset: int = 0

    def update(self) -> None:
        """Read what is new; a log that cannot be read has nothing new."""
        with suppress(OSError), self.log.open("rb") as file:
            if self.log.stat().st_size < self._offset:
                self._offset = 0  # The log was rotated.
            while True:
                file.seek(self._offset)
                content = file.read(_CHUNK)
                complete = content[: content.rfind(b"\n") + 1]
                if not complete:
                    return
                self._offset += len(complete)
                found = (match.group(1) for match in _PULL.finditer(complete))
                self.addresses.update(each.decode("ascii", "replace") for each in found)


class MachineContacts:
    """A `treenail.provisioning.server.access.ConfigRequestLog`. Thread-safe."""

    def __init__(self, registry_log: Path) -> None:
        self._pulls = RegistryPulls(registry_log)
        self._lock = Lock()
        self._served: set[str] = set()
        self._refused: dict[str, str] = {}
        """Reasons by address; empty for a config that was not ready."""

    def record(self, row: RequestRow) -> None:
        """Record a request for a config."""
        with self._lock:
            if row.outcome is RequestOutcome.SERVED:
                self._served.add(row.address)
                self._refused.pop(row.address, None)
            elif row.outcome is not RequestOutcome.CHECKED and row.address not in self._served:
                is_early = row.status == HTTPStatus.SERVICE_UNAVAILABLE
                self._refused[row.address] = "" if is_early else row.reason or str(row.outcome)

    def describe(self, registry: str) -> str:
        """Say what machines got last; ``registry`` is ``HOST:PORT``, empty without one."""
        with self._lock:
            self._pulls.update()
            pulled, served = sorted(self._pulls.addresses), sorted(self._served)
            refused = dict(self._refused)
        if registry and pulled:
            return f"{_join(pulled)} pulled the image from {registry}, and must boot it"
        if served and registry:
            return (
                f"{_join(served)} got the config, and no machine has pulled its image from "
                f"{registry}: check on the machine that it reaches this address, and read: "
                "journalctl -u treenail-firstboot"
            )
        if served:
            return f"{_join(served)} got the config"
        for address, why in sorted(refused.items()):
            if why:
                return f"{address} requested the config, and got none: {why}"
        if refused:
            return f"{_join(sorted(refused))} requested the config before it was ready"
        return "no machine has requested a config from this process"


def _join(addresses: Sequence[str]) -> str:
    more = len(addresses) - _NAMES_LIMIT
    return ", ".join(addresses[:_NAMES_LIMIT]) + (f" and {more} more" if more > 0 else "")
