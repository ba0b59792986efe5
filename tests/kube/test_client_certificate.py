"""The Node in the client certificate of a kubeconfig."""

from pathlib import Path

import pytest

from treenail.errors import UnreachableError
from treenail.kube.transport.credentials import read_node_name
from treenail.kube.transport.kubeconfig import ApiServerConfig
from treenail_lab.apiserver.access.certificates import CertificateAuthority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


# A name may end with characters that the next bytes of the certificate continue: "0" is a tag.
@pytest.mark.parametrize("name", ["n1", "n1.example.com", "node-0", "a", "a" * 52])
def test_node_is_that_of_the_first_certificate(
    authority: CertificateAuthority, tmp_path: Path, name: str
) -> None:
    identity = authority.make_client_identity(f"system:node:{name}", ["system:nodes"])
    # The kubelet's kubelet-client-current.pem has the certificate, its chain and the key.
    chain = identity.certificate + authority.pem + identity.private_key
    file = tmp_path / "kubelet-client-current.pem"
    file.write_bytes(chain)
    for certificate in (chain, identity.private_key + chain, str(file)):
        assert read_node_name(ApiServerConfig("https://a", certificate=certificate)) == name


def test_other_user_has_no_node(authority: CertificateAuthority) -> None:
    for user in ("system:node", "admin", "a system:node:n1"):
        certificate = authority.make_client_identity(user, ["system:node:n2"]).certificate
        assert read_node_name(ApiServerConfig("https://a", certificate=certificate)) == ""
    assert read_node_name(ApiServerConfig("https://a", token="t")) == ""


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n",
        b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n",
    ],
)
def test_unusable_certificate_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "client.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UnreachableError, match=f"cannot use {file} of kubeconfig k: "):
        read_node_name(ApiServerConfig("https://a", certificate=str(file), source="kubeconfig k"))
