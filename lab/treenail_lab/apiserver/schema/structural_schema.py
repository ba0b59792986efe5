"""OpenAPI v3 structural schemas of custom resources: pruning, defaulting and validation.

Rules in CEL (``x-kubernetes-validations``) are not evaluated: an object that only breaks such a
rule is accepted.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from treenail_lab.apiserver.errors import Cause
from treenail_lab.apiserver.objects import Json, copy, equal

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
_KEPT_AT_ROOT = ("apiVersion", "kind", "metadata")
_FORMATS = {
    "date-time": re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)"),
    "byte": re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}"),
}
_JUNCTORS = (
    ("anyOf", "at least one schema (anyOf)"),
    ("oneOf", "one and only one schema (oneOf)"),
)
_INTEGER_BITS = {"int32": 31, "int64": 63}


def without_nulls(schema: Json, value: Any) -> Any:
    """The value without the nulls that mean "not set": all that the schema does not allow."""
    match value:
        case dict():
            properties: Json = schema.get("properties") or {}
            others = schema.get("additionalProperties")
            rest = others if isinstance(others, dict) else {}
            return {
                name: without_nulls(properties.get(name, rest), item)
                for name, item in value.items()
                if not (item is None and name in properties and not _keeps_null(properties[name]))
            }
        case list():
            return [without_nulls(schema.get("items") or {}, item) for item in value]
        case _:
            return value


def _keeps_null(schema: Json) -> bool:
    return bool(schema.get("nullable")) or "default" in schema


def conformed(schema: Json, obj: Json) -> Json:
    """The object without unknown fields and with defaults, as the server would store it."""
    shaped = _shaped(schema, obj, resource=True)
    return {**shaped, **{name: obj[name] for name in _KEPT_AT_ROOT if name in obj}}


def _shaped(schema: Json, value: Any, *, resource: bool = False) -> Any:
    match value:
        case dict():
            return _shaped_object(schema, value, resource=resource)
        case list():
            items = schema.get("items") or {"x-kubernetes-preserve-unknown-fields": True}
            return [_shaped(items, item) for item in value]
        case _:
            return value


def _shaped_object(schema: Json, value: Json, *, resource: bool) -> Json:
    properties: Json = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or others is True or not schema
    embedded = resource or schema.get("x-kubernetes-embedded-resource")
    shaped: Json = {}
    for name, item in value.items():
        if name in properties:
            shaped[name] = _shaped(properties[name], item)
        elif isinstance(others, dict):
            shaped[name] = _shaped(others, item)
        elif keeps or (embedded and name in _KEPT_AT_ROOT):
            shaped[name] = item
    for name, inner in properties.items():
        unset = shaped.get(name) is None and not (name in shaped and inner.get("nullable"))
        if unset and "default" in inner:
            shaped[name] = _shaped(inner, copy(inner["default"]))
    return shaped


def unknown_fields(schema: Json, value: Any, path: str = "") -> Iterator[str]:
    """The paths of what the schema does not know, and :func:`conformed` therefore drops."""
    match value:
        case dict():
            kept = _shaped_object(schema, value, resource=not path)
            properties: Json = schema.get("properties") or {}
            others = schema.get("additionalProperties")
            for name, item in value.items():
                if name in _KEPT_AT_ROOT and name in kept:
                    continue
                if name not in kept:
                    yield _join(path, name)
                elif name in properties:
                    yield from unknown_fields(properties[name], item, _join(path, name))
                elif isinstance(others, dict):
                    yield from unknown_fields(others, item, _join(path, name))
        case list() if "items" in schema:
            for index, item in enumerate(value):
                yield from unknown_fields(schema["items"], item, f"{path}[{index}]")
        case _:
            pass


def problems(schema: Json, obj: Json) -> list[Cause]:
    """What the schema forbids about an object."""
    return list(_problems(schema, obj, ""))


def _problems(schema: Json, value: Any, path: str) -> Iterator[Cause]:
    if value is None and schema.get("nullable"):
        return
    wrong_type = _type_problem(schema, value, path)
    if wrong_type is not None:
        yield wrong_type
        return
    if "enum" in schema and not _among(schema["enum"], value):
        supported = ", ".join(json.dumps(choice) for choice in schema["enum"])
        message = f"Unsupported value: {_shown(value)}: supported values: {supported}"
        yield Cause("FieldValueNotSupported", message, path)
    match value:
        case bool():
            pass
        case int() | float():
            yield from _number_problems(schema, value, path)
        case str():
            yield from _string_problems(schema, value, path)
        case list():
            yield from _array_problems(schema, value, path)
        case dict():
            yield from _object_problems(schema, value, path)
        case _:
            pass
    yield from _junctor_problems(schema, value, path)


def _type_problem(schema: Json, value: Any, path: str) -> Cause | None:
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, str) or _is_integer(value):
            return None
        wanted = "integer,string"
    elif wanted is None or _is_type(value, wanted):
        return None
    found = _type_name(value)
    where = path or "<nil>"
    message = f'Invalid value: "{found}": {where} in body must be of type {wanted}: "{found}"'
    return Cause("FieldValueTypeInvalid", message, path)


def _is_integer(value: Any) -> bool:
    whole = isinstance(value, float) and value.is_integer()
    return (isinstance(value, int) and not isinstance(value, bool)) or whole


def _is_type(value: Any, wanted: str) -> bool:
    if wanted == "integer":
        return _is_integer(value)
    if wanted == "number" and isinstance(value, bool):
        return False
    return isinstance(value, _TYPES.get(wanted, ()))


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = ("boolean", "integer", "number", "string", "array", "object")
    return next(name for name in names if _is_type(value, name))


def _number_problems(schema: Json, value: float, path: str) -> Iterator[Cause]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None:
        if schema.get("exclusiveMinimum"):
            if value <= least:
                yield _invalid(path, value, f"should be greater than {least}")
        elif value < least:
            yield _invalid(path, value, f"should be greater than or equal to {least}")
    if most is not None:
        if schema.get("exclusiveMaximum"):
            if value >= most:
                yield _invalid(path, value, f"should be less than {most}")
        elif value > most:
            yield _invalid(path, value, f"should be less than or equal to {most}")
    step = schema.get("multipleOf")
    if step and not math.isclose(value / step, round(value / step)):
        yield _invalid(path, value, f"should be a multiple of {step}")
    bits = _INTEGER_BITS.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        yield _invalid(path, value, f"must be of type {schema['format']}: {_shown(value)}")


def _string_problems(schema: Json, value: str, path: str) -> Iterator[Cause]:
    most = schema.get("maxLength")
    if most is not None and len(value) > most:
        message = f"Too long: may not be more than {most} bytes"
        yield Cause("FieldValueTooLong", message, path)
    least = schema.get("minLength", 0)
    if len(value) < least:
        yield _invalid(path, value, f"should be at least {least} chars long")
    pattern = schema.get("pattern")
    if pattern and re.search(pattern, value) is None:
        yield _invalid(path, value, f"should match '{pattern}'")
    form = _FORMATS.get(schema.get("format", ""))
    if form is not None and form.fullmatch(value) is None:
        yield _invalid(path, value, f"must be of type {schema['format']}: {_shown(value)}")


def _array_problems(schema: Json, value: list[Any], path: str) -> Iterator[Cause]:
    most = schema.get("maxItems")
    if most is not None and len(value) > most:
        message = f"Too many: {len(value)}: must have at most {most} items"
        yield Cause("FieldValueTooMany", message, path)
    least = schema.get("minItems", 0)
    if len(value) < least:
        yield _invalid(path, len(value), f"should have at least {least} items")
    items = schema.get("items") or {}
    for index, item in enumerate(value):
        yield from _problems(items, item, f"{path}[{index}]")
    yield from _duplicates(schema, value, path)


def _duplicates(schema: Json, value: list[Any], path: str) -> Iterator[Cause]:
    kind = schema.get("x-kubernetes-list-type")
    keys = schema.get("x-kubernetes-list-map-keys") or []
    seen: list[Any] = []
    for index, item in enumerate(value):
        if kind == "map" and isinstance(item, dict):
            identity: Any = {name: item[name] for name in keys if name in item}
        elif kind == "set" or schema.get("uniqueItems"):
            identity = item
        else:
            return
        if _among(seen, identity):
            message = f"Duplicate value: {_shown(identity)}"
            yield Cause("FieldValueDuplicate", message, f"{path}[{index}]")
        seen.append(identity)


def _object_problems(schema: Json, value: Json, path: str) -> Iterator[Cause]:
    for name in schema.get("required") or []:
        if name not in value:
            yield Cause("FieldValueRequired", "Required value", _join(path, name))
    most, least = schema.get("maxProperties"), schema.get("minProperties", 0)
    if most is not None and len(value) > most:
        message = f"Too many: {len(value)}: must have at most {most} items"
        yield Cause("FieldValueTooMany", message, path)
    if len(value) < least:
        yield _invalid(path, len(value), f"should have at least {least} properties")
    properties: Json = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    for name, item in value.items():
        if name in properties:
            yield from _problems(properties[name], item, _join(path, name))
        elif isinstance(others, dict):
            yield from _problems(others, item, _join(path, name))


def _junctor_problems(schema: Json, value: Any, path: str) -> Iterator[Cause]:
    for inner in schema.get("allOf") or []:
        yield from _problems(inner, value, path)
    for name, what in _JUNCTORS:
        choices = schema.get(name) or []
        fitting = sum(not any(_problems(inner, value, path)) for inner in choices)
        if choices and (fitting == 0 or (name == "oneOf" and fitting > 1)):
            yield _invalid(path, value, f"must validate {what}")
    if "not" in schema and not any(_problems(schema["not"], value, path)):
        yield _invalid(path, value, "must not validate the schema (not)")


def _among(values: list[Any], value: Any) -> bool:
    return any(equal(one, value) for one in values)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _invalid(path: str, value: Any, rule: str) -> Cause:
    shown = _shown(value) if not isinstance(value, dict | list) else '""'
    return Cause("FieldValueInvalid", f"Invalid value: {shown}: {path} in body {rule}", path)
