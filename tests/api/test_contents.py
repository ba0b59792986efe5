"""Contents of files are decoded within limits, or rejected with their location."""

import base64
import contextlib
import gzip
import hashlib
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.configs import ENCODINGS
from tests.api.fuzzing import damaged, fuzz
from treenail.api.decode import Fields
from treenail.api.ignition.model import SIZE_LIMIT, Contents
from treenail.errors import ConfigError, IgnitionError


def contents(**values: object) -> Contents:
    return Contents.from_fields(Fields(values, "files[3].contents", IgnitionError))


def refusal(**values: object) -> str:
    with pytest.raises(IgnitionError) as caught:
        contents(**values).decode_bytes()
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (None, b""),
        ("", b""),
        ("data:,", b""),
        ("data:,a%20b=%3D%25", b"a b==%"),
        ("data:,a+b_c", b"a+b_c"),
        ("data:;base64,aGk=", b"hi"),
        ("data:text/plain;charset=utf-8;base64,aGk=", b"hi"),
        ("data:text/plain;charset=US-ASCII,hi", b"hi"),
        ('data:text/plain;a="x,\\";y";b=c;base64,aGk=', b"hi"),
        ("data:application/x-gzip;base64,", b""),
        ("data:,%C3%A9%00%ff", b"\xc3\xa9\x00\xff"),
    ],
)
def test_data_url_is_decoded(source: str | None, found: bytes) -> None:
    assert contents(source=source).decode_bytes() == found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:;base64,a-b_", ".source: expected base64, found other data"),
        ("data:;base64,aGk", ".source: expected base64, found other data"),
        ("data:;base64,{{ .Text }}", ".source: expected base64, found the placeholder {{ .Text }}"),
        ("data:;base64,<base64>", ".source: expected base64, found the placeholder <base64>"),
        ("data:;base64,${TEXT}", ".source: expected base64, found the placeholder ${TEXT}"),
        ("data:;base64,%TEXT%", ".source: expected base64, found the placeholder %TEXT%"),
        ("data:;base64,aGk=aGk=", ".source: expected base64, found other data"),
        ("data:;base64,aG\nk=", ".source: expected base64, found other data"),
        ("data:;base64,é", ".source: expected base64, found other data"),
        ("data:,a b", ".source: invalid URL character 1 after the comma"),
        ("data:,ab%2", ".source: invalid URL character 2 after the comma"),
        ("data:,é", ".source: invalid URL character 0 after the comma"),
        ("data:text", ".source: malformed data: URL before its comma"),
        ("data:;base64;a=b,", ".source: malformed data: URL before its comma"),
        ("file:///etc/passwd", ".source: expected a data: URL, found a string"),
        (
            "https://example.com/x",
            ".source: expected a data: URL, found a remote URL",
        ),
    ],
)
def test_invalid_data_url_is_rejected_with_its_location(source: str, message: str) -> None:
    assert refusal(source=source) == "files[3].contents" + message


def test_gzip_contents_are_decompressed_member_by_member() -> None:
    packed = base64.b64encode(gzip.compress(b"a") + gzip.compress(b"b")).decode()
    assert contents(source="data:;base64," + packed, compression="gzip").decode_bytes() == b"ab"


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (gzip.compress(b"abc")[:-1], ".source: expected gzip, found truncated gzip"),
        (b"plain", ".source: expected gzip, found other data"),
        (gzip.compress(b"a") + b"tail", ".source: expected gzip, found other data"),
        (
            gzip.compress(bytes(SIZE_LIMIT + 1)),
            f": more than {SIZE_LIMIT} bytes when decompressed",
        ),
        (
            gzip.compress(bytes(SIZE_LIMIT // 2)) + gzip.compress(bytes(SIZE_LIMIT // 2 + 1)),
            f": more than {SIZE_LIMIT} bytes when decompressed",
        ),
    ],
    ids=["cut", "plain", "tail", "bomb", "two halves of a bomb"],
)
def test_broken_gzip_or_gzip_bomb_is_rejected(packed: bytes, message: str) -> None:
    source = "data:;base64," + base64.b64encode(packed).decode()
    assert refusal(source=source, compression="gzip") == "files[3].contents" + message


def test_unknown_compression_is_rejected() -> None:
    assert refusal(compression="xz") == (
        "files[3].contents.compression: expected gzip or nothing, found 'xz'"
    )


def test_contents_are_checked_against_their_digest() -> None:
    digest = "sha512-" + hashlib.sha512(b"hi").hexdigest()
    assert contents(source="data:,hi", verification={"hash": digest}).decode_bytes() == b"hi"
    assert refusal(source="data:,ho", verification={"hash": digest}) == (
        "files[3].contents.verification.hash: the contents have another digest"
    )
    for wrong in ("sha512-abc", "md5-" + "0" * 32, ""):
        assert refusal(verification={"hash": wrong}).startswith(
            "files[3].contents.verification.hash: expected "
        )


def test_contents_are_absent_from_repr_and_errors() -> None:
    assert "canary" not in repr(contents(source="data:,canary"))
    assert "canary" not in refusal(source="data:,canary canary")
    assert "canary" not in refusal(source="canary")


def test_contents_round_trip_without_loss() -> None:
    for values in (
        {},
        {"source": "", "compression": ""},
        {"verification": {"hash": "sha256-" + "0" * 64}},
    ):
        assert contents(**values).to_json() == values
    headers = [{"name": "a", "value": "b"}]
    assert contents(source="https://x/", httpHeaders=headers).to_json() == {
        "source": "https://x/",
        "httpHeaders": headers,
    }


@fuzz
@given(st.binary(), st.sampled_from(ENCODINGS))
def test_every_encoding_decodes_to_the_original_bytes(raw: bytes, encode: object) -> None:
    assert contents(**encode(raw)).decode_bytes() == raw


@fuzz
@given(
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters='#"<>[]^`{|}\\'))
)
def test_percent_decoding_matches_the_standard_library(text: str) -> None:
    with contextlib.suppress(IgnitionError):
        assert contents(source="data:," + text).decode_bytes() == urllib.parse.unquote_to_bytes(
            text
        )


FULL = {
    "source": "data:text/plain;charset=utf-8;base64,"
    + base64.b64encode(gzip.compress(b"a")).decode(),
    "compression": "gzip",
    "verification": {"hash": "sha256-" + hashlib.sha256(b"a").hexdigest()},
    "httpHeaders": [{"name": "a", "value": "b"}],
}


@fuzz
@given(
    damaged(FULL)
    | st.fixed_dictionaries(
        {"source": st.text() | st.text(st.sampled_from('data:;,=%0a"\\/b64')).map("data:".__add__)}
    )
    | st.binary().map(
        lambda raw: {
            "source": "data:;base64," + base64.b64encode(raw).decode(),
            "compression": "gzip",
        }
    )
)
def test_any_contents_are_decoded_or_rejected(values: object) -> None:
    with contextlib.suppress(ConfigError):
        Contents.from_fields(Fields.from_json(values, "x", IgnitionError)).decode_bytes()
