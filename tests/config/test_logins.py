"""Which login is shown after any sequence of arrivals, refusals and successes."""

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


class Machine:
    """A machine whose newest login, registry and agent come and go."""

    def __init__(self) -> None:
        self.known, self.in_place = CredentialHistory(), PullSecret()

    def arrives(self, login: RegistryCredential | None) -> None:
        self.newest = secret(login)
        self.known = logins.renew_history(self.known, self.in_place, self.newest)
        self._put()

    def pulls(self, *accepted: RegistryCredential) -> bool:
        """As the agent does: twice at most."""
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


def test_the_login_before_is_used_while_the_newest_is_refused_and_forgotten_when_it_is_not() -> (
    None
):
    machine = Machine()
    machine.arrives(A)
    assert machine.pulls(A)
    machine.arrives(B)
    assert machine.shown == B
    assert machine.pulls(A)
    assert machine.shown == A
    assert list(logins.describe_rejections(machine.known, machine.newest)) == [
        "quay.example refused the newest login for it; the one before stays in use"
    ]
    machine.arrives(C)
    assert machine.shown == C
    assert list(logins.describe_rejections(machine.known, machine.newest)) == []
    assert machine.pulls(C)
    assert machine.known.last_good == {"quay.example": C}


def test_of_two_logins_that_were_never_used_the_earlier_one_is_kept() -> None:
    machine = Machine()
    for login in (A, B, C):
        machine.arrives(login)
    assert machine.pulls(A)
    assert machine.shown == A


def test_when_both_are_refused_the_newest_is_tried_again() -> None:
    machine = Machine()
    machine.arrives(A)
    machine.pulls(A)
    machine.arrives(B)
    assert not machine.pulls(C)
    assert machine.shown == B
    assert machine.pulls(B)


def test_a_login_that_was_taken_away_is_not_kept() -> None:
    machine = Machine()
    machine.arrives(A)
    machine.pulls(A)
    machine.arrives(None)
    assert machine.shown is None
    assert machine.known.is_empty


@given(st.lists(st.sampled_from([*"ABC", "pull A", "pull B", "pull C", "pull"]), max_size=12))
def test_a_login_that_worked_last_is_shown_or_kept_until_a_newer_one_works(events) -> None:
    machine, letters, last = Machine(), {"A": A, "B": B, "C": C}, None
    machine.arrives(A)
    for event in events:
        if event in letters:
            machine.arrives(letters[event])
            assert machine.shown == letters[event] or machine.known.rejected_digests
        elif machine.pulls(*(letters[each] for each in event.split()[1:])):
            last = machine.shown
        assert last is None or last in (machine.shown, machine.known.last_good["quay.example"])


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
def test_the_longest_entry_that_begins_a_pull_spec_counts(image: str, name: str | None) -> None:
    entries = ("quay.example", "quay.example/os", "quay.example:5000")
    assert logins.find_registry(PullSecret(dict.fromkeys(entries, A)), image) == name


@pytest.mark.parametrize(
    "content", [b"{", b'{"auths": {}, "refused": 5}', b'{"refused": {"a": 1}}']
)
def test_what_is_no_experience_is_refused_and_not_repeated(content: bytes) -> None:
    with pytest.raises(CredentialError, match=r"^f"):
        logins.decode_history(content, where="f")


def test_no_login_is_shown_by_its_representation() -> None:
    assert "dTph" not in repr(CredentialHistory({"quay.example": A}))
