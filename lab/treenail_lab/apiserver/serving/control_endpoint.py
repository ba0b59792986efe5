"""The control endpoint below ``/lab``, for members of system:masters only.

::

    GET    /lab/faults              the faults at work
    POST   /lab/faults              {"fault": "reject", "code": 503, "times": 2,
                                     "match": {"verb": "patch", "resource": "nodes"}}
                                    refuse, delay (seconds), reject (code, retryAfterSeconds) or
                                    lose-answer; limited by times or forSeconds, or until lifted
                                    at once: cut-watches (match: resource, user), expire-versions
    DELETE /lab/faults[/ID]         lift one or all
    GET    /lab/requests            counts by user, verb and resource, and the latest requests
    DELETE /lab/requests            count from zero
    GET    /lab/watches             how many watches are open, by plural
    PUT    /lab/kubelets/NODE       {"gone": true}: its pods do not end any more
    GET    /lab/snapshot            the whole state
    PUT    /lab/snapshot            replace the whole state
"""

from typing import Protocol

from treenail_lab.apiserver.access.authentication import User
from treenail_lab.apiserver.controllers.controllers import Upkeep
from treenail_lab.apiserver.errors import ApiError, bad_request, method_not_allowed, no_such_path
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.watch import Watches
from treenail_lab.apiserver.request import Ask
from treenail_lab.apiserver.serving.faults import (
    MATCH_FIELDS,
    Delay,
    Fault,
    Faults,
    LoseAnswer,
    Match,
    Refuse,
    Reject,
)
from treenail_lab.apiserver.serving.request_log import RequestLog
from treenail_lab.apiserver.storage import snapshot
from treenail_lab.apiserver.storage.store import Store

_PREFIX = "/lab/"


class Server(Protocol):
    """What the endpoint works on."""

    @property
    def store(self) -> Store: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def requests(self) -> RequestLog: ...
    @property
    def watches(self) -> Watches: ...
    @property
    def upkeep(self) -> Upkeep: ...
    def load(self, document: Json) -> None: ...
    def inject(
        self,
        fault: Fault,
        match: Match | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int: ...


def answer(server: Server, ask: Ask, user: User, body: Json) -> Json:
    """Do what a request below ``/lab`` asks for; raises ApiError."""
    if not user.master:
        raise ApiError(403, "Forbidden", f'User "{user.name}" is not in system:masters')
    match ask.verb, ask.path.removeprefix(_PREFIX).split("/"):
        case "get", ["faults"]:
            return {"faults": [one.json() for one in server.faults.at_work()]}
        case "create", ["faults"]:
            return _inject(server, body)
        case "delete", ["faults", *rest]:
            server.faults.lift(int(rest[0]) if rest and rest[0].isdigit() else None)
            return {}
        case "get", ["requests"]:
            return server.requests.json()
        case "delete", ["requests"]:
            server.requests.reset()
            return {}
        case "get", ["watches"]:
            return dict(server.watches.counts())
        case "update", ["kubelets", node]:
            return _set_kubelet(server, node, gone=bool(body.get("gone")))
        case "get", ["snapshot"]:
            return snapshot.taken(server.store)
        case "update", ["snapshot"]:
            server.load(body)
            return {}
        case _, ["faults" | "requests" | "watches" | "snapshot", *_]:
            raise method_not_allowed()
        case _:
            raise no_such_path()


def _set_kubelet(server: Server, node: str, *, gone: bool) -> Json:
    kubelets = server.upkeep.kubelets
    if gone:
        kubelets.leave(node)
    else:
        kubelets.come_back(node)
        server.upkeep.look()
    return {"gone": sorted(kubelets.gone)}


def _inject(server: Server, body: Json) -> Json:
    match = _match(body.get("match", {}))
    if body.get("fault") == "cut-watches":
        return {"cut": server.watches.cut(match.resource, match.user)}
    if body.get("fault") == "expire-versions":
        server.store.expire()
        return {}
    times = None if body.get("times") is None else int(_number(body, "times"))
    for_s = None if body.get("forSeconds") is None else _number(body, "forSeconds")
    return {"id": server.inject(_fault(body), match, times=times, for_s=for_s)}


def _number(body: Json, name: str, default: float = 0) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name}: expected a number, found {value!r}")
    return value


def _match(fields: object) -> Match:
    if not isinstance(fields, dict) or not all(isinstance(one, str) for one in fields.values()):
        raise bad_request("match: expected an object of strings")
    unknown = sorted(set(fields) - set(MATCH_FIELDS))
    if unknown:
        raise bad_request(f"match: unknown {', '.join(unknown)}")
    return Match(**fields)


def _fault(body: Json) -> Fault:
    match body.get("fault"):
        case "refuse":
            return Refuse()
        case "delay":
            return Delay(_number(body, "seconds"))
        case "reject" if body.get("code") in {429, 500, 503}:
            return Reject(body["code"], int(_number(body, "retryAfterSeconds", 1)))
        case "reject":
            raise bad_request("reject: expected code 429, 500 or 503")
        case "lose-answer":
            return LoseAnswer()
        case other:
            raise bad_request(f"unknown fault {other!r}")
