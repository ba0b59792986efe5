"""The lab's API server without a network: requests of simulated processes, in virtual time.

It is the lab's registry, authorization, watches and controllers. A request takes a moment, in
which other threads run; `ClusterFaults` decides what happens to it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.simulation.threads import STARTED_AT, SimEvent, SimProcess, Simulation, TaskKilled
from treenail.clocks import format_rfc3339
from treenail.errors import UnreachableError
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.manifests import installation
from treenail_lab.apiserver.access.authentication import ApiUser, TokenIssuer
from treenail_lab.apiserver.access.authorization import Authorizer
from treenail_lab.apiserver.errors import ApiError
from treenail_lab.apiserver.registry.list_watch import (
    OpenWatch,
    WatchOptions,
    WatchPace,
    build_selection,
)
from treenail_lab.apiserver.request import ServerRequest, parse_request
from treenail_lab.apiserver.serving.http import is_metadata_requested, select_metadata
from treenail_lab.apiserver.serving.server import ApiServer
from treenail_lab.apiserver.serving.verbs import RequestBody, VerbDispatcher
from treenail_lab.apiserver.store import ChangeWaiter

Json = dict[str, Any]
ADMIN = ApiUser("kubernetes-admin", ("system:masters",))
_HISTORY = 500
_LATENCY_S = 0.003
"""Of a request, before and after it is executed."""


class StateClock:
    """The clock of the API server: that of the present simulation."""

    def __init__(self) -> None:
        self.simulation = Simulation()

    def now(self) -> float:
        return STARTED_AT + self.simulation.time

    def monotonic(self) -> float:
        return self.simulation.time

    def sleep(self, seconds: float) -> None:
        self.simulation.park(seconds)


class SimLoop:
    """The part of an event loop that the lab's controllers use."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process

    def call_soon(self, run: Callable[[], object]) -> "SimHandle":
        return self.call_later(0.0, run)

    def call_later(self, seconds: float, run: Callable[[], object]) -> "SimHandle":
        return SimHandle(self._process, seconds, run)


class SimHandle:
    """A call that can be cancelled."""

    def __init__(self, process: SimProcess, seconds: float, run: Callable[[], object]) -> None:
        self._process, self._seconds, self._call = process, seconds, run
        self._is_cancelled = False
        process.start("controllers", self._run)

    def cancel(self) -> None:
        self._is_cancelled = True

    def _run(self) -> None:
        self._process.sleep(self._seconds)
        if not self._is_cancelled:
            self._call()


class SimCluster:
    """An API server whose state can be saved, restored, and used by simulation after simulation."""

    def __init__(self, directory: Path) -> None:
        self.clock = StateClock()
        self.api = ApiServer(directory, clock=self.clock)
        # kube-apiserver keeps a limited number of changes too; those of a day would be memory.
        self.api.store._history = _HISTORY
        self.authorizer = Authorizer(self.api.store)
        self.verbs = VerbDispatcher(self.api.registry, TokenIssuer(directory, self.clock))
        self.begin(Simulation())

    def begin(self, simulation: Simulation) -> None:
        """Serve the processes of a new simulation."""
        self.simulation = self.clock.simulation = simulation
        self.streams: dict[SimStream, None] = {}
        self.faults = ClusterFaults(self)
        self.api.controllers.detach_loop()
        self.api.watches.find_pace = self.faults.find_pace
        process = simulation.make_process("apiserver")
        self.api.controllers.attach_loop(SimLoop(process))  # type: ignore[arg-type]  # a part of it

    def save(self) -> "ClusterState":
        store = self.api.store
        kinds = [(storage, list(objects)) for storage, objects in store.dump_objects()]
        return ClusterState(store.version, kinds)

    def load(self, state: "ClusterState", *, skipped_versions: int = 0) -> None:
        """Replace all objects; the resource version may go back, as with an etcd restore.

        It goes ahead with ``skipped_versions``, while objects keep theirs: ``etcdutl snapshot
        restore --bump-revision --mark-compacted``.
        """
        pairs = ((storage, obj) for storage, objects in state.kinds for obj in objects)
        self.api.store.load_objects(state.version + skipped_versions, pairs)
        self.api.controllers.reload()

    def cut_watches(self, process: SimProcess | None = None) -> None:
        for stream in list(self.streams):
            if process in {None, stream.process}:
                stream.cut()

    # What an administrator, a kubelet or a test does, without faults and at once.

    def install_kinds(self) -> None:
        for crd in installation.load_crds():
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            self.execute("POST", path, crd)

    def execute(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        user: ApiUser = ADMIN,
        **query: str,
    ) -> Json:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        content = b"" if body is None else json.dumps(body).encode()
        request = parse_request(method, path, query)
        found = self.api.kinds.find_kind(request.group, request.version, request.plural)
        answer = self.verbs.answer_request(request, found, RequestBody(content, kind, "x"), user)
        return answer.document

    def expire_events(self, ttl_s: float) -> None:
        """Delete old Events, as kube-apiserver does (--event-ttl)."""
        end = format_rfc3339(self.clock.now() - ttl_s)
        for event in self.objects("", "events"):
            if event["lastTimestamp"] < end:
                meta = event["metadata"]
                self.api.store.remove_object(("", "events"), (meta["namespace"], meta["name"]))

    def objects(self, group: str, plural: str) -> list[Json]:
        return list(self.api.store.list_objects((group, plural)))


class ClusterState:
    """All objects at a resource version."""

    def __init__(self, version: int, kinds: list[tuple[tuple[str, str], list[Json]]]) -> None:
        self.version = version
        # Stored objects are replaced, never changed.
        self.kinds = kinds


class ClusterFaults:
    """Faults of requests and watches; by default none.

    Each limit in time is that of the simulation.
    """

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.before: Callable[[SimProcess, ServerRequest], ApiResponse | None] = lambda *_: None
        """Called before a write is executed; it may answer, raise, or kill a process."""
        self.after: Callable[[SimProcess, ServerRequest], ApiResponse | None] = lambda *_: None
        self.windows: list[FaultWindow] = []

    def add(self, window: "FaultWindow") -> None:
        self.windows.append(window)
        if window.should_cut:
            for stream in list(self._cluster.streams):
                if stream.process.name.startswith(window.process):
                    stream.cut()

    @property
    def left_s(self) -> float:
        """Seconds until the end of the last fault."""
        now = self._cluster.simulation.time
        return max((each.until - now for each in self.windows), default=0.0)

    def find(self, process: str, name: str) -> "FaultWindow | None":
        """Return the fault of this name that affects the process now."""
        if not self.windows:
            return None
        now = self._cluster.simulation.time
        self.windows = [each for each in self.windows if each.until > now]
        return next(
            (
                each
                for each in self.windows
                if each.name == name and process.startswith(each.process)
            ),
            None,
        )

    def find_pace(self, _plural: str, process: str) -> WatchPace:
        """Return how late the watches of a process deliver events."""
        late = self.find(process, "late")
        return WatchPace(delay_s=late.lag_s, is_random=True) if late else WatchPace()

    def check_request(self, process: SimProcess) -> ApiResponse | None:
        if self.find(process.name, "outage"):
            raise UnreachableError("the API server does not answer: connection refused")
        if rejection := self.find(process.name, "reject"):
            return make_error(rejection.code, retry_after_s=rejection.retry_after_s)
        return None


class FaultWindow:
    """A fault that lasts for some time, of one process, of those with a prefix, or of all."""

    def __init__(
        self, name: str, until: float, process: str = "", *, code: int = 0,
        retry_after_s: int = 0, version: int = 0, lag_s: float = 0.0, should_cut: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.until, self.process = name, until, process
        self.code, self.retry_after_s = code, retry_after_s
        self.version, self.lag_s, self.should_cut = version, lag_s, should_cut


_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def make_error(code: int, *, retry_after_s: int = 0) -> ApiResponse:
    """Return the answer of an API server with a fault."""
    error = ApiError(code, _REASONS[code], "injected fault", retry_after_s=retry_after_s or None)
    body = json.dumps(error.to_status()).encode()
    return ApiResponse(code, body, float(retry_after_s))


class SimTransport:
    """The connections of one process with one identity."""

    def __init__(self, cluster: SimCluster, process: SimProcess, user: ApiUser) -> None:
        self._cluster, self._process, self._user = cluster, process, user

    def send(self, request: ApiRequest) -> ApiResponse:
        cluster, process = self._cluster, self._process
        simulation, faults = cluster.simulation, cluster.faults
        simulation.park(_LATENCY_S)
        parsed = parse_request(request.method, request.path, request.params)
        reply = faults.check_request(process)
        if reply is None and parsed.is_change:
            reply = faults.before(process, parsed)
        if reply is None:
            reply = self._execute(parsed, request)
            if parsed.is_change:
                reply = faults.after(process, parsed) or reply
        simulation.park(_LATENCY_S)
        return reply

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "SimStream":
        return SimStream(self._cluster, self._process, request, self._user)

    def close(self) -> None:
        """There are no connections."""

    def _execute(self, parsed: ServerRequest, request: ApiRequest) -> ApiResponse:
        cluster = self._cluster
        # Reads of one object are never stale: etcd answers them with its newest state.
        stale = cluster.faults.find(self._process.name, "stale")
        if stale is not None and parsed.verb == "list":
            query = {"resourceVersion": str(stale.version), "resourceVersionMatch": "Exact"}
            parsed = parse_request(request.method, request.path, {**request.params, **query})
        try:
            cluster.authorizer.check_access(self._user, parsed)
            kind = cluster.api.kinds.find_kind(parsed.group, parsed.version, parsed.plural)
            body = RequestBody(request.body, request.content_type, "treenail")
            answer = cluster.verbs.answer_request(parsed, kind, body, self._user)
        except ApiError as error:
            return ApiResponse(
                error.code, _dump(error.to_status()), float(error.retry_after_s or 0)
            )
        document = answer.document
        if is_metadata_requested(request.accept):
            document = select_metadata(document)
        return ApiResponse(answer.code, _dump(document))


class DirectTransport(SimTransport):
    """Requests of an administrator, without faults and at once."""

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster, cluster.simulation.make_process("administrator"), ADMIN)

    def send(self, request: ApiRequest) -> ApiResponse:
        return self._execute(parse_request(request.method, request.path, request.params), request)


class SimStream:
    """A watch, of the lab's `WatchTable`."""

    def __init__(
        self, cluster: SimCluster, process: SimProcess, request: ApiRequest, user: ApiUser
    ) -> None:
        self.process = process
        self._cluster, self._request, self._user = cluster, request, user
        self._is_closed = self._is_cut = False
        self._watch: OpenWatch | None = None
        self._ended = SimEvent(cluster.simulation)

    def read_response(self) -> ApiResponse:
        cluster, request = self._cluster, self._request
        cluster.simulation.park(_LATENCY_S)
        parsed = parse_request(request.method, request.path, request.params)
        if reply := cluster.faults.check_request(self.process):
            return reply
        try:
            cluster.authorizer.check_access(self._user, parsed)
            kind = cluster.api.kinds.find_kind(parsed.group, parsed.version, parsed.plural)
        except ApiError as error:
            return ApiResponse(error.code, _dump(error.to_status()))
        self._version = int(request.params["resourceVersion"])
        waiter = SimWaiter(cluster, cluster.api.store.open_waiter(kind.storage))
        self._watch = OpenWatch(kind, self.process.name, waiter)
        matches = build_selection(parsed, kind)
        timeout_s = float(request.params["timeoutSeconds"])
        self._options = WatchOptions(matches, self._version, timeout_s, should_send_bookmarks=True)
        return ApiResponse(200)

    def iter_lines(self) -> Iterator[bytes]:
        watch, cluster = self._watch, self._cluster
        assert watch is not None
        cluster.streams[self] = None
        events = cluster.api.watches.stream_events(watch, self._options)
        with watch.waiter:
            try:
                while not self._is_closed and (event := _advance(events)) is not None:
                    yield from self._send_event(event)
                    if self._is_cut:
                        break
            finally:
                cluster.streams.pop(self, None)
                with suppress(StopIteration, TaskKilled):
                    events.aclose().send(None)  # type: ignore[attr-defined]  # a generator
        if self._is_cut and not self._is_closed:
            raise UnreachableError("the connection broke")

    def _send_event(self, event: Json) -> Iterator[bytes]:
        cluster, kind = self._cluster, event["type"]
        if kind == "BOOKMARK" and self._version > cluster.api.store.version:
            # kube-apiserver sends nothing to a watch from a version of its future.
            return
        while (held := cluster.faults.find(self.process.name, "hold")) and not self._ended.is_set():
            self._ended.wait(held.until - cluster.simulation.time)
        if self._ended.is_set():
            return
        obj = event["object"]
        if is_metadata_requested(self._request.accept) and kind != "ERROR":
            obj = select_metadata(obj)
        line = _dump({"type": kind, "object": obj})
        yield line
        if cluster.faults.find(self.process.name, "duplicate") and kind != "ERROR":
            yield line

    def cut(self) -> None:
        self._is_cut = True
        self._ended.set()
        if self._watch is not None:
            self._watch.end()

    def close(self) -> None:
        self._is_closed = True
        self._ended.set()
        if self._watch is not None:
            self._watch.end()


class SimWaiter(ChangeWaiter):
    """Waits in virtual time, without an event loop."""

    def __init__(self, cluster: SimCluster, waiter: ChangeWaiter) -> None:
        super().__init__(waiter._waiters)
        self.wakeup: Any = SimEvent(cluster.simulation)

    async def wait(self, timeout_s: float) -> None:
        if self.wakeup.wait(max(timeout_s, 0.0)):
            self.wakeup.clear()


def _advance(events: Any) -> Json | None:
    """Return the next event of a watch; None at its end."""
    try:
        anext(events).send(None)
    except StopIteration as found:
        return found.value
    except StopAsyncIteration:
        return None
    raise AssertionError("a watch waited outside the simulation")


def _dump(document: Json) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
