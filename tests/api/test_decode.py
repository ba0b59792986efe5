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
    return list(
        Fields.from_json({"files": FILES["spec"]["files"][:2]}, "spec").iter_objects("files")
    )


def refusal(read: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    return str(caught.value)


def test_a_wrong_type_is_named_with_its_place_and_value() -> None:
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


def test_a_wrong_element_is_named_by_its_index() -> None:
    fields = Fields.from_json(FILES, "").get_object("spec")
    assert refusal(lambda: list(fields.iter_objects("files"))) == (
        "spec.files[2]: expected an object, found a string"
    )
    keys = Fields({"sshAuthorizedKeys": ["a", 1234]}, "user")
    assert refusal(lambda: keys.get_text_list("sshAuthorizedKeys")) == (
        "user.sshAuthorizedKeys[1]: expected a string, found a number or a boolean"
    )


def test_a_secret_of_the_wrong_type_is_not_quoted() -> None:
    user = Fields({"passwordHash": 12345}, "user")
    assert refusal(lambda: user.get_optional_text("passwordHash")) == (
        "user.passwordHash: expected a string, found a number or a boolean"
    )


def test_absent_and_null_are_the_same() -> None:
    for fields in (Fields({}, "x"), Fields(dict.fromkeys("abcdefgh"), "x")):
        assert fields.get_text("a") == ""
        assert fields.get_optional_text("b") is None
        assert fields.get_bool("c") is False
        assert fields.get_optional_bool("d") is None
        assert fields.get_optional_integer("e") is None
        assert fields.get_text_list("f") == ()
        assert fields.get_object("g").values == {}
        assert list(fields.iter_objects("h")) == []


def test_required_text_must_be_there_and_not_empty() -> None:
    fields = Fields({"name": ""}, "metadata")
    assert refusal(lambda: fields.get_required_text("name")) == (
        "metadata.name: expected a string, found an empty string"
    )
    assert refusal(lambda: fields.get_required_text("uid")) == (
        "metadata.uid: expected a string, found nothing"
    )


def test_unusual_keys_are_quoted_in_the_place() -> None:
    fields = Fields({"annotations": {"a.io/b": 1}}, "metadata")
    assert refusal(lambda: fields.get_text_map("annotations")) == (
        'metadata.annotations["a.io/b"]: expected a string, found 1'
    )


def test_half_a_character_is_refused() -> None:
    fields = Fields({"name": "a\ud800"}, "metadata")
    assert refusal(lambda: fields.get_text("name")) == (
        "metadata.name: expected a string, found half a surrogate pair at character 1"
    )


def test_the_error_is_of_the_class_the_caller_chose() -> None:
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
        Fields.get_text, Fields.get_optional_text, Fields.get_required_text, Fields.get_bool, Fields.get_optional_bool,
        Fields.get_optional_integer, Fields.get_list, Fields.get_text_list, Fields.get_object, Fields.get_text_map,
        lambda fields, name: list(fields.iter_objects(name)),
    ]  # fmt: skip
    for read in readers:
        with contextlib.suppress(ConfigError):
            read(Fields({name: value}, "x"), name)
