"""Certificates and the internal registry's pull secret, synced independently of updates."""

import json
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from treenail import clocks, errors
from treenail.api.controllerconfig import ControllerConfigContents
from treenail.config import node_paths
from treenail.daemon.configuration.path_watcher import PathWatcher
from treenail.encoding import json_text
from treenail.host.filesystem import atomic_files
from treenail.log import MessageId
from treenail.update.drift.drift_policy import is_contested

log = logging.getLogger(__name__)

Json = dict[str, object]

REGISTRIES_FILE = "/var/lib/treenail/registry-cas.json"
CHECK_INTERVAL_S = 10.0
"""Interval between checks of the files when inotify reports nothing."""
_CA_FILE = "ca.crt"
_LIMIT = 1024 * 1024
_WORLD_READABLE, _OWNER_ONLY = 0o644, 0o600


@dataclass(frozen=True, slots=True)
class _DesiredFiles:
    """The files that a ControllerConfig demands on each node."""

    files: Mapping[str, atomic_files.FileSpec]
    registries: frozenset[str]


class ControllerConfigSync:
    """Writes the files that the ControllerConfig demands on nodes, also during updates.

    Content that is no certificate is rejected, and the file on disk stays. A missing
    ControllerConfig changes nothing. A registry's directory is removed when the ControllerConfig
    no longer lists the registry and the agent created the directory. Files that another program
    changes are restored at most `restores_per_hour` times; then they are reported and left alone.
    """

    def __init__(
        self,
        files: atomic_files.HostFiles,
        watcher: PathWatcher,
        clock: clocks.Clock,
        *,
        pull_secret: str,
        restores_per_hour: int,
    ) -> None:
        """``pull_secret`` is the path for the pull secret of the cluster's own registry."""
        self._files = files
        self._watcher = watcher
        self._clock = clock
        self._pull_secret = pull_secret
        self._restores_per_hour = restores_per_hour
        self._lock = threading.Lock()
        self._document: Json | None = None
        self._desired: _DesiredFiles | None = None
        self._rejections: tuple[str, ...] = ()
        self._placed: Mapping[str, atomic_files.FileSpec] = {}
        self._restores: dict[str, tuple[float, ...]] = {}
        self._next_check = float("-inf")
        self._problems: tuple[str, ...] = ()

    def accept_document(self, document: Json | None) -> None:
        """Store the ControllerConfig for the next sync. May be called from any thread."""
        with self._lock:
            self._document = document or self._document

    def sync_files(self) -> tuple[str, ...]:
        """Write the files of the last accepted document; return one sentence for each problem.

        Reads the disk after a new document, after a file was touched, and every
        `CHECK_INTERVAL_S` seconds. Other calls cost nothing.
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
            contents = ControllerConfigContents.from_json(document)
        except errors.ConfigError as error:
            self._rejections = (
                f"cannot read the ControllerConfig: {error}; the files of its last version stay",
            )
            return
        rejections: list[str] = []
        files = {file.path: file for file in self._collect_certificates(contents, rejections)}
        if contents.pull_secret is not None:
            content = contents.pull_secret.rstrip(b"\n") + b"\n"
            files[self._pull_secret] = atomic_files.FileSpec(
                self._pull_secret, content, _OWNER_ONLY
            )
        self._rejections = tuple(rejections)
        self._desired = _DesiredFiles(files, frozenset(contents.registry_cas))
        self._watcher.watch_paths(files, directories=())

    def _collect_certificates(
        self, contents: ControllerConfigContents, rejections: list[str]
    ) -> Iterator[atomic_files.FileSpec]:
        before = self._desired.files if self._desired else {}
        wanted = {
            node_paths.KUBELET_CA: contents.kubelet_ca,
            node_paths.CLOUD_CA: contents.cloud_ca,
        } | {
            _registry_ca_path(registry): content
            for registry, content in contents.registry_cas.items()
        }
        for path, content in wanted.items():
            if not content:
                continue
            if _is_certificate(content):
                yield atomic_files.FileSpec(path, content, _WORLD_READABLE)
                continue
            rejections.append(
                f"cannot write {path}: the ControllerConfig's content for it is no PEM "
                "certificate; the file on disk stays"
            )
            if path in before:
                yield before[path]

    def _place_files(self, desired: _DesiredFiles, now: float) -> Iterator[str]:
        """Write the files; yield one sentence for each problem."""
        try:
            ours = self._read_registries() | desired.registries
            self._record_registries(ours)
            changed = [file for file in desired.files.values() if not self._files.has_file(file)]
            restored = {file.path for file in changed if self._placed.get(file.path) == file}
            contested = {path for path in restored if self._is_contested(path, now)}
            to_write = [file for file in changed if file.path not in contested]
            if to_write:
                self._write_files(to_write, restored)
            for path in restored - contested:
                self._restores[path] = (*self._restores.get(path, ()), now)[
                    -self._restores_per_hour :
                ]
            self._placed = desired.files
            for registry in sorted(ours - desired.registries):
                self._remove_registry(registry)
            self._record_registries(desired.registries)
        except errors.FileError as error:
            yield str(error)
            return
        for path in sorted(contested):
            yield f"another program keeps changing {path}; treenail leaves it alone for an hour"

    def _is_contested(self, path: str, now: float) -> bool:
        return is_contested(self._restores.get(path, ()), self._restores_per_hour, now)

    def _write_files(self, files: list[atomic_files.FileSpec], restored: set[str]) -> None:
        self._files.write_files(files)
        for file in files:
            log.info(
                "restored %s from the ControllerConfig after another program changed it"
                if file.path in restored
                else "wrote %s from the ControllerConfig",
                file.path,
                extra={"message_id": MessageId.CREDENTIALS_CHANGED},
            )

    def _remove_registry(self, registry: str) -> None:
        path = _registry_ca_path(registry)
        if self._files.remove_file(path):
            log.info("removed %s: the ControllerConfig no longer lists %s", path, registry)

    def _read_registries(self) -> frozenset[str]:
        content = self._files.read_file(REGISTRIES_FILE, limit=_LIMIT)
        try:
            document: object = json_text.parse_json(content) if content else []
        except ValueError:
            document = []
        registries = document if isinstance(document, list) else []
        return frozenset(registry for registry in registries if isinstance(registry, str))

    def _record_registries(self, registries: frozenset[str]) -> None:
        file = atomic_files.FileSpec(
            REGISTRIES_FILE, json.dumps(sorted(registries)).encode(), _OWNER_ONLY
        )
        if not self._files.has_file(file):
            self._files.write_files([file])


def _registry_ca_path(registry: str) -> str:
    return f"{node_paths.REGISTRY_CAS}/{registry}/{_CA_FILE}"


def _is_certificate(content: bytes) -> bool:
    """Return whether OpenSSL accepts the content as certificate authorities."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError):
        return False
    return True
