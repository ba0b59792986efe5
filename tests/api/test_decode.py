"""A wrong field is rejected with its location, the expected and the found type."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz, json_values
from treenail.api.decode import Fields, load_json
from treenail.errors import ConfigError, IgnitionError

FILES = {"spec": {"files": [{}, {"path": 7, "mode": "0644", "ok": True}, "x"], "name": ""}}


def files() -> list[Fields]:
    return list(
        Fields.from_json({"files": FILES["spec"]["files"][:2]}, "spec").iter_objects("files")
    )


def refusal(read: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return str(caught.value)


def test_wrong_type_is_rejected_with_location_and_value() -> None:
    file = files()[1]
    assert (
        refusal(lambda: file.get_text("path")) == "spec.files[1].path: expected a string, found 7"
    )
    assert refusal(lambda: file.get_optional_integer("mode")) == (
        "spec.files[1].mode: expected an integer, found a string"
    )
    assert refusal(lambda: file.get_bool("path")) == (
        "spec.files[1].path: expected true or false, found 7"
    )
    assert (
        refusal(lambda: file.get_object("ok")) == "spec.files[1].ok: expected an object, found true"
    )
    assert refusal(lambda: file.get_list("ok")) == "spec.files[1].ok: expected a list, found true"


def test_wrong_list_element_is_rejected_with_its_index() -> None:
    fields = Fields.from_json(FILES, "").get_object("spec")
    assert refusal(lambda: list(fields.iter_objects("files"))) == (
        "spec.files[2]: expected an object, found a string"
    )
    keys = Fields({"sshAuthorizedKeys": ["a", 1234]}, "user")
    assert refusal(lambda: keys.get_text_list("sshAuthorizedKeys")) == (
        "user.sshAuthorizedKeys[1]: expected a string, found a number or a boolean"
    )


def test_secret_of_wrong_type_is_withheld() -> None:
    user = Fields({"passwordHash": 12345}, "user")
    assert refusal(lambda: user.get_optional_text("passwordHash")) == (
        "user.passwordHash: expected a string, found a number or a boolean"
    )


def test_null_field_reads_like_an_absent_field() -> None:
    for fields in (Fields({}, "x"), Fields(dict.fromkeys("abcdefgh"), "x")):
        assert fields.get_text("a") == ""
        assert fields.get_optional_text("b") is None
        assert fields.get_bool("c") is False
        assert fields.get_optional_bool("d") is None
        assert fields.get_optional_integer("e") is None
        assert fields.get_text_list("f") == ()
        assert fields.get_object("g").values == {}
        assert list(fields.iter_objects("h")) == []


def test_required_text_absent_or_empty_is_rejected() -> None:
    fields = Fields({"name": ""}, "metadata")
    assert refusal(lambda: fields.get_required_text("name")) == (
        "metadata.name: expected a string, found an empty string"
    )
    assert refusal(lambda: fields.get_required_text("uid")) == (
        "metadata.uid: expected a string, found nothing"
    )


def test_unusual_keys_are_quoted_in_the_location() -> None:
    fields = Fields({"annotations": {"a.io/b": 1}}, "metadata")
    assert refusal(lambda: fields.get_text_map("annotations")) == (
        'metadata.annotations["a.io/b"]: expected a string, found 1'
    )


def test_lone_surrogate_is_rejected() -> None:
    fields = Fields({"name": "a\ud800"}, "metadata")
    assert refusal(lambda: fields.get_text("name")) == (
        "metadata.name: expected a string, found half a surrogate pair at character 1"
    )


def test_error_has_the_class_of_the_caller() -> None:
    with pytest.raises(IgnitionError):
        Fields.from_json([], "spec.config", IgnitionError)
    with pytest.raises(IgnitionError):
        list(Fields({"a": [1]}, "x", IgnitionError).iter_objects("a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": }', "f.json, line 1, column 7: not JSON: Expecting value"),
        ("{\n'a'}", None),
        (b'{"a": "\xff"}', "f.json: expected UTF-8, found another encoding at byte 7"),
        ("[" * 100_000, "f.json: nested too deeply"),
        ('{"a": NaN}', "f.json: not JSON: a number outside of JSON"),
        ("9" * 5000, "f.json: not JSON: a number outside of JSON"),
    ],
)
def test_invalid_json_is_rejected_with_its_location(text: str | bytes, message: str | None) -> None:
    found = refusal(lambda: load_json(text, where="f.json"))
    assert found.startswith("f.json")
    assert message in (None, found)


def test_json_bytes_with_byte_order_mark_are_read() -> None:
    assert load_json(b'\xef\xbb\xbf{"a": 1}', where="f.json") == {"a": 1}


@fuzz
@given(st.text() | st.binary())
def test_any_text_is_json_or_rejected(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        load_json(text, where="f")


@fuzz
@given(json_values, st.sampled_from("abc"))
def test_any_value_is_read_or_rejected(value: object, name: str) -> None:
    readers = [
        Fields.get_text,
        Fields.get_optional_text,
        Fields.get_required_text,
        Fields.get_bool,
        Fields.get_optional_bool,
        Fields.get_optional_integer,
        Fields.get_list,
        Fields.get_text_list,
        Fields.get_object,
        Fields.get_text_map,
        lambda fields, name: list(fields.iter_objects(name)),
    ]
    for read in readers:
        with contextlib.suppress(ConfigError):
            read(Fields({name: value}, "x"), name)
