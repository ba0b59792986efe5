"""Lists, whole or in pages that agree on one resource version."""

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


def build_selection(ask: ServerRequest, kind: ResourceKind) -> ObjectPredicate:
    """The test for what a list or watch request is about."""
    by_label = parse_label_selector(ask.query.get("labelSelector", ""))
    by_field = parse_field_selector(ask.query.get("fieldSelector", ""), kind)
    namespace = ask.namespace

    def selected(obj: Json) -> bool:
        if namespace and obj["metadata"].get("namespace") != namespace:
            return False
        return by_label(obj) and by_field(obj)

    return selected


def list_objects(store: Store, kind: ResourceKind, ask: ServerRequest) -> Json:
    """A list document, or one page of it; raises 410 when a page's version is forgotten."""
    selected = build_selection(ask, kind)
    version, start = _find_start(store, ask)
    if version == store.version:
        objects = store.list_objects(kind.storage, ask.namespace)
    else:
        try:
            store.check_version(version)
            then = store.read_at(kind.storage, version)
        except ApiError as error:
            raise (expired_continue_error() if ask.query.get("continue") else error) from None
        objects = [then[where] for where in sorted(then)]
    items = [
        convert_version(kind, obj) for obj in objects if read_key(obj) > start and selected(obj)
    ]
    metadata: Json = {"resourceVersion": str(version)}
    limit = ask.read_number("limit")
    if limit and len(items) > limit:
        metadata["continue"] = _encode_token(version, items[limit - 1])
        if not _has_selector(ask):
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": metadata,
        "items": items,
    }


def _has_selector(ask: ServerRequest) -> bool:
    return bool(ask.query.get("labelSelector") or ask.query.get("fieldSelector"))


def _find_start(store: Store, ask: ServerRequest) -> tuple[int, tuple[str, str]]:
    """The version to list at, and the key after which to begin."""
    if token := ask.query.get("continue"):
        if ask.read_number("resourceVersion"):
            raise bad_request_error(
                "specifying resource version is not allowed when using continue"
            )
        return _decode_token(token)
    asked = ask.read_number("resourceVersion") or 0
    if asked > store.version:
        raise too_large_version_error(asked, store.version)
    exact = ask.query.get("resourceVersionMatch") == "Exact"
    return (asked if exact else store.version), ("", "")


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
