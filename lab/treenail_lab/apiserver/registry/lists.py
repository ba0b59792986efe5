"""Lists, whole or in pages that agree on one resource version."""

import base64
import json

from treenail_lab.apiserver.errors import ApiError, bad_request, expired_continue, too_large_version
from treenail_lab.apiserver.objects import Json, key
from treenail_lab.apiserver.registry.registry import served
from treenail_lab.apiserver.request import Ask
from treenail_lab.apiserver.schema.kinds import Kind
from treenail_lab.apiserver.schema.selectors import Predicate, fields_match, labels_match
from treenail_lab.apiserver.storage.store import Store


def selection(ask: Ask, kind: Kind) -> Predicate:
    """The test for what a list or watch request is about."""
    by_label = labels_match(ask.query.get("labelSelector", ""))
    by_field = fields_match(ask.query.get("fieldSelector", ""), kind)
    namespace = ask.namespace

    def selected(obj: Json) -> bool:
        if namespace and obj["metadata"].get("namespace") != namespace:
            return False
        return by_label(obj) and by_field(obj)

    return selected


def listed(store: Store, kind: Kind, ask: Ask) -> Json:
    """A list document, or one page of it; raises 410 when a page's version is forgotten."""
    selected = selection(ask, kind)
    version, start = _from_where(store, ask)
    if version == store.version:
        objects = store.list(kind.storage, ask.namespace)
    else:
        try:
            store.check_version(version)
            then = store.at(kind.storage, version)
        except ApiError as error:
            raise (expired_continue() if ask.query.get("continue") else error) from None
        objects = [then[where] for where in sorted(then)]
    items = [served(kind, obj) for obj in objects if key(obj) > start and selected(obj)]
    metadata: Json = {"resourceVersion": str(version)}
    limit = ask.number("limit")
    if limit and len(items) > limit:
        metadata["continue"] = _token(version, items[limit - 1])
        if not _selects(ask):
            metadata["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return {
        "kind": f"{kind.kind}List",
        "apiVersion": kind.api_version,
        "metadata": metadata,
        "items": items,
    }


def _selects(ask: Ask) -> bool:
    return bool(ask.query.get("labelSelector") or ask.query.get("fieldSelector"))


def _from_where(store: Store, ask: Ask) -> tuple[int, tuple[str, str]]:
    """The version to list at, and the key after which to begin."""
    if token := ask.query.get("continue"):
        if ask.number("resourceVersion"):
            raise bad_request("specifying resource version is not allowed when using continue")
        return _read_token(token)
    asked = ask.number("resourceVersion") or 0
    if asked > store.version:
        raise too_large_version(asked, store.version)
    exact = ask.query.get("resourceVersionMatch") == "Exact"
    return (asked if exact else store.version), ("", "")


def _token(version: int, last: Json) -> str:
    namespace, name = key(last)
    document = {"v": "meta.k8s.io/v1", "rv": version, "start": [namespace, name]}
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode()


def _read_token(token: str) -> tuple[int, tuple[str, str]]:
    try:
        document = json.loads(base64.urlsafe_b64decode(token))
        namespace, name = document["start"]
        return int(document["rv"]), (str(namespace), str(name))
    except (ValueError, KeyError, TypeError):
        raise bad_request("continue key is not valid") from None
