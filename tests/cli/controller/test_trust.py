"""``treenail-controller trust``: the files of nodes, without the private key."""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from treenail.api import documents
from treenail.api.machineconfig import MachineConfig
from treenail.cli.controller.main import main
from treenail.config.wanted_state import read_wanted_state


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    path.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


def test_files_require_signatures_of_the_repository(
    key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trust", "--signing-key", str(key), "quay.io/example/os"]) == 0
    printed = capsys.readouterr().out
    assert "-----BEGIN PUBLIC KEY-----" in printed
    assert "PRIVATE" not in printed
    policy = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    (requirement,) = policy["transports"]["docker"]["quay.io/example/os"]
    assert requirement["type"] == "sigstoreSigned"
    assert f"# {requirement['keyPath']}\n" in printed
    assert "  quay.io/example/os:\n    use-sigstore-attachments: true\n" in printed


def test_config_of_a_role_has_the_files(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trust", "--signing-key", str(key), "--role", "worker", "quay.io/example/os"]
    assert main(words) == 0
    document = documents.load_document(capsys.readouterr().out, where="the output")
    wanted = read_wanted_state(MachineConfig.from_json(document))
    assert set(wanted.files) == {
        "/etc/containers/policy.json",
        "/etc/containers/registries.d/treenail.yaml",
        "/etc/pki/containers/treenail.pub",
    }


@pytest.mark.parametrize(
    ("content", "repository", "text"),
    [
        (b"no key", "quay.io/example/os", "cannot use the signing key"),
        (b"x" * 70_000, "quay.io/example/os", "longer than"),
        (None, "quay.io/example/os", "cannot read the signing key"),
        (b"", "quay.io/example/os:tag", "REPOSITORY"),
        (b"", "os", "REPOSITORY"),
    ],
)
def test_unusable_argument_is_refused(
    tmp_path: Path,
    content: bytes | None,
    repository: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bad.pem"
    if content is not None:
        path.write_bytes(content)
    assert main(["trust", "--signing-key", str(path), repository]) in {1, 2}
    assert text in capsys.readouterr().err.replace("\n", " ")
