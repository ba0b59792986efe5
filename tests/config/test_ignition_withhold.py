"""The secrets of an Ignition document are withheld for review."""

import base64
import gzip
import json
from typing import Any

import pytest
from hypothesis import given

from tests.api.configs import configs, ignition, with_files
from tests.api.fuzzing import fuzz
from treenail.api.ignition.parser import parse_ignition
from treenail.config.ignition.emit import VERSIONS_SERVED, emit_ignition
from treenail.config.ignition.withhold import withhold_secrets

Json = dict[str, Any]

SHA512 = "sha512-" + "0" * 128


def withhold_file(**fields: object) -> Json:
    found = withhold_secrets(with_files({"path": "/etc/a", **fields}))
    return found["storage"]["files"][0]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o700, 0o4750, 0])
def test_file_that_others_may_not_read_is_withheld_with_its_size(mode: int) -> None:
    contents = {"source": "data:,canary%20x", "verification": {"hash": SHA512}}
    # Contents with a wrong digest have no size.
    assert withhold_file(mode=mode, contents=contents)["contents"] == {"source": "data:,withheld"}
    found = withhold_file(mode=mode, contents={"source": "data:,canary%20x"})
    assert found == {
        "path": "/etc/a",
        "mode": mode,
        "contents": {"source": "data:,withheld%2C%208%20bytes"},
    }


def test_size_is_that_of_the_decompressed_contents() -> None:
    packed = base64.b64encode(gzip.compress(b"x" * 1000)).decode()
    contents = {"source": f"data:;base64,{packed}", "compression": "gzip"}
    found = withhold_file(mode=0o600, contents=contents)
    assert found["contents"] == {"source": "data:,withheld%2C%201000%20bytes"}


@pytest.mark.parametrize("mode", [None, 0o644, 0o755, 0o604])
def test_file_that_others_may_read_is_shown(mode: int | None) -> None:
    file = {"contents": {"source": "data:,shown", "verification": {"hash": SHA512}}}
    assert withhold_file(**file, mode=mode)["contents"] == file["contents"]


def test_file_with_the_path_of_a_secret_is_withheld_in_every_mode() -> None:
    found = withhold_file(
        path="/etc/kubernetes/kubeconfig", mode=0o644, contents={"source": "data:,canary"}
    )
    assert found["contents"] == {"source": "data:,withheld%2C%206%20bytes"}


def test_all_sources_of_a_file_are_withheld() -> None:
    found = withhold_file(mode=0o600, append=[{"source": "data:,canary"}, {"source": "data:,"}])
    assert found["append"] == [
        {"source": "data:,withheld%2C%206%20bytes"},
        {"source": "data:,withheld%2C%200%20bytes"},
    ]


def test_remote_source_is_shown_without_its_secrets() -> None:
    contents = {
        "source": "https://user:canary@example.com/a?token=canary",
        "httpHeaders": [{"name": "Authorization", "value": "Bearer canary"}],
        "verification": {"hash": SHA512},
    }
    found = withhold_file(mode=0o600, contents=contents)
    assert found["contents"]["source"].startswith("https://<withheld>@example.com/a?")
    assert list(found["contents"]) == ["source"]
    assert "canary" not in json.dumps(found)
    public = withhold_file(mode=0o644, contents=contents)
    assert public["contents"]["httpHeaders"] == [{"name": "Authorization", "value": "<withheld>"}]
    assert "canary" not in json.dumps(public)


def test_every_kind_of_secret_is_withheld() -> None:
    reference = {
        "source": "https://example.com/a?token=canary",
        "httpHeaders": [{"name": "Authorization", "value": "Bearer canary"}, {"name": "b"}],
    }
    document = ignition(
        passwd={
            "users": [{"name": "core", "passwordHash": "canary", "sshAuthorizedKeys": ["shown"]}],
            "groups": [{"name": "g", "passwordHash": "canary"}],
        },
        storage={
            "luks": [
                {
                    "name": "root",
                    "keyFile": {"source": "data:,canary"},
                    "clevis": {"custom": {"pin": "sss", "config": '{"x": "canary"}'}},
                }
            ]
        },
    )
    document["ignition"] |= {
        "config": {"merge": [reference], "replace": reference},
        "proxy": {"httpProxy": "http://user:canary@proxy", "noProxy": ["shown"]},
        "security": {"tls": {"certificateAuthorities": [{"source": "data:,shown"}]}},
    }
    before = json.dumps(document)
    text = json.dumps(withhold_secrets(document))
    assert "canary" not in text
    assert text.count("shown") == 3
    assert json.dumps(document) == before


@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_document_of_every_version_stays_readable(version: str) -> None:
    files = [
        {"path": "/a", "mode": 0o600, "append": [{"source": "data:,canary"}]},
        {"path": "/b", "mode": 0o600, "contents": {"source": "data:,canary"}},
        {"path": "/c", "contents": {"source": "data:,shown"}},
    ]
    document = emit_ignition(parse_ignition(with_files(*files)), version)
    found = withhold_secrets(document)
    texts = {
        file.path: (file.append[0] if file.append else file.contents).decode_bytes()
        for file in parse_ignition(found).files
    }
    assert texts == {"/a": b"withheld, 6 bytes", "/b": b"withheld, 6 bytes", "/c": b"shown"}


@fuzz
@given(configs())
def test_withheld_config_differs_only_in_contents(document: Json) -> None:
    config = parse_ignition(document)
    found = parse_ignition(withhold_secrets(emit_ignition(config, "3.5.0")))
    assert [file.path for file in found.files] == [file.path for file in config.files]
    assert found.units == config.units
    for file, before in zip(found.files, config.files, strict=True):
        if before.contents.source and file.mode is not None and not file.mode & 0o004:
            size = len(before.contents.decode_bytes())
            assert file.contents.decode_bytes() == f"withheld, {size} bytes".encode()
