"""Lists, complete or in pages of one resource version."""

import base64
import json

from treenail_lab.apiserver.errors import (
    ApiError,
    bad_request_error,
    expired_continue_error,
    too_large_version_error,
)
from treenail_lab.apiserver.objects import Json, read_key
from treenail_lab.apiserver.registry.registry import convert_version
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.schema.kinds import ResourceKind
from treenail_lab.apiserver.schema.selectors import (
    ObjectPredicate,
    parse_field_selector,
    parse_label_selector,
)
from treenail_lab.apiserver.storage.store import Store


def build_selection(request: ServerRequest, kind: ResourceKind) -> ObjectPredicate:
    """Return the predicate of a list or watch request."""
    by_label = parse_label_selector(request.query.get("labelSelector", ""))
    by_field = parse_field_selector(request.query.get("fieldSelector", ""), kind)
    namespace = request.namespace

    def selected(obj: Json) -> bool:
        if namespace and obj["metadata"].get("namespace") != namespace:
            return False
        return by_label(obj) and by_field(obj)

    return selected


def list_objects(store: Store, kind: ResourceKind, request: ServerRequest) -> Json:
    """Return a list document or one page of it; raise 410 when its version was compacted."""
    selected = build_selection(request, kind)
    version, start = _find_start(store, request)
    if version == store.version:
        objects = store.list_objects(kind.storage, request.namespace)
    else:
        try:
            store.check_version(version)
            then = store.read_at(kind.storage, version)
        except ApiError as error:
            raise (expired_continue_error() if request.query.get("continue") else error) from None
        objects = [then[where] for where in sorted(then)]
    items = [
        convert_version(kind, obj) for obj in objects if read_key(obj) > start and selected(obj)
    ]
    metadata: Json = {"resourceVersion": str(version)}
    limit = request.read_number("limit")
    if limit and len(items) > limit:
        metadata["continue"] = _encode_token(version, items[limit - 1])
        if not _has_selector(request):
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": metadata,
        "items": items,
    }


def _has_selector(request: ServerRequest) -> bool:
    return bool(request.query.get("labelSelector") or request.query.get("fieldSelector"))


def _find_start(store: Store, request: ServerRequest) -> tuple[int, tuple[str, str]]:
    """Return the version to list at, and the key after which to begin."""
    if token := request.query.get("continue"):
        if request.read_number("resourceVersion"):
            raise bad_request_error(
                "specifying resource version is not allowed when using continue"
            )
        return _decode_token(token)
    requested = request.read_number("resourceVersion") or 0
    if requested > store.version:
        raise too_large_version_error(requested, store.version)
    exact = request.query.get("resourceVersionMatch") == "Exact"
    return (requested if exact else store.version), ("", "")


def _encode_token(version: int, last: Json) -> str:
    namespace, name = read_key(last)
    document = {"v": "meta.k8s.io/v1", "rv": version, "start": [namespace, name]}
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode()


def _decode_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        document = json.loads(base64.urlsafe_b64decode(token))
        namespace, name = document["start"]
        return int(document["rv"]), (str(namespace), str(name))
    except (ValueError, KeyError, TypeError):
        raise bad_request_error("continue key is not valid") from None
