"""The control endpoint below ``/lab``, for members of system:masters only.

::

    GET    /lab/faults              the active faults
    POST   /lab/faults              {"fault": "reject", "code": 503, "times": 2,
                                     "match": {"verb": "patch", "resource": "nodes"}}
                                    refuse, delay (seconds), reject (code, retryAfterSeconds) or
                                    lose-answer: for times requests, for forSeconds, or until
                                    lifted; and, at once, cut-watches (match: resource, user) or
                                    expire-versions; and, for watches (match: resource, user),
                                    hold-watches, or delay-watches (seconds, random)
    DELETE /lab/faults[/ID]         lift one or all
    GET    /lab/requests            counts by user, verb and resource, and the latest requests
    DELETE /lab/requests            count from zero
    GET    /lab/watches             how many watches are open, by plural
    PUT    /lab/kubelets/NODE       {"stopped": true}: its pods no longer start or end
    GET    /lab/snapshot            the whole state
    PUT    /lab/snapshot            replace the whole state
"""

from dataclasses import dataclass

from treenail_lab.apiserver.access.authentication import ApiUser
from treenail_lab.apiserver.controllers.controllers import ControllerLoop
from treenail_lab.apiserver.errors import (
    ApiError,
    bad_request_error,
    method_not_allowed_error,
    path_not_found_error,
)
from treenail_lab.apiserver.objects import Json
from treenail_lab.apiserver.registry.crds import CustomKinds
from treenail_lab.apiserver.registry.list_watch import WatchTable
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.serving.faults import (
    MATCH_FIELDS,
    DelayFault,
    DelayWatchesFault,
    Fault,
    FaultInjector,
    FaultMatch,
    HoldWatchesFault,
    LoseAnswerFault,
    RefuseFault,
    RejectFault,
)
from treenail_lab.apiserver.serving.http import RequestLog
from treenail_lab.apiserver.store import Store, restore_snapshot, take_snapshot

_PREFIX = "/lab/"


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """The means of tests and benchmarks to change the server beside the Kubernetes API."""

    store: Store
    faults: FaultInjector
    requests: RequestLog
    watches: WatchTable
    controllers: ControllerLoop
    custom_kinds: CustomKinds

    def answer_request(self, request: ServerRequest, user: ApiUser, body: Json) -> Json:
        """Execute a request below ``/lab``; raise `ApiError`."""
        if not user.is_master:
            raise ApiError(403, "Forbidden", f'User "{user.name}" is not in system:masters')
        match request.verb, request.path.removeprefix(_PREFIX).split("/"):
            case "get", ["faults"]:
                return {"faults": [fault.to_json() for fault in self.faults.list_active()]}
            case "create", ["faults"]:
                return self._create_fault(body)
            case "delete", ["faults", *rest]:
                self.faults.lift_fault(int(rest[0]) if rest and rest[0].isdigit() else None)
                return {}
            case "get", ["requests"]:
                return self.requests.to_json()
            case "delete", ["requests"]:
                self.requests.reset()
                return {}
            case "get", ["watches"]:
                return dict(self.watches.count_watches())
            case "update", ["kubelets", node]:
                self.set_kubelet(node, is_stopped=bool(body.get("stopped")))
                return {"stopped": sorted(self.controllers.kubelets.stopped_nodes)}
            case "get", ["snapshot"]:
                return take_snapshot(self.store)
            case "update", ["snapshot"]:
                self.load_state(body)
                return {}
            case _, ["faults" | "requests" | "watches" | "snapshot", *_]:
                raise method_not_allowed_error()
            case _:
                raise path_not_found_error()

    def inject_fault(
        self,
        fault: Fault,
        match: FaultMatch | None = None,
        *,
        times: int | None = None,
        for_s: float | None = None,
    ) -> int:
        """Begin a fault for ``times`` matching requests, for some seconds, or until lifted.

        Return its number for ``faults.lift_fault``. Refused users lose their open watches too.
        """
        match = match or FaultMatch()
        if isinstance(fault, RefuseFault):
            self.watches.cut_watches(match.resource, match.user)
        return self.faults.inject_fault(fault, match, times=times, for_s=for_s)

    def load_state(self, document: Json) -> None:
        """Replace the whole state by a snapshot; open watches end with 410."""
        restore_snapshot(self.store, document)
        self.custom_kinds.reload_kinds()
        self.controllers.reload()

    def set_kubelet(self, node: str, *, is_stopped: bool) -> None:
        """Stop the kubelet of a node, as when its machine is off, or start it again."""
        kubelets = self.controllers.kubelets
        if is_stopped:
            kubelets.stop_kubelet(node)
        else:
            kubelets.start_kubelet(node)
            self.controllers.schedule_run()

    def _create_fault(self, body: Json) -> Json:
        match = _read_match(body.get("match", {}))
        if body.get("fault") == "cut-watches":
            return {"cut": self.watches.cut_watches(match.resource, match.user)}
        if body.get("fault") == "expire-versions":
            self.store.expire_versions()
            return {}
        times = None if body.get("times") is None else int(_read_number(body, "times"))
        for_s = None if body.get("forSeconds") is None else _read_number(body, "forSeconds")
        return {"id": self.inject_fault(_read_fault(body), match, times=times, for_s=for_s)}


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
        case "hold-watches":
            return HoldWatchesFault()
        case "delay-watches":
            return DelayWatchesFault(_read_number(body, "seconds"), bool(body.get("random")))
        case other:
            raise bad_request_error(f"unknown fault {other!r}")
