"""OpenAPI v3 structural schemas of custom resources: pruning, defaulting and validation.

Rules in CEL (``x-kubernetes-validations``) are not evaluated: an object that only breaks such a
rule is accepted.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from treenail_lab.apiserver.errors import StatusCause
from treenail_lab.apiserver.objects import Json, copy_json, is_equal

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


def drop_nulls(schema: Json, value: Any) -> Any:
    """Return the value without nulls that the schema does not allow: they mean "not set"."""
    match value:
        case dict():
            properties: Json = schema.get("properties") or {}
            others = schema.get("additionalProperties")
            rest = others if isinstance(others, dict) else {}
            return {
                name: drop_nulls(properties.get(name, rest), item)
                for name, item in value.items()
                if not (
                    item is None and name in properties and not _is_null_allowed(properties[name])
                )
            }
        case list():
            return [drop_nulls(schema.get("items") or {}, item) for item in value]
        case _:
            return value


def _is_null_allowed(schema: Json) -> bool:
    return bool(schema.get("nullable")) or "default" in schema


def conform_object(schema: Json, obj: Json) -> Json:
    """Return the object without unknown fields and with defaults, as it is stored."""
    shaped = _shape_value(schema, obj, resource=True)
    return {**shaped, **{name: obj[name] for name in _KEPT_AT_ROOT if name in obj}}


def _shape_value(schema: Json, value: Any, *, resource: bool = False) -> Any:
    match value:
        case dict():
            return _shape_object(schema, value, resource=resource)
        case list():
            items = schema.get("items") or {"x-kubernetes-preserve-unknown-fields": True}
            return [_shape_value(items, item) for item in value]
        case _:
            return value


def _shape_object(schema: Json, value: Json, *, resource: bool) -> Json:
    properties: Json = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or others is True or not schema
    embedded = resource or schema.get("x-kubernetes-embedded-resource")
    shaped: Json = {}
    for name, item in value.items():
        if name in properties:
            shaped[name] = _shape_value(properties[name], item)
        elif isinstance(others, dict):
            shaped[name] = _shape_value(others, item)
        elif keeps or (embedded and name in _KEPT_AT_ROOT):
            shaped[name] = item
    for name, inner in properties.items():
        unset = shaped.get(name) is None and not (name in shaped and inner.get("nullable"))
        if unset and "default" in inner:
            shaped[name] = _shape_value(inner, copy_json(inner["default"]))
    return shaped


def find_unknown_fields(schema: Json, value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of unknown fields, which `conform_object` drops."""
    match value:
        case dict():
            kept = _shape_object(schema, value, resource=not path)
            properties: Json = schema.get("properties") or {}
            others = schema.get("additionalProperties")
            for name, item in value.items():
                if name in _KEPT_AT_ROOT and name in kept:
                    continue
                if name not in kept:
                    yield _join_path(path, name)
                elif name in properties:
                    yield from find_unknown_fields(properties[name], item, _join_path(path, name))
                elif isinstance(others, dict):
                    yield from find_unknown_fields(others, item, _join_path(path, name))
        case list() if "items" in schema:
            for index, item in enumerate(value):
                yield from find_unknown_fields(schema["items"], item, f"{path}[{index}]")
        case _:
            pass


def find_problems(schema: Json, obj: Json) -> list[StatusCause]:
    """Return the causes for which the schema forbids an object."""
    return list(_find_value_problems(schema, obj, ""))


def _find_value_problems(schema: Json, value: Any, path: str) -> Iterator[StatusCause]:
    if value is None and schema.get("nullable"):
        return
    wrong_type = _find_type_problem(schema, value, path)
    if wrong_type is not None:
        yield wrong_type
        return
    if "enum" in schema and not _is_among(schema["enum"], value):
        supported = ", ".join(json.dumps(choice) for choice in schema["enum"])
        message = f"Unsupported value: {_format_value(value)}: supported values: {supported}"
        yield StatusCause("FieldValueNotSupported", message, path)
    match value:
        case bool():
            pass
        case int() | float():
            yield from _find_number_problems(schema, value, path)
        case str():
            yield from _find_string_problems(schema, value, path)
        case list():
            yield from _find_array_problems(schema, value, path)
        case dict():
            yield from _find_object_problems(schema, value, path)
        case _:
            pass
    yield from _find_junctor_problems(schema, value, path)


def _find_type_problem(schema: Json, value: Any, path: str) -> StatusCause | None:
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, str) or _is_integer(value):
            return None
        wanted = "integer,string"
    elif wanted is None or _is_type(value, wanted):
        return None
    actual = _type_name(value)
    where = path or "<nil>"
    message = f'Invalid value: "{actual}": {where} in body must be of type {wanted}: "{actual}"'
    return StatusCause("FieldValueTypeInvalid", message, path)


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


def _find_number_problems(schema: Json, value: float, path: str) -> Iterator[StatusCause]:
    minimum, maximum = schema.get("minimum"), schema.get("maximum")
    if minimum is not None:
        if schema.get("exclusiveMinimum"):
            if value <= minimum:
                yield _invalid_cause(path, value, f"should be greater than {minimum}")
        elif value < minimum:
            yield _invalid_cause(path, value, f"should be greater than or equal to {minimum}")
    if maximum is not None:
        if schema.get("exclusiveMaximum"):
            if value >= maximum:
                yield _invalid_cause(path, value, f"should be less than {maximum}")
        elif value > maximum:
            yield _invalid_cause(path, value, f"should be less than or equal to {maximum}")
    step = schema.get("multipleOf")
    if step and not math.isclose(value / step, round(value / step)):
        yield _invalid_cause(path, value, f"should be a multiple of {step}")
    bits = _INTEGER_BITS.get(schema.get("format", ""))
    if bits and not -(2**bits) <= value < 2**bits:
        yield _invalid_cause(
            path, value, f"must be of type {schema['format']}: {_format_value(value)}"
        )


def _find_string_problems(schema: Json, value: str, path: str) -> Iterator[StatusCause]:
    """Yield the first problem of length and pattern, and that of the format."""
    most, least = schema.get("maxLength"), schema.get("minLength", 0)
    pattern = schema.get("pattern")
    if most is not None and len(value) > most:
        message = f"Too long: may not be more than {most} bytes"
        yield StatusCause("FieldValueTooLong", message, path)
    elif len(value) < least:
        yield _invalid_cause(path, value, f"should be at least {least} chars long")
    elif pattern and _compile_pattern(pattern).search(value) is None:
        yield _invalid_cause(path, value, f"should match '{pattern}'")
    form = _FORMATS.get(schema.get("format", ""))
    if form is not None and form.fullmatch(value) is None:
        yield _invalid_cause(
            path, value, f"must be of type {schema['format']}: {_format_value(value)}"
        )


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern as Go does: ``$`` is the end of the text, not of a line before it."""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1] + r"\Z"
    return re.compile(pattern, re.ASCII)


def _find_array_problems(schema: Json, value: list[Any], path: str) -> Iterator[StatusCause]:
    most = schema.get("maxItems")
    if most is not None and len(value) > most:
        message = f"Too many: {len(value)}: must have at most {most} items"
        yield StatusCause("FieldValueTooMany", message, path)
    least = schema.get("minItems", 0)
    if len(value) < least:
        yield _invalid_cause(path, len(value), f"should have at least {least} items")
    items = schema.get("items") or {}
    for index, item in enumerate(value):
        yield from _find_value_problems(items, item, f"{path}[{index}]")
    yield from _find_duplicates(schema, value, path)


def _find_duplicates(schema: Json, value: list[Any], path: str) -> Iterator[StatusCause]:
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
        if _is_among(seen, identity):
            message = f"Duplicate value: {_format_value(identity)}"
            yield StatusCause("FieldValueDuplicate", message, f"{path}[{index}]")
        seen.append(identity)


def _find_object_problems(schema: Json, value: Json, path: str) -> Iterator[StatusCause]:
    for name in schema.get("required") or []:
        if name not in value:
            yield StatusCause("FieldValueRequired", "Required value", _join_path(path, name))
    most, least = schema.get("maxProperties"), schema.get("minProperties", 0)
    if most is not None and len(value) > most:
        message = f"Too many: {len(value)}: must have at most {most} items"
        yield StatusCause("FieldValueTooMany", message, path)
    if len(value) < least:
        yield _invalid_cause(path, len(value), f"should have at least {least} properties")
    properties: Json = schema.get("properties") or {}
    others = schema.get("additionalProperties")
    for name, item in value.items():
        if name in properties:
            yield from _find_value_problems(properties[name], item, _join_path(path, name))
        elif isinstance(others, dict):
            yield from _find_value_problems(others, item, _join_path(path, name))


def _find_junctor_problems(schema: Json, value: Any, path: str) -> Iterator[StatusCause]:
    for inner in schema.get("allOf") or []:
        yield from _find_value_problems(inner, value, path)
    for name, what in _JUNCTORS:
        choices = schema.get(name) or []
        fitting = sum(not any(_find_value_problems(inner, value, path)) for inner in choices)
        if choices and (fitting == 0 or (name == "oneOf" and fitting > 1)):
            yield _invalid_cause(path, value, f"must validate {what}")
    if "not" in schema and not any(_find_value_problems(schema["not"], value, path)):
        yield _invalid_cause(path, value, "must not validate the schema (not)")


def _is_among(values: list[Any], value: Any) -> bool:
    return any(is_equal(one, value) for one in values)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _format_value(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _invalid_cause(path: str, value: Any, rule: str) -> StatusCause:
    shown = _format_value(value) if not isinstance(value, dict | list) else '""'
    return StatusCause("FieldValueInvalid", f"Invalid value: {shown}: {path} in body {rule}", path)
