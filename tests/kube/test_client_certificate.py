"""The name in the client certificate of a kubeconfig."""

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from treenail.errors import UnreachableError
from treenail.kube.transport.credentials import parse_subject_name, read_subject_name
from treenail.kube.transport.kubeconfig import ApiServerConfig
from treenail_lab.apiserver.access.certificates import CertificateAuthority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


def test_name_is_that_of_the_first_certificate(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    identity = authority.make_client_identity("system:node:n1.example.com", ["system:nodes"])
    # The kubelet's kubelet-client-current.pem has the certificate, its chain and the key.
    chain = identity.certificate + authority.pem + identity.private_key
    file = tmp_path / "kubelet-client-current.pem"
    file.write_bytes(chain)
    for certificate in (chain, identity.private_key + chain, str(file)):
        config = ApiServerConfig("https://a", certificate=certificate)
        assert read_subject_name(config) == "system:node:n1.example.com"
    assert read_subject_name(ApiServerConfig("https://a", token="t")) == ""


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n", "cut"])
def test_unusable_certificate_is_named(
    authority: CertificateAuthority, tmp_path: Path, content: bytes | str | None
) -> None:
    file = tmp_path / "client.pem"
    if content == "cut":
        pem = authority.make_client_identity("a", []).certificate.decode("ascii")
        der = ssl.PEM_cert_to_DER_cert(pem)
        file.write_text(ssl.DER_cert_to_PEM_cert(der[:100]))
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(UnreachableError, match=f"cannot use {file} of kubeconfig k: "):
        read_subject_name(
            ApiServerConfig("https://a", certificate=str(file), source="kubeconfig k")
        )


def test_damaged_certificate_raises_nothing_but_value_error(
    authority: CertificateAuthority,
) -> None:
    pem = authority.make_client_identity("system:node:n1", ["a", "b"]).certificate
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    assert parse_subject_name(der) == "system:node:n1"
    for place in range(len(der)):
        with pytest.raises(ValueError, match=r"."):
            parse_subject_name(der[:place])
        for value in (0x00, 0x30, 0x7F, 0x80, 0xFF):
            with suppress(ValueError):
                parse_subject_name(der[:place] + bytes((value,)) + der[place + 1 :])
