"""Patches: JSON patch (RFC 6902), JSON merge patch (RFC 7386) and strategic merge patch.

A strategic merge patch is a merge patch with keyed lists. The keys are the ``patchMergeKey`` of the
API types. Node taints and pod tolerations have none: these lists are replaced, as in
kube-apiserver.
"""

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


MERGE_KEYS = {
    "addresses": "type",
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "podIPs": "ip",
    "ports": "containerPort",
    "secrets": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
# Lists of plain values that are merged as sets.
MERGED_SETS = frozenset({("metadata", "finalizers"), ("spec", "podCIDRs")})

_DIRECTIVES = ("$setElementOrder/", "$deleteFromPrimitiveList/", "$patch", "$retainKeys")


def apply_strategic_merge(target: Json, patch: Any) -> Json:
    """Return the target with the patch merged in; raise 400 for a malformed patch."""
    if not isinstance(patch, dict):
        raise bad_request_error("a strategic merge patch must be an object")
    return _merge_objects(target, patch, ())


def _merge_objects(target: Json, patch: Json, path: tuple[str, ...]) -> Json:
    match patch.get("$patch"):
        case "replace":
            return {name: copy_json(value) for name, value in patch.items() if name != "$patch"}
        case "delete":
            return {}
        case None | "merge":
            pass
        case other:
            raise bad_request_error(f"Unknown patch type '{other}' in map")
    merged = dict(target)
    retained = patch.get("$retainKeys")
    if isinstance(retained, list):
        merged = {name: value for name, value in merged.items() if name in retained}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            _delete_values(merged, name.partition("/")[2], value)
        elif name.startswith(_DIRECTIVES):
            continue
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(merged.get(name), value, (*path, name))
    return merged


def _merge_value(old: Any, new: Any, path: tuple[str, ...]) -> Any:
    match new:
        case dict():
            return _merge_objects(old if isinstance(old, dict) else {}, new, path)
        case list() if path in MERGED_SETS:
            had = list(old or [])
            return _interleave_names([value for value in had if value not in new], list(new), had)
        case list() if path[-1] in MERGE_KEYS and all(isinstance(item, dict) for item in new):
            return _merge_lists(old if isinstance(old, list) else [], new, path)
        case _:
            return copy_json(new)


def _merge_lists(old: list[Json], new: list[Json], path: tuple[str, ...]) -> list[Json]:
    if {"$patch": "replace"} in new:
        return [copy_json(item) for item in new if item != {"$patch": "replace"}]
    field = MERGE_KEYS[path[-1]]
    if field == "containerPort" and not any(field in item for item in new):
        field = "port"
    known = [item.get(field) for item in old]
    patched: dict[Any, Json] = {}
    gone = []
    for item in new:
        if field not in item:
            raise bad_request_error(f"map: {item} does not contain declared merge key: {field}")
        name = item[field]
        if item.get("$patch") == "delete":
            gone.append(name)
        else:
            had = old[known.index(name)] if name in known else {}
            patched[name] = _merge_objects(patched.get(name, had), item, path)
    kept = {name: item for name, item in zip(known, old, strict=True) if name not in gone}
    rest = [name for name in kept if name not in patched]
    return [
        patched[name] if name in patched else kept[name]
        for name in _interleave_names(rest, list(patched), known)
    ]


def _interleave_names(kept: list[Any], patched: list[Any], known: list[Any]) -> list[Any]:
    """Merge the kept and the patched names: each in its order, known names in their old order.

    A name that the patch adds comes before all kept names that do not precede it.
    """
    merged = []
    waiting = list(kept)
    for name in patched:
        while waiting and name in known and known.index(waiting[0]) < known.index(name):
            merged.append(waiting.pop(0))
        merged.append(name)
    return merged + waiting


def _delete_values(target: Json, name: str, values: Any) -> None:
    if not isinstance(values, list):
        raise bad_request_error(f"$deleteFromPrimitiveList/{name}: expected a list")
    if isinstance(target.get(name), list):
        target[name] = [value for value in target[name] if value not in values]
