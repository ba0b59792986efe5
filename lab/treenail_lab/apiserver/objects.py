"""Kubernetes objects as JSON documents.

An object in the store is never changed; a change begins with `copy_json`.
"""

from typing import Any

# An API server handles documents of any shape, so their values are not typed.
Json = dict[str, Any]
ObjectKey = tuple[str, str]


def copy_json(value: Any) -> Any:
    """Return a deep copy of a JSON value."""
    if isinstance(value, dict):
        return {name: copy_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [copy_json(item) for item in value]
    return value


def is_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true is not 1."""
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(is_equal(left[k], right[k]) for k in left)
        case list(), list():
            return len(left) == len(right) and all(map(is_equal, left, right))
        case _:
            return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def read_key(obj: Json) -> ObjectKey:
    """Return namespace (empty for cluster-scoped objects) and name."""
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def read_uid(obj: Json) -> str:
    return str(obj["metadata"].get("uid", ""))


def read_finalizers(obj: Json) -> list[str]:
    return obj["metadata"].get("finalizers") or []


def read_labels(obj: Json) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def read_owner_references(obj: Json) -> list[Json]:
    return obj["metadata"].get("ownerReferences") or []


def is_deleting(obj: Json) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def find_value(obj: Json, *path: str) -> Any:
    """Return the value at a path of keys; None when a key is missing."""
    value: Any = obj
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return value
