"""A wrong field is named by its place, with what was expected and what was found."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz, json_values
from treenail.api.decode import Fields, load_json
from treenail.errors import ConfigError, IgnitionError

FILES = {"spec": {"files": [{}, {"path": 7, "mode": "0644", "ok": True}, "x"], "name": ""}}


def files() -> list[Fields]:
    return list(Fields.of({"files": FILES["spec"]["files"][:2]}, "spec").objects("files"))


def refusal(read: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return str(caught.value)


def test_a_wrong_type_is_named_with_its_place_and_value() -> None:
    file = files()[1]
    assert refusal(lambda: file.text("path")) == "spec.files[1].path: expected a string, found 7"
    assert refusal(lambda: file.optional_integer("mode")) == (
        "spec.files[1].mode: expected an integer, found a string"
    )
    assert refusal(lambda: file.flag("path")) == (
        "spec.files[1].path: expected true or false, found 7"
    )
    assert refusal(lambda: file.nested("ok")) == "spec.files[1].ok: expected an object, found true"
    assert refusal(lambda: file.list_of("ok")) == "spec.files[1].ok: expected a list, found true"


def test_a_wrong_element_is_named_by_its_index() -> None:
    fields = Fields.of(FILES, "").nested("spec")
    assert refusal(lambda: list(fields.objects("files"))) == (
        "spec.files[2]: expected an object, found a string"
    )
    keys = Fields({"sshAuthorizedKeys": ["a", 1234]}, "user")
    assert refusal(lambda: keys.texts("sshAuthorizedKeys")) == (
        "user.sshAuthorizedKeys[1]: expected a string, found a number or a boolean"
    )


def test_a_secret_of_the_wrong_type_is_not_quoted() -> None:
    user = Fields({"passwordHash": 12345}, "user")
    assert refusal(lambda: user.optional_text("passwordHash")) == (
        "user.passwordHash: expected a string, found a number or a boolean"
    )


def test_absent_and_null_are_the_same() -> None:
    for fields in (Fields({}, "x"), Fields(dict.fromkeys("abcdefgh"), "x")):
        assert fields.text("a") == ""
        assert fields.optional_text("b") is None
        assert fields.flag("c") is False
        assert fields.optional_flag("d") is None
        assert fields.optional_integer("e") is None
        assert fields.texts("f") == ()
        assert fields.nested("g").values == {}
        assert list(fields.objects("h")) == []


def test_required_text_must_be_there_and_not_empty() -> None:
    fields = Fields({"name": ""}, "metadata")
    assert refusal(lambda: fields.required_text("name")) == (
        "metadata.name: expected a string, found an empty string"
    )
    assert refusal(lambda: fields.required_text("uid")) == (
        "metadata.uid: expected a string, found nothing"
    )


def test_unusual_keys_are_quoted_in_the_place() -> None:
    fields = Fields({"annotations": {"a.io/b": 1}}, "metadata")
    assert refusal(lambda: fields.text_map("annotations")) == (
        'metadata.annotations["a.io/b"]: expected a string, found 1'
    )


def test_half_a_character_is_refused() -> None:
    fields = Fields({"name": "a\ud800"}, "metadata")
    assert refusal(lambda: fields.text("name")) == (
        "metadata.name: expected a string, found half a surrogate pair at character 1"
    )


def test_the_error_is_of_the_class_the_caller_chose() -> None:
    with pytest.raises(IgnitionError):
        Fields.of([], "spec.config", IgnitionError)
    with pytest.raises(IgnitionError):
        list(Fields({"a": [1]}, "x", IgnitionError).objects("a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": }', "f.json, line 1, column 7: not JSON: Expecting value"),
        ("{\n'a'}", None),
        (b'{"a": "\xff"}', "f.json: expected UTF-8, found another encoding at byte 7"),
        ("[" * 100_000, "f.json: nested too deeply"),
        ('{"a": NaN}', "f.json: not JSON: a number that JSON can't hold"),
        ("9" * 5000, "f.json: not JSON: a number that JSON can't hold"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(text: str | bytes, message: str | None) -> None:
    found = refusal(lambda: load_json(text, where="f.json"))
    assert found.startswith("f.json")
    assert message in (None, found)


def test_json_in_bytes_may_start_with_a_byte_order_mark() -> None:
    assert load_json(b'\xef\xbb\xbf{"a": 1}', where="f.json") == {"a": 1}


@fuzz
@given(st.text() | st.binary())
def test_any_text_is_json_or_refused(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        load_json(text, where="f")


@fuzz
@given(json_values, st.sampled_from("abc"))
def test_any_value_is_read_or_refused(value: object, name: str) -> None:
    readers = [
        Fields.text, Fields.optional_text, Fields.required_text, Fields.flag, Fields.optional_flag,
        Fields.optional_integer, Fields.list_of, Fields.texts, Fields.nested, Fields.text_map,
        lambda fields, name: list(fields.objects(name)),
    ]  # fmt: skip
    for read in readers:
        with contextlib.suppress(ConfigError):
            read(Fields({name: value}, "x"), name)
