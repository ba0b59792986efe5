"""HTTP: who asks, for what, and the answer."""

import json
from typing import Any

from aiohttp import web

from treenail.lab.apiserver.authorization import Authorizer
from treenail.lab.apiserver.errors import ApiError, bad_request, no_such_path
from treenail.lab.apiserver.kinds import Kind
from treenail.lab.apiserver.lists import selection
from treenail.lab.apiserver.objects import Json
from treenail.lab.apiserver.registry import Registry, served
from treenail.lab.apiserver.request import Ask, read
from treenail.lab.apiserver.users import Authenticator, User
from treenail.lab.apiserver.verbs import Answer, Body, Verbs
from treenail.lab.apiserver.watch import Watches, WatchOptions

# As the real server: half an hour to an hour when a client sets no limit.
_WATCH_S = 1800.0
MAX_BODY = 3 * 1024 * 1024
_OPEN_PATHS = ("/healthz", "/readyz", "/livez")


class Web:
    """The aiohttp application."""

    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator,
        authorizer: Authorizer,
        verbs: Verbs,
        watches: Watches,
    ) -> None:
        self._registry = registry
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._verbs = verbs
        self._watches = watches
        self.app = web.Application(client_max_size=MAX_BODY)
        self.app.router.add_route("*", "/{path:.*}", self._serve)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.path in _OPEN_PATHS:
                return web.Response(text="ok")
            user = self._user(request)
            ask = read(request.method, request.path, request.query)
            if not ask.on_resource:
                raise no_such_path()
            self._authorizer.check(user, ask)
            kind = self._registry.kinds.find(ask.group, ask.version, ask.plural)
            if ask.verb == "watch":
                return await self._watch(request, ask, kind, user)
            answer = self._verbs.answer(ask, kind, await _body(request), user)
        except ApiError as error:
            return _error(error)
        return _json(answer)

    def _user(self, request: web.Request) -> User:
        certificate: Any = request.get_extra_info("peercert")
        return self._authenticator.user(request.headers.get("Authorization", ""), certificate)

    async def _watch(
        self, request: web.Request, ask: Ask, kind: Kind, user: User
    ) -> web.StreamResponse:
        options = _watch_options(ask, kind)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        async for event in self._watches.events(kind, user.name, options):
            event["object"] = (
                served(kind, event["object"]) if event["type"] != "ERROR" else event["object"]
            )
            await response.write(_dumps(event) + b"\n")
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


async def _body(request: web.Request) -> Body:
    try:
        content = await request.read()
    except web.HTTPRequestEntityTooLarge:
        message = f"Request entity too large: limit is {MAX_BODY}"
        raise ApiError(413, "RequestEntityTooLarge", message) from None
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
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
