"""Certificate authorities and the cluster's own pull secret: beside updates, never with them."""

import json
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail.api.controllerconfig import ControllerConfigContents
from treenail.clock import Clock
from treenail.config import names
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.errors import ConfigError, FileError
from treenail.host.filesystem.files import FileSpec, HostFiles
from treenail.log import MessageId
from treenail.update.drift.drift_policy import is_contested

log = logging.getLogger(__name__)

Json = dict[str, object]

REGISTRIES_FILE = "/var/lib/treenail/registry-cas.json"
CHECK_INTERVAL_S = 10.0
"""How often the files are looked at where nobody tells that they were touched."""
_CA_FILE = "ca.crt"
_LIMIT = 1024 * 1024
_WORLD_READABLE, _OWNER_ONLY = 0o644, 0o600


@dataclass(frozen=True, slots=True)
class _DesiredFiles:
    """What a ControllerConfig has nodes have."""

    files: Mapping[str, FileSpec]
    registries: frozenset[str]


class ControllerConfigSync:
    """Puts in place what the ControllerConfig hands to nodes, whatever updates are doing.

    What is not a certificate is refused and what was there stays. A ControllerConfig that is gone,
    or was never there, changes nothing. Directories of registries that it names no more are
    removed if they are ours. What somebody else changes or removes is put back, a few times an
    hour and no more: of two who write the same file, this one gives in, and says so.
    """

    def __init__(
        self,
        files: HostFiles,
        watcher: PathWatcher,
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
        self._restores_per_hour = restores_per_hour
        self._lock = threading.Lock()
        self._document: Json | None = None
        self._desired: _DesiredFiles | None = None
        self._rejections: tuple[str, ...] = ()
        self._placed: Mapping[str, FileSpec] = {}
        self._restores: dict[str, tuple[float, ...]] = {}
        self._next_check = float("-inf")
        self._problems: tuple[str, ...] = ()

    def accept_document(self, document: Json | None) -> None:
        """Take the ControllerConfig as it is now; for any thread."""
        with self._lock:
            self._document = document or self._document

    def sync_files(self) -> tuple[str, ...]:
        """Have in place what was offered; returns what is wrong, a sentence each.

        Looks at the disk when there is something new, when a file was touched, and every `CHECK_INTERVAL_S`
        seconds; in between it costs nothing.
        """
        with self._lock:
            document, self._document = self._document, None
        touched = self._watcher.take_touched()
        now = self._clock.monotonic()
        if document is not None:
            self._parse_document(document)
        elif not (touched.is_incomplete or touched.paths) and now < self._next_check:
            return self._problems
        if self._desired is not None:
            self._next_check = now + CHECK_INTERVAL_S
            self._problems = (*self._rejections, *self._place_files(self._desired, now))
        else:
            self._problems = self._rejections
        return self._problems

    def _parse_document(self, document: Json) -> None:
        try:
            found = ControllerConfigContents.from_json(document)
        except ConfigError as error:
            self._rejections = (f"the ControllerConfig: {error}; what it handed out before stays",)
            return
        refused: list[str] = []
        files = {file.path: file for file in self._collect_certificates(found, refused)}
        if found.pull_secret is not None:
            content = found.pull_secret.rstrip(b"\n") + b"\n"
            files[self._pull_secret] = FileSpec(self._pull_secret, content, _OWNER_ONLY)
        self._rejections = tuple(refused)
        self._desired = _DesiredFiles(files, frozenset(found.registry_cas))
        self._watcher.watch_paths(files, directories=())

    def _collect_certificates(
        self, found: ControllerConfigContents, rejections: list[str]
    ) -> Iterator[FileSpec]:
        before = self._desired.files if self._desired else {}
        wanted = {names.KUBELET_CA: found.kubelet_ca, names.CLOUD_CA: found.cloud_ca} | {
            _registry_ca_path(registry): content for registry, content in found.registry_cas.items()
        }
        for path, content in wanted.items():
            if not content:
                continue
            if _is_certificate(content):
                yield FileSpec(path, content, _WORLD_READABLE)
                continue
            rejections.append(
                f"what the ControllerConfig has for {path} holds no certificate that can be "
                "read; what is there stays"
            )
            if path in before:
                yield before[path]

    def _place_files(self, desired: _DesiredFiles, now: float) -> Iterator[str]:
        """Yields what is wrong."""
        try:
            ours = self._read_registries() | desired.registries
            self._record_registries(ours)
            changed = [file for file in desired.files.values() if not self._files.has_file(file)]
            again = {file.path for file in changed if self._placed.get(file.path) == file}
            lost = {path for path in again if self._is_contested(path, now)}
            due = [file for file in changed if file.path not in lost]
            if due:
                self._write_files(due, again)
            for path in again - lost:
                self._restores[path] = (*self._restores.get(path, ()), now)[
                    -self._restores_per_hour :
                ]
            self._placed = desired.files
            for registry in sorted(ours - desired.registries):
                self._remove_registry(registry)
            self._record_registries(desired.registries)
        except FileError as error:
            yield str(error)
            return
        for path in sorted(lost):
            yield f"something else keeps changing {path}; it is left as it is for an hour"

    def _is_contested(self, path: str, now: float) -> bool:
        return is_contested(self._restores.get(path, ()), self._restores_per_hour, now)

    def _write_files(self, files: list[FileSpec], again: set[str]) -> None:
        self._files.write_files(files)
        for file in files:
            log.info(
                "somebody changed %s: put back what the cluster hands out"
                if file.path in again
                else "the cluster hands out new credentials: wrote %s",
                file.path,
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _remove_registry(self, registry: str) -> None:
        place = _registry_ca_path(registry)
        if self._files.remove_file(place):
            log.info("the cluster trusts %s by itself no more: removed %s", registry, place)

    def _read_registries(self) -> frozenset[str]:
        content = self._files.read_file(REGISTRIES_FILE, limit=_LIMIT)
        try:
            found: object = json.loads(content) if content else []
        except ValueError:
            found = []
        noted = found if isinstance(found, list) else []
        return frozenset(each for each in noted if isinstance(each, str))

    def _record_registries(self, registries: frozenset[str]) -> None:
        file = FileSpec(REGISTRIES_FILE, json.dumps(sorted(registries)).encode(), _OWNER_ONLY)
        if not self._files.has_file(file):
            self._files.write_files([file])


def _registry_ca_path(registry: str) -> str:
    return f"{names.REGISTRY_CAS}/{registry}/{_CA_FILE}"


def _is_certificate(content: bytes) -> bool:
    """Whether OpenSSL takes it for certificate authorities."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError):
        return False
    return True
