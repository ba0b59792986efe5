"""HTTP: who asks, for what, and the answer."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from treenail_lab.apiserver.access.authentication import Authenticator, User
from treenail_lab.apiserver.access.authorization import Authorizer
from treenail_lab.apiserver.errors import ApiError, bad_request
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.lists import selection
from treenail_lab.apiserver.registry.registry import Registry, served
from treenail_lab.apiserver.registry.watch import Watches, WatchOptions
from treenail_lab.apiserver.request import Ask, read
from treenail_lab.apiserver.schema.kinds import Kind
from treenail_lab.apiserver.serving import discovery, openapi
from treenail_lab.apiserver.serving.faults import Delay, Faults, LoseAnswer, Refuse, Reject
from treenail_lab.apiserver.serving.request_log import RequestLog
from treenail_lab.apiserver.serving.verbs import Answer, Body, Verbs

# As the real server: half an hour to an hour when a client sets no limit.
_WATCH_S = 1800.0
_MAX_BODY = 3 * 1024 * 1024
_MAX_SNAPSHOT = 1024 * 1024 * 1024
_OPEN_PATHS = ("/healthz", "/readyz", "/livez")
_LAB = "/lab/"


@dataclass(frozen=True, slots=True)
class Backend:
    """What answers requests; ``control`` those below ``/lab``."""

    registry: Registry
    authenticator: Authenticator
    authorizer: Authorizer
    verbs: Verbs
    watches: Watches
    faults: Faults
    requests: RequestLog
    control: Callable[[Ask, User, Json], Json]


class Dropped(Exception):
    """The connection is to end without an answer."""


class Web:
    """The aiohttp application."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.app = web.Application(client_max_size=_MAX_SNAPSHOT)
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in _OPEN_PATHS:
                return web.Response(text="ok")
            user = self._user(request)
            ask = read(request.method, request.path, request.query)
            if ask.path.startswith(_LAB):
                document = (await _body(request, _MAX_SNAPSHOT)).object()
                return _json(Answer(200, self._backend.control(ask, user, document)))
        except ApiError as error:
            return _error(error)
        return await self._log(request, ask, user)

    async def _log(self, request: web.Request, ask: Ask, user: User) -> web.StreamResponse:
        """The answer to a request about the cluster, after it was counted."""
        note = self._backend.requests.note
        if ask.verb == "watch":
            # Counted when it begins, because it may be open for an hour.
            note(ask, user.name, 200)
        try:
            response = await self._answer(request, ask, user)
        except Dropped:
            if request.transport is not None:
                request.transport.abort()
            response = web.Response(status=0)
        except ApiError as error:
            response = _error(error)
        if ask.verb != "watch":
            note(ask, user.name, response.status)
        return response

    async def _answer(self, request: web.Request, ask: Ask, user: User) -> web.StreamResponse:
        loses = await self._meet_faults(ask, user)
        backend = self._backend
        backend.authorizer.check(user, ask)
        if not ask.on_resource:
            source = openapi if ask.path.startswith(openapi.ROOT) else discovery
            return _json(Answer(200, source.document(backend.registry.kinds, ask.path)))
        kind = backend.registry.kinds.find(ask.group, ask.version, ask.plural)
        if ask.verb == "watch":
            return await self._watch(request, ask, kind, user)
        body = await _body(request, _MAX_BODY)
        answer = backend.verbs.answer(ask, kind, body, user)
        if loses:
            raise Dropped
        return _json(answer)

    async def _meet_faults(self, ask: Ask, user: User) -> bool:
        """Suffer the faults that concern a request; whether its answer is to be lost."""
        loses = False
        for fault in self._backend.faults.meet(ask, user.name):
            match fault:
                case Refuse():
                    raise Dropped
                case Delay(seconds):
                    await asyncio.sleep(seconds)
                case Reject():
                    raise fault.error()
                case LoseAnswer():
                    loses = True
        return loses

    def _user(self, request: web.Request) -> User:
        certificate: Any = request.get_extra_info("peercert")
        authorization = request.headers.get("Authorization", "")
        user = self._backend.authenticator.user(authorization, certificate)
        if name := request.headers.get("Impersonate-User"):
            groups = request.headers.getall("Impersonate-Group", [])
            return self._backend.authorizer.impersonated(user, name, groups)
        return user

    async def _watch(
        self, request: web.Request, ask: Ask, kind: Kind, user: User
    ) -> web.StreamResponse:
        options = _watch_options(ask, kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        with self._backend.watches.open(kind, user.name) as watch:
            await response.prepare(request)
            async for event in self._backend.watches.events(watch, options):
                obj = event["object"]
                if event["type"] != "ERROR":
                    obj = served(kind, obj)
                await response.write(_dumps({"type": event["type"], "object": obj}) + b"\n")
        return response


def _watch_options(ask: Ask, kind: Kind) -> WatchOptions:
    asked = ask.query.get("resourceVersion", "")
    if asked and not asked.isdigit():
        raise bad_request(f'resourceVersion: Invalid value: "{asked}"')
    initial = ask.flag("sendInitialEvents")
    if initial and ask.query.get("resourceVersionMatch") != "NotOlderThan":
        raise bad_request("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan")
    from_now = initial or asked in {"", "0"}
    return WatchOptions(
        matches=selection(ask, kind),
        version=None if from_now else int(asked),
        timeout_s=float(ask.number("timeoutSeconds") or _WATCH_S),
        bookmarks=ask.flag("allowWatchBookmarks"),
        initial_events=initial,
    )


async def _body(request: web.Request, limit: int) -> Body:
    if (request.content_length or 0) > limit:
        message = f"Request entity too large: limit is {limit}"
        raise ApiError(413, "RequestEntityTooLarge", message)
    content = await request.read()
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip()
    return Body(content, media_type, request.headers.get("User-Agent", ""))


def _dumps(document: Json) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _json(answer: Answer) -> web.Response:
    return web.Response(
        status=answer.code, body=_dumps(answer.document), content_type="application/json"
    )


def _error(error: ApiError) -> web.Response:
    response = _json(Answer(error.code, error.status()))
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
