import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.registry.images import make_client, push_image
from treenail.config.bootstrap_registry import (
    MIRROR_FILE,
    RECORD_FILE,
    RECORD_LIMIT,
    BootstrapRegistryRecord,
    decode_record,
    encode_record,
    format_mirror_file,
    is_mirror_file_of,
    list_node_files,
)
from treenail.config.pullsecret import encode_pull_secret
from treenail.errors import ConfigError
from treenail_lab.registry.service import PULLER, RegistryService

CANARY = "hunter2canary"
FINAL = "127.0.0.1:9/example/os"
"""A final name whose registry refuses connections."""
RECORD = BootstrapRegistryRecord(
    "10.0.0.5:22625", "puller", CANARY, ("quay.io/example/arbiter", "quay.io/example/os")
)


def change(**fields: object) -> bytes:
    """The sample record with other values; None removes a field."""
    document = {**json.loads(encode_record(RECORD)), **fields}
    return json.dumps({name: each for name, each in document.items() if each is not None}).encode()


def test_record_is_read_again():
    assert decode_record(encode_record(RECORD), where="f") == RECORD


def test_record_with_unsorted_repositories_is_sorted():
    record = replace(RECORD, repositories=("quay.io/b", "quay.io/a", "quay.io/b"))
    found = decode_record(encode_record(record), where="f")
    assert found.repositories == ("quay.io/a", "quay.io/b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (change(extra=1), "f.extra: unknown field"),
        (change(registry=None), "f.registry: expected a string, found nothing"),
        (change(registry="10.0.0.5/../x"), "f.registry is '10.0.0.5/../x/os"),
        (change(registry="10.0.0.5/x"), "f.registry: expected HOST:PORT, found a path"),
        (change(registry='h"\n[x]'), "does not start with a registry host"),
        (change(repositories=[]), "expected 1 to 100 repositories, found 0"),
        (change(repositories=["quay.io/x"] * 101), "found 101"),
        (change(repositories=['quay.io/"\n']), "lower-case path components"),
        (change(repositories=["quay.io"]), "f.repositories[0]"),
        (change(repositories=["quay.io/os:latest"]), "f.repositories[0]"),
        (change(username="a:b"), "no colon in the user name"),
        (change(password="two words"), "printable ASCII characters"),
        (change(password=None), "f.password: expected a string, found nothing"),
        (b" " * (RECORD_LIMIT + 1), "longer than 65536 bytes"),
    ],
)
def test_invalid_record_is_refused(content, message):
    with pytest.raises(ConfigError) as error:
        decode_record(content, where="f")
    assert message in str(error.value)


def test_invalid_record_shows_no_password():
    for content in (change(password=f"{CANARY} {CANARY}"), change(password=[CANARY])):
        with pytest.raises(ConfigError) as error:
            decode_record(content, where="f")
        assert CANARY not in str(error.value)
    assert CANARY not in repr(RECORD)


def test_invalid_record_is_not_written():
    with pytest.raises(ConfigError, match="the record of the bootstrap registry"):
        encode_record(replace(RECORD, registry="a/b"))


def test_mirror_file_has_a_mirror_for_digests_per_repository():
    found = tomllib.loads(format_mirror_file(RECORD).decode())
    assert found == {
        "registry": [
            {
                "prefix": name,
                "location": name,
                "mirror": [
                    {
                        "location": f"10.0.0.5:22625/{name.partition('/')[2]}",
                        "pull-from-mirror": "digest-only",
                    }
                ],
            }
            for name in RECORD.repositories
        ]
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (format_mirror_file(RECORD), True),
        (format_mirror_file(replace(RECORD, registry="10.0.0.5:22626")), False),
        (format_mirror_file(RECORD) + format_mirror_file(replace(RECORD, registry="x")), False),
        (b"", False),
        (b"[[registry]]\nprefix = 'a'\n", False),
        (b"registry = 1", False),
        (b"\xff", False),
        (b"not toml", False),
    ],
)
def test_only_mirrors_of_the_registry_are_recognized(content, expected):
    assert is_mirror_file_of(content, RECORD.registry) is expected


def test_node_files_are_readable_except_the_record():
    files = {each.path: each for each in list_node_files(RECORD, b"pem")}
    ca = "/etc/docker/certs.d/10.0.0.5:22625/ca.crt"
    assert {path: each.mode for path, each in files.items()} == {
        MIRROR_FILE: 0o644,
        ca: 0o644,
        RECORD_FILE: 0o600,
    }
    assert files[ca].contents.decode_bytes() == b"pem"
    assert decode_record(files[RECORD_FILE].contents.decode_bytes(), where="f") == RECORD
    assert set(files) == set(RECORD.paths)


@pytest.fixture
def registry() -> Iterator[RegistryService]:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with RegistryService() as service:
        yield service


@pytest.mark.process
def test_mirror_file_sends_skopeo_to_the_registry_for_digests_only(
    registry: RegistryService, tmp_path: Path
) -> None:
    image = push_image(make_client(registry), repository="example/os", tag="latest")
    record = BootstrapRegistryRecord(registry.host, PULLER, registry.passwords[PULLER], (FINAL,))
    (tmp_path / "registries.conf").write_bytes(format_mirror_file(record))
    (tmp_path / "auth.json").write_bytes(encode_pull_secret(record.make_pull_secret()))

    def inspect(reference: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["skopeo", "--registries-conf", str(tmp_path / "registries.conf"), "inspect", "--raw",
             "--authfile", str(tmp_path / "auth.json"), "--retry-times", "0",
             "--cert-dir", str(registry.ca_file.parent), f"docker://{FINAL}{reference}"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    by_digest = inspect(f"@{image.digest}")
    assert by_digest.returncode == 0, by_digest.stderr
    assert '"layers"' in by_digest.stdout
    by_tag = inspect(":latest")
    assert by_tag.returncode != 0
    assert "127.0.0.1:9" in by_tag.stderr
