"""Tests of the selected credential after sequences of arrivals, rejections and pulls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.config import logins
from treenail.config.logins import CredentialHistory
from treenail.config.pullsecret import PullSecret, RegistryCredential
from treenail.errors import CredentialError

IMAGE = "quay.example/os/node@sha256:" + "0" * 64
A, B, C = RegistryCredential("dTph"), RegistryCredential("dTpi"), RegistryCredential("dTpj")


def secret(login: RegistryCredential | None, *, name: str = "quay.example") -> PullSecret:
    return PullSecret({} if login is None else {name: login, "other.example": A})


class CredentialNode:
    """Node with an agent that receives credentials and pulls from a registry."""

    def __init__(self) -> None:
        self.known, self.in_place = CredentialHistory(), PullSecret()

    def arrives(self, login: RegistryCredential | None) -> None:
        self.newest = secret(login)
        self.known = logins.renew_history(self.known, self.in_place, self.newest)
        self._put()

    def pulls(self, *accepted: RegistryCredential) -> bool:
        """Pull as the agent does: at most twice."""
        for _ in range(2):
            if self.shown in accepted:
                self.known = logins.record_success(self.known, self.newest, IMAGE)
                self._put()
                return True
            before = self.shown
            found = logins.record_rejection(self.known, self.newest, IMAGE)
            self.known = found or self.known
            self._put()
            if found is None or self.shown == before or not self.known.rejected_digests:
                return False
        return False

    @property
    def shown(self) -> RegistryCredential | None:
        return self.in_place.credentials.get("quay.example")

    def _put(self) -> None:
        self.known = logins.decode_history(logins.encode_history(self.known), where="f")
        self.in_place = logins.select_credentials(self.known, self.newest)


def test_previous_login_is_used_while_newest_is_rejected() -> None:
    node = CredentialNode()
    node.arrives(A)
    assert node.pulls(A)
    node.arrives(B)
    assert node.shown == B
    assert node.pulls(A)
    assert node.shown == A
    assert list(logins.describe_rejections(node.known, node.newest)) == [
        "registry quay.example rejected the newest credential; the previous one stays in use"
    ]
    node.arrives(C)
    assert node.shown == C
    assert list(logins.describe_rejections(node.known, node.newest)) == []
    assert node.pulls(C)
    assert node.known.last_good == {"quay.example": C}


def test_earlier_of_two_unused_logins_is_retained() -> None:
    node = CredentialNode()
    for login in (A, B, C):
        node.arrives(login)
    assert node.pulls(A)
    assert node.shown == A


def test_newest_login_is_retried_after_both_are_rejected() -> None:
    node = CredentialNode()
    node.arrives(A)
    node.pulls(A)
    node.arrives(B)
    assert not node.pulls(C)
    assert node.shown == B
    assert node.pulls(B)


def test_removed_login_is_dropped() -> None:
    node = CredentialNode()
    node.arrives(A)
    node.pulls(A)
    node.arrives(None)
    assert node.shown is None
    assert node.known.is_empty


@given(st.lists(st.sampled_from([*"ABC", "pull A", "pull B", "pull C", "pull"]), max_size=12))
def test_last_working_login_is_retained_until_a_newer_one_works(events) -> None:
    node, letters, last = CredentialNode(), {"A": A, "B": B, "C": C}, None
    node.arrives(A)
    for event in events:
        if event in letters:
            node.arrives(letters[event])
            assert node.shown == letters[event] or node.known.rejected_digests
        elif node.pulls(*(letters[each] for each in event.split()[1:])):
            last = node.shown
        assert last is None or last in (node.shown, node.known.last_good["quay.example"])


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("quay.example/os/node@sha256:0", "quay.example/os"),
        ("quay.example/os/node:tag", "quay.example/os"),
        ("quay.example/osx/node", "quay.example"),
        ("quay.example:5000/os/node", "quay.example:5000"),
        ("elsewhere.example/os", None),
        ("", None),
    ],
)
def test_longest_prefix_of_pull_spec_is_found(image: str, name: str | None) -> None:
    entries = ("quay.example", "quay.example/os", "quay.example:5000")
    assert logins.find_registry(PullSecret(dict.fromkeys(entries, A)), image) == name


@pytest.mark.parametrize(
    "content", [b"{", b'{"auths": {}, "refused": 5}', b'{"refused": {"a": 1}}']
)
def test_invalid_history_raises_error_without_its_content(content: bytes) -> None:
    with pytest.raises(CredentialError, match=r"^cannot parse (pull secret )?f: "):
        logins.decode_history(content, where="f")


def test_repr_withholds_login() -> None:
    assert "dTph" not in repr(CredentialHistory({"quay.example": A}))
