"""List objects once and then watch them, as client-go's reflector does."""

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from treenail import clocks, errors, retry
from treenail.kube import api_client, resource_version, resources

log = logging.getLogger(__name__)

ObjectHandler = Callable[[str, api_client.Json | None], None]
"""Receives the key, and the object or None when deleted; raises TooLargeError to get it again."""

# client-go watches for 5 to 10 minutes at random (reflector.go), so that a server does not end all
# watches in the same second.
_DURATION_S = 300
# A server that ends a watch sooner and without an event is overloaded or broken: back off.
_MIN_DURATION_S = 1.0
STALE_AFTER_S = 90.0
"""Silence after which a watch is stale, unless a check shows that nothing changed."""
CHECK_AFTER_S = 75.0
"""Silence after which the watch is checked. kube-apiserver sends a bookmark about once a minute,
but none for a kind without any change since its start (cacher.go)."""
_NOT_CONNECTED = "not connected yet"
SETTLE_S = 2.0
"""Time after a lost connection in which the API server sends what changed meanwhile."""


@dataclass(frozen=True, slots=True)
class WatchScope:
    """The objects of a resource, limited by namespace and selectors."""

    resource: resources.Resource
    namespace: str = ""
    field_selector: str = ""
    label_selector: str = ""
    is_optional: bool = False
    """True when the cluster may lack the kind or forbid it; then requests are rare."""
    has_metadata_only: bool = False
    """True when the objects need neither spec nor status."""
    duration_s: float = _DURATION_S
    """How long a watch lasts, and up to twice as long; then another one resumes."""

    @property
    def params(self) -> dict[str, str]:
        """The selectors as query parameters."""
        selectors = {"fieldSelector": self.field_selector, "labelSelector": self.label_selector}
        return {name: value for name, value in selectors.items() if value}


class ResourceWatch:
    """Reports the objects of a scope and each change, on its own thread.

    ``on_change`` runs once for each version of an object. ``on_connected`` runs after the first
    complete list and after each reconnect. ``on_lost`` runs when the server is unreachable, or an
    object too large, and again when the error changes. The callbacks run on the watching thread;
    they should only enqueue.

    The watch resumes at the last resourceVersion, also that of a bookmark: after an hour without
    the server two small requests are enough. It lists again when the server answers 410 Gone, when
    the version of a server that was lost has gone back, and after a watch without even a bookmark.
    """

    def __init__(
        self,
        client: api_client.Client,
        scope: WatchScope,
        clock: clocks.Clock,
        *,
        on_change: ObjectHandler,
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[errors.ClusterError], None] = lambda _: None,
        backoff: retry.Backoff | None = None,
        jitter: retry.Random = random.random,
    ) -> None:
        self._client = client
        self._scope = scope
        self._clock = clock
        self._on_change = on_change
        self._on_connected = on_connected
        self._list_handlers: list[Callable[[], None]] = []
        self._on_lost = on_lost
        self._backoff = backoff or retry.Backoff()
        # For what only a user can change: a missing kind or role, and objects that are too large.
        self._rare_backoff = retry.Backoff(first_s=60.0, max_s=600.0)
        self._jitter = jitter
        self._stopped = threading.Event()
        self._stream: api_client.WatchStream | None = None
        self._thread: threading.Thread | None = None
        self._resource_version = ""
        self._reported: dict[str, tuple[object, object]] = {}
        self._omitted: errors.TooLargeError | None = None  # of the list in progress
        self._last_error: str | None = _NOT_CONNECTED
        self._is_lost = False
        """True from a lost connection until the next one."""
        self._list_requested_at = float("-inf")
        self._check_requested_at = float("-inf")
        self._needs_check = False
        self._listed_at: float | None = None
        self._contact_at = float("-inf")
        self._settled_at = float("-inf")
        self._restored_at = float("-inf")

    def add_list_handler(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` after each complete list, once all its objects are reported.

        Add handlers before ``start``.
        """
        self._list_handlers.append(handler)

    def start(self) -> None:
        """Run on a daemon thread."""
        self._thread = threading.Thread(
            target=self.run, name=f"watch-{self._scope.resource.plural}", daemon=True
        )
        self._thread.start()

    def run(self) -> None:
        """List and watch until ``stop``."""
        while not self._stopped.is_set():
            self._stopped.wait(self._list_and_watch())

    def stop(self, *, limit_s: float = 5.0) -> None:
        """Stop from any thread; return when the watching thread is done, or after ``limit_s``."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def retire(self) -> None:
        """Stop to report; the watch ends when its duration is over.

        Its connection then serves other requests. To abort it would cost another TLS handshake.
        """
        self._stopped.set()

    def request_list(self) -> None:
        """List again, from any thread, although the watch may be intact."""
        self._list_requested_at = self._clock.monotonic()
        if (stream := self._stream) is not None:
            stream.close()

    def check_if_silent(self) -> None:
        """Check that no change was missed if the server is silent, which a proxy can cause."""
        is_connected = self._listed_at is not None and self._last_error is None
        waited_s = self._clock.monotonic() - self._check_requested_at
        if is_connected and min(self.silence_s, waited_s) > CHECK_AFTER_S:
            self._check_requested_at = self._clock.monotonic()
            self._needs_check = True
            if (stream := self._stream) is not None:
                stream.close()

    @property
    def listed_at(self) -> float | None:
        """Monotonic time at which the last complete list began; None before the first one."""
        return self._listed_at

    @property
    def silence_s(self) -> float:
        """Seconds since the last list, event, bookmark or connection; infinite without any."""
        return self._clock.monotonic() - self._contact_at

    @property
    def stale_reason(self) -> str:
        """Why the reported objects may be outdated; empty when the watch is current."""
        plural = self._scope.resource.plural
        if self._listed_at is None:
            return f"{plural} are not listed yet" + (f": {self.error}" if self.error else "")
        if (error := self._last_error) is not None:
            return f"the watch of {plural} is disconnected: {error}"
        if not self._resource_version:
            # 410 Gone after a compaction or a restore; the list may wait for its backoff.
            return f"{plural} must be listed again"
        if self._clock.monotonic() < self._settled_at:
            return f"the watch of {plural} has just reconnected"
        if self.silence_s > STALE_AFTER_S:
            return f"the watch of {plural} received no event for more than {STALE_AFTER_S:g} s"
        return ""

    @property
    def error(self) -> str:
        """Why the watch is disconnected, and what helps; empty while it is not, or not yet."""
        return (self._last_error or "").removeprefix(_NOT_CONNECTED)

    @property
    def restored_s(self) -> float:
        """Seconds since the API server was first seen in an older state; infinite if it never was.

        A backup of etcd was restored. The time begins again with each restore.
        """
        return self._clock.monotonic() - self._restored_at

    def _needs_list(self) -> bool:
        return (
            not self._resource_version
            or self._listed_at is None
            or self._listed_at < self._list_requested_at
        )

    def _list_and_watch(self) -> float:
        """List if needed and watch once; return the seconds to pause afterwards."""
        try:
            if self._needs_check:
                self._check_versions()
            if self._is_lost and not self._needs_list():
                self._check_server_version()
            if self._needs_list():
                self._list_objects()
            return 0.0 if self._watch_events() else self._backoff.next_pause_s()
        except errors.GoneError as error:
            log.debug("listing again: %s", error)
            self._resource_version = ""
            return self._backoff.next_pause_s()
        except errors.ClusterError as error:
            if not isinstance(error, errors.UnreachableError):
                # The server rejects the request, for example for a version from before it was
                # restored from a backup. Without a response the version may still be valid.
                self._resource_version = ""
            return self._handle_error(error)

    def _handle_error(self, error: errors.ClusterError) -> float:
        if self._stopped.is_set():
            return 0.0
        self._is_lost = True
        text = f"{error}; {error.remedy}".removesuffix("; ")
        if text != self._last_error:
            self._last_error = text
            self._on_lost(error)
        # A missing CustomResourceDefinition gives 404, a missing role 403.
        withheld = (errors.NotFoundError, errors.ForbiddenError) if self._scope.is_optional else ()
        is_rare = isinstance(error, (errors.TooLargeError, *withheld))
        pause_s = (self._rare_backoff if is_rare else self._backoff).next_pause_s()
        return (
            max(pause_s, error.retry_after_s)
            if isinstance(error, errors.TooManyRequestsError)
            else pause_s
        )

    def _list_objects(self) -> None:
        began = self._clock.monotonic()
        self._omitted = None
        try:
            # Without a resourceVersion the API server lists the newest state, never an older one.
            version, listed = self._report_pages(is_paged=True)
        except errors.GoneError:
            # The continue token expired. As in client-go's pager, the next list has no pages.
            version, listed = self._report_pages(is_paged=False)
        if not version:
            raise errors.ClusterError(
                f"list {self._scope.resource.plural}: the response has no resourceVersion"
            )
        for key in sorted(self._reported.keys() - listed):
            del self._reported[key]
            self._on_change(key, None)
        if self._omitted is not None:
            raise self._omitted
        self._resource_version = version
        self._listed_at = began
        for handler in self._list_handlers:
            handler()
        self._mark_connected(is_complete=True)

    def _check_server_version(self) -> None:
        """Request a list if the server is behind the last version: etcd was restored.

        Such a server accepts a watch from the old version, but sends nothing below it. Once it is
        past that version again, events arrive, and all changes until then are missing.
        """
        page = next(
            self._client.list_pages(
                self._scope.resource,
                namespace=self._scope.namespace,
                params={**self._scope.params, "limit": "1"},
                has_metadata_only=True,
            )
        )
        if resource_version.is_older_version(page.resource_version, self._resource_version):
            log.warning(
                "the version of %s went back from %s to %s; listing",
                self._scope.resource.plural,
                self._resource_version,
                page.resource_version,
            )
            self._resource_version = ""
            self._restored_at = self._clock.monotonic()
            # Versions are used again, so an equal one can be another state.
            self._reported = dict.fromkeys(self._reported, (None, None))

    def _check_versions(self) -> None:
        """List the versions of all objects; request a list of the objects if one differs."""
        plural, listed = self._scope.resource.plural, ""
        versions: set[tuple[str, object, object]] = set()
        for page in self._client.list_pages(
            self._scope.resource,
            namespace=self._scope.namespace,
            params=self._scope.params,
            has_metadata_only=True,
        ):
            listed = page.resource_version
            versions.update((format_key(item), *_get_version(item)) for item in page.items)
        self._needs_check = self._is_lost = False
        known = {(key, *version) for key, version in self._reported.items()}
        if missed := len({key for key, *_ in versions ^ known}):
            log.warning("the watch of %s missed changes of %d objects; listing", plural, missed)
            self._resource_version = ""
            return
        log.debug("the watch of %s was silent, but nothing changed", plural)
        self._resource_version = listed
        self._contact_at = self._clock.monotonic()

    def _report_pages(self, *, is_paged: bool) -> tuple[str, set[str]]:
        """Report each page as it arrives; return the version of the list and all keys."""
        version, listed = "", set[str]()
        for page in self._client.list_pages(
            self._scope.resource,
            namespace=self._scope.namespace,
            params=self._scope.params,
            is_paged=is_paged,
            has_metadata_only=self._scope.has_metadata_only,
        ):
            version = page.resource_version
            for item in page.items:
                listed.add(format_key(item))
                if self._has_older_version(item):
                    # etcd may continue with higher versions: etcdutl snapshot restore
                    # --bump-revision.
                    self._restored_at = self._clock.monotonic()
                try:
                    self._report_object(item)
                except errors.TooLargeError as error:
                    # What the list lacks is deleted last, and makes room for the next list.
                    self._omitted = error
        return version, listed

    def _has_older_version(self, document: api_client.Json) -> bool:
        """Return whether a newer version of the same object was reported before."""
        known_uid, known_version = self._reported.get(format_key(document), (None, None))
        uid, version = _get_version(document)
        return uid == known_uid and resource_version.is_older_version(
            str(version), str(known_version)
        )

    def _watch_events(self) -> bool:
        """Watch once; return False when the watch ended at once and without an event."""
        began = self._clock.monotonic()
        has_events = False
        stream = self._client.watch(
            self._scope.resource,
            namespace=self._scope.namespace,
            params={**self._scope.params, "resourceVersion": self._resource_version},
            duration_s=int(self._scope.duration_s * (1 + self._jitter())),
            has_metadata_only=self._scope.has_metadata_only,
        )
        self._stream = stream
        try:
            if self._is_interrupted():
                return True
            try:
                stream.connect()
            except errors.UnreachableError:
                # `request_list` and `check_if_silent` close a stream that connects, too.
                if self._is_interrupted():
                    return True
                raise
            self._mark_connected()
            for event in stream:
                has_events = True
                if self._stopped.is_set():
                    continue
                self._backoff.reset()
                self._handle_event(event)
                self._contact_at = self._clock.monotonic()
        finally:
            self._stream = None
            stream.close()
        lasted_s = self._clock.monotonic() - began
        if not has_events and lasted_s >= self._scope.duration_s:
            # kube-apiserver sends a bookmark about once a minute, but nothing to a watch from a
            # version of its future, which is what an etcd restore makes of ours.
            self._resource_version = ""
        if not (has_events or lasted_s >= _MIN_DURATION_S):
            return False
        self._backoff.reset()
        return True

    def _is_interrupted(self) -> bool:
        """Return whether another thread requested the end of the watch."""
        return self._stopped.is_set() or self._needs_list() or self._needs_check

    def _mark_connected(self, *, is_complete: bool = False) -> None:
        """Note a contact; after a complete list nothing is missing."""
        now = self._clock.monotonic()
        self._contact_at = now
        self._is_lost = False
        if is_complete:
            self._settled_at = now
        if self._last_error is not None:
            if not is_complete:
                self._settled_at = now + SETTLE_S
            self._last_error = None
            self._rare_backoff.reset()
            self._on_connected()

    def _handle_event(self, event: api_client.WatchEvent) -> None:
        # Also for an object that the selectors no longer match.
        if event.type == "DELETED":
            key = format_key(event.object)
            if self._reported.pop(key, None) is not None:
                self._on_change(key, None)
        elif event.type in {"ADDED", "MODIFIED"}:
            self._report_object(event.object)
        self._resource_version = str(
            # A BOOKMARK has nothing but its kind and this version.
            resources.get_object(event.object, "metadata").get("resourceVersion")
            or self._resource_version
        )

    def _report_object(self, document: api_client.Json) -> None:
        key, version = format_key(document), _get_version(document)
        if self._reported.get(key) != version:
            self._on_change(key, document)
            self._reported[key] = version


def _get_version(document: api_client.Json) -> tuple[object, object]:
    metadata = resources.get_object(document, "metadata")
    return (metadata.get("uid"), metadata.get("resourceVersion"))


def format_key(document: api_client.Json) -> str:
    """Return ``namespace/name``, or the name of a cluster-scoped object."""
    metadata = resources.get_object(document, "metadata")
    name, namespace = str(metadata.get("name")), metadata.get("namespace")
    return f"{namespace}/{name}" if namespace else name
