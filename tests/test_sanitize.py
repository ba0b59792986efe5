"""Sanitizing of other programs' text."""

import time

import pytest

from tests.fixtures import canaries
from treenail.sanitize import quote_value, sanitize_text, withhold_forms

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        (f"docker://registry.example/os@{DIGEST}", f"docker://registry.example/os@{DIGEST}"),
        (f"pulling registry:5000/os:1@{DIGEST}", f"pulling registry:5000/os:1@{DIGEST}"),
        ("https://me:secret@registry.example/v2/: 401", "https://registry.example/v2/: 401"),
        ("docker://secret@registry.example/os", "docker://registry.example/os"),
        ('reading "me:secret@registry.example/os"', 'reading "registry.example/os"'),
        ("me:secret@registry.example/os: denied", "registry.example/os: denied"),
        ("GET https://s3.example/blob?X-Sig=abc&y=1: 403", "GET https://s3.example/blob?… 403"),
        ("Authorization: Bearer eyJhbGciOi.abc", "Authorization: Bearer …"),
        ("sent me%3Ahunter%402 to it", "sent … to it"),
        ("see a%3A%2F%2Fr.example", "see a%3A%2F%2Fr.example"),
        ("basic authentication is off", "basic authentication is off"),
        ("mail someone@example.org", "mail someone@example.org"),
        ("RUN env: DB_PASSWORD=hunter2 HOME=/root", "RUN env: DB_PASSWORD=… HOME=/root"),
        ("password='two words' next", "password=… next"),
        ('token="two words"; true', "token=…; true"),
        ('{"auths":{"r":{"auth":"aGk6aHVudGVy"}}}', '{"auths":{"r":{"auth":"…"}}}'),
        (r"{\"auth\": \"aGk6aHVudGVy\"}", r"{\"auth\": \"…\"}"),
        ('"password" : "hunter2", "user": "me"', '"password" : "…", "user": "me"'),
        ("skopeo login --password hunter2 r.example", "skopeo login --password … r.example"),
        ("skopeo copy --src-creds=me:hunter2 a b", "skopeo copy --src-creds=… a b"),
        ("curl -u me:hunter2 https://r.example", "curl -u … https://r.example"),
        ("curl --user me:hunter2 r", "curl --user … r"),
        ("https://r.example/?token=hunter2", "https://r.example/?…"),
        ("id -u 1000:1000", "id -u 1000:1000"),
        ("cannot read password: permission denied", "cannot read password: permission denied"),
        ("Secret builds/push: expected a login", "Secret builds/push: expected a login"),
        ("podman --registry-token hunter2 pull", "podman --registry-token … pull"),
        ("a non-password login", "a non-password login"),
        ("unknown option --token", "unknown option --token"),
        ("Transaction in progress: upgrade\n You can", "Transaction in progress: upgrade You can"),
    ],
)
def test_sanitize_removes_only_credentials(text: str, scrubbed: str) -> None:
    assert sanitize_text(text) == scrubbed


def test_sanitize_cuts_long_text_with_ellipsis() -> None:
    assert sanitize_text("x" * 100, limit=10) == "xxxxxxxxx…"


def test_error_of_a_program_shows_no_token_and_no_key() -> None:
    for kind in canaries.KNOWN_BY_FORM:
        for encode in canaries.FORMS.values():
            shown = sanitize_text(f"cannot pull: {encode(canaries.SECRETS[kind])}")
            assert canaries.find_leaks(shown.encode()) == []


@pytest.mark.parametrize("value", ["x" * 200_000, {"a" * 60: ["b" * 60]}, 10**200])
def test_quoted_value_is_bounded(value: object) -> None:
    assert len(quote_value(value)) == 100


@pytest.mark.parametrize(
    "piece",
    [
        "-",
        "a-",
        "--a",
        "--a-",
        " --a-a-a-",
        "_",
        '"',
        '"a',
        "-u ",
        "password=",
        "a:",
        *("a:=", "(a:", "http://", "-eyJaaaaa", "password:'"),
        "%3A",
        "QUJD",
        "tn_a_",
        "Basic ",
        "-----BEGIN PRIVATE ",
    ],
)
def test_sanitize_of_a_long_hostile_line_takes_linear_time(piece: str) -> None:
    began = time.process_time()
    assert len(sanitize_text(piece * (200_000 // len(piece)), limit=400)) <= 400
    withhold_forms(piece * (100_000 // len(piece)), "…")
    # With a pattern that backtracks it takes 4 s to minutes, now 0.2 s.
    assert time.process_time() - began < 2.0
