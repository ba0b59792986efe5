"""Transport to an in-memory API server with versions and injected failures."""

import json
from collections.abc import Iterator

from treenail.kube.api_client import PatchType, ResponseStream
from treenail.kube.request import ApiRequest, ApiResponse

Json = dict[str, object]


class Cluster:
    """Stores objects, merges patches, rejects stale updates, and records every request.

    ``failures`` are raised by the next requests, one each; with ``lost`` the request takes
    effect and only its answer is missing.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.requests: list[ApiRequest] = []
        self.failures: list[Exception | None] = []
        self.lost = False
        self._version = 0

    def send(self, request: ApiRequest) -> ApiResponse:
        self.requests.append(request)
        failure = self.failures.pop(0) if self.failures else None
        if failure and not self.lost:
            raise failure
        reply = self._answer(request, json.loads(request.body or b"{}"))
        if failure:
            raise failure
        return reply

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream:
        raise NotImplementedError("this transport has no streams")

    def close(self) -> None:
        """Do nothing."""

    def _answer(self, request: ApiRequest, body: Json) -> ApiResponse:
        path = request.path
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"  # type: ignore[index]  # a dict
            if path in self.objects:
                return refusal(409, "AlreadyExists")
            return self._store(path, body)
        found = self.objects.get(path)
        if found is None:
            return refusal(404, "NotFound")
        if request.method == "PUT":
            wanted = body["metadata"].get("resourceVersion")  # type: ignore[attr-defined]  # a dict
            if wanted and wanted != found["metadata"]["resourceVersion"]:  # type: ignore[index]  # a dict
                return refusal(409, "Conflict")
            return self._store(path, body)
        if request.method == "PATCH":
            assert request.content_type == PatchType.MERGE
            return self._store(path, merged(found, body))
        return ApiResponse(200, json.dumps(found).encode())

    def _store(self, path: str, body: Json) -> ApiResponse:
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}  # type: ignore[dict-item]  # a dict
        self.objects[path] = {**body, "metadata": metadata}
        return ApiResponse(200, json.dumps(self.objects[path]).encode())


class Answers:
    """A transport that returns the given responses in turn."""

    def __init__(self, *replies: ApiResponse) -> None:
        self._replies = list(replies)
        self.requests: list[ApiRequest] = []
        self.stream_s = 0.0

    def send(self, request: ApiRequest) -> ApiResponse:
        self.requests.append(request)
        return self._replies.pop(0)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> "AnsweredStream":
        self.requests.append(request)
        self.stream_s = duration_s
        return AnsweredStream(self._replies.pop(0))

    def close(self) -> None:
        """Do nothing."""


class AnsweredStream:
    """One response whose body is the lines."""

    def __init__(self, reply: ApiResponse) -> None:
        self._reply = reply

    def read_response(self) -> ApiResponse:
        return self._reply

    def iter_lines(self) -> Iterator[bytes]:
        yield from self._reply.body.splitlines()

    def close(self) -> None:
        """Do nothing."""


def reply(body: object, status: int = 200) -> ApiResponse:
    return ApiResponse(status, json.dumps(body).encode())


def refusal(code: int, reason: str, message: str = "", **more: object) -> ApiResponse:
    status = {"kind": "Status", "code": code, "reason": reason, "message": message or reason}
    return reply(status | more, code)


def merged(found: Json, change: Json) -> Json:
    result = dict(found)
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(old := result.get(key), dict):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result
