"""Base64 of users: line ends are skipped as in the API server, and nothing else is."""

import base64

import pytest

from treenail.api.controllerconfig import ControllerConfigContents
from treenail.config.pullsecret import parse_pull_secret, read_login_secret
from treenail.config.trust_anchors import find_certificates
from treenail.encoding import json_text
from treenail.errors import TreenailError
from treenail.image.input_checks import read_context

WRONG = ("AAAAB", "A", "AA_A", "AA-A", "é", "AAAAé", "=", "====", "A=AA", "AAA=AAAA", "AA A", "\0")
LINES = base64.encodebytes(b"a" * 200).decode()


@pytest.mark.parametrize("text", WRONG)
def test_wrong_base64_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"ase64|ASCII|adding"):
        json_text.decode_base64(text)


@pytest.mark.parametrize("text", [LINES, LINES.replace("\n", "\r\n"), LINES.replace("\n", "")])
def test_lines_of_base64_are_joined(text: str) -> None:
    assert json_text.decode_base64(text) == b"a" * 200


@pytest.mark.parametrize("text", WRONG)
def test_wrong_base64_in_a_document_is_refused_without_a_traceback(text: str) -> None:
    secret = {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": text}}
    for read in (
        lambda: read_login_secret(secret, where="Secret a"),
        lambda: read_context({"binaryData": {"a": text}}, "ConfigMap a"),
        lambda: ControllerConfigContents.from_json({"spec": {"additionalTrustBundle": text}}),
        lambda: parse_pull_secret(
            f'{{"auths": {{"a": {{"auth": "{text}"}}}}}}'.encode(), where="a"
        ),
    ):
        with pytest.raises(TreenailError):
            read()
    pem = f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"
    assert len(find_certificates(pem.encode())) <= 1
