"""Pointer configs name the server, its CA and a token."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from treenail.api.ignition.model import Contents
from treenail.config.ignition.emit import VERSIONS_SERVED
from treenail.errors import UsageError
from treenail.provisioning.content.document import build_pointer
from treenail_lab.apiserver.access.certificates import CertificateAuthority

SERVER = "https://api-int.example.com:22623"
TOKEN = "tn_worker-1_" + "s" * 43
LIMIT = 2048
"""Maximum size of user data on some platforms, in bytes."""


@pytest.fixture
def authority(tmp_path: Path) -> bytes:
    return CertificateAuthority(tmp_path).pem


@pytest.mark.parametrize("version", ["3.1.0", "3.2.0", "3.3.0", "3.4.0", "3.5.0"])
def test_token_is_a_header_from_3_1(version: str) -> None:
    assert build_pointer(SERVER, "worker", version, token=TOKEN) == {
        "ignition": {
            "version": version,
            "config": {
                "merge": [
                    {
                        "source": f"{SERVER}/config/worker",
                        "httpHeaders": [{"name": "Authorization", "value": f"Bearer {TOKEN}"}],
                    }
                ]
            },
        }
    }


@pytest.mark.parametrize(("version", "name"), [("2.2.0", "append"), ("3.0.0", "merge")])
def test_token_is_in_the_query_before_3_1(version: str, name: str) -> None:
    source = f"{SERVER}/config/worker?token={TOKEN}"
    assert build_pointer(SERVER, "worker", version, token=TOKEN) == {
        "ignition": {"version": version, "config": {name: [{"source": source}]}}
    }


@pytest.mark.parametrize("version", VERSIONS_SERVED)
def test_pointer_without_a_token_is_that_of_the_mco(version: str, authority: bytes) -> None:
    found = build_pointer(f"{SERVER}/", "worker", version, authorities=authority)
    reference = found["ignition"]["config"]["append" if version < "3" else "merge"][0]
    assert reference == {"source": f"{SERVER}/config/worker"}
    (trusted,) = found["ignition"]["security"]["tls"]["certificateAuthorities"]
    assert Contents(trusted["source"]).decode_bytes() == authority


def test_pointer_is_smaller_than_the_limit_of_user_data(authority: bytes) -> None:
    found = build_pointer(SERVER, "worker", "3.4.0", authorities=authority, token=TOKEN)
    assert len(json.dumps(found)) < LIMIT
    # An RSA key of 2048 bits and its signature have about 450 bytes more than EC ones.
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    longer = len(public) + 256 - 91 - 72
    assert len(json.dumps(found)) + longer * 4 / 3 * 1.1 < LIMIT


def test_bundle_becomes_one_entry_for_each_certificate(tmp_path: Path, authority: bytes) -> None:
    (tmp_path / "other").mkdir()
    other = CertificateAuthority(tmp_path / "other").pem
    bundle = b"# root\n" + authority + b"subject: \xe9 - x\n" + other + authority
    found = build_pointer(SERVER, "worker", "3.4.0", authorities=bundle)
    trusted = found["ignition"]["security"]["tls"]["certificateAuthorities"]
    texts = [Contents(each["source"]).decode_bytes() for each in trusted]
    assert texts == [authority, other]


@pytest.mark.parametrize(
    "server",
    [
        "", "api-int.example.com", "http://api-int.example.com", "https://", "https://a b",
        "https://a/path", "https://a?x=1", "https://user@a", "https://a:x", "https://a\nb",
        "https://a#b", "https://é",
    ],
)  # fmt: skip
def test_invalid_url_of_the_server_is_refused(server: str) -> None:
    with pytest.raises(UsageError, match="expected https://HOST:PORT"):
        build_pointer(server, "worker", "3.4.0")


@pytest.mark.parametrize("server", ["https://10.0.0.1", "https://[fd00::1]:22623", "https://a/"])
def test_addresses_are_valid_servers(server: str) -> None:
    assert build_pointer(server, "worker", "3.4.0")


@pytest.mark.parametrize("bundle", [b"x", b"-----BEGIN CERTIFICATE-----\n", b"\xff\xfe"])
def test_file_without_a_certificate_is_refused(bundle: bytes) -> None:
    with pytest.raises(UsageError, match="expected a certificate in PEM"):
        build_pointer(SERVER, "worker", "3.4.0", authorities=bundle)
