"""Encode frozen dataclasses as JSON and decode them again, by the types of their fields.

The codec is for the files that treenail writes for itself. A rollback boots an older agent, so each
version must read the files of an older and of a newer one:

* The JSON key of a field is its name, or the one that `key` gives it.
* A missing key takes the field's default. Every field that is added to a released class needs one.
* Unknown keys are ignored.
* An unknown member of an enumeration is an error, unless the field declares a fallback or skips
  such entries (see `key`).

Never change the type or the meaning of a released key: add another key.

Supported are ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, enumerations (a StrEnum
by value, any other by name), dataclasses, tuples, frozen sets, mappings with keys of text, and
unions. Dataclasses in a union need a field of the same key that is a different ``Literal`` in each.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Literal, TypeVar, Union, cast, get_args, get_origin

Json = dict[str, object]
T = TypeVar("T")

_OPTIONS = "treenail.codec"
_UNSET = object()
_NULL = type(None)
_PART_SIZE = 256 * 1024
_PART_ENTRIES = 16
_JSON_NAMES = {
    dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer",
    float: "a number", _NULL: "null",
}  # fmt: skip


class CodecError(ValueError):
    """A document does not fit the class; the message begins with the path of the key."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)


class UnknownMemberError(CodecError):
    """A value is no member of its enumeration: another version may have added it."""


def parse_json(text: str | bytes) -> object:
    """Parse JSON; raise `ValueError`, also for a document that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


@dataclass(frozen=True, slots=True)
class _Options:
    key: str = ""
    fallback: object = _UNSET
    can_skip: bool = False
    is_required: bool = False
    resolve: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class _FieldCodec:
    """A field of a dataclass; ``resolve`` returns its type."""

    name: str
    key: str
    resolve: Callable[[], object]
    is_required: bool
    can_be_null: bool
    options: _Options


def key(
    name: str = "",
    *,
    fallback: object = _UNSET,
    can_skip: bool = False,
    is_required: bool = False,
    resolve: Callable[[], object] | None = None,
) -> dict[str, object]:
    """Return the ``metadata`` of a dataclass field whose JSON key is ``name``.

    ``fallback`` is the value where a member of an enumeration is unknown. With ``can_skip`` the
    entries of a tuple, set or mapping that hold an unknown member are left out. ``is_required``
    refuses a document without the key although the field has a default: a default that a damaged
    file must not bring about. ``resolve`` returns the type of the field when a value is decoded
    first, so that its import can wait.
    """
    return {_OPTIONS: _Options(name, fallback, can_skip, is_required, resolve)}


def encode_parts(document: object) -> Iterator[bytes]:
    """Yield the JSON text of a large document in parts, as ``json.dumps`` writes it."""
    parts: list[str] = []
    size = 0
    for part in _list_parts(document):
        parts.append(part)
        size += len(part)
        if size >= _PART_SIZE:
            yield "".join(parts).encode()
            parts, size = [], 0
    yield "".join(parts).encode()


def _list_parts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        before = "{"
        for name, inner in value.items():
            yield f"{before}{json.dumps(name)}: "
            yield from _list_parts(inner)
            before = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list) and value:
        before = "["
        for start in range(0, len(value), _PART_ENTRIES):
            yield f"{before}{json.dumps(value[start : start + _PART_ENTRIES])[1:-1]}"
            before = ", "
        yield "]"
    else:
        yield json.dumps(value)


def encode(value: object, *, version: int | None = None) -> Json:
    """Return the JSON object for a dataclass, with ``version`` as its first key if there is one.

    Raise the version of a document only when an older treenail must not read it. Raises
    `ValueError` for a number that is not finite.
    """
    encoded = cast("Json", _encode(value))
    return encoded if version is None else {"version": version, **encoded}


def decode(cls: type[T], document: object, *, version: int | None = None) -> T:
    """Return the ``cls`` that `encode` made ``document`` from, in this or in another treenail.

    Raises `CodecError` when a required key is missing, when a value has a wrong type, and when
    the document has another version.
    """
    fields = _expect(dict, document, "")
    if version is not None and fields.get("version") != version:
        raise CodecError("version", f"expected {version}, found {fields.get('version')!r:.80}")
    return cast("T", _decode(cls, document, "", _Options()))


def _encode(value: object) -> object:
    match value:
        case Enum():
            return value.value if isinstance(value, str) else value.name
        case float() if not math.isfinite(value):
            # `decode` refuses it: the document would be lost at the next start.
            raise ValueError(f"cannot encode {value} as JSON")
        case None | str() | bool() | int() | float():
            return value
        case Mapping():
            return {_encode_key(name): _encode(inner) for name, inner in value.items()}
        case frozenset():
            return sorted(map(_encode_key, value))
        case tuple():
            return [_encode(inner) for inner in value]
        case _:
            pass
    cls: type = type(value)
    if not is_dataclass(cls):
        raise TypeError(f"cannot encode {cls.__name__} as JSON")
    return {field.key: _encode(getattr(value, field.name)) for field in _list_fields(cls)}


def _encode_key(value: object) -> str:
    if type(value) is str:
        return value
    encoded = _encode(value)
    if not isinstance(encoded, str):
        raise TypeError(f"cannot encode {type(value).__name__} as a key of JSON")
    return encoded


def _decode(kind: object, value: object, path: str, options: _Options) -> object:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in arguments:
            raise CodecError(path, f"expected {' or '.join(map(repr, arguments))}")
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, path, options)
    if origin is tuple:
        return tuple(_decode_items(arguments, _expect(list, value, path), path, options))
    if origin is frozenset:
        return frozenset(
            _decode_items((*arguments, ...), _expect(list, value, path), path, options)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decode_mapping(arguments, _expect(dict, value, path), path, options)
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _decode_member(kind, value, path)
        if is_dataclass(kind):
            return _decode_object(kind, _expect(dict, value, path), path)
        if kind in _JSON_NAMES:
            return _expect(kind, value, path)
    raise TypeError(f"cannot decode JSON as {kind}")


def _decode_object(cls: type, document: Json, path: str) -> object:
    values: Json = {}
    for field in _list_fields(cls):
        inner = f"{path}.{field.key}" if path else field.key
        if field.key not in document:
            if field.is_required:
                raise CodecError(inner, "the key is missing")
            continue
        value = document[field.key]
        if value is None and field.can_be_null:
            values[field.name] = None
            continue
        try:
            values[field.name] = _decode(field.resolve(), value, inner, field.options)
        except UnknownMemberError:
            if field.options.fallback is _UNSET:
                raise
            values[field.name] = field.options.fallback
    return cls(**values)


def _decode_items(
    arguments: tuple[object, ...], values: list[object], path: str, options: _Options
) -> list[object]:
    if arguments[-1] is not Ellipsis:
        if len(values) != len(arguments):
            raise CodecError(path, f"expected {len(arguments)} values, found {len(values)}")
        kinds: Collection[object] = arguments
    else:
        kinds = [arguments[0]] * len(values)
    items: list[object] = []
    for index, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        try:
            # A list may have thousands of texts.
            if kind is str and type(value) is str:
                items.append(value)
            else:
                items.append(_decode(kind, value, f"{path}[{index}]", _Options()))
        except UnknownMemberError:
            if not options.can_skip:
                raise
    return items


def _decode_mapping(
    arguments: tuple[object, ...], document: Json, path: str, options: _Options
) -> dict[object, object]:
    mapping: dict[object, object] = {}
    for name, value in document.items():
        inner = f"{path}.{name}"
        try:
            decoded = _decode(arguments[0], name, inner, _Options())
            mapping[decoded] = _decode(arguments[1], value, inner, _Options())
        except UnknownMemberError:
            if not options.can_skip:
                raise
    return mapping


def _decode_union(kinds: tuple[object, ...], value: object, path: str, options: _Options) -> object:
    if value is None and _NULL in kinds:
        return None
    if isinstance(value, dict):
        kinds = _choose_by_literal(kinds, value, path)
    others = [kind for kind in kinds if kind is not _NULL]
    for kind in others[:-1]:
        try:
            return _decode(kind, value, path, options)
        except CodecError:
            continue
    return _decode(others[-1], value, path, options)


def _choose_by_literal(kinds: tuple[object, ...], value: Json, path: str) -> tuple[object, ...]:
    """Return the dataclass of a union that the value's tag names; ``kinds`` without such a tag."""
    classes = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    if len(classes) <= 1:
        return kinds
    tags = [_find_literals(cls) for cls in classes]
    for name in tags[0]:
        if all(name in tag for tag in tags):
            for cls, tag in zip(classes, tags, strict=True):
                if value.get(name) in tag[name]:
                    return (cls,)
            raise UnknownMemberError(f"{path}.{name}" if path else name, "expected another value")
    raise TypeError(f"cannot tell {' and '.join(cls.__name__ for cls in classes)} apart")


def _find_literals(cls: type) -> dict[str, tuple[object, ...]]:
    types = ((field.key, field.resolve()) for field in _list_fields(cls))
    return {name: get_args(kind) for name, kind in types if get_origin(kind) is Literal}


def _decode_member(kind: type[Enum], value: object, path: str) -> Enum:
    text = _expect(str, value, path)
    try:
        return kind(text) if issubclass(kind, str) else kind[text]
    except (ValueError, KeyError):
        raise UnknownMemberError(path, f"{text!r:.80} is no {kind.__name__}") from None


def _expect(kind: type[T], value: object, path: str) -> T:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return cast("T", _read_float(value, path))
    if type(value) is not kind:
        actual = _JSON_NAMES.get(type(value), type(value).__name__)
        raise CodecError(path, f"expected {_JSON_NAMES[kind]}, found {actual}")
    return value


def _read_float(value: float, path: str) -> float:
    """Convert a number of JSON, in which Python also reads NaN and integers of any size."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CodecError(path, "expected a finite number")
    return number


@cache
def _list_fields(cls: type) -> tuple[_FieldCodec, ...]:
    return tuple(_make_field_codec(cls, field) for field in fields(cls))


def _make_field_codec(cls: type, field: Field[object]) -> _FieldCodec:
    options = cast("_Options", field.metadata.get(_OPTIONS, _Options()))

    def resolve() -> object:
        return typing.get_type_hints(cls)[field.name] if isinstance(field.type, str) else field.type

    return _FieldCodec(
        name=field.name,
        key=options.key or field.name,
        resolve=options.resolve or resolve,
        is_required=options.is_required
        or (field.default is MISSING and field.default_factory is MISSING),
        can_be_null=field.default is None,
        options=options,
    )
