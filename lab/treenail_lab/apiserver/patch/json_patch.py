"""JSON patch (RFC 6902) and JSON merge patch (RFC 7386)."""

from typing import Any

from treenail_lab.apiserver.errors import ApiError, bad_request_error
from treenail_lab.apiserver.objects import Json, copy_json, is_equal


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Return the target with the patch merged in: null removes, a list replaces."""
    if not isinstance(patch, dict):
        return copy_json(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_merge_patch(merged.get(name), value)
    return merged


def apply_json_patch(target: Json, operations: Any) -> Any:
    """Return the target after all operations; raise 422 or, for a malformed patch, 400."""
    if not isinstance(operations, list):
        raise bad_request_error(
            "json: cannot unmarshal object into Go value of type jsonpatch.Patch"
        )
    document: Any = copy_json(target)
    for operation in operations:
        if not isinstance(operation, dict):
            raise bad_request_error("error decoding patch: an operation must be an object")
        document = _apply_operation(document, operation)
    return document


def _apply_operation(document: Any, operation: Json) -> Any:
    path = _parse_pointer(operation.get("path"))
    match operation.get("op"):
        case "add":
            return _add_value(document, path, copy_json(_read_value(operation)))
        case "remove":
            _remove_value(document, path)
        case "replace":
            if path:
                _remove_value(document, path)
            return _add_value(document, path, copy_json(_read_value(operation)))
        case "move":
            moved = _remove_value(document, _parse_pointer(operation.get("from")))
            return _add_value(document, path, moved)
        case "copy":
            return _add_value(
                document,
                path,
                copy_json(_find_value(document, _parse_pointer(operation.get("from")))),
            )
        case "test":
            if not is_equal(_find_value(document, path, missing=None), operation.get("value")):
                raise _patch_error(f"testing value {operation.get('path')} failed")
        case other:
            raise bad_request_error(f"unexpected kind of operation: {other}")
    return document


def _patch_error(why: str) -> ApiError:
    message = f"the server rejected our request due to an error in our request ({why})"
    return ApiError(422, "Invalid", message)


def _read_value(operation: Json) -> Any:
    if "value" not in operation:
        raise _patch_error(f"{operation['op']} operation without value")
    return operation["value"]


def _parse_pointer(text: object) -> list[str]:
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise bad_request_error(f"error decoding patch: {text!r} is not a JSON pointer")
    return [step.replace("~1", "/").replace("~0", "~") for step in text.split("/")[1:]]


_MISSING = object()


def _find_value(document: Any, path: list[str], missing: Any = _MISSING) -> Any:
    for step in path:
        match document:
            case dict() if step in document:
                document = document[step]
            case list() if step.isdigit() and int(step) < len(document):
                document = document[int(step)]
            case _ if missing is not _MISSING:
                return missing
            case _:
                raise _patch_error(f"missing path: /{'/'.join(path)}")
    return document


def _add_value(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _find_value(document, path[:-1]), path[-1]
    match parent:
        case dict():
            parent[last] = value
        case list() if last == "-":
            parent.append(value)
        case list() if last.isdigit() and int(last) <= len(parent):
            parent.insert(int(last), value)
        case _:
            raise _patch_error(f"add operation does not apply: /{'/'.join(path)}")
    return document


def _remove_value(document: Any, path: list[str]) -> Any:
    if not path:
        raise _patch_error("the whole document cannot be removed")
    parent, last = _find_value(document, path[:-1]), path[-1]
    match parent:
        case dict() if last in parent:
            return parent.pop(last)
        case list() if last.isdigit() and int(last) < len(parent):
            return parent.pop(int(last))
        case _:
            raise _patch_error(f"remove operation does not apply: /{'/'.join(path)}")
