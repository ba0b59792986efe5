"""The log of requests, in a ConfigMap that all servers of a cluster share."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail import clocks, errors, retry
from treenail.api.component_names import PART_OF_LABELS
from treenail.kube import api_client, resources
from treenail.provisioning.machines import logged_requests

log = logging.getLogger(__name__)

REQUEST_CONFIGMAP = "treenail-ignition-requests"
"""ConfigMap with the requests of the last day, in the namespace of the server."""
WRITE_PERIOD_S = 5.0
"""Time between two writes: each one stores the whole log again."""
_MAX_PAUSE_S = 60.0
_MAX_CONFLICTS = 8
_END_S = 5.0

RowChange = Callable[
    [tuple[logged_requests.LoggedRequest, ...]], tuple[logged_requests.LoggedRequest, ...]
]
"""Returns the rows with changed checks."""


class RequestStore:
    """The ConfigMap of the log. Writes are compare-and-set, so that servers lose no row."""

    def __init__(self, client: api_client.Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._known: tuple[str, tuple[logged_requests.LoggedRequest, ...]] = ("", ())

    def read_rows(self) -> tuple[logged_requests.LoggedRequest, ...]:
        """Read all rows, oldest first; raise `ClusterError`."""
        return self._parse_rows(
            self._client.get(resources.CONFIGMAPS, self._name, namespace=self._namespace)
        )

    def change_rows(self, change: RowChange) -> tuple[logged_requests.LoggedRequest, ...]:
        """Write the changed rows, and return them; raise `ClusterError`.

        ``change`` is called again after a write of another server.
        """
        for _ in range(_MAX_CONFLICTS - 1):
            try:
                return self._try_change(change)
            except errors.ConflictError:
                continue
        return self._try_change(change)

    def _try_change(self, change: RowChange) -> tuple[logged_requests.LoggedRequest, ...]:
        try:
            configmap = self._client.get(
                resources.CONFIGMAPS, self._name, namespace=self._namespace
            )
        except errors.NotFoundError:
            self._create_configmap()
            raise errors.ConflictError(f"ConfigMap {self._name} was created") from None
        data = resources.get_object(configmap, "data")
        after = change(self._parse_rows(configmap))
        new = {**data, **logged_requests.format_requests(after)}
        if data != new:
            body = {**configmap, "data": new}
            written = self._client.update(
                resources.CONFIGMAPS, self._name, body, namespace=self._namespace
            )
            self._known = _get_version(written), after
        return after

    def _parse_rows(self, configmap: api_client.Json) -> tuple[logged_requests.LoggedRequest, ...]:
        """Parse the rows, unless the version is that of the last read or write.

        1,000 rows take 45 ms of CPU time, and a server reads them every 30 s.
        """
        version, rows = self._known
        if not version or version != _get_version(configmap):
            rows = logged_requests.parse_requests(resources.get_object(configmap, "data"))
            self._known = _get_version(configmap), rows
        return rows

    def _create_configmap(self) -> None:
        body: api_client.Json = {
            "apiVersion": resources.CONFIGMAPS.api_version,
            "kind": resources.CONFIGMAPS.kind,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": PART_OF_LABELS,
            },
        }
        try:
            self._client.create(resources.CONFIGMAPS, body, namespace=self._namespace)
        except errors.ForbiddenError as error:
            raise errors.NotFoundError(
                f"cannot find ConfigMap {self._namespace}/{self._name}",
                remedy=f"run: kubectl create configmap -n {self._namespace} {self._name}",
            ) from error


def _get_version(configmap: api_client.Json) -> str:
    return str(resources.get_object(configmap, "metadata").get("resourceVersion") or "")


class RequestLogWriter:
    """A `treenail.provisioning.machines.logged_requests.ConfigRequestLog` in a ConfigMap.

    ``record`` only adds to memory. A thread of its own writes, and while the API server does not
    answer, the newest rows wait in memory.
    """

    def __init__(
        self,
        store: RequestStore,
        clock: clocks.Clock,
        *,
        period_s: float = WRITE_PERIOD_S,
        after_write: Callable[[], None] = lambda: None,
    ) -> None:
        """``after_write`` runs in the writing thread every period; it may raise `TreenailError`."""
        self._store = store
        self._clock = clock
        self._period_s = period_s
        self._after_write = after_write
        # A restarted server must not replace the rows of its predecessor.
        self._server = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._own: dict[str, logged_requests.LoggedRequest] = {}
        self._latest: dict[tuple[object, ...], str] = {}
        self._is_changed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_periodically, name="request-log", daemon=True
        )

    def record(self, row: logged_requests.RequestRow) -> None:
        """Add the request to the rows that wait for the next write."""
        new = logged_requests.log_request(f"{self._server}-{next(self._numbers)}", row)
        key = new.coalescing_key
        with self._lock:
            known = self._own.get(self._latest.get(key, "")) if key is not None else None
            logged = new if known is None else known.add_request(new.row)
            self._own[logged.id] = logged
            if key is not None:
                self._latest[key] = logged.id
            self._is_changed = True
            if len(self._own) >= 2 * logged_requests.MAX_ROWS:
                self._keep_rows(
                    logged_requests.select_newest(self._own.values(), self._clock.now())
                )

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write the rows that wait, for 5 s at most."""
        self._stop.set()
        self._thread.join(_END_S)

    def write_rows(self) -> None:
        """Write the rows that wait; raise `ClusterError`."""
        with self._lock:
            if not self._is_changed:
                return
            self._is_changed = False
            own = tuple(self._own.values())
        try:
            merged = self._store.change_rows(
                lambda stored: logged_requests.merge_requests(stored, own, self._clock.now())
            )
        except BaseException:
            with self._lock:
                self._is_changed = True
            raise
        written, sent = {request.id: request for request in merged}, {request.id for request in own}
        with self._lock:
            self._keep_rows(
                [
                    # A request of the meantime may have been added to the row.
                    replace(request, is_checked=written[request.id].is_checked)
                    if request.id in written
                    else request
                    for request in self._own.values()
                    if request.id in written or request.id not in sent
                ]
            )

    def _keep_rows(self, rows: Iterable[logged_requests.LoggedRequest]) -> None:
        self._own = {request.id: request for request in rows}
        self._latest = {key: name for key, name in self._latest.items() if name in self._own}

    def _write_periodically(self) -> None:
        backoff = retry.Backoff(first_s=self._period_s, max_s=_MAX_PAUSE_S)
        pause_s, problem = self._period_s, ""
        while not self._stop.wait(pause_s):
            before, problem = problem, self._try_write()
            if problem:
                pause_s = backoff.next_pause_s()
            else:
                backoff.reset()
                pause_s = self._period_s
            if problem and problem != before:
                log.warning("cannot write the log of requests, trying again: %s", problem)
            elif before and not problem:
                log.info("wrote the log of requests again")
        self._try_write()

    def _try_write(self) -> str:
        """Return why the rows could not be written; empty when they were."""
        try:
            self.write_rows()
            if not self._stop.is_set():
                self._after_write()
        except errors.TreenailError as error:
            return f"{error} ({error.remedy})" if error.remedy else str(error)
        except Exception:
            # The thread must outlive a bug: without it the log would end.
            log.exception("cannot write the log of requests")
        return ""
