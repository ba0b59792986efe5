"""Certificate authorities and the cluster's own pull secret: beside updates, never with them."""

import json
import logging
import ssl
import threading
from collections.abc import Iterator
from typing import Protocol

from treenail.api.controllerconfig import NodeTrust
from treenail.config import names
from treenail.daemon.ports import Credentials
from treenail.errors import ConfigError, FileError
from treenail.host.files import File, Files
from treenail.log import MessageId

log = logging.getLogger(__name__)

Json = dict[str, object]

RECORD = "/var/lib/treenail/registry-cas.json"
_CA = "ca.crt"
_LIMIT = 1024 * 1024
_WORLD, _OWNER = 0o644, 0o600


class Source(Protocol):
    """Credentials that are put in place."""

    def refresh(self) -> tuple[str, ...]:
        """Put them in place; returns what is wrong, a sentence each."""


class InOrder:
    """Pull secrets, and what is put in place before them."""

    def __init__(self, *before: Source, pull_secrets: Credentials) -> None:
        self._before = before
        self._pull_secrets = pull_secrets

    def refresh(self) -> tuple[str, ...]:
        """Put all in place; returns what is wrong with any, a sentence each."""
        sources = (*self._before, self._pull_secrets)
        return tuple(problem for source in sources for problem in source.refresh())

    def refused(self, image: str) -> bool:
        """The image's registry refused the login; whether there is now another to try."""
        return self._pull_secrets.refused(image)

    def proven(self, image: str) -> None:
        """The image was pulled with the login that is in place."""
        self._pull_secrets.proven(image)


class Trust:
    """Puts in place what the ControllerConfig hands to nodes, whatever updates are doing.

    What is not a certificate is refused and what was there stays. A ControllerConfig that is gone,
    or was never there, changes nothing. Directories of registries that it names no more are
    removed if they are ours.
    """

    def __init__(self, files: Files, *, pull_secret: str) -> None:
        """``pull_secret`` is where that of the cluster's own registry goes."""
        self._files = files
        self._pull_secret = pull_secret
        self._lock = threading.Lock()
        self._document: Json | None = None
        self._done: Json | None = None
        self._problems: tuple[str, ...] = ()

    def offer(self, document: Json | None) -> None:
        """Take the ControllerConfig as it is now; for any thread."""
        with self._lock:
            if document is not None:
                self._document = document

    def refresh(self) -> tuple[str, ...]:
        """Put in place what was offered; returns what is wrong, a sentence each."""
        with self._lock:
            document = self._document
        if document is None:
            return ()
        if document == self._done:
            return self._problems
        problems: list[str] = []
        failed = False
        try:
            found = NodeTrust.from_json(document)
        except ConfigError as error:
            problems.append(f"the ControllerConfig: {error}; what it handed out before stays")
        else:
            failed = not self._place(found, problems)
        self._problems = tuple(problems)
        if not failed:
            self._done = document
        return self._problems

    def _place(self, found: NodeTrust, problems: list[str]) -> bool:
        """Whether nothing is left to be tried again."""
        try:
            files = [*self._certificates(found, problems)]
            if found.pull_secret is not None:
                content = found.pull_secret.rstrip(b"\n") + b"\n"
                files.append(File(self._pull_secret, content, _OWNER))
            ours = self._ours() | found.registry_cas.keys()
            self._remember(ours)
            changed = [file for file in files if not self._files.has(file)]
            if changed:
                self._files.write_all(changed)
                log.info(
                    "the cluster hands out new credentials: wrote %s",
                    ", ".join(file.path for file in changed),
                    extra={"message_id": MessageId.CREDENTIALS_CHANGED},
                )
            for registry in sorted(ours - found.registry_cas.keys()):
                self._forget(registry)
            self._remember(set(found.registry_cas))
        except FileError as error:
            problems.append(str(error))
            return False
        return True

    def _certificates(self, found: NodeTrust, problems: list[str]) -> Iterator[File]:
        wanted = {names.KUBELET_CA: found.kubelet_ca, names.CLOUD_CA: found.cloud_ca} | {
            _place_of(registry): content for registry, content in found.registry_cas.items()
        }
        for path, content in wanted.items():
            if not content:
                continue
            if _certifies(content):
                yield File(path, content, _WORLD)
            else:
                problems.append(
                    f"what the ControllerConfig has for {path} holds no certificate that can be "
                    "read; what is there stays"
                )

    def _forget(self, registry: str) -> None:
        place = _place_of(registry)
        if self._files.remove(place):
            log.info("the cluster trusts %s by itself no more: removed %s", registry, place)

    def _ours(self) -> set[str]:
        content = self._files.read(RECORD, limit=_LIMIT)
        try:
            found: object = json.loads(content) if content else []
        except ValueError:
            found = []
        return (
            {each for each in found if isinstance(each, str)} if isinstance(found, list) else set()
        )

    def _remember(self, registries: set[str]) -> None:
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
