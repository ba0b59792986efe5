"""YAML is read like Go's YAML 1.1; invalid and oversized documents are rejected."""

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz
from treenail.api.documents import dump_document, load_document, load_documents
from treenail.encoding import json_text, yaml11
from treenail.encoding.yaml11 import ALIAS_LIMIT
from treenail.errors import ConfigError


def value_of(scalar: str) -> object:
    return load_document(f"a: {scalar}", where="f.yaml")["a"]


def refusal(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load_document(text, where="f.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        # PyYAML gives other types.
        ("1:20", "1:20"), ("0o17", 15), ("2020-01-01", "2020-01-01"), ("y", True), ("N", False),
        ("1e3", 1000), ("2001-12-14T21:59:43.10-05:00", "2001-12-14T21:59:43.10-05:00"),
        ("08", 8), ("0O17", 15), ("1.0", 1), ("-1e-3", -0.001), ("190:20:30.15", "190:20:30.15"),
        # PyYAML and Go agree.
        ("on", True), ("Off", False), ("017", 15), ("1_000", 1000), (".5", 0.5), ("0b11", 3),
        ("0x1F", 31), ("-0x1F", -31), ("+5", 5), ("~", None), ("", None), ("null", None),
        ("yes", True), ("NO", False), ("True", True), ("nULL", "nULL"), ("yEs", "yEs"),
        # Edge cases.
        ("18446744073709551615", 18446744073709551615), ("-0", 0), ("1e999", "1e999"),
        ("18446744073709551616", 18446744073709551616), (".", "."), ("0o8", "0o8"), ("0x", "0x"),
        ("1__0", 10), ("_1", "_1"), (".5_0", ".5_0"), ("+.5", 0.5), ("1e21", 1e21), ("=", "="),
        ("٣", "٣"), ("<<", "<<"), ("1.", 1), ("0_7", 7), ("-", ["x"]),
    ],
)  # fmt: skip
def test_plain_scalar_has_the_type_go_gives_it(scalar: str, value: object) -> None:
    if scalar == "-":
        scalar = "[x]"
    found = value_of(scalar)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("scalar", ['"{}"', "'{}'", "!!str {}", "|-\n  {}", ">-\n  {}"])
@pytest.mark.parametrize("text", ["1", "y", "0o17", "null", "1e3", ".inf"])
def test_quoted_scalar_is_a_string(scalar: str, text: str) -> None:
    assert value_of(scalar.format(text)) == text


def test_tag_decides_the_type_or_is_rejected() -> None:
    assert value_of('!!int "0o17"') == 15
    assert value_of("!!float 1") == 1
    assert value_of("!!timestamp 2020-01-01") == "2020-01-01"
    assert refusal("a: !!int y") == "f.yaml, line 1, column 4: value does not match its tag !!int"
    assert (
        refusal("a: !!int true") == "f.yaml, line 1, column 4: value does not match its tag !!int"
    )
    assert refusal("a: !!binary aGk=") == ("f.yaml, line 1, column 4: a tag without a JSON type")
    assert refusal("a: !!python/name:os.system x") == (
        "f.yaml, line 1, column 4: a tag without a JSON type"
    )


def test_key_is_always_a_string() -> None:
    assert load_document("1: a\ny: b\n0o17: c\n2020-01-01: d\n", where="f") == {
        "1": "a",
        "true": "b",
        "15": "c",
        "2020-01-01": "d",
    }
    assert refusal("1.5: a") == "f.yaml, line 1, column 1: a key that is not a string; quote it"
    assert refusal("? [a]\n: b") == (
        "f.yaml, line 1, column 3: a key that is not a string; quote it"
    )


def test_duplicate_key_is_rejected() -> None:
    assert refusal("a: 1\nb: 2\na: 3\n") == "f.yaml, line 3, column 1: duplicate key 'a'"
    assert refusal(f"{'k' * 99}: 1\n" * 2).endswith(f"duplicate key '{'k' * 60}'")


def test_tab_in_the_indent_is_named_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"line 2, column \d: not YAML: found a tab") as info:
        load_document("a:\n\tb: 1\n", where="f.yaml")
    assert info.value.remedy == "indent with spaces, not with tabs"


def test_merge_key_does_not_override_own_keys() -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  <<: [*x, *y]\n  c: 3\n"
    assert load_document(text, where="f")["z"] == {"a": 1, "b": 1, "c": 3}
    assert refusal("a:\n  <<: 1\n") == (
        "f.yaml, line 2, column 7: a merge key needs a mapping or a list of mappings"
    )


def test_every_document_of_a_stream_is_read() -> None:
    assert load_documents("---\na: 1\n---\n---\nb: 2\n...\n", where="f") == [{"a": 1}, {"b": 2}]
    assert load_documents("", where="f") == []
    assert refusal("a: 1\n---\nb: 2\n") == "f.yaml: expected one document, found 2"
    assert refusal("") == "f.yaml: expected one document, found 0"
    assert refusal("- a\n") == "f.yaml: expected an object at the top of the document"


def test_anchor_ends_with_its_document() -> None:
    assert refusal("a: &x 1\n---\nb: *x\n").startswith("f.yaml, line 3, column 4: ")


def test_text_with_a_brace_is_read_as_json_or_yaml() -> None:
    assert load_document('{"a": "y", "b": [1, null]}', where="f") == {"a": "y", "b": [1, None]}
    assert load_document("{a: y}", where="f") == {"a": True}


def test_alias_bomb_is_rejected_and_few_aliases_are_read() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert load_document("\n".join(lines[:5]), where="f")["a2"] == [[["x"] * 2] * 2] * 2
    assert refusal("\n".join(lines)).endswith("the aliases make the document too large")
    long = f"a: &a {'x' * (ALIAS_LIMIT // 2)}\nb: [*a, *a]\n"
    assert refusal(long).endswith("the aliases make the document too large")


def test_alias_loop_is_rejected() -> None:
    assert refusal("a: &a [*a]") == (
        "f.yaml, line 1, column 8: an alias without an anchor, or inside its own anchor"
    )


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "a:\n", "{", "&a [", "? "])
def test_deep_nesting_is_rejected(opening: str) -> None:
    refusal("a: " + opening * 100_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: .inf", "f.yaml, line 1, column 4: a number outside of JSON; quote it"),
        ("a: .nan", "f.yaml, line 1, column 4: a number outside of JSON; quote it"),
        (b"a: \xff", "f.yaml: expected UTF-8, found another encoding at byte 3"),
        ("a: \x00", "f.yaml: not YAML: it has characters that YAML forbids"),
        ("a: 'x", None),
        ("a:\n\t- b", None),
        ("%YAML 3.0\n---\na: 1", None),
    ],
)
def test_invalid_yaml_is_rejected_with_its_location(text: str | bytes, message: str | None) -> None:
    assert message in (None, refusal(text))


def test_document_beyond_size_limit_is_rejected() -> None:
    assert "more than the limit of 67108864" in refusal("x" * (64 * 1024 * 1024 + 1))


def test_value_that_yaml_cannot_hold_is_rejected() -> None:
    with pytest.raises(ConfigError, match="YAML cannot represent"):
        dump_document({"a": "\ud800"})


keys = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]))
finite = st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda value: not (value.is_integer() or value == 0)
)
written = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | keys
    | st.sampled_from(["y", "0o17", "1:20", "1e3", "2020-01-01", "<<", "~", "a\n", " \n x", "="])
    | st.text(st.sampled_from("0123456789.eE+-_xob:~yn# '\"\n\t|>&*!%@`[]{},?")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


WRITTEN_BY_GO = [
    ({"a": "1:20", "b": "-1:0.5", "c": "20:70"}, 'a: "1:20"\nb: "-1:0.5"\nc: 20:70\n'),
    (
        {"a": "2026-01-31", "b": "2026-02-30", "c": "2026-1-2T3:4:5Z", "d": "2026-01-31 24:0:0"},
        'a: "2026-01-31"\nb: 2026-02-30\nc: "2026-1-2T3:4:5Z"\nd: 2026-01-31 24:0:0\n',
    ),
    (
        {"a": "=", "b": "<<a", "c": "~", "d": "yes", "e": "017", "f": "1e3", "g": ""},
        'a: =\nb: <<a\nc: "~"\nd: "yes"\ne: "017"\nf: "1e3"\ng: ""\n',
    ),
    (
        {"a": "it's", "b": "a: b", "c": " a", "d": "a #b", "e": "%", "f": "a\tb"},
        "a: it's\nb: 'a: b'\nc: ' a'\nd: 'a #b'\ne: '%'\nf: \"a\\tb\"\n",
    ),
    (
        {"a": "a\nb", "c": ["\na", " a\nb"], "d": "a\n\n"},
        "a: |-\n  a\n  b\nc:\n- |2-\n\n  a\n- |2-\n   a\n  b\nd: |+\n  a\n\n",
    ),
    (
        {"a": [], "b": {}, "c": None, "d": True, "e": [{"f": 1, "g": [2]}]},
        "a: []\nb: {}\nc: null\nd: true\ne:\n- f: 1\n  g:\n  - 2\n",
    ),
    (
        {"a": 0.9, "b": 1e-05, "c": 1.0, "d": 2**63 - 1},
        "a: 0.9\nb: 1e-05\nc: 1\nd: 9223372036854775807\n",
    ),
    (
        dict.fromkeys(["z", "a100", "a12", "a9", "aZ", "a01", "a-b", "a_b", "Z", "2", "10"], 1),
        "".join(f"{key}: 1\n" for key in ['"2"', '"10"', "Z", "a-b", "a_b", "a01", "a9", "a12",
                                          "a100", "aZ", "z"]),
    ),
    (
        {"a": "word " * 20 + "end"},
        f"a: {'word ' * 15}word\n  word word word word end\n",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("document", "text"), WRITTEN_BY_GO)
def test_dumped_document_has_the_bytes_of_go(document: dict[str, object], text: str) -> None:
    assert yaml11.dump_yaml(document, line_width=80) == text
    assert load_document(text, where="f") == document


@fuzz
@given(st.dictionaries(keys, written, max_size=5))
def test_dumped_document_is_read_back_unchanged(document: dict[str, object]) -> None:
    assert load_document(dump_document(document), where="f") == document


@fuzz
@given(st.text() | st.binary() | st.text(st.sampled_from("ab:-?&*!|>'\"[]{},#%~ \n\t<0")))
def test_any_text_is_read_or_rejected(text: str | bytes) -> None:
    with contextlib.suppress(ConfigError):
        for document in load_documents(text, where="f"):
            assert json.loads(json.dumps(document, allow_nan=False)) == document


@fuzz
@given(st.from_regex(r"\A[-+]?[0-9._eExXoObB:]{1,12}\Z"))
def test_any_number_like_scalar_is_a_finite_number_or_a_string(scalar: str) -> None:
    with contextlib.suppress(ConfigError):
        value = value_of(scalar)
        assert isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 400])
def test_encode_parts_writes_the_text_of_json_dumps(count: int) -> None:
    files = [{"path": f"/{number}", "contents": 'é"\\' * 700} for number in range(count)]
    document = {"a": {}, "b": [], "c": {"files": files, "d": [[], {}]}, "é": None}
    parts = list(json_text.encode_parts(document))
    assert b"".join(parts) == json.dumps(document).encode()
    assert len(parts) > 2 or count < 400
