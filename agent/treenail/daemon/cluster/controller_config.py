"""Certificate authorities and the cluster's own pull secret: beside updates, never with them."""

import json
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api.controllerconfig import NodeTrust
from treenail.clock import Clock
from treenail.config import names
from treenail.daemon.configuration.path_watcher import Watcher
from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import File, Files
from treenail.log import MessageId
from treenail.update.drift.drift_policy import fought

log = logging.getLogger(__name__)

Json = dict[str, object]

RECORD = "/var/lib/treenail/registry-cas.json"
LOOK_S = 10.0
"""How often the files are looked at where nobody tells that they were touched."""
_CA = "ca.crt"
_LIMIT = 1024 * 1024
_WORLD, _OWNER = 0o644, 0o600


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a ControllerConfig has nodes have."""

    files: Mapping[str, File]
    registries: frozenset[str]


class Trust:
    """Puts in place what the ControllerConfig hands to nodes, whatever updates are doing.

    What is not a certificate is refused and what was there stays. A ControllerConfig that is gone,
    or was never there, changes nothing. Directories of registries that it names no more are
    removed if they are ours. What somebody else changes or removes is put back, a few times an
    hour and no more: of two who write the same file, this one gives in, and says so.
    """

    def __init__(
        self,
        files: Files,
        watcher: Watcher,
        clock: Clock,
        *,
        pull_secret: str,
        restores_per_hour: int,
    ) -> None:
        """``pull_secret`` is where that of the cluster's own registry goes."""
        self._files = files
        self._watcher = watcher
        self._clock = clock
        self._pull_secret = pull_secret
        self._per_hour = restores_per_hour
        self._lock = threading.Lock()
        self._offered: Json | None = None
        self._wish: _Wish | None = None
        self._refused: tuple[str, ...] = ()
        self._placed: Mapping[str, File] = {}
        self._restored: dict[str, tuple[float, ...]] = {}
        self._look_at = float("-inf")
        self._problems: tuple[str, ...] = ()

    def offer(self, document: Json | None) -> None:
        """Take the ControllerConfig as it is now; for any thread."""
        with self._lock:
            self._offered = document or self._offered

    def refresh(self) -> tuple[str, ...]:
        """Have in place what was offered; returns what is wrong, a sentence each.

        Looks at the disk when there is something new, when a file was touched, and every `LOOK_S`
        seconds; in between it costs nothing.
        """
        with self._lock:
            document, self._offered = self._offered, None
        touched = self._watcher.take()
        now = self._clock.monotonic()
        if document is not None:
            self._take(document)
        elif not (touched.all or touched.paths) and now < self._look_at:
            return self._problems
        if self._wish is not None:
            self._look_at = now + LOOK_S
            self._problems = (*self._refused, *self._place(self._wish, now))
        else:
            self._problems = self._refused
        return self._problems

    def _take(self, document: Json) -> None:
        try:
            found = NodeTrust.from_json(document)
        except ConfigError as error:
            self._refused = (f"the ControllerConfig: {error}; what it handed out before stays",)
            return
        refused: list[str] = []
        files = {file.path: file for file in self._certificates(found, refused)}
        if found.pull_secret is not None:
            content = found.pull_secret.rstrip(b"\n") + b"\n"
            files[self._pull_secret] = File(self._pull_secret, content, _OWNER)
        self._refused = tuple(refused)
        self._wish = _Wish(files, frozenset(found.registry_cas))
        self._watcher.watch(files, below=())

    def _certificates(self, found: NodeTrust, refused: list[str]) -> Iterator[File]:
        before = self._wish.files if self._wish else {}
        wanted = {names.KUBELET_CA: found.kubelet_ca, names.CLOUD_CA: found.cloud_ca} | {
            _place_of(registry): content for registry, content in found.registry_cas.items()
        }
        for path, content in wanted.items():
            if not content:
                continue
            if _certifies(content):
                yield File(path, content, _WORLD)
                continue
            refused.append(
                f"what the ControllerConfig has for {path} holds no certificate that can be "
                "read; what is there stays"
            )
            if path in before:
                yield before[path]

    def _place(self, wish: _Wish, now: float) -> Iterator[str]:
        """Yields what is wrong."""
        try:
            ours = self._ours() | wish.registries
            self._remember(ours)
            changed = [file for file in wish.files.values() if not self._files.has(file)]
            again = {file.path for file in changed if self._placed.get(file.path) == file}
            lost = {path for path in again if self._fought(path, now)}
            due = [file for file in changed if file.path not in lost]
            if due:
                self._write(due, again)
            for path in again - lost:
                self._restored[path] = (*self._restored.get(path, ()), now)[-self._per_hour :]
            self._placed = wish.files
            for registry in sorted(ours - wish.registries):
                self._forget(registry)
            self._remember(wish.registries)
        except FileError as error:
            yield str(error)
            return
        for path in sorted(lost):
            yield f"something else keeps changing {path}; it is left as it is for an hour"

    def _fought(self, path: str, now: float) -> bool:
        return fought(self._restored.get(path, ()), self._per_hour, now)

    def _write(self, files: list[File], again: set[str]) -> None:
        self._files.write_all(files)
        for file in files:
            log.info(
                "somebody changed %s: put back what the cluster hands out"
                if file.path in again
                else "the cluster hands out new credentials: wrote %s",
                file.path,
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _forget(self, registry: str) -> None:
        place = _place_of(registry)
        if self._files.remove(place):
            log.info("the cluster trusts %s by itself no more: removed %s", registry, place)

    def _ours(self) -> frozenset[str]:
        content = self._files.read(RECORD, limit=_LIMIT)
        try:
            found: object = json.loads(content) if content else []
        except ValueError:
            found = []
        noted = found if isinstance(found, list) else []
        return frozenset(each for each in noted if isinstance(each, str))

    def _remember(self, registries: frozenset[str]) -> None:
        file = File(RECORD, json.dumps(sorted(registries)).encode(), _OWNER)
        if not self._files.has(file):
            self._files.write_all([file])


def _place_of(registry: str) -> str:
    return f"{names.REGISTRY_CAS}/{registry}/{_CA}"


def _certifies(content: bytes) -> bool:
    """Whether OpenSSL takes it for certificate authorities."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError):
        return False
    return True
