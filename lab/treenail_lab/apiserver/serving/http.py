"""HTTP: authentication, the parsed request and the response.

A client may request only the metadata of objects in its Accept header. A log of the answered
requests serves benchmarks and tests.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from treenail.clocks import Clock, format_micro_time
from treenail_lab.apiserver.access.authentication import ApiUser, Authenticator
from treenail_lab.apiserver.access.authorization import Authorizer
from treenail_lab.apiserver.errors import ApiError, bad_request_error
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.list_watch import WatchOptions, WatchTable, build_selection
from treenail_lab.apiserver.registry.registry import ObjectRegistry, convert_version
from treenail_lab.apiserver.request import ServerRequest, parse_request
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.serving import discovery
from treenail_lab.apiserver.serving.faults import (
    DelayFault,
    FaultInjector,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.verbs import ApiAnswer, PodLogs, RequestBody, VerbDispatcher

_API_VERSION = "meta.k8s.io/v1"
_KIND = "PartialObjectMetadata"


def is_metadata_requested(accept: str) -> bool:
    """Return whether the first accepted media type names PartialObjectMetadata."""
    media_type, *parameters = (part.strip() for part in accept.partition(",")[0].split(";"))
    values = dict(parameter.partition("=")[::2] for parameter in parameters)
    return (
        media_type == "application/json"
        and values.get("as") in {_KIND, f"{_KIND}List"}
        and (values.get("g"), values.get("v")) == ("meta.k8s.io", "v1")
    )


def select_metadata(document: Json) -> Json:
    """Return the metadata of an object or of the objects of a list; a Status stays as it is."""
    if document.get("kind") == "Status":
        return document
    if "items" not in document:
        return {"kind": _KIND, "apiVersion": _API_VERSION, "metadata": document["metadata"]}
    return {
        "kind": f"{_KIND}List",
        "apiVersion": _API_VERSION,
        "metadata": document["metadata"],
        "items": [select_metadata(member) for member in document["items"]],
    }


_REMEMBERED = 2_000


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One request; ``time`` in seconds since the epoch, ``code`` 0 without an answer."""

    time: float
    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int

    def to_json(self) -> Json:
        return {
            "time": format_micro_time(self.time),
            "user": self.user,
            "verb": self.verb,
            "resource": self.resource,
            "namespace": self.namespace,
            "name": self.name,
            "code": self.code,
        }


class RequestLog:
    """Counts by user, verb and resource since the last reset, and the latest requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._latest: deque[RequestEntry] = deque(maxlen=_REMEMBERED)

    def note_request(self, request: ServerRequest, user: str, code: int) -> None:
        resource = request.resource or request.path
        self._counts[user, request.verb, resource] += 1
        self._latest.append(
            RequestEntry(
                self._clock.now(),
                user,
                request.verb,
                resource,
                request.namespace,
                request.name,
                code,
            )
        )

    def count_requests(self, *, user: str = "", verb: str = "", resource: str = "") -> int:
        """Count the requests; empty matches all."""
        wanted = (user, verb, resource)
        return sum(
            number
            for counted, number in self._counts.items()
            if all(not a or a == f for a, f in zip(wanted, counted, strict=True))
        )

    def count_by_user(self) -> dict[tuple[str, str, str], int]:
        """Return the number of requests by user, verb and resource."""
        return dict(self._counts)

    def list_latest(self) -> tuple[RequestEntry, ...]:
        """Return the latest requests, oldest first."""
        return tuple(self._latest)

    def reset(self) -> None:
        self._counts.clear()
        self._latest.clear()

    def to_json(self) -> Json:
        counts = [
            {"user": user, "verb": verb, "resource": resource, "count": number}
            for (user, verb, resource), number in sorted(self._counts.items())
        ]
        return {"counts": counts, "latest": [entry.to_json() for entry in self._latest]}


# Like kube-apiserver, whose --min-request-timeout is 1800 s, for clients that set no limit.
_WATCH_S = 1800.0
_MAX_BODY = 3 * 1024 * 1024
_MAX_SNAPSHOT = 1024 * 1024 * 1024
_OPEN_PATHS = ("/healthz", "/readyz", "/livez")
_LAB = "/lab/"


@dataclass(frozen=True, slots=True)
class ApiBackend:
    """The parts that answer requests; ``answer_control`` answers those below ``/lab``."""

    registry: ObjectRegistry
    authenticator: Authenticator
    authorizer: Authorizer
    verbs: VerbDispatcher
    watches: WatchTable
    faults: FaultInjector
    requests: RequestLog
    pod_logs: PodLogs
    answer_control: Callable[[ServerRequest, ApiUser, Json], Json]


class ConnectionDropped(Exception):
    """The connection must be closed without an answer."""


class WebApplication:
    """The aiohttp application."""

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend
        self.app = web.Application(client_max_size=_MAX_SNAPSHOT)
        self.app.router.add_route("*", "/{path:.*}", self._serve_request)

    async def _serve_request(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in _OPEN_PATHS:
                return web.Response(text="ok")
            user = self._identify_user(request)
            api_request = parse_request(request.method, request.path, request.query)
            if api_request.path.startswith(_LAB):
                document = (await _read_body(request, _MAX_SNAPSHOT)).parse_object()
                return _json_response(
                    ApiAnswer(200, self._backend.answer_control(api_request, user, document))
                )
        except ApiError as error:
            return _error_response(error)
        return await self._answer_logged(request, api_request, user)

    async def _answer_logged(
        self, request: web.Request, api_request: ServerRequest, user: ApiUser
    ) -> web.StreamResponse:
        """Answer a request to the Kubernetes API and record it."""
        note = self._backend.requests.note_request
        if api_request.verb == "watch":
            # Recorded when it begins, because it may be open for an hour.
            note(api_request, user.name, 200)
        try:
            response = await self._answer_request(request, api_request, user)
        except ConnectionDropped:
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=0)
        except ApiError as error:
            response = _error_response(error)
        if api_request.verb != "watch":
            note(api_request, user.name, response.status)
        return response

    async def _answer_request(
        self, request: web.Request, api_request: ServerRequest, user: ApiUser
    ) -> web.StreamResponse:
        loses_answer = await self._apply_faults(api_request, user)
        backend = self._backend
        backend.authorizer.check_access(user, api_request)
        if not api_request.is_resource_request:
            is_openapi = api_request.path.startswith(discovery.OPENAPI_ROOT)
            build = discovery.build_openapi if is_openapi else discovery.build_document
            return _json_response(ApiAnswer(200, build(backend.registry.kinds, api_request.path)))
        kind = backend.registry.kinds.find_kind(
            api_request.group, api_request.version, api_request.plural
        )
        if api_request.verb == "watch":
            return await self._stream_watch(request, api_request, kind, user)
        if (kind.plural, api_request.subresource, api_request.verb) == ("pods", "log", "get"):
            return await self._stream_log(request, api_request)
        if api_request.subresource == "approval":
            signing_request = backend.registry.find_object(kind, "", api_request.name)
            backend.authorizer.check_approval(user, signing_request)
        body = await _read_body(request, _MAX_BODY)
        answer = backend.verbs.answer_request(api_request, kind, body, user)
        if loses_answer:
            raise ConnectionDropped
        if is_metadata_requested(request.headers.get("Accept", "")):
            answer = ApiAnswer(answer.code, select_metadata(answer.document))
        return _json_response(answer)

    async def _apply_faults(self, api_request: ServerRequest, user: ApiUser) -> bool:
        """Apply the faults that match a request; return whether its answer must be lost."""
        loses_answer = False
        for fault in self._backend.faults.match_request(api_request, user.name):
            match fault:
                case RefuseFault():
                    raise ConnectionDropped
                case DelayFault(seconds):
                    await asyncio.sleep(seconds)
                case RejectFault():
                    raise fault.to_error()
                case LoseAnswerFault():
                    loses_answer = True
        return loses_answer

    def _identify_user(self, request: web.Request) -> ApiUser:
        certificate: Any = request.get_extra_info("peercert")
        authorization = request.headers.get("Authorization", "")
        user = self._backend.authenticator.authenticate_user(authorization, certificate)
        if name := request.headers.get("Impersonate-User"):
            groups = request.headers.getall("Impersonate-Group", [])
            return self._backend.authorizer.resolve_impersonation(user, name, groups)
        return user

    async def _stream_watch(
        self, request: web.Request, api_request: ServerRequest, kind: ResourceKind, user: ApiUser
    ) -> web.StreamResponse:
        options = _parse_watch_options(api_request, kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        has_metadata_only = is_metadata_requested(request.headers.get("Accept", ""))
        with self._backend.watches.open_watch(kind, user.name) as watch:
            await response.prepare(request)
            async for event in self._backend.watches.stream_events(watch, options):
                obj = event["object"]
                if event["type"] != "ERROR":
                    obj = convert_version(kind, obj)
                if has_metadata_only:
                    obj = select_metadata(obj)
                line = _dump_json({"type": event["type"], "object": obj}) + b"\n"
                try:
                    await response.write(line)
                except ConnectionError:
                    # The client left. aiohttp would log a traceback.
                    break
        return response

    async def _stream_log(
        self, request: web.Request, api_request: ServerRequest
    ) -> web.StreamResponse:
        chunks = self._backend.pod_logs.stream_log(api_request)
        # Before the response begins: an error has a status code of its own.
        first = await anext(chunks, b"")
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        try:
            await response.write(first)
            async for chunk in chunks:
                await response.write(chunk)
        except ConnectionError:
            pass
        return response


def _parse_watch_options(api_request: ServerRequest, kind: ResourceKind) -> WatchOptions:
    version = api_request.query.get("resourceVersion", "")
    if version and not version.isdigit():
        raise bad_request_error(f'resourceVersion: Invalid value: "{version}"')
    initial = api_request.read_flag("sendInitialEvents")
    if initial and api_request.query.get("resourceVersionMatch") != "NotOlderThan":
        raise bad_request_error(
            "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        )
    from_now = initial or version in {"", "0"}
    return WatchOptions(
        matches=build_selection(api_request, kind),
        version=None if from_now else int(version),
        timeout_s=float(api_request.read_number("timeoutSeconds") or _WATCH_S),
        should_send_bookmarks=api_request.read_flag("allowWatchBookmarks"),
        should_send_initial_events=initial,
    )


async def _read_body(request: web.Request, limit: int) -> RequestBody:
    if (request.content_length or 0) > limit:
        message = f"Request entity too large: limit is {limit}"
        raise ApiError(413, "RequestEntityTooLarge", message)
    content = await request.read()
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip()
    return RequestBody(content, media_type, request.headers.get("User-Agent", ""))


def _dump_json(document: Json) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _json_response(answer: ApiAnswer) -> web.Response:
    return web.Response(
        status=answer.code, body=_dump_json(answer.document), content_type="application/json"
    )


def _error_response(error: ApiError) -> web.Response:
    response = _json_response(ApiAnswer(error.code, error.to_status()))
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
