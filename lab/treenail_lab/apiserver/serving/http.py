"""HTTP: who asks, for what, and the answer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from treenail_lab.apiserver.access.authentication import ApiUser, Authenticator
from treenail_lab.apiserver.access.authorization import Authorizer
from treenail_lab.apiserver.errors import ApiError, bad_request_error
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.lists import build_selection
from treenail_lab.apiserver.registry.registry import ObjectRegistry, convert_version
from treenail_lab.apiserver.registry.watch import WatchOptions, WatchTable
from treenail_lab.apiserver.request import ServerRequest, parse_request
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.serving import discovery, openapi
from treenail_lab.apiserver.serving.faults import (
    DelayFault,
    FaultInjector,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.request_log import RequestLog
from treenail_lab.apiserver.serving.verbs import ApiAnswer, RequestBody, VerbDispatcher

# As the real server: half an hour to an hour when a client sets no limit.
_WATCH_S = 1800.0
_MAX_BODY = 3 * 1024 * 1024
_MAX_SNAPSHOT = 1024 * 1024 * 1024
_OPEN_PATHS = ("/healthz", "/readyz", "/livez")
_LAB = "/lab/"


@dataclass(frozen=True, slots=True)
class ApiBackend:
    """What answers requests; ``answer_control`` those below ``/lab``."""

    registry: ObjectRegistry
    authenticator: Authenticator
    authorizer: Authorizer
    verbs: VerbDispatcher
    watches: WatchTable
    faults: FaultInjector
    requests: RequestLog
    answer_control: Callable[[ServerRequest, ApiUser, Json], Json]


class ConnectionDropped(Exception):
    """The connection is to end without an answer."""


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
            ask = parse_request(request.method, request.path, request.query)
            if ask.path.startswith(_LAB):
                document = (await _read_body(request, _MAX_SNAPSHOT)).parse_object()
                return _json_response(
                    ApiAnswer(200, self._backend.answer_control(ask, user, document))
                )
        except ApiError as error:
            return _error_response(error)
        return await self._answer_logged(request, ask, user)

    async def _answer_logged(
        self, request: web.Request, ask: ServerRequest, user: ApiUser
    ) -> web.StreamResponse:
        """The answer to a request about the cluster, after it was counted."""
        note = self._backend.requests.note_request
        if ask.verb == "watch":
            # Counted when it begins, because it may be open for an hour.
            note(ask, user.name, 200)
        try:
            response = await self._answer_request(request, ask, user)
        except ConnectionDropped:
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=0)
        except ApiError as error:
            response = _error_response(error)
        if ask.verb != "watch":
            note(ask, user.name, response.status)
        return response

    async def _answer_request(
        self, request: web.Request, ask: ServerRequest, user: ApiUser
    ) -> web.StreamResponse:
        loses = await self._apply_faults(ask, user)
        backend = self._backend
        backend.authorizer.check_access(user, ask)
        if not ask.is_resource_request:
            source = openapi if ask.path.startswith(openapi.ROOT) else discovery
            return _json_response(ApiAnswer(200, source.document(backend.registry.kinds, ask.path)))
        kind = backend.registry.kinds.find_kind(ask.group, ask.version, ask.plural)
        if ask.verb == "watch":
            return await self._stream_watch(request, ask, kind, user)
        body = await _read_body(request, _MAX_BODY)
        answer = backend.verbs.answer_request(ask, kind, body, user)
        if loses:
            raise ConnectionDropped
        return _json_response(answer)

    async def _apply_faults(self, ask: ServerRequest, user: ApiUser) -> bool:
        """Suffer the faults that concern a request; whether its answer is to be lost."""
        loses = False
        for fault in self._backend.faults.match_request(ask, user.name):
            match fault:
                case RefuseFault():
                    raise ConnectionDropped
                case DelayFault(seconds):
                    await asyncio.sleep(seconds)
                case RejectFault():
                    raise fault.to_error()
                case LoseAnswerFault():
                    loses = True
        return loses

    def _identify_user(self, request: web.Request) -> ApiUser:
        certificate: Any = request.get_extra_info("peercert")
        authorization = request.headers.get("Authorization", "")
        user = self._backend.authenticator.authenticate_user(authorization, certificate)
        if name := request.headers.get("Impersonate-User"):
            groups = request.headers.getall("Impersonate-Group", [])
            return self._backend.authorizer.resolve_impersonation(user, name, groups)
        return user

    async def _stream_watch(
        self, request: web.Request, ask: ServerRequest, kind: ResourceKind, user: ApiUser
    ) -> web.StreamResponse:
        options = _parse_watch_options(ask, kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with self._backend.watches.open_watch(kind, user.name) as watch:
            await response.prepare(request)
            async for event in self._backend.watches.stream_events(watch, options):
                obj = event["object"]
                if event["type"] != "ERROR":
                    obj = convert_version(kind, obj)
                await response.write(_dump_json({"type": event["type"], "object": obj}) + b"\n")
        return response


def _parse_watch_options(ask: ServerRequest, kind: ResourceKind) -> WatchOptions:
    asked = ask.query.get("resourceVersion", "")
    if asked and not asked.isdigit():
        raise bad_request_error(f'resourceVersion: Invalid value: "{asked}"')
    initial = ask.read_flag("sendInitialEvents")
    if initial and ask.query.get("resourceVersionMatch") != "NotOlderThan":
        raise bad_request_error(
            "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        )
    from_now = initial or asked in {"", "0"}
    return WatchOptions(
        matches=build_selection(ask, kind),
        version=None if from_now else int(asked),
        timeout_s=float(ask.read_number("timeoutSeconds") or _WATCH_S),
        should_send_bookmarks=ask.read_flag("allowWatchBookmarks"),
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
