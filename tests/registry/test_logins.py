"""Choice of the login: the entry with the longest path that contains the repository."""

import json

import pytest

from treenail.config.pullsecret import parse_pull_secret
from treenail.registry.authorization import select_login

ENTRIES = {
    "quay.io": {"username": "host", "password": "p"},
    "quay.io/team": {"username": "team", "password": "p"},
    "quay.io/team/os": {"username": "os", "password": "a:b"},
    "localhost:5000": {"username": "port", "password": "p"},
    "https://index.docker.io/v1/": {"username": "hub", "password": "p"},
    "token.example": {"identitytoken": "canary"},
}


@pytest.mark.parametrize(
    ("host", "repository", "user"),
    [
        ("quay.io", "other/os", "host"),
        ("quay.io", "team/node", "team"),
        ("quay.io", "team/os", "os"),
        ("quay.io", "team/os/deep", "os"),
        ("quay.io", "teams/os", "host"),
        ("localhost:5000", "os", "port"),
        ("localhost", "os", None),
        ("docker.io", "library/os", "hub"),
    ],
)
def test_longest_path_chooses_the_login(host: str, repository: str, user: str | None) -> None:
    secret = parse_pull_secret(json.dumps({"auths": ENTRIES}).encode(), where="the test")
    login = select_login(secret.credentials, host, repository)
    assert (login.user if login else None) == user


def test_login_shows_no_secret() -> None:
    secret = parse_pull_secret(json.dumps({"auths": ENTRIES}).encode(), where="the test")
    login = select_login(secret.credentials, "quay.io", "team/os")
    assert login.password == "a:b"
    assert repr(login) == "Login()"
    token = select_login(secret.credentials, "token.example", "os")
    assert not token.is_anonymous
    assert "canary" not in repr(token)
    assert token.list_secrets() == ("canary",)
