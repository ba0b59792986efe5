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

from treenail_lab.apiserver.access.authentication import ApiUser
from treenail_lab.apiserver.controllers.controllers import ControllerLoop
from treenail_lab.apiserver.errors import (
    ApiError,
    bad_request_error,
    method_not_allowed_error,
    path_not_found_error,
)
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.watch import WatchTable
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.serving.faults import (
    MATCH_FIELDS,
    DelayFault,
    Fault,
    FaultInjector,
    FaultMatch,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.request_log import RequestLog
from treenail_lab.apiserver.storage import snapshot
from treenail_lab.apiserver.storage.store import Store

_PREFIX = "/lab/"


class ControlledServer(Protocol):
    """What the endpoint works on."""

    @property
    def store(self) -> Store: ...
    @property
    def faults(self) -> FaultInjector: ...
    @property
    def requests(self) -> RequestLog: ...
    @property
    def watches(self) -> WatchTable: ...
    @property
    def controllers(self) -> ControllerLoop: ...
    def load_state(self, document: Json) -> None: ...
    def inject_fault(
        self,
        fault: Fault,
        match: FaultMatch | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int: ...


def answer_request(server: ControlledServer, ask: ServerRequest, user: ApiUser, body: Json) -> Json:
    """Do what a request below ``/lab`` asks for; raises ApiError."""
    if not user.is_master:
        raise ApiError(403, "Forbidden", f'User "{user.name}" is not in system:masters')
    match ask.verb, ask.path.removeprefix(_PREFIX).split("/"):
        case "get", ["faults"]:
            return {"faults": [one.to_json() for one in server.faults.list_active()]}
        case "create", ["faults"]:
            return _inject_fault(server, body)
        case "delete", ["faults", *rest]:
            server.faults.lift_fault(int(rest[0]) if rest and rest[0].isdigit() else None)
            return {}
        case "get", ["requests"]:
            return server.requests.to_json()
        case "delete", ["requests"]:
            server.requests.reset()
            return {}
        case "get", ["watches"]:
            return dict(server.watches.count_watches())
        case "update", ["kubelets", node]:
            return _set_kubelet(server, node, gone=bool(body.get("gone")))
        case "get", ["snapshot"]:
            return snapshot.take_snapshot(server.store)
        case "update", ["snapshot"]:
            server.load_state(body)
            return {}
        case _, ["faults" | "requests" | "watches" | "snapshot", *_]:
            raise method_not_allowed_error()
        case _:
            raise path_not_found_error()


def _set_kubelet(server: ControlledServer, node: str, *, gone: bool) -> Json:
    kubelets = server.controllers.kubelets
    if gone:
        kubelets.stop_kubelet(node)
    else:
        kubelets.start_kubelet(node)
        server.controllers.schedule_run()
    return {"gone": sorted(kubelets.stopped_nodes)}


def _inject_fault(server: ControlledServer, body: Json) -> Json:
    match = _read_match(body.get("match", {}))
    if body.get("fault") == "cut-watches":
        return {"cut": server.watches.cut_watches(match.resource, match.user)}
    if body.get("fault") == "expire-versions":
        server.store.expire_versions()
        return {}
    times = None if body.get("times") is None else int(_read_number(body, "times"))
    for_s = None if body.get("forSeconds") is None else _read_number(body, "forSeconds")
    return {"id": server.inject_fault(_read_fault(body), match, times=times, for_s=for_s)}


def _read_number(body: Json, name: str, default: float = 0) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request_error(f"{name}: expected a number, found {value!r}")
    return value


def _read_match(fields: object) -> FaultMatch:
    if not isinstance(fields, dict) or not all(isinstance(one, str) for one in fields.values()):
        raise bad_request_error("match: expected an object of strings")
    unknown = sorted(set(fields) - set(MATCH_FIELDS))
    if unknown:
        raise bad_request_error(f"match: unknown {', '.join(unknown)}")
    return FaultMatch(**fields)


def _read_fault(body: Json) -> Fault:
    match body.get("fault"):
        case "refuse":
            return RefuseFault()
        case "delay":
            return DelayFault(_read_number(body, "seconds"))
        case "reject" if body.get("code") in {429, 500, 503}:
            return RejectFault(body["code"], int(_read_number(body, "retryAfterSeconds", 1)))
        case "reject":
            raise bad_request_error("reject: expected code 429, 500 or 503")
        case "lose-answer":
            return LoseAnswerFault()
        case other:
            raise bad_request_error(f"unknown fault {other!r}")
