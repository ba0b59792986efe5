"""The Secret with access tokens: a cached copy, and changes by compare-and-set."""

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from treenail import clocks, errors
from treenail.api import decode
from treenail.api.component_names import PART_OF_LABELS
from treenail.controllers.runtime.informer_set import InformerSet, InformerView
from treenail.kube import api_client, resources, watch
from treenail.provisioning.tokens import tokens

log = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN_SECRET = "treenail-ignition-tokens"  # noqa: S105  # a name
"""Name of the Secret."""
CONFIRM_S = 5.0
"""Interval between reads of the Secret for tokens that the copy does not have: any client can send
one."""
_ATTEMPTS = 20
"""Attempts of one change. Each conflict means that another process succeeded."""

TableChange = Callable[[tokens.TokenTable], tuple[tokens.TokenTable, T]]
"""Returns the changed table and a result. It may run more than once, so it has no other effects."""


@dataclass(frozen=True, slots=True)
class ObservedTokens:
    """The Secret as it was last seen."""

    table: tokens.TokenTable | None = None
    """None when the Secret cannot be read."""
    problem: str = ""
    resource_version: str = ""
    """Empty when the Secret does not exist."""


@dataclass(slots=True)
class _QueuedChange(Generic[T]):
    apply: TableChange[T]
    result: T | None = None
    error: errors.TreenailError | None = None
    is_done: bool = False


class TokenStore:
    """Reads the Secret from memory, and changes it in the cluster. Thread-safe.

    Changes of many threads are written together: while one write is in progress, further changes
    wait and become the next write. Correctness does not depend on how current the copy is, because
    the API server refuses a write that is based on another version.
    """

    def __init__(self, client: api_client.Client, namespace: str, clock: clocks.Clock) -> None:
        self._client = client
        self._clock = clock
        self._contact_at = clock.monotonic()
        self._namespace = namespace
        self._lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._pending: list[_QueuedChange[object]] = []
        self._observed: ObservedTokens | None = None
        self._confirm_lock = threading.Lock()
        self._confirmed_at = float("-inf")
        self._is_confirmed = False
        self._parser = tokens.TokenTableParser(self.where)
        self._nodes: InformerView[bool] | None = None

    def add_to_informers(self, informers: InformerSet) -> None:
        """Watch the Secret and the Nodes. Call it before the informers start."""
        self._nodes = informers.add_view(watch.WatchScope(resources.NODES), lambda _: True)
        scope = watch.WatchScope(
            resources.SECRETS, self._namespace, field_selector=f"metadata.name={TOKEN_SECRET}"
        )
        key = f"{self._namespace}/{TOKEN_SECRET}"

        def observe_watched(secret: decode.Json) -> ObservedTokens:
            observed = self.observe_secret(secret)
            if observed.problem:
                log.error("%s", observed.problem)
            return observed

        view = informers.add_view(scope, observe_watched)

        def observe_absence() -> None:
            if view.find(key) is not None:
                return
            known = self._observed
            self.observe_secret(None)
            if known is None or known.resource_version:
                log.warning("%s does not exist: every access token is unknown", self.where)

        def observe_list() -> None:
            observe_absence()
            if (observed := view.find(key)) is not None:
                # Versions begin lower after etcd was restored from a backup.
                with self._lock:
                    self._observed = observed

        view.add_handler(lambda *_: observe_absence())
        view.add_list_handler(observe_list)

    @property
    def nodes(self) -> Collection[str] | None:
        """The names of all Nodes; None while they are unknown."""
        if self._nodes is None or self._nodes.listed_at is None:
            return None
        return self._nodes.get_all().keys()

    @property
    def where(self) -> str:
        """The Secret, for messages."""
        return f"Secret {self._namespace}/{TOKEN_SECRET}"

    @property
    def observed(self) -> ObservedTokens | None:
        """The last known content; None before the first read."""
        return self._observed

    @property
    def silence_s(self) -> float:
        """Seconds since the API server last showed the Secret, or since the start."""
        return self._clock.monotonic() - self._contact_at

    def note_contact(self) -> None:
        """Record that the watch of the Secret is current."""
        self._contact_at = self._clock.monotonic()

    def confirm_copy(self) -> bool:
        """Read the Secret, at most every `CONFIRM_S`; return False when that is impossible.

        A watch lags, and may be silent for 90 s before it counts as outdated. While one thread
        reads, others get the result before.
        """
        is_due = self._clock.monotonic() >= self._confirmed_at + CONFIRM_S
        if is_due and self._confirm_lock.acquire(blocking=False):
            try:
                self._is_confirmed = self._can_fetch()
                self._confirmed_at = self._clock.monotonic()
            finally:
                self._confirm_lock.release()
        return self._is_confirmed

    def observe_secret(self, secret: decode.Json | None) -> ObservedTokens:
        """Store what a watch or a response shows; None when the Secret does not exist."""
        self.note_contact()
        with self._lock:
            observed = self._parse_secret(secret)
            if not _is_older(observed, self._observed):
                self._observed = observed
        return observed

    def load(self) -> tokens.TokenTable:
        """Read the Secret from the cluster; raise `ClusterError` or `ConfigError`."""
        return _get_table(self._fetch_secret())

    def change(self, apply: TableChange[T]) -> T:
        """Change the table and return the result of the change.

        Nothing is written when the table stays equal; then the result is that of a read from the
        cluster. Raises `ClusterError`, `ConfigError` for an unreadable or full Secret, and what
        ``apply`` raises.
        """
        change: _QueuedChange[T] = _QueuedChange(apply)
        with self._lock:
            self._pending.append(cast("_QueuedChange[object]", change))
        with self._commit_lock:
            if not change.is_done:
                with self._lock:
                    batch, self._pending = self._pending, []
                self._commit_batch(batch)
        if change.error is not None:
            raise change.error
        return cast("T", change.result)

    def _commit_batch(self, batch: list[_QueuedChange[object]]) -> None:
        """Complete every change of the batch."""
        try:
            self._write_batch(batch)
        except errors.TreenailError as error:
            for change in batch:
                change.error = change.error or error
        except BaseException:
            # The other threads must not take a missing result for a success.
            for change in batch:
                change.error = change.error or errors.ClusterError(
                    f"cannot change {self.where}: another change of the same write failed"
                )
            raise
        finally:
            for change in batch:
                change.is_done = True

    def _write_batch(self, batch: list[_QueuedChange[object]]) -> None:
        base, is_copy = self._observed, True
        if base is None or base.table is None or not base.resource_version:
            base, is_copy = self._fetch_secret(), False
        for _ in range(_ATTEMPTS):
            before = _get_table(base)
            table = _apply_changes(batch, before)
            if table == before:
                if not is_copy:
                    return
                # No write shows whether the copy is old: a revoked token may still be in it.
                base, is_copy = self._fetch_secret(), False
                continue
            try:
                self.observe_secret(self._write_table(table, base.resource_version))
            except errors.NotFoundError as error:
                if not base.resource_version:
                    raise errors.ClusterError(
                        f"cannot create {self.where}: namespace {self._namespace} does not exist",
                        remedy="name the namespace of the server with --namespace, or install it: "
                        "treenail-controller manifests --enable serve | kubectl apply -f -",
                    ) from error
                base, is_copy = self._fetch_secret(), False
            except (errors.ConflictError, errors.AlreadyExistsError):
                base, is_copy = self._fetch_secret(), False
            else:
                return
        raise errors.ClusterError(
            f"cannot change {self.where}: other processes changed it {_ATTEMPTS} times meanwhile"
        )

    def _write_table(self, table: tokens.TokenTable, resource_version: str) -> decode.Json:
        data: decode.Json = {"data": tokens.format_token_table(table)}
        metadata: decode.Json = {"name": TOKEN_SECRET, "namespace": self._namespace}
        if not resource_version:
            metadata["labels"] = PART_OF_LABELS
            body: decode.Json = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **data}
            return self._client.create(resources.SECRETS, body, namespace=self._namespace)
        # The API server refuses the patch with 409 when the version differs.
        body = {"metadata": {"resourceVersion": resource_version}, **data}
        return self._client.patch(resources.SECRETS, TOKEN_SECRET, body, namespace=self._namespace)

    def _can_fetch(self) -> bool:
        try:
            self._fetch_secret()
        except errors.TreenailError as error:
            log.debug("cannot read %s: %s", self.where, error)
            return False
        return True

    def _fetch_secret(self) -> ObservedTokens:
        secret = self._client.find(resources.SECRETS, TOKEN_SECRET, namespace=self._namespace)
        return self.observe_secret(secret) if secret else ObservedTokens(tokens.TokenTable())

    def _parse_secret(self, secret: decode.Json | None) -> ObservedTokens:
        if secret is None:
            return ObservedTokens(tokens.TokenTable())
        metadata = decode.Fields.from_json(secret, self.where).get_object("metadata")
        version = metadata.get_text("resourceVersion")
        try:
            return ObservedTokens(self._parser.parse(secret), "", version)
        except errors.ConfigError as error:
            return ObservedTokens(None, str(error), version)


def _apply_changes(
    batch: list[_QueuedChange[object]], table: tokens.TokenTable
) -> tokens.TokenTable:
    for change in batch:
        try:
            table, change.result = change.apply(table)
            change.error = None
        except errors.TreenailError as error:
            change.error = error
    return table


def _get_table(observed: ObservedTokens) -> tokens.TokenTable:
    if observed.table is None:
        raise errors.ConfigError(
            observed.problem,
            remedy="restore the Secret from a backup, or delete it and create new tokens",
        )
    return observed.table


def _is_older(observed: ObservedTokens, known: ObservedTokens | None) -> bool:
    """Return whether the watch shows a version that a write of this process has replaced.

    An old copy would only cost a conflict.
    """
    versions = (observed.resource_version, known.resource_version if known else "")
    if not all(
        version.isascii() and version.isdigit() and len(version) <= 20 for version in versions
    ):
        return False
    return int(versions[0]) < int(versions[1])
