"""What policy.json asks of an image: the narrowest scope says so."""

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


def test_the_default_counts_where_no_scope_does() -> None:
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
def test_every_scope_that_an_image_is_in_counts_before_the_default(scope: str) -> None:
    found = find_rule(policy(REJECT, {scope: SIGNED}), IMAGE)
    assert found == SignatureRule(
        SignatureTrust.SIGNED,
        f"transports.docker[{scope!r}]",
        ("/etc/pki/node.pub",),
        is_strict=True,
    )


def test_the_narrower_scope_counts() -> None:
    scopes = {"registry.example.com:5000": REJECT, "registry.example.com:5000/os": ANYTHING}
    assert find_rule(policy(REJECT, scopes), IMAGE).trust is SignatureTrust.UNSIGNED


def test_all_requirements_of_a_scope_count_together() -> None:
    assert find_rule(policy([*SIGNED, *REJECT]), IMAGE).trust is SignatureTrust.REJECTED
    two = [*SIGNED, {"type": "signedBy", "keyType": "GPGKeys", "keyPaths": ["/a.gpg", "/b.gpg"]}]
    assert find_rule(policy(two), IMAGE).keys == ("/etc/pki/node.pub", "/a.gpg", "/b.gpg")


def test_ostree_is_asked_for_a_verified_image_only_where_it_would_do_so() -> None:
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
        b'{"default": [{"type": "reject"}], "transports": []}',
        b'{"default": [{"type": "reject"}], "transports": {"docker": 1}}',
        b"[" * 100_000,
    ],
)
def test_a_policy_that_cannot_be_read_is_refused_with_a_remedy(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"policy\.json can't be used") as refused:
        find_rule(content, IMAGE)
    assert "containers-policy.json(5)" in refused.value.remedy
