import base64
import json
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treenail.config.pullsecret import (
    PullSecret,
    RegistryCredential,
    encode_pull_secret,
    find_credential,
    merge_pull_secrets,
    parse_pull_secret,
    read_login_secret,
)
from treenail.errors import CredentialError

CANARY = "hunter2canary"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def logins(document: object) -> dict[str, RegistryCredential]:
    return dict(parse_pull_secret(json.dumps(document).encode(), where="f").credentials)


@pytest.mark.parametrize(
    ("entry", "login"),
    [
        ({"auth": b64("me:secret")}, RegistryCredential(b64("me:secret"))),
        ({"auth": b64("me:se:cret")}, RegistryCredential(b64("me:se:cret"))),
        ({"username": "me", "password": "secret"}, RegistryCredential(b64("me:secret"))),
        (
            {"username": "me", "password": "x", "auth": b64("you:y")},
            RegistryCredential(b64("you:y")),
        ),
        ({"identitytoken": "token"}, RegistryCredential("", "token")),
        ({"auth": b64("0:"), "identitytoken": "token"}, RegistryCredential(b64("0:"), "token")),
        ({"auth": b64("me:s") + "\n", "email": "a@b", "other": 1}, RegistryCredential(b64("me:s"))),
        ({"auth": None, "username": "me", "password": "s"}, RegistryCredential(b64("me:s"))),
        ({}, RegistryCredential()),
    ],
)
def test_login_is_parsed_in_every_form(entry, login):
    assert logins({"auths": {"quay.io": entry}}) == {"quay.io": login}


def test_dockercfg_is_parsed():
    entry = {"auth": b64("me:secret"), "email": "a@example.com"}
    assert logins({"quay.io": entry, "https://index.docker.io/v1/": entry}) == {
        "quay.io": RegistryCredential(b64("me:secret")),
        "docker.io": RegistryCredential(b64("me:secret")),
    }


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b'{"auths": {}}', b'{"auths": null}'])
def test_an_empty_secret_has_no_logins(content):
    assert parse_pull_secret(content, where="f") == PullSecret()


@pytest.mark.parametrize(
    ("name", "registry"),
    [
        ("quay.io", "quay.io"),
        ("quay.io/team/image", "quay.io/team/image"),
        ("registry.svc:5000", "registry.svc:5000"),
        ("[2001:db8::1]:5000", "[2001:db8::1]:5000"),
        ("*.example.com", "*.example.com"),
        ("https://quay.io", "quay.io"),
        ("http://registry.svc:5000/v2/", "registry.svc:5000"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
    ],
)
def test_registry_names_are_normalized_for_lookup(name, registry):
    assert list(logins({"auths": {name: {"auth": b64("a:b")}}})) == [registry]


@pytest.mark.parametrize("order", [1, -1])
def test_normalized_spelling_of_registry_wins(order):
    entries = [("quay.io", {"auth": b64("a:exact")}), ("https://quay.io", {"auth": b64("a:b")})]
    assert logins({"auths": dict(entries[::order])}) == {
        "quay.io": RegistryCredential(b64("a:exact"))
    }


def test_cluster_login_overrides_internal_one_for_same_registry():
    internal = PullSecret(
        {"both": RegistryCredential("internal"), "image-registry.svc:5000": RegistryCredential("i")}
    )
    cluster = PullSecret(
        {"both": RegistryCredential("cluster"), "quay.io": RegistryCredential("c")}
    )
    assert merge_pull_secrets(internal, cluster) == PullSecret(
        {
            "both": RegistryCredential("cluster"),
            "image-registry.svc:5000": RegistryCredential("i"),
            "quay.io": RegistryCredential("c"),
        }
    )


def test_equal_logins_give_equal_bytes():
    one = parse_pull_secret(b'{"auths":{"b":{"username":"u","password":"p"},"a":{}}}', where="f")
    two = parse_pull_secret(b'{"auths": {"a": {}, "b": {"auth": "dTpw"}}, "other": 1}', where="f")
    assert encode_pull_secret(one) == encode_pull_secret(two)
    assert json.loads(encode_pull_secret(one)) == {"auths": {"a": {}, "b": {"auth": "dTpw"}}}


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,9}\.io(:[0-9]{1,5})?(/[a-z]{1,5})?", fullmatch=True),
        st.builds(
            RegistryCredential,
            st.just("") | st.text(min_size=1).map(lambda text: b64(f"user:{text}")),
            st.text(),
        ),
    )
)
def test_encoded_secret_parses_to_the_same(found):
    assert parse_pull_secret(encode_pull_secret(PullSecret(found)), where="f") == PullSecret(found)


BROKEN = {
    "invalid JSON": (CANARY.encode(), "it is not a JSON object"),
    "truncated": (f'{{"auths": {{"a": {{"auth": "{CANARY}'.encode(), "it is not a JSON object"),
    "invalid UTF-8": (b"\xff" + CANARY.encode(), "it is not a JSON object"),
    "too deep": (b"[" * 100_000, "it is not a JSON object"),
    "a list": (json.dumps([CANARY]).encode(), "it is not a JSON object"),
    "too long": (CANARY.encode() * 100_000, "it is longer than 1048576 bytes"),
    "no registries": (
        json.dumps({"password": CANARY}).encode(),
        'it has no object "auths" and is not a .dockercfg',
    ),
    "credential helpers alone": (
        json.dumps({"credHelpers": {CANARY: "ecr-login"}, "credsStore": CANARY}).encode(),
        "credential helpers are not supported: credHelpers and credsStore",
    ),
    "auths is no object": (
        json.dumps({"auths": [CANARY]}).encode(),
        'it has no object "auths" and is not a .dockercfg',
    ),
    "a registry without a name": (
        json.dumps({"auths": {"a": {}, "": {"auth": CANARY}}}).encode(),
        "the name of entry 2 is not a registry name",
    ),
    "an invalid registry": (
        json.dumps({"auths": {f"my {CANARY}": {}}}).encode(),
        "the name of entry 1 is not a registry name",
    ),
    **{
        name: (
            json.dumps({"auths": {"a": {}, CANARY: entry}}).encode(),
            "entry 2 has no usable auth, username and password, or identitytoken",
        )
        for name, entry in {
            "an entry that is text": CANARY,
            "auth is no base64": {"auth": f"{CANARY}!"},
            "auth is truncated": {"auth": b64(f"a:{CANARY}").rstrip("=")[:-1]},
            "auth is a token only": {"auth": b64(CANARY)},
            "auth is a number": {"auth": 5, "x": CANARY},
            "the password is a list": {"username": "me", "password": [CANARY]},
            "the token is an object": {"identitytoken": {"token": CANARY}},
        }.items()
    },
}


@pytest.mark.parametrize("broken", BROKEN)
def test_invalid_secret_raises_error_without_its_content(broken):
    content, why = BROKEN[broken]
    with pytest.raises(CredentialError) as caught:
        parse_pull_secret(content, where="/etc/pull.json")
    error = caught.value
    assert str(error) == f"cannot parse pull secret /etc/pull.json: {why}"
    assert error.remedy.startswith('write it as {"auths"')
    assert (error.__cause__, error.__context__) == (None, None)
    shown = "".join(traceback.format_exception(error)) + repr(error.__dict__)
    assert CANARY not in shown
    assert b64(CANARY) not in shown


def test_repr_withholds_secrets():
    secret = parse_pull_secret(
        json.dumps(
            {"auths": {"a": {"auth": b64(f"a:{CANARY}"), "identitytoken": CANARY}}}
        ).encode(),
        where="f",
    )
    shown = repr(secret) + repr(secret.credentials) + str(secret)
    assert CANARY not in shown
    assert b64(f"a:{CANARY}") not in shown


def login_secret(kind: str, key: str, content: str) -> dict[str, object]:
    return {"type": f"kubernetes.io/{kind}", "data": {key: b64(content)}}


def test_secrets_of_both_types_become_the_same_dockerconfigjson() -> None:
    entry = {"auth": b64("me:secret"), "email": "a@example.com"}
    old = login_secret("dockercfg", ".dockercfg", json.dumps({"r.example.com": entry}))
    new = login_secret(
        "dockerconfigjson", ".dockerconfigjson", json.dumps({"auths": {"r.example.com": entry}})
    )
    found = read_login_secret(old, where="Secret push")
    assert found == read_login_secret(new, where="Secret push")
    assert json.loads(encode_pull_secret(found)) == {
        "auths": {"r.example.com": {"auth": b64("me:secret")}}
    }


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (None, "expected type kubernetes.io/dockerconfigjson or kubernetes.io/dockercfg"),
        ({"type": "Opaque", "data": {}}, "found 'Opaque'"),
        ({"type": "kubernetes.io/dockercfg"}, "it has no key .dockercfg"),
        (login_secret("dockerconfigjson", ".dockercfg", "{}"), "it has no key .dockerconfigjson"),
        (
            {"type": "kubernetes.io/dockercfg", "data": {".dockercfg": f"={CANARY}"}},
            "is not base64",
        ),
        (login_secret("dockercfg", ".dockercfg", "{}"), "it has no login"),
        (
            login_secret(
                "dockerconfigjson", ".dockerconfigjson", '{"auths": {}, "credHelpers": {"a": "b"}}'
            ),
            "it has no login; credential helpers are not supported: credHelpers",
        ),
        (login_secret("dockercfg", ".dockercfg", CANARY), "not a JSON object"),
    ],
)
def test_secret_that_holds_no_login_is_rejected(document: object, expected: str) -> None:
    with pytest.raises(CredentialError) as raised:
        read_login_secret(document, where="Secret builds/push")
    assert expected in str(raised.value)
    assert "Secret builds/push" in str(raised.value)
    assert CANARY not in "".join(traceback.format_exception(raised.value))


def test_login_of_longest_path_wins() -> None:
    short, long = RegistryCredential(b64("a:a")), RegistryCredential(b64("b:b"))
    secret = PullSecret({"r:5000": short, "r:5000/team/os": long, "docker.io": short})
    assert find_credential(secret, "r:5000", "team/os") == long
    assert find_credential(secret, "r:5000", "team/os/node") == long
    assert find_credential(secret, "r:5000", "team/osx") == short
    assert find_credential(secret, "r", "team/os") is None
    assert find_credential(secret, "index.docker.io", "library/os") == short
