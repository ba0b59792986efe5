"""Tests of the selected credential after sequences of arrivals, rejections and pulls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.config import pullsecret
from treenail.config.pullsecret import CredentialHistory, PullSecret, RegistryCredential
from treenail.errors import CredentialError

IMAGE = "quay.example/os/node@sha256:" + "0" * 64
A, B, C = RegistryCredential("dTph"), RegistryCredential("dTpi"), RegistryCredential("dTpj")


def secret(login: RegistryCredential | None, *, name: str = "quay.example") -> PullSecret:
    return PullSecret({} if login is None else {name: login, "other.example": A})


class CredentialNode:
    """Node with an agent that receives credentials and pulls from a registry."""

    def __init__(self) -> None:
        self.history, self.in_place = CredentialHistory(), PullSecret()

    def receive_login(self, login: RegistryCredential | None) -> None:
        self.newest = secret(login)
        self.history = pullsecret.renew_history(self.history, self.in_place, self.newest)
        self._write_files()

    def pull_image(self, *accepted: RegistryCredential) -> bool:
        """Pull as the agent does: at most twice."""
        for _ in range(2):
            if self.current_login in accepted:
                self.history = pullsecret.record_success(self.history, self.newest, IMAGE)
                self._write_files()
                return True
            before = self.current_login
            found = pullsecret.record_rejection(self.history, self.newest, IMAGE)
            self.history = found or self.history
            self._write_files()
            if found is None or self.current_login == before or not self.history.rejected_digests:
                return False
        return False

    @property
    def current_login(self) -> RegistryCredential | None:
        return self.in_place.credentials.get("quay.example")

    def _write_files(self) -> None:
        self.history = pullsecret.decode_history(pullsecret.encode_history(self.history), where="f")
        self.in_place = pullsecret.select_credentials(self.history, self.newest)


def test_previous_login_is_used_while_newest_is_rejected() -> None:
    node = CredentialNode()
    node.receive_login(A)
    assert node.pull_image(A)
    node.receive_login(B)
    assert node.current_login == B
    assert node.pull_image(A)
    assert node.current_login == A
    assert list(pullsecret.describe_rejections(node.history, node.newest)) == [
        "registry quay.example rejected the newest credential; the previous one stays in use"
    ]
    node.receive_login(C)
    assert node.current_login == C
    assert list(pullsecret.describe_rejections(node.history, node.newest)) == []
    assert node.pull_image(C)
    assert node.history.last_good == {"quay.example": C}


def test_earlier_of_two_unused_logins_is_retained() -> None:
    node = CredentialNode()
    for login in (A, B, C):
        node.receive_login(login)
    assert node.pull_image(A)
    assert node.current_login == A


def test_newest_login_is_retried_after_both_are_rejected() -> None:
    node = CredentialNode()
    node.receive_login(A)
    node.pull_image(A)
    node.receive_login(B)
    assert not node.pull_image(C)
    assert node.current_login == B
    assert node.pull_image(B)


def test_removed_login_is_dropped() -> None:
    node = CredentialNode()
    node.receive_login(A)
    node.pull_image(A)
    node.receive_login(None)
    assert node.current_login is None
    assert node.history.is_empty


@given(st.lists(st.sampled_from([*"ABC", "pull A", "pull B", "pull C", "pull"]), max_size=12))
def test_last_working_login_is_retained_until_a_newer_one_works(events) -> None:
    node, logins_by_letter, last = CredentialNode(), {"A": A, "B": B, "C": C}, None
    node.receive_login(A)
    for event in events:
        if event in logins_by_letter:
            node.receive_login(logins_by_letter[event])
            assert node.current_login == logins_by_letter[event] or node.history.rejected_digests
        elif node.pull_image(*(logins_by_letter[each] for each in event.split()[1:])):
            last = node.current_login
        assert last is None or last in (node.current_login, node.history.last_good["quay.example"])


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
    assert pullsecret.find_registry(PullSecret(dict.fromkeys(entries, A)), image) == name


@pytest.mark.parametrize(
    "content", [b"{", b'{"auths": {}, "rejected": 5}', b'{"rejected": {"a": 1}}']
)
def test_invalid_history_raises_error_without_its_content(content: bytes) -> None:
    with pytest.raises(CredentialError, match=r"^cannot parse (pull secret )?f: "):
        pullsecret.decode_history(content, where="f")


def test_repr_withholds_login() -> None:
    assert "dTph" not in repr(CredentialHistory({"quay.example": A}))
