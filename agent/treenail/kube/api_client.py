"""Client of the Kubernetes API: its verbs on plain JSON, over any transport."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeVar

from treenail import errors, memory
from treenail.encoding import json_text
from treenail.kube import resources
from treenail.kube.request import (
    JSON_CONTENT_TYPE,
    MAX_BYTES,
    OBJECT_PAGES,
    PAGE_BYTES,
    ApiRequest,
    ApiResponse,
    make_response_error,
    make_status_error,
)

Json = dict[str, object]
JsonPatch = list[Json]
Params = Mapping[str, str]
T = TypeVar("T")

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
        page_size: int = 125,
        max_pages: int = 800,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._transport = transport
        self._field_manager = field_manager
        self._limit_s = limit_s
        self._page_size = page_size
        self._max_pages = max_pages
        self._page_bytes = page_bytes
        self._object_bytes = OBJECT_PAGES * page_bytes

    def get(self, resource: resources.Resource, name: str, *, namespace: str = "") -> Json:
        return self._send_request("GET", resource, name, namespace)

    def find(self, resource: resources.Resource, name: str, *, namespace: str = "") -> Json | None:
        """Return the object; None when it does not exist."""
        try:
            return self.get(resource, name, namespace=namespace)
        except errors.NotFoundError:
            return None

    def read_path(self, path: str) -> Json:
        """Read a document that is no object of a resource, such as those of discovery."""
        operation, answer = self._exchange_request("GET", path, ("GET", path))
        return _decode_object(operation, answer)

    def list(
        self, resource: resources.Resource, *, namespace: str = "", params: Params = _NO_PARAMS
    ) -> Listing:
        """List all objects, page by page."""
        pages = self.list_parsed(resource, lambda page: [page], namespace=namespace, params=params)
        items = tuple(item for page in pages for item in page.items)
        return Listing(items, pages[-1].resource_version)

    def list_parsed(
        self,
        resource: resources.Resource,
        parse_page: Callable[[Listing], Iterable[T]],
        *,
        namespace: str = "",
        params: Params = _NO_PARAMS,
        has_metadata_only: bool = False,
    ) -> Sequence[T]:
        """List all objects as ``parse_page`` returns them; only one page of whole ones is held."""
        read_pages = partial(
            self.list_pages,
            resource,
            namespace=namespace,
            params=params,
            has_metadata_only=has_metadata_only,
        )
        try:
            return [value for page in read_pages() for value in parse_page(page)]
        except errors.GoneError:  # The continue token expired: as in client-go's pager.
            return [value for page in read_pages(is_paged=False) for value in parse_page(page)]

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
        pages. A page of too many bytes is requested again with half as many objects; raises
        TooLargeError, with its name, for one object of too many bytes.
        """
        # A continue token is valid for 5 to 15 minutes (ListOptions in meta/v1): etcd then
        # compacts the versions that it reads. It has no limit: each page may have another one.
        limit = first_limit = int(params.get("limit", self._page_size)) if is_paged else 0
        unread = max_objects = self._max_pages * self._page_size
        is_too_large = False
        while unread > 0:
            params = {**params, "limit": str(limit)} if limit else params
            try:
                operation, answer = self._exchange_request(
                    "GET",
                    resource.build_path(namespace=namespace),
                    ("GET", resource.plural, namespace),
                    params=params,
                    accept=_ACCEPT_METADATA_LIST if has_metadata_only else JSON_CONTENT_TYPE,
                    max_bytes={0: MAX_BYTES, 1: self._object_bytes}.get(limit, self._page_bytes),
                )
            except errors.TooLargeError:
                if limit > 1:
                    limit //= 2
                    continue
                if has_metadata_only or not limit:
                    raise
                has_metadata_only = is_too_large = True  # Only its name is read.
                continue
            page, size = _decode_object(operation, answer), len(answer)
            listed, metadata = page.get("items"), page.get("metadata")
            if not isinstance(metadata, dict):
                raise errors.ClusterError(f"list {resource.plural}: the response has no metadata")
            # Kubernetes 1.30 answers null for an empty list of metadata.
            items = tuple(listed) if isinstance(listed, list) else ()
            if is_too_large:
                raise _make_size_error(resource, items, self._object_bytes)
            yield Listing(items, str(metadata.get("resourceVersion") or ""))
            if not metadata.get("continue"):
                return
            # Released before the next page arrives.
            del answer, page, listed, items
            params = {**params, "continue": str(metadata["continue"])}
            unread -= limit or self._page_size
            if size < self._page_bytes // 4:
                limit = min(2 * limit, first_limit)
        raise errors.ClusterError(f"list {resource.plural}: more than {max_objects} objects")

    def create(self, resource: resources.Resource, body: Json, *, namespace: str = "") -> Json:
        return self._send_request("POST", resource, "", namespace, body=body)

    def update(
        self,
        resource: resources.Resource,
        name: str,
        body: Json,
        *,
        namespace: str = "",
        subresource: str = "",
    ) -> Json:
        """Replace the object; raise ConflictError if ``body`` has an old resourceVersion."""
        return self._send_request(
            "PUT", resource, name, namespace, subresource=subresource, body=body
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
        return self._send_request("DELETE", resource, name, namespace, body=options)

    def evict(self, namespace: str, pod: str, *, uid: str = "") -> None:
        """Evict the pod (policy/v1); raise TooManyRequestsError while a budget forbids it."""
        body: Json = {
            # Kubernetes has this version of the kind since 1.22.
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        if options := _build_delete_options(uid):
            body["deleteOptions"] = options
        # The answer is a Status without information. A drain of a node gets dozens.
        self._exchange_request(
            "POST",
            resources.PODS.build_path(pod, namespace=namespace, subresource="eviction"),
            ("POST", resources.PODS.plural, namespace, pod, "eviction"),
            body=body,
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
            max_bytes=self._object_bytes,
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
        max_bytes: int = MAX_BYTES,
    ) -> tuple[str, bytes]:
        """Return the description of the request for messages, and the body of its answer."""
        # The API server requires fieldManager for apply and derives it from User-Agent otherwise.
        if method in {"POST", "PUT", "PATCH"}:
            params = {"fieldManager": self._field_manager, **params}
        data = b"" if body is None else json.dumps(body).encode("ascii")
        reply = self._transport.send(
            ApiRequest(method, path, params, data, content_type, self._limit_s, accept, max_bytes)
        )
        operation = " ".join(filter(None, words))
        if not 200 <= reply.status < 300:
            raise make_response_error(operation, reply)
        return operation, reply.body


def _build_delete_options(uid: str, grace_s: int | None = None, resource_version: str = "") -> Json:
    options: Json = {}
    preconditions = {"uid": uid, "resourceVersion": resource_version}
    if required := {name: value for name, value in preconditions.items() if value}:
        options["preconditions"] = required
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


def _make_size_error(
    resource: resources.Resource, items: Sequence[Json], max_bytes: int
) -> errors.TooLargeError:
    """Build the error for the first object of a page, of which only the metadata are read."""
    metadata = resources.get_object(items[0] if items else {}, "metadata")
    name, namespace = metadata.get("name"), metadata.get("namespace")
    where = f" -n {namespace}" if namespace else ""
    return errors.TooLargeError(
        f"list {resource.plural}: one object has more than {memory.format_bytes(max_bytes)}",
        remedy=f"delete it: kubectl delete {resource.plural} {name}{where}",
    )


def _decode_object(operation: str, text: bytes) -> Json:
    try:
        value = json_text.parse_json(text)
    except ValueError as error:
        raise errors.ClusterError(f"{operation}: the response is not JSON") from error
    if not isinstance(value, dict):
        raise errors.ClusterError(f"{operation}: the response is not a JSON object")
    return value
