"""Read dataclasses from JSON and write them as JSON, by the types of their fields.

The type of a field says how it stands in JSON::

    boot_id: Annotated[str, Key("status.nodeInfo.bootID")] = ""
    began_at: Annotated[float, Via(float, int, wire=int)] = 0.0
    names: tuple[NonEmptyText, ...] = ()

Supported are ``str``, ``int``, ``float``, ``bool``, enumerations (a StrEnum by value, any other by
name), dataclasses, tuples of one type, frozen sets, mappings with keys of text, and each of them or
None.

There are two kinds of documents. `encode` and `decode` are for the files that treenail writes for
itself. A rollback boots an older agent, so each version must read the files of an older and of a
newer one:

* The key of a field is its name, or that of its `Key`.
* A missing key takes the field's default. Every field that is added to a released class needs one.
* Unknown keys are ignored. An unknown member of an enumeration is an error, unless the field
  declares a fallback or skips such entries (see `Key`).

Never change the type or the meaning of a released key: add another key.

`JsonObject` is for objects of the Kubernetes API and for records in their fields, with the rules of
Go's encoding/json:

* The key of a field is its name in camelCase, or that of its `Key`.
* A key that is missing or ``null`` takes the field's default, or the zero value of its type.
* Unknown keys are ignored, kept in a field with `REST`, or refused by a class with ``is_strict``.
* None is not written. ``object`` and ``dict[str, object]`` are values that are not read further.
"""

import itertools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Annotated, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin

from treenail.encoding import json_values
from treenail.errors import ConfigError

Json = dict[str, object]
Writer = Callable[[object], object]
T = TypeVar("T")

_NULL = type(None)
_OPEN_OBJECT = dict[str, object]
_PLAIN = frozenset({str, bool, int, _NULL})
_ZEROS: dict[object, object] = {str: "", bool: False, int: 0, float: 0, object: None}


class CodecError(ValueError):
    """A document does not fit the class; the message begins with the path of the key."""


class UnknownMember(json_values.Mismatch):
    """The value is no member of its enumeration: another version may have added it."""


class Key:
    """Where a field stands in its object: a key, or several with dots between.

    ``fallback`` is the value where a member of an enumeration is unknown. With ``can_skip`` the
    entries of a tuple, set or mapping that hold an unknown member are left out. ``is_required``
    refuses a document without the key although the field has a default: a default that a damaged
    file must not bring about. With ``omit`` a value that equals the default is not written.
    ``resolve`` returns the type of the field when a value is read first, so that its import can
    wait. ``part`` is what the field holds instead of the value of a key.
    """

    # The markers are no dataclasses: each of these takes 0.4 ms of a command's start.
    __slots__ = ("can_skip", "fallback", "is_required", "omit", "part", "path", "resolve")

    def __init__(
        self,
        path: str = "",
        *,
        fallback: object = json_values.NO_VALUE,
        can_skip: bool = False,
        is_required: bool = False,
        omit: bool | None = None,
        resolve: Callable[[], object] | None = None,
        part: "Part | None" = None,
    ) -> None:
        self.path = path
        self.fallback = fallback
        self.can_skip = can_skip
        self.is_required = is_required
        self.omit = omit
        self.resolve = resolve
        self.part = part


Part = Literal["rest", "whole", "inline", "none"]
"""The part of an object that a field holds.

``rest`` are the keys of no other field and ``whole`` is the object itself, both without null.
``inline`` are the keys of the field's own dataclass.
"""

REST, WHOLE, INLINE, EXCLUDED = (
    Key(part="rest"),
    Key(part="whole"),
    Key(part="inline"),
    Key(part="none"),
)


_NO_KEY = Key()


class Via:
    """Conversion of a value that was read as ``wire``, by default as the annotated type.

    ``read`` may raise `Mismatch`, or `ConfigError` without a location. The result of ``write`` is
    JSON. None is not converted.
    """

    __slots__ = ("read", "wire", "write")

    def __init__(
        self,
        read: Callable[..., object] | None = None,
        write: Callable[..., object] | None = None,
        wire: object = None,
    ) -> None:
        self.read = read
        self.write = write
        self.wire = wire


def require(
    expected: str, is_valid: Callable[..., object], wire: object = None, *, shows: bool = False
) -> Via:
    """Return the marker of a condition on the value: "expected ``expected``, found …".

    With ``shows`` the error has the value itself, which must not be a secret.
    """

    def read(value: object) -> object:
        if not is_valid(value):
            problem = f"expected {expected}, found {value!r:.60}" if shows else ""
            raise json_values.Mismatch(expected, None if shows else value, problem=problem)
        return value

    return Via(read, wire=wire)


NonEmptyText = Annotated[str, require("a string", bool)]


class _ClassOptions:
    __slots__ = ("api_version", "is_strict", "kind", "omits_defaults", "where")

    def __init__(
        self,
        *,
        where: str = "",
        kind: str = "",
        api_version: str = "",
        is_strict: bool = False,
        omits_defaults: bool = False,
    ) -> None:
        self.where = where
        self.kind = kind
        self.api_version = api_version
        self.is_strict = is_strict
        self.omits_defaults = omits_defaults


_NO_OPTIONS = _ClassOptions()


class WrittenObject:
    """Base of dataclasses that are written as objects of the Kubernetes API.

    A class with a ``kind`` writes ``apiVersion`` and ``kind``. ``omits_defaults`` is `Key.omit` for
    the other fields.
    """

    __slots__ = ()
    _json_options: ClassVar[_ClassOptions] = _NO_OPTIONS

    def __init_subclass__(cls, **options: typing.Any) -> None:
        # A dataclass with slots is made twice, the second time without the options.
        if "_json_options" not in vars(cls):
            cls._json_options = _ClassOptions(**options)

    def to_json(self) -> Json:
        """Return the JSON object."""
        return cast("Json", _API.encode(self))


class JsonObject(WrittenObject):
    """Base of dataclasses that are objects of the Kubernetes API, or records in them.

    ``where`` begins the location in errors. A class with a ``kind`` refuses another one.
    """

    __slots__ = ()

    @classmethod
    def from_json(cls, document: object, where: str = "") -> Self:
        """Read an object; raise `ConfigError`."""
        return cast("Self", read_value(cls, document, where or cls._json_options.where))


class Shape(JsonObject):
    """Base of classes that only the codec makes, for code that converts their fields.

    A shape has the fields of a dataclass, without the cost of making one: no comparison, no text.
    """

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name} of {type(self).__name__}")


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or issubclass(kind, Shape)


def _get_options(cls: type) -> _ClassOptions:
    return cls._json_options if issubclass(cls, WrittenObject) else _NO_OPTIONS


def _get_member_name(member: object) -> object:
    is_text = isinstance(member, str)
    return cast("Enum", member).value if is_text else cast("Enum", member).name


def _list_markers(kind: object) -> tuple[object, ...]:
    # Like typing.get_args, which takes ten times as long.
    return cast("tuple[object, ...]", getattr(kind, "__metadata__", ()))


def _strip_markers(kind: object) -> object:
    return getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind


def _strip_null(kind: object) -> object:
    """Return the type of an optional value; any other type as it is."""
    is_union = isinstance(kind, types.UnionType) or getattr(kind, "__origin__", None) is Union
    inner = [each for each in get_args(kind) if each is not _NULL] if is_union else []
    return inner[0] if len(inner) == 1 else kind


def _list_vias(kind: object) -> list[Via]:
    return [marker for marker in _list_markers(kind) if isinstance(marker, Via)]


def _find_wire(kind: object) -> object:
    """Return the type that an annotated type is read as first."""
    wires = (via.wire for via in _list_vias(kind) if via.wire is not None)
    return next(wires, _strip_markers(kind))


def _get_zero(kind: object) -> object:
    """Return the JSON of Go's zero value of a type."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _get_zero(_find_wire(kind))
    if origin in (Union, types.UnionType):
        return None
    if origin in (tuple, frozenset):
        return []
    is_enum = isinstance(kind, type) and issubclass(kind, Enum)
    return "" if is_enum else _ZEROS.get(kind, {})


def _merge_at(document: dict[str, typing.Any], place: json_values.Path, values: Json) -> None:
    for step in place:
        document = document.setdefault(step, {})
    document.update(values)


def _list_fields(cls: type) -> Iterator[tuple[str, object, object]]:
    """Yield names, types and defaults; `NO_VALUE` without a default."""
    if issubclass(cls, Shape):
        for name, kind in cls.__annotations__.items():
            yield name, kind, vars(cls).get(name, json_values.NO_VALUE)
        return
    for field in fields(cast("typing.Any", cls)):
        default: object = json_values.NO_VALUE if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init:
            yield field.name, field.type, default


class _FieldRule:
    """How a field of a dataclass stands in JSON."""

    __slots__ = ("default", "key", "kind", "name", "omits_default", "path")

    def __init__(
        self, cls: type, name: str, kind: object, default: object, *, is_api: bool
    ) -> None:
        if isinstance(kind, str):
            kind = typing.get_type_hints(cls, include_extras=True)[name]
        keys = (marker for marker in _list_markers(kind) if isinstance(marker, Key))
        key = next(keys, _NO_KEY)
        path = key.path
        if not path and key.part is None:
            head, *rest = name.split("_")
            path = head + "".join(map(str.capitalize, rest)) if is_api else name
        self.name = name
        self.key = key
        self.kind = kind
        self.path: json_values.Path = tuple(path.split(".")) if path else ()
        """The keys from the object of the class to the value."""
        self.default = default
        """`NO_VALUE` without a default."""
        self.omits_default = is_api and _get_options(cls).omits_defaults
        if key.omit is not None:
            self.omits_default = key.omit

    @property
    def place(self) -> json_values.Path:
        """The path of the object that the field stands in."""
        return self.path[:-1] if self.key.part is None else self.path


class _Codec:
    """Readers and writers by one set of rules; those of a type are made once."""

    def __init__(self, *, is_api: bool, is_strict: bool = False) -> None:
        self.is_api = is_api
        self._is_strict = is_strict
        self._readers: dict[object, json_values.Reader] = {
            str: json_values.read_text if is_api else json_values.read_any_text,
            bool: json_values.read_bool,
            int: json_values.read_integer if is_api else json_values.read_any_integer,
            float: json_values.read_number,
        }
        if is_api:
            self._readers[object] = json_values.read_any
            self._readers[_OPEN_OBJECT] = json_values.read_present_keys
        self._writers: dict[type, Writer] = {}
        self._rules: dict[type, tuple[_FieldRule, ...]] = {}

    def get_reader(self, kind: object) -> json_values.Reader:
        """Return the reader of a type."""
        if (read := self._readers.get(kind)) is None:
            read = self._readers[kind] = self._make_reader(kind)
        return read

    def _make_reader(self, kind: object) -> json_values.Reader:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self._make_annotated_reader(kind)
        if (inner := _strip_null(kind)) is not kind:
            return json_values.allow_null(self.get_reader(inner))
        if origin is frozenset or (origin is tuple and arguments[-1] is Ellipsis):
            return self._make_items_reader(kind)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._make_mapping_reader(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return self._make_member_reader({_get_member_name(member): member for member in kind})
        if isinstance(kind, type) and _is_record(kind):
            return self._make_object_reader(kind)
        raise TypeError(f"cannot decode JSON as {kind}")

    def _make_annotated_reader(self, kind: object) -> json_values.Reader:
        wire = _find_wire(kind)
        read = self.get_reader(wire)
        # An API's null is the zero value of a type, but a list may have it as an entry.
        can_be_null = any(_NULL in get_args(_strip_markers(each)) for each in (kind, wire))
        for via in _list_vias(kind):
            if via.read is not None:
                read = json_values.chain(read, via.read, can_be_null=can_be_null)
        return read

    def _make_member_reader(self, members: Mapping[object, object]) -> json_values.Reader:
        names = [str(name) for name in members if name]
        expected = f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
        read = self.get_reader(str)

        def read_member(value: object) -> object:
            if (member := members.get(read(value))) is None:
                raise UnknownMember(problem=f"expected {expected}, found {value!r:.60}")
            return member

        return read_member

    def _make_items_reader(self, kind: object, *, can_skip: bool = False) -> json_values.Reader:
        make, arguments = cast("type", get_origin(kind)), get_args(kind)
        read = self.get_reader(arguments[0])

        def read_items(value: object) -> object:
            items: list[object] = []
            for index, item in enumerate(json_values.read_list(value)):
                try:
                    items.append(read(item))
                except json_values.Mismatch as problem:
                    if not (can_skip and isinstance(problem, UnknownMember)):
                        problem.steps.append(index)
                        raise
            return make(items)

        return read_items

    def _make_mapping_reader(self, kind: object, *, can_skip: bool = False) -> json_values.Reader:
        arguments = get_args(kind)
        if self.is_api and arguments == (str, str):
            return json_values.read_text_map
        read_name, read = map(self.get_reader, arguments)
        zero = _get_zero(arguments[1]) if self.is_api else None

        def read_mapping(value: object) -> dict[object, object]:
            mapping: dict[object, object] = {}
            for name, inner in json_values.read_object(value).items():
                try:
                    mapping[read_name(name)] = read(zero if inner is None else inner)
                except json_values.Mismatch as problem:
                    if not (can_skip and isinstance(problem, UnknownMember)):
                        problem.steps.append(name)
                        raise
            return mapping

        return read_mapping

    def _make_object_reader(self, cls: type) -> json_values.Reader:
        """Return a reader that looks at the fields when it reads first: most processes read few."""
        read: json_values.Reader | None = None

        def read_object(document: object) -> object:
            nonlocal read
            if read is None:
                read = self._make_fields_reader(cls)
            return read(document)

        return read_object

    def _make_fields_reader(self, cls: type) -> json_values.Reader:
        rules = self.list_rules(cls)
        # The keys of each object by its path, parents first.
        known: dict[json_values.Path, set[str]] = {(): set()}
        for rule in rules:
            for depth, step in enumerate(rule.path):
                known.setdefault(rule.path[:depth], set()).add(step)
            known.setdefault(rule.place, set()).update(self._list_inline_keys(rule))
        places = {path: number for number, path in enumerate(known)}
        checks = [
            (path, place, check)
            for path, place in places.items()
            for check in self._list_checks(cls, path, known[path])
        ]
        inner = [(path, places[path[:-1]], path[-1]) for path in known if path]
        keys: list[
            tuple[json_values.Path, int, str, str, json_values.Reader, Callable[[], object] | None]
        ] = []
        parts: list[tuple[json_values.Path, int, str, json_values.Reader]] = []
        for rule in rules:
            path, place = rule.path, places[rule.place]
            if rule.key.part is None:
                read = self.make_value_reader(rule)
                read_absent = self._make_absent_reader(rule, read)
                keys.append((path, place, path[-1], rule.name, read, read_absent))
            else:
                parts.append((path, place, rule.name, self._make_part_reader(rule, known[path])))
        missing = None if self.is_api else json_values.NO_VALUE
        return json_values.RecordReader(cls, missing, inner, checks, keys, parts).read

    def _list_checks(
        self, cls: type, path: json_values.Path, known: set[str]
    ) -> Iterator[Callable[[Json], None]]:
        options = _get_options(cls)
        if options.kind and not path:
            known.update(("apiVersion", "kind"))
            yield partial(json_values.check_kind, options.kind)
        is_open = any(
            rule.path == path and rule.key.part in ("rest", "whole")
            for rule in self.list_rules(cls)
        )
        if (self._is_strict or options.is_strict) and not is_open:
            yield partial(json_values.refuse_unknown_keys, known)

    def _list_inline_keys(self, rule: _FieldRule) -> Iterator[str]:
        if rule.key.part == "inline":
            inline = cast("type", _strip_null(_find_wire(rule.kind)))
            yield from (inner.path[0] for inner in self.list_rules(inline))

    def _make_part_reader(self, rule: _FieldRule, known: set[str]) -> json_values.Reader:
        if rule.key.part == "inline":
            # The keys of both classes stand in one object, so neither refuses those of the other.
            return (_API if self.is_api else _OWN).make_value_reader(rule)
        return partial(json_values.copy_without, known if rule.key.part == "rest" else ())

    def _make_absent_reader(
        self, rule: _FieldRule, read: json_values.Reader
    ) -> Callable[[], object] | None:
        """Return the reader of a missing key; None for a field with a default."""
        if rule.default is not json_values.NO_VALUE and not rule.key.is_required:
            return None
        zero = _get_zero(rule.kind) if self.is_api else None

        def read_absent() -> object:
            if not self.is_api:
                raise json_values.Mismatch(problem="the key is missing")
            try:
                return read(zero)
            except json_values.Mismatch as problem:
                if not problem.steps:
                    problem.value = json_values.NO_VALUE
                raise

        return read_absent

    def make_value_reader(self, rule: _FieldRule) -> json_values.Reader:
        """Return the reader of the value of a field."""
        key = rule.key
        if key.resolve is not None:
            read: json_values.Reader = partial(self._read_lazily, key.resolve)
        elif key.can_skip:
            plain = _strip_markers(rule.kind)
            is_list = get_origin(plain) in (tuple, frozenset)
            make = self._make_items_reader if is_list else self._make_mapping_reader
            read = make(plain, can_skip=True)
        else:
            read = self._make_annotated_reader(rule.kind)
        can_be_null = rule.default is None
        if key.fallback is json_values.NO_VALUE and (self.is_api or not can_be_null):
            return read

        def read_value(value: object) -> object:
            if value is None and can_be_null:
                return None
            try:
                return read(value)
            except UnknownMember:
                if key.fallback is json_values.NO_VALUE:
                    raise
                return key.fallback

        return read_value

    def _read_lazily(self, resolve: Callable[[], object], value: object) -> object:
        return self.get_reader(resolve())(value)

    def list_rules(self, cls: type) -> tuple[_FieldRule, ...]:
        """Return the rules of the fields that are in JSON."""
        if (rules := self._rules.get(cls)) is None:
            made = (_FieldRule(cls, *field, is_api=self.is_api) for field in _list_fields(cls))
            rules = tuple(rule for rule in made if rule.key.part != "none")
            self._rules[cls] = rules
        return rules

    def encode(self, value: object) -> object:
        """Return the JSON of a value."""
        cls = type(value)
        if (write := self._writers.get(cls)) is None:
            write = self._writers[cls] = self._make_writer(cls)
        return write(value)

    def _make_writer(self, cls: type) -> Writer:
        if issubclass(cls, Enum):
            return _get_member_name
        if issubclass(cls, str | int | list | _NULL):
            return json_values.read_any
        if issubclass(cls, float):
            return json_values.write_number
        if issubclass(cls, Mapping):
            return self._write_mapping
        if issubclass(cls, frozenset):
            return lambda value: sorted(map(self._write_name, cast("frozenset[object]", value)))
        if issubclass(cls, tuple):
            return lambda value: [self.encode(inner) for inner in cast("tuple[object]", value)]
        if _is_record(cls):
            return self._make_object_writer(cls)
        raise TypeError(f"cannot encode {cls.__name__} as JSON")

    def _write_mapping(self, value: object) -> Json:
        return {
            name if type(name) is str else self._write_name(name): (
                inner if type(inner) in _PLAIN else self.encode(inner)
            )
            for name, inner in cast("Mapping[object, object]", value).items()
        }

    def _write_name(self, value: object) -> str:
        encoded = self.encode(value)
        if not isinstance(encoded, str):
            raise TypeError(f"cannot encode {type(value).__name__} as a key of JSON")
        return encoded

    def _make_object_writer(self, cls: type) -> Writer:
        options = _get_options(cls)
        head = {"apiVersion": options.api_version, "kind": options.kind} if options.kind else {}
        rules = [rule for rule in self.list_rules(cls) if rule.key.part != "whole"]
        groups = [
            (place, [self._make_writing_step(rule) for rule in group])
            for place, group in itertools.groupby(rules, lambda rule: rule.place)
        ]
        omits_null, encode = self.is_api, self.encode

        def write_object(record: object) -> object:
            document: dict[str, typing.Any] = {**head}
            for place, steps in groups:
                target = {} if place else document
                for name, key, write, default in steps:
                    value = getattr(record, name)
                    if (value is None and omits_null) or value == default:
                        continue
                    if write is not None:
                        value = write(value)
                    elif type(value) not in _PLAIN:
                        value = encode(value)
                    if key is None:
                        target.update(value)
                    else:
                        target[key] = value
                if place and target:
                    _merge_at(document, place, target)
            return document

        return write_object

    def _make_writing_step(self, rule: _FieldRule) -> tuple[str, str | None, Writer | None, object]:
        """Return the name, the key, the writer, and the value that is not written."""
        key = rule.path[-1] if rule.key.part is None else None
        default = rule.default if rule.omits_default else json_values.NO_VALUE
        return rule.name, key, self._get_writer(rule.kind), default

    def _get_writer(self, kind: object) -> Writer | None:
        """Return the writer of a field; None where the type of the value says how to write it."""
        for via in _list_vias(kind):
            if via.write is not None:
                return via.write
        plain = _strip_markers(kind)
        if self.is_api and plain in (object, _OPEN_OBJECT):
            return json_values.read_any  # JSON already, and often large
        inner = _strip_null(plain)
        return None if inner is plain else self._get_writer(inner)


_OWN, _API = _Codec(is_api=False), _Codec(is_api=True)
_STRICT = _Codec(is_api=True, is_strict=True)


def get_reader(kind: object) -> json_values.Reader:
    """Return the reader of a type by the rules of an API."""
    return _API.get_reader(kind)


def read_value(kind: object, value: object, where: str, *, is_strict: bool = False) -> object:
    """Read a value by the rules of an API; raise `ConfigError` with the location below ``where``.

    With ``is_strict`` no class below has unknown keys.
    """
    try:
        return (_STRICT if is_strict else _API).get_reader(kind)(value)
    except json_values.Mismatch as problem:
        raise ConfigError(problem.format_message(where), remedy=problem.remedy) from problem


def encode(value: object, *, version: int | None = None) -> Json:
    """Return the JSON object for a dataclass, with ``version`` as its first key if there is one.

    Raise the version only when an older treenail must not read the document. Raises `ValueError`
    for a number that is not finite.
    """
    encoded = cast("Json", _OWN.encode(value))
    return encoded if version is None else {"version": version, **encoded}


def decode(cls: type[T], document: object, *, version: int | None = None) -> T:
    """Return the ``cls`` that `encode` made ``document`` from, in this or in another treenail.

    Raises `CodecError` when a required key is missing, when a value has a wrong type, and when
    the document has another version.
    """
    try:
        actual = json_values.read_object(document).get("version")
        if version is not None and actual != version:
            raise CodecError(f"version: expected {version}, found {actual!r:.80}")
        return cast("T", _OWN.get_reader(cls)(document))
    except json_values.Mismatch as problem:
        raise CodecError(problem.format_message("")) from problem
