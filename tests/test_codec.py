"""The codec of our own files: what it writes, what it reads, and what it refuses."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.encoding import codec
from treenail.encoding.codec import CodecError


class Colour(StrEnum):
    RED = "red"
    DEEP_BLUE = "deep-blue"


class Rank(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class Everything:
    text: str
    number: int
    share: float
    switch: bool
    colour: Colour
    rank: Rank
    point: Point
    maybe: Point | None = None
    state: bool | None = None
    names: tuple[str, ...] = ()
    paths: frozenset[str] = frozenset()
    units: Mapping[str, bool | None] = field(default_factory=dict)
    seconds: Mapping[Colour, float] = field(default_factory=dict)
    boot_id: Annotated[str, codec.Key("bootID")] = ""


@dataclass(frozen=True, slots=True)
class Guarded:
    level: Annotated[int, codec.Key(is_required=True)] = 0


FULL = Everything(
    text="a",
    number=1,
    share=0.5,
    switch=True,
    colour=Colour.DEEP_BLUE,
    rank=Rank.HIGH,
    point=Point(1, 2),
    maybe=Point(3),
    state=False,
    names=("b", "c"),
    paths=frozenset({"/z", "/a"}),
    units={"a.service": True, "b.service": None},
    seconds={Colour.RED: 1.5},
    boot_id="boot-1",
)

FULL_JSON: dict[str, object] = {
    "text": "a",
    "number": 1,
    "share": 0.5,
    "switch": True,
    "colour": "deep-blue",
    "rank": "HIGH",
    "point": {"x": 1, "y": 2},
    "maybe": {"x": 3, "y": 0},
    "state": False,
    "names": ["b", "c"],
    "paths": ["/a", "/z"],
    "units": {"a.service": True, "b.service": None},
    "seconds": {"red": 1.5},
    "bootID": "boot-1",
}

REQUIRED = {
    key: FULL_JSON[key] for key in ("text", "number", "share", "switch", "colour", "rank", "point")
}


def test_encode_every_type_writes_plain_json() -> None:
    assert codec.encode(FULL) == FULL_JSON
    assert list(codec.encode(FULL)) == list(FULL_JSON)


def test_decode_every_type_restores_the_object() -> None:
    assert codec.decode(Everything, json.loads(json.dumps(FULL_JSON))) == FULL


def test_decode_missing_keys_takes_defaults() -> None:
    found = codec.decode(Everything, REQUIRED)
    assert found == Everything("a", 1, 0.5, True, Colour.DEEP_BLUE, Rank.HIGH, Point(1, 2))


def test_decode_unknown_keys_are_ignored_at_every_depth() -> None:
    document = {**FULL_JSON, "later": [1], "point": {"x": 1, "y": 2, "z": 3}}
    assert codec.decode(Everything, document) == FULL


def test_decode_integer_for_float_is_converted() -> None:
    found = codec.decode(Everything, {**FULL_JSON, "share": 2})
    assert found.share == 2.0
    assert isinstance(found.share, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 1}, "text: expected a string, found 1"),
        ({"text": None}, "text: expected a string, found null"),
        ({"number": True}, "number: expected an integer, found true"),
        ({"number": 1.5}, "number: expected an integer, found 1.5"),
        ({"share": True}, "share: expected a number, found true"),
        ({"switch": 1}, "switch: expected true or false, found 1"),
        ({"colour": "green"}, "colour: expected red or deep-blue, found 'green'"),
        ({"colour": 1}, "colour: expected a string, found 1"),
        ({"rank": "2"}, "rank: expected LOW or HIGH, found '2'"),
        ({"point": []}, "point: expected an object, found a list"),
        ({"point": {}}, "point.x: the key is missing"),
        ({"maybe": {"x": "1"}}, "maybe.x: expected an integer, found a string"),
        ({"maybe": 1}, "maybe: expected an object, found 1"),
        ({"state": "yes"}, "state: expected true or false, found a string"),
        ({"names": "b"}, "names: expected a list, found a string"),
        ({"names": ["b", 1]}, "names[1]: expected a string, found 1"),
        ({"paths": {}}, "paths: expected a list, found an object"),
        (
            {"units": {"a.service": "on"}},
            'units["a.service"]: expected true or false, found a string',
        ),
        ({"seconds": {"green": 1.0}}, "seconds.green: expected red or deep-blue, found 'green'"),
        ({"bootID": 1}, "bootID: expected a string, found 1"),
    ],
)
def test_decode_wrong_type_names_the_path(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CodecError) as caught:
        codec.decode(Everything, {**FULL_JSON, **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("missing", REQUIRED)
def test_decode_missing_required_key_is_refused(missing: str) -> None:
    document = {name: value for name, value in REQUIRED.items() if name != missing}
    with pytest.raises(CodecError, match=f"^{missing}: the key is missing$"):
        codec.decode(Everything, document)


def test_encode_with_version_writes_it_first() -> None:
    assert next(iter(codec.encode(Point(1), version=3).items())) == ("version", 3)


def test_decode_with_version_refuses_another_one() -> None:
    assert codec.decode(Point, {"version": 3, "x": 1}, version=3) == Point(1)
    for document in ({"version": 4, "x": 1}, {"x": 1}):
        with pytest.raises(CodecError, match=r"^version: expected 3, found"):
            codec.decode(Point, document, version=3)


def test_decode_key_required_despite_a_default_is_refused_when_missing() -> None:
    assert Guarded().level == 0
    with pytest.raises(CodecError, match=r"^level: the key is missing$"):
        codec.decode(Guarded, {})


def test_decode_no_object_is_refused() -> None:
    with pytest.raises(CodecError, match=r"^expected an object, found a list$"):
        codec.decode(Point, [1, 2])


@dataclass(frozen=True, slots=True)
class Past:
    colour: Colour
    seconds: Annotated[Mapping[Colour, float], codec.Key(can_skip=True)] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class Tolerant:
    colour: Annotated[Colour, codec.Key(fallback=Colour.DEEP_BLUE)] = Colour.RED
    history: Annotated[tuple[Past, ...], codec.Key(can_skip=True)] = ()
    strict: tuple[Past, ...] = ()


def test_decode_unknown_member_with_fallback_takes_it() -> None:
    assert codec.decode(Tolerant, {"colour": "green"}).colour is Colour.DEEP_BLUE
    assert codec.decode(Tolerant, {}).colour is Colour.RED


def test_decode_wrong_type_with_fallback_is_refused() -> None:
    with pytest.raises(CodecError, match=r"^colour: expected a string"):
        codec.decode(Tolerant, {"colour": 1})


def test_decode_unknown_member_in_skippable_entries_leaves_only_them_out() -> None:
    rows = [{"colour": "red"}, {"colour": "green"}, {"colour": "deep-blue"}]
    found = codec.decode(Tolerant, {"history": rows})
    assert found.history == (Past(Colour.RED), Past(Colour.DEEP_BLUE))
    row = {"colour": "red", "seconds": {"red": 1, "green": 2}}
    found = codec.decode(Tolerant, {"history": [row]})
    assert found.history == (Past(Colour.RED, {Colour.RED: 1.0}),)


def test_decode_unknown_member_elsewhere_is_refused() -> None:
    with pytest.raises(
        CodecError, match=r"^strict\[0\]\.colour: expected red or deep-blue, found 'green'$"
    ):
        codec.decode(Tolerant, {"strict": [{"colour": "green"}]})


def test_decode_damaged_entry_among_skippable_ones_is_refused() -> None:
    with pytest.raises(CodecError, match=r"^history\[0\]\.colour: the key is missing$"):
        codec.decode(Tolerant, {"history": [{}]})


def _resolve_loudly() -> object:
    RESOLVED.append("Point")
    return Point | None


RESOLVED: list[str] = []


@dataclass(frozen=True, slots=True)
class Lazy:
    point: Annotated[object, codec.Key(resolve=_resolve_loudly)] = None


def test_decode_lazy_type_is_resolved_for_a_value_only() -> None:
    RESOLVED.clear()
    assert codec.decode(Lazy, {"point": None}) == Lazy()
    assert RESOLVED == []
    assert codec.decode(Lazy, {"point": {"x": 1}}) == Lazy(Point(1))
    assert RESOLVED == ["Point"]


@dataclass(frozen=True, slots=True)
class Forward:
    inner: "Later"


@dataclass(frozen=True, slots=True)
class Later:
    x: int


def test_decode_annotation_as_text_is_resolved() -> None:
    assert codec.decode(Forward, {"inner": {"x": 1}}) == Forward(Later(1))


@dataclass(frozen=True, slots=True)
class Unsupported:
    colour: object


class Plain(Enum):
    ONE = 1


def test_unsupported_types_are_errors_of_the_program() -> None:
    with pytest.raises(TypeError, match="cannot decode JSON as"):
        codec.decode(Unsupported, {"colour": "red"})
    with pytest.raises(TypeError, match="cannot encode bytes as JSON"):
        codec.encode(Unsupported(b"red"))
    with pytest.raises(TypeError, match="cannot encode int as a key"):
        codec.encode(Unsupported({1: "red"}))
    assert codec.encode(Unsupported(Plain.ONE)) == {"colour": "ONE"}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_number_that_no_reader_accepts_is_not_written(number: float) -> None:
    with pytest.raises(ValueError, match=r"cannot encode -?(nan|inf) as JSON"):
        codec.encode(Unsupported({"share": number}))


@given(st.builds(Everything, share=st.floats(allow_nan=False, allow_infinity=False)))
def test_any_object_survives_encoding(value: Everything) -> None:
    assert codec.decode(Everything, json.loads(json.dumps(codec.encode(value)))) == value
