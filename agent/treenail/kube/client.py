"""The verbs of the Kubernetes API on raw JSON, over any transport."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from treenail.errors import ClusterError, GoneError
from treenail.kube.request import (
    JSON_CONTENT_TYPE,
    ApiRequest,
    ApiResponse,
    make_response_error,
    make_status_error,
)
from treenail.kube.resources import PODS, Resource

Json = dict[str, object]
JsonPatch = list[Json]
Params = Mapping[str, str]

_NO_PARAMS: Params = {}


class ResponseStream(Protocol):
    """One answer that goes on. ``close`` may come from any thread and wakes the reader."""

    def read_response(self) -> ApiResponse: ...
    def iter_lines(self) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class Transport(Protocol):
    """How requests get to the API server; raises Unreachable when they don't."""

    def send(self, request: ApiRequest) -> ApiResponse: ...
    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream: ...
    def close(self) -> None: ...


class PatchType(StrEnum):
    """How a patch is to be read; APPLY is server-side apply."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    JSON = "application/json-patch+json"
    APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a list found, and the version to watch from."""

    items: tuple[Json, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """ADDED, MODIFIED, DELETED or BOOKMARK, and the object it is about."""

    type: str
    object: Json


class WatchStream:
    """What happens to some objects, from ``Client.watch``: ``connect``, then iterate."""

    def __init__(self, stream: ResponseStream, what: str) -> None:
        self._stream = stream
        self._what = what

    def connect(self) -> None:
        """Connect and ask; Gone when the version to begin at is too old."""
        reply = self._stream.read_response()
        if reply.status != 200:
            raise make_response_error(self._what, reply)

    def __iter__(self) -> Iterator[WatchEvent]:
        """Each event as it comes, until the server ends the watch or ``close`` is called.

        Gone when the version became too old, Unreachable when the connection broke.
        """
        for line in self._stream.iter_lines():
            event = _decode_object(self._what, line)
            found = event.get("object")
            if not isinstance(found, dict):
                raise ClusterError(f"{self._what}: an event without an object")
            if event.get("type") == "ERROR":
                raise make_status_error(self._what, found)
            yield WatchEvent(str(event.get("type")), found)

    def close(self) -> None:
        """End the watch from any thread; whoever iterates wakes up at once."""
        self._stream.close()


class Client:
    """One API server, as one identity.

    Every verb returns the object the server answered with and raises a ClusterError of the
    class that says what happened. ``namespace`` is empty for what has none, and for a list or a
    watch over all of them. ``params`` are further query parameters (``fieldSelector``,
    ``dryRun``...). A verb takes at most ``limit_s``; a list that long for each page.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        field_manager: str = "treenail",
        limit_s: float = 15.0,
        page_size: int = 250,
        max_pages: int = 400,
    ) -> None:
        self._transport = transport
        self._field_manager = field_manager
        self._limit_s = limit_s
        self._page_size = page_size
        self._max_pages = max_pages

    def get(
        self, resource: Resource, name: str, *, namespace: str = "", params: Params = _NO_PARAMS
    ) -> Json:
        return self._send_request("GET", resource, name, namespace, params=params)

    def list(
        self, resource: Resource, *, namespace: str = "", params: Params = _NO_PARAMS
    ) -> Listing:
        """Every object, fetched page by page.

        A list that outlives its snapshot begins again in one page, as client-go's does.
        """
        try:
            return self._list_pages(resource, namespace, {"limit": str(self._page_size), **params})
        except GoneError:
            return self._list_pages(resource, namespace, params)

    def create(
        self, resource: Resource, body: Json, *, namespace: str = "", params: Params = _NO_PARAMS
    ) -> Json:
        return self._send_request("POST", resource, "", namespace, body=body, params=params)

    def update(
        self,
        resource: Resource,
        name: str,
        body: Json,
        *,
        namespace: str = "",
        subresource: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Replace it; Conflict if ``body`` has a resourceVersion that is not the current one."""
        return self._send_request(
            "PUT", resource, name, namespace, subresource=subresource, body=body, params=params
        )

    def patch(
        self,
        resource: Resource,
        name: str,
        body: Json | JsonPatch,
        patch_type: PatchType = PatchType.MERGE,
        *,
        namespace: str = "",
        subresource: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Change it. APPLY takes the fields over from whoever had them (``force``)."""
        if patch_type is PatchType.APPLY:
            params = {"force": "true", **params}
        return self._send_request(
            "PATCH",
            resource,
            name,
            namespace,
            subresource=subresource,
            body=body,
            content_type=patch_type,
            params=params,
        )

    def delete(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        grace_s: int | None = None,
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Delete it; Conflict if ``uid`` is given and it is another one of the same name."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **_build_delete_options(uid, grace_s),
        }
        return self._send_request("DELETE", resource, name, namespace, body=options, params=params)

    def evict(
        self,
        namespace: str,
        pod: str,
        *,
        uid: str = "",
        grace_s: int | None = None,
        params: Params = _NO_PARAMS,
    ) -> None:
        """Ask for the pod to go, by policy/v1; TooManyRequests while its budget forbids it."""
        body: Json = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        if options := _build_delete_options(uid, grace_s):
            body["deleteOptions"] = options
        self._send_request(
            "POST", PODS, pod, namespace, subresource="eviction", body=body, params=params
        )

    def watch(
        self,
        resource: Resource,
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
        duration_s: int = 300,
    ) -> WatchStream:
        """What happens from ``params["resourceVersion"]`` on, for about ``duration_s``."""
        request = ApiRequest(
            "GET",
            resource.build_path(namespace=namespace),
            {
                "watch": "true",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(duration_s),
                **params,
            },
            limit_s=self._limit_s,
        )
        # The server ends the watch; the transport does only if the server forgets to.
        stream = self._transport.open_stream(request, duration_s=duration_s + 2 * self._limit_s)
        return WatchStream(stream, f"watch {resource.plural}")

    def _list_pages(self, resource: Resource, namespace: str, params: Params) -> Listing:
        items: tuple[Json, ...] = ()
        for _ in range(self._max_pages):
            page = self._send_request("GET", resource, "", namespace, params=params)
            found, metadata = page.get("items"), page.get("metadata")
            if isinstance(found, list):
                items += tuple(found)
            if not isinstance(metadata, dict):
                raise ClusterError(f"list {resource.plural}: an answer without metadata")
            if not metadata.get("continue"):
                return Listing(items, str(metadata.get("resourceVersion") or ""))
            params = {**params, "continue": str(metadata["continue"])}
        raise ClusterError(
            f"list {resource.plural}: more than {self._max_pages} pages of {self._page_size}"
        )

    def _send_request(
        self,
        method: str,
        resource: Resource,
        name: str,
        namespace: str,
        *,
        subresource: str = "",
        body: Json | JsonPatch | None = None,
        content_type: str = JSON_CONTENT_TYPE,
        params: Params = _NO_PARAMS,
    ) -> Json:
        if method in {"POST", "PUT", "PATCH"}:
            params = {"fieldManager": self._field_manager, **params}
        path = resource.build_path(name, namespace=namespace, subresource=subresource)
        data = b"" if body is None else json.dumps(body).encode("ascii")
        reply = self._transport.send(
            ApiRequest(method, path, params, data, content_type, self._limit_s)
        )
        what = " ".join(
            part for part in (method, resource.plural, namespace, name, subresource) if part
        )
        if not 200 <= reply.status < 300:
            raise make_response_error(what, reply)
        return _decode_object(what, reply.body)


def _build_delete_options(uid: str, grace_s: int | None) -> Json:
    options: Json = {}
    if uid:
        options["preconditions"] = {"uid": uid}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


def _decode_object(what: str, text: bytes) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"{what}: the answer is not JSON") from error
    if not isinstance(value, dict):
        raise ClusterError(f"{what}: the answer is not a JSON object")
    return value
