"""The rule of policy.json for an image: the narrowest scope decides."""

import json

import pytest

from treenail.errors import ConfigError
from treenail.update.checks.signature_policy import SignatureRule, SignatureTrust, find_rule

IMAGE = "registry.example.com:5000/os/node@sha256:" + "a" * 64
ANYTHING = [{"type": "insecureAcceptAnything"}]
REJECT = [{"type": "reject"}]
SIGNED = [{"type": "sigstoreSigned", "keyPath": "/etc/pki/node.pub"}]


def policy(default: object, docker: object = None) -> bytes:
    return json.dumps({"default": default, "transports": {"docker": docker or {}}}).encode()


def test_rule_without_matching_scope_is_the_default() -> None:
    other = {
        "quay.io": REJECT,
        "registry.example.com": REJECT,
        "registry.example.com:5000/o": REJECT,
    }
    assert find_rule(policy(ANYTHING, other), IMAGE) == SignatureRule(
        SignatureTrust.UNSIGNED, "default"
    )
    assert find_rule(policy(REJECT, {"quay.io": ANYTHING}), IMAGE) == SignatureRule(
        SignatureTrust.REJECTED, "default"
    )


@pytest.mark.parametrize(
    "scope",
    [
        IMAGE,
        "registry.example.com:5000/os/node",
        "registry.example.com:5000/os",
        "registry.example.com:5000",
        "*.example.com",
        "*.com",
        "",
    ],
)
def test_rule_of_any_matching_scope_overrides_the_default(scope: str) -> None:
    found = find_rule(policy(REJECT, {scope: SIGNED}), IMAGE)
    assert found == SignatureRule(
        SignatureTrust.SIGNED,
        f"transports.docker[{scope!r}]",
        ("/etc/pki/node.pub",),
        is_strict=True,
    )


def test_rule_of_narrower_scope_wins() -> None:
    scopes = {"registry.example.com:5000": REJECT, "registry.example.com:5000/os": ANYTHING}
    assert find_rule(policy(REJECT, scopes), IMAGE).trust is SignatureTrust.UNSIGNED


def test_rule_combines_all_requirements_of_a_scope() -> None:
    assert find_rule(policy([*SIGNED, *REJECT]), IMAGE).trust is SignatureTrust.REJECTED
    two = [*SIGNED, {"type": "signedBy", "keyType": "GPGKeys", "keyPaths": ["/a.gpg", "/b.gpg"]}]
    assert find_rule(policy(two), IMAGE).keys == ("/etc/pki/node.pub", "/a.gpg", "/b.gpg")


def test_rule_is_strict_only_if_the_default_does_not_accept_anything() -> None:
    assert not find_rule(policy(ANYTHING, {"": SIGNED}), IMAGE).is_strict
    assert find_rule(policy(SIGNED), IMAGE).is_strict


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        policy([]),
        policy(ANYTHING, {"": []}),
        policy(["reject"]),
        policy([{"type": "trustMe"}]),
        policy([{"type": {}}]),
        policy([{"type": ["reject"]}]),
        policy([{"type": "x" * 100_000}]),
        b'{"default": [{"type": "reject"}], "transports": []}',
        b'{"default": [{"type": "reject"}], "transports": {"docker": 1}}',
        b"[" * 100_000,
    ],
)
def test_invalid_policy_is_refused_with_a_remedy(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"cannot use .*policy\.json") as refused:
        find_rule(content, IMAGE)
    assert "containers-policy.json(5)" in refused.value.remedy
    assert len(str(refused.value)) < 300
