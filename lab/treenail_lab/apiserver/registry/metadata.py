"""Rules for ``metadata`` of every kind."""

import re
import secrets
import uuid

from treenail_lab.apiserver.errors import (
    StatusCause,
    bad_request_error,
    conflict_error,
    invalid_error,
)
from treenail_lab.apiserver.objects import Json, copy_json, is_deleting, read_finalizers
from treenail_lab.apiserver.schema.kinds import ResourceKind

_NAME_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
_MAX_GENERATED_BASE = 58
_MAX_ANNOTATIONS = 256 * 1024

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_LABEL = re.compile(_LABEL)
_DNS_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")

_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    r"for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_LABEL_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character"
)
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric character"
)
# Fields that the server sets and clients cannot change.
_SERVER_FIELDS = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
         "generation")  # fmt: skip


def normalize_body(kind: ResourceKind, namespace: str, name: str, body: Json) -> Json:
    """Return a copy of a body with kind, namespace and name of its URL; raise 400 on conflict."""
    for field in ("apiVersion", "kind") if kind.is_custom else ():
        if not body.get(field):
            raise bad_request_error(f"Object '{field}' is missing in the body of the request")
    api_version = body.get("apiVersion") or kind.api_version
    if api_version != kind.api_version:
        raise bad_request_error(
            f"the API version in the data ({api_version}) does not match the expected API "
            f"version ({kind.api_version})"
        )
    if (body_kind := body.get("kind") or kind.kind) != kind.kind:
        raise bad_request_error(
            f'{body_kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
        )
    obj: Json = copy_json(body)
    metadata = obj.get("metadata") or {}
    _check_types(kind, obj, metadata)
    body_namespace = metadata.get("namespace") or namespace
    if body_namespace != namespace:
        raise bad_request_error(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if name and (metadata.get("name") or name) != name:
        raise bad_request_error(
            f"the name of the object ({metadata['name']}) does not match the name on the URL "
            f"({name})"
        )
    metadata = {key: value for key, value in metadata.items() if value is not None}
    metadata.pop("selfLink", None)
    if namespace:
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    if name:
        metadata["name"] = name
    return obj | {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}


def _check_types(kind: ResourceKind, obj: Json, metadata: Json) -> None:
    """Raise 400 for values of a wrong type."""
    if not isinstance(metadata, dict):
        raise bad_request_error("metadata: expected an object")
    objects = [] if kind.is_custom else [(name, obj.get(name)) for name in ("spec", "status")]
    objects += [(f"metadata.{name}", metadata.get(name)) for name in ("labels", "annotations")]
    for where, value in objects:
        if value is not None and not isinstance(value, dict):
            raise bad_request_error(f"{where}: expected an object")
    for name, wanted in (("finalizers", str), ("ownerReferences", dict)):
        items = metadata.get(name) or []
        if not isinstance(items, list) or not all(isinstance(item, wanted) for item in items):
            raise bad_request_error(f"metadata.{name}: expected a list of {wanted.__name__}")


def prepare_new(obj: Json, now: str, *, generation: bool) -> Json:
    """Return a new object with name, uid and creation time."""
    metadata = dict(obj["metadata"])
    for name in (*_SERVER_FIELDS, "resourceVersion", "managedFields"):
        metadata.pop(name, None)
    if not metadata.get("name") and (base := metadata.get("generateName")):
        tail = "".join(secrets.choice(_NAME_CHARACTERS) for _ in range(5))
        metadata["name"] = base[:_MAX_GENERATED_BASE] + tail
    metadata["uid"] = str(uuid.uuid4())
    metadata["creationTimestamp"] = now
    if generation:
        metadata["generation"] = 1
    return obj | {"metadata": _drop_empty(metadata)}


def prepare_changed(kind: ResourceKind, old: Json, new: Json) -> Json:
    """Return a changed object with the server's metadata; raise 409 for another version."""
    metadata = dict(new["metadata"])
    name = old["metadata"]["name"]
    version = metadata.get("resourceVersion")
    if version and str(version) != old["metadata"]["resourceVersion"]:
        raise conflict_error(kind.group, kind.plural, name)
    if (uid := metadata.get("uid")) and uid != old["metadata"]["uid"]:
        cause = _invalid_cause("metadata.uid", uid, "field is immutable")
        raise invalid_error(kind.group, kind.kind, name, [cause])
    for name in (*_SERVER_FIELDS, "resourceVersion", "managedFields"):
        metadata.pop(name, None)
        if name in old["metadata"]:
            metadata[name] = old["metadata"][name]
    return new | {"metadata": _drop_empty(metadata)}


def check_uid(kind: ResourceKind, old: Json, new: Json) -> None:
    """Raise 409 when a document has the uid of another object of the same name."""
    uid, actual = (new.get("metadata") or {}).get("uid"), old["metadata"]["uid"]
    if uid and uid != actual:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {actual}"
        raise conflict_error(kind.group, kind.plural, old["metadata"]["name"], why)


def _drop_empty(metadata: Json) -> Json:
    lists = ("labels", "annotations", "finalizers", "ownerReferences")
    return {name: value for name, value in metadata.items() if value or name not in lists}


def find_problems(kind: ResourceKind, obj: Json, old: Json | None = None) -> list[StatusCause]:
    """Return the causes for which an object's metadata is invalid."""
    metadata = obj["metadata"]
    problems = [] if old else _find_name_problems(kind, metadata)
    for name, value in (metadata.get("labels") or {}).items():
        problems += _find_key_problems(name, "metadata.labels")
        if not isinstance(value, str) or len(value) > 63 or not _is_qualified(value):
            problems.append(_invalid_cause("metadata.labels", value, _LABEL_RULE))
    for name, value in (metadata.get("annotations") or {}).items():
        problems += _find_key_problems(name.lower(), "metadata.annotations")
        if not isinstance(value, str):
            problems.append(_invalid_cause("metadata.annotations", value, "must be a string"))
    problems += _find_size_problems(metadata)
    problems += _find_owner_problems(metadata)
    if old is not None and is_deleting(old):
        added = sorted(set(read_finalizers(obj)) - set(read_finalizers(old)))
        if added:
            message = (
                "Forbidden: no new finalizers can be added if the object is being deleted, "
                "found new finalizers []string{" + ", ".join(f'"{name}"' for name in added) + "}"
            )
            problems.append(StatusCause("FieldValueForbidden", message, "metadata.finalizers"))
    return problems


def _find_name_problems(kind: ResourceKind, metadata: Json) -> list[StatusCause]:
    name = metadata.get("name")
    if not name:
        message = "Required value: name or generateName is required"
        return [StatusCause("FieldValueRequired", message, "metadata.name")]
    if kind.group == "rbac.authorization.k8s.io":
        is_valid = "/" not in name and "%" not in name and name not in {".", ".."}
    elif kind.plural == "namespaces":
        is_valid = len(name) <= 63 and _DNS_LABEL.fullmatch(name) is not None
    else:
        is_valid = len(name) <= 253 and _DNS_SUBDOMAIN.fullmatch(name) is not None
    return [] if is_valid else [_invalid_cause("metadata.name", name, _SUBDOMAIN_RULE)]


def _is_qualified(value: str) -> bool:
    return value == "" or _QUALIFIED.fullmatch(value) is not None


def _find_key_problems(name: str, where: str) -> list[StatusCause]:
    prefix, slash, rest = name.rpartition("/")
    is_valid = 0 < len(rest) <= 63 and _is_qualified(rest)
    if slash:
        is_valid = is_valid and len(prefix) <= 253 and _DNS_SUBDOMAIN.fullmatch(prefix) is not None
    return [] if is_valid else [_invalid_cause(where, name, _KEY_RULE)]


def _find_size_problems(metadata: Json) -> list[StatusCause]:
    annotations = metadata.get("annotations") or {}
    size = sum(len(name) + len(str(value)) for name, value in annotations.items())
    if size <= _MAX_ANNOTATIONS:
        return []
    message = f"Too long: must have at most {_MAX_ANNOTATIONS} bytes"
    return [StatusCause("FieldValueTooLong", message, "metadata.annotations")]


def _find_owner_problems(metadata: Json) -> list[StatusCause]:
    problems = []
    owners = metadata.get("ownerReferences") or []
    for index, owner in enumerate(owners):
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                place = f"metadata.ownerReferences[{index}].{name}"
                message = "Required value: must not be empty"
                problems.append(StatusCause("FieldValueRequired", message, place))
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        message = "Only one reference can have Controller set to true"
        problems.append(_invalid_cause("metadata.ownerReferences", owners, message))
    return problems


def _invalid_cause(where: str, value: object, rule: str) -> StatusCause:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return StatusCause("FieldValueInvalid", f"Invalid value: {shown}: {rule}", where)
