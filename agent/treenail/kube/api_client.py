"""Client of the Kubernetes API: its verbs on plain JSON, over any transport."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from treenail import errors
from treenail.encoding import json_text
from treenail.kube import resources
from treenail.kube.request import (
    JSON_CONTENT_TYPE,
    ApiRequest,
    ApiResponse,
    make_response_error,
    make_status_error,
)

Json = dict[str, object]
JsonPatch = list[Json]
Params = Mapping[str, str]

_NO_PARAMS: Params = {}
# A server that cannot leave spec and status out answers with the whole objects.
_ACCEPT_METADATA, _ACCEPT_METADATA_LIST = (
    f"{JSON_CONTENT_TYPE};as={kind};g=meta.k8s.io;v=v1,{JSON_CONTENT_TYPE}"
    for kind in ("PartialObjectMetadata", "PartialObjectMetadataList")
)


class ResponseStream(Protocol):
    """A streaming response. Any thread may call ``close``, which wakes the reader."""

    def read_response(self) -> ApiResponse: ...
    def iter_lines(self) -> Iterator[bytes]: ...
    def close(self) -> None: ...


class Transport(Protocol):
    """Carries requests to the API server; raises UnreachableError when it gets no response."""

    def send(self, request: ApiRequest) -> ApiResponse: ...
    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream: ...
    def close(self) -> None: ...


class PatchType(StrEnum):
    """Content type of a patch; APPLY is server-side apply."""

    MERGE = "application/merge-patch+json"
    STRATEGIC = "application/strategic-merge-patch+json"
    JSON = "application/json-patch+json"
    # The API has no type for apply in JSON, but JSON is valid YAML.
    APPLY = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Listing:
    """The listed objects, and the resourceVersion to watch from."""

    items: tuple[Json, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """ADDED, MODIFIED, DELETED or BOOKMARK with its object."""

    type: str
    object: Json


class WatchStream:
    """Events of ``Client.watch``: call ``connect``, then iterate."""

    def __init__(self, stream: ResponseStream, operation: str) -> None:
        self._stream = stream
        self._operation = operation

    def connect(self) -> None:
        """Send the request; raise GoneError when the resourceVersion has expired."""
        reply = self._stream.read_response()
        if reply.status != 200:
            raise make_response_error(self._operation, reply)

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield each event as it arrives, until the server ends the watch or ``close`` is called.

        Raises GoneError when the resourceVersion expired, UnreachableError when the connection
        broke.
        """
        for line in self._stream.iter_lines():
            event = _decode_object(self._operation, line)
            document = event.get("object")
            if not isinstance(document, dict):
                raise errors.ClusterError(f"{self._operation}: the event has no object")
            # The status line is long sent, so the API server reports an error as an event with a
            # Status.
            if event.get("type") == "ERROR":
                raise make_status_error(self._operation, document)
            yield WatchEvent(str(event.get("type")), document)

    def close(self) -> None:
        """End the watch from any thread; the thread that iterates returns at once."""
        self._stream.close()


class Client:
    """Client of one API server with one identity.

    Every verb returns the object of the response, and raises the `ClusterError` class of the error.
    ``namespace`` is empty for cluster-scoped objects and for all namespaces. ``params`` are more
    query parameters (``fieldSelector``, ``dryRun``). ``limit_s`` limits each request.
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
        self,
        resource: resources.Resource,
        name: str,
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        return self._send_request("GET", resource, name, namespace, params=params)

    def read_path(self, path: str) -> Json:
        """Read a document that is no object of a resource, such as those of discovery."""
        operation, answer = self._exchange_request("GET", path, ("GET", path))
        return _decode_object(operation, answer)

    def list(
        self, resource: resources.Resource, *, namespace: str = "", params: Params = _NO_PARAMS
    ) -> Listing:
        """List all objects, page by page.

        When the continue token expires the list restarts without pages, as in client-go's pager.
        """
        try:
            pages = tuple(self.list_pages(resource, namespace=namespace, params=params))
        except errors.GoneError:
            pages = tuple(
                self.list_pages(resource, namespace=namespace, params=params, is_paged=False)
            )
        items = tuple(item for page in pages for item in page.items)
        return Listing(items, pages[-1].resource_version)

    def list_pages(
        self,
        resource: resources.Resource,
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
        is_paged: bool = True,
        has_metadata_only: bool = False,
    ) -> Iterator[Listing]:
        """Yield the pages of a list as they arrive, so that a caller need not hold all of them.

        All pages are of the moment of the first one. With ``has_metadata_only`` the objects have
        neither spec nor status. Raises GoneError when the continue token expires: then list without
        pages.
        """
        if is_paged:
            # A continue token is valid for 5 to 15 minutes (ListOptions in meta/v1): etcd then
            # compacts the versions that it reads.
            params = {"limit": str(self._page_size), **params}
        for _ in range(self._max_pages):
            operation, answer = self._exchange_request(
                "GET",
                resource.build_path(namespace=namespace),
                ("GET", resource.plural, namespace),
                params=params,
                accept=_ACCEPT_METADATA_LIST if has_metadata_only else JSON_CONTENT_TYPE,
            )
            page = _decode_object(operation, answer)
            listed, metadata = page.get("items"), page.get("metadata")
            if not isinstance(metadata, dict):
                raise errors.ClusterError(f"list {resource.plural}: the response has no metadata")
            # Kubernetes 1.30 answers null for an empty list of metadata.
            items = tuple(listed) if isinstance(listed, list) else ()
            yield Listing(items, str(metadata.get("resourceVersion") or ""))
            if not metadata.get("continue"):
                return
            # Released before the next page arrives.
            del answer, page, listed, items
            params = {**params, "continue": str(metadata["continue"])}
        raise errors.ClusterError(
            f"list {resource.plural}: more than {self._max_pages} pages of {self._page_size}"
        )

    def create(
        self,
        resource: resources.Resource,
        body: Json,
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        return self._send_request("POST", resource, "", namespace, body=body, params=params)

    def update(
        self,
        resource: resources.Resource,
        name: str,
        body: Json,
        *,
        namespace: str = "",
        subresource: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Replace the object; raise ConflictError if ``body`` has an old resourceVersion."""
        return self._send_request(
            "PUT", resource, name, namespace, subresource=subresource, body=body, params=params
        )

    def patch(
        self,
        resource: resources.Resource,
        name: str,
        body: Json | JsonPatch,
        patch_type: PatchType = PatchType.MERGE,
        *,
        namespace: str = "",
        subresource: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Change the object. APPLY takes ownership of conflicting fields (``force``)."""
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
        resource: resources.Resource,
        name: str,
        *,
        namespace: str = "",
        uid: str = "",
        resource_version: str = "",
        grace_s: int | None = None,
        propagation: str = "",
        params: Params = _NO_PARAMS,
    ) -> Json:
        """Delete the object; raise ConflictError if ``uid`` or the version is given and differs.

        ``propagation`` is ``Background``, ``Foreground`` or ``Orphan``; empty for the default of
        the kind, which leaves the pods of a Job.
        """
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **_build_delete_options(uid, grace_s, resource_version),
        }
        if propagation:
            options["propagationPolicy"] = propagation
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
        """Evict the pod (policy/v1); raise TooManyRequestsError while a budget forbids it."""
        body: Json = {
            # Kubernetes has this version of the kind since 1.22.
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        if options := _build_delete_options(uid, grace_s):
            body["deleteOptions"] = options
        # The answer is a Status without information. A drain of a node gets dozens.
        self._exchange_request(
            "POST",
            resources.PODS.build_path(pod, namespace=namespace, subresource="eviction"),
            ("POST", resources.PODS.plural, namespace, pod, "eviction"),
            body=body,
            params=params,
        )

    def watch(
        self,
        resource: resources.Resource,
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
        duration_s: int = 300,
        has_metadata_only: bool = False,
    ) -> WatchStream:
        """Watch from ``params["resourceVersion"]`` on, for about ``duration_s``."""
        request = ApiRequest(
            "GET",
            resource.build_path(namespace=namespace),
            {
                "watch": "true",
                # About once a minute the API server sends its version, so that a watch of quiet
                # objects can resume later (KEP-956).
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(duration_s),
                **params,
            },
            limit_s=self._limit_s,
            accept=_ACCEPT_METADATA if has_metadata_only else JSON_CONTENT_TYPE,
        )
        # The API server ends the watch after timeoutSeconds. The longer limit guards against a
        # server that does not.
        stream = self._transport.open_stream(request, duration_s=duration_s + 2 * self._limit_s)
        return WatchStream(stream, f"watch {resource.plural}")

    def _send_request(
        self,
        method: str,
        resource: resources.Resource,
        name: str,
        namespace: str,
        *,
        subresource: str = "",
        body: Json | JsonPatch | None = None,
        content_type: str = JSON_CONTENT_TYPE,
        params: Params = _NO_PARAMS,
    ) -> Json:
        if not name and method != "POST":
            # The path would be that of the collection: DELETE would remove all objects.
            raise errors.NotFoundError(f"cannot {method} {resource.kind}: its name is empty")
        operation, answer = self._exchange_request(
            method,
            resource.build_path(name, namespace=namespace, subresource=subresource),
            (method, resource.plural, namespace, name, subresource),
            body=body,
            content_type=content_type,
            params=params,
        )
        return _decode_object(operation, answer)

    def _exchange_request(
        self,
        method: str,
        path: str,
        words: Sequence[str],
        *,
        body: Json | JsonPatch | None = None,
        content_type: str = JSON_CONTENT_TYPE,
        params: Params = _NO_PARAMS,
        accept: str = JSON_CONTENT_TYPE,
    ) -> tuple[str, bytes]:
        """Return the description of the request for messages, and the body of its answer."""
        # The API server requires fieldManager for apply and derives it from User-Agent otherwise.
        if method in {"POST", "PUT", "PATCH"}:
            params = {"fieldManager": self._field_manager, **params}
        data = b"" if body is None else json.dumps(body).encode("ascii")
        reply = self._transport.send(
            ApiRequest(method, path, params, data, content_type, self._limit_s, accept)
        )
        operation = " ".join(filter(None, words))
        if not 200 <= reply.status < 300:
            raise make_response_error(operation, reply)
        return operation, reply.body


def _build_delete_options(uid: str, grace_s: int | None, resource_version: str = "") -> Json:
    options: Json = {}
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    if required := {name: value for name, value in preconditions.items() if value}:
        options["preconditions"] = required
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


def _decode_object(operation: str, text: bytes) -> Json:
    try:
        value = json_text.parse_json(text)
    except ValueError as error:
        raise errors.ClusterError(f"{operation}: the response is not JSON") from error
    if not isinstance(value, dict):
        raise errors.ClusterError(f"{operation}: the response is not a JSON object")
    return value
