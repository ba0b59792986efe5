"""Secrets of owned NodePools: what they have, and how tokens are renewed and end.

HyperShift's tables (tokensecret_controller_test.go) are data here: TestGetTokenIDTimeLived,
TestTokenIDNeedRotation, TestRotateTokenID, TestIsTokenExpired.
"""

import base64
import json

import pytest

from tests.controllers.hosted.owning.secret_site import (
    HASHES,
    HOUR,
    PLANE,
    SecretSite,
    decode,
    get_notes,
    make_config,
    make_machine,
    make_pool,
)
from treenail import clocks
from treenail.api import machineconfig
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import token_secret
from treenail.config.ignition import hosted_payload
from treenail.controllers.hosted.config.pool_config import PoolConfigError
from treenail.controllers.hosted.owning import token_secrets

NOW = 1_700_000_000.0
RENEWAL_S = token_secrets.RENEWAL_S
FIRST, SECOND = HASHES[:2]
TOKEN, USER_DATA = f"token-np-{FIRST}", f"user-data-np-{FIRST}"
COPY = f"{USER_DATA}-userdata"


@pytest.fixture
def site() -> SecretSite:
    site = SecretSite()
    site.run()
    return site


@pytest.mark.parametrize(
    ("text", "is_renewed"),
    [
        (None, True),
        (clocks.format_rfc3339(NOW - HOUR), False),
        (clocks.format_micro_time(NOW - RENEWAL_S), True),
        (clocks.format_micro_time(NOW - RENEWAL_S + 0.001), False),
        ("2023-11-14T21:13:20.123456789Z", False),
        # HyperShift's server reports these two, and the token has no end.
        ("", True),
        ("wrong format", True),
    ],
)
def test_token_is_renewed_after_half_of_its_lifetime(
    site: SecretSite, text: str | None, is_renewed: bool
) -> None:
    notes = dict(get_notes(site.secrets[TOKEN]))
    del notes[hosted_key.TOKEN_TIME]
    site.annotate(TOKEN, notes | ({} if text is None else {hosted_key.TOKEN_TIME: text}))
    site.run()
    assert site.read_tokens() == (("uuid-2", "uuid-1") if is_renewed else ("uuid-1", ""))


@pytest.mark.parametrize(
    ("text", "is_over"),
    [
        (None, False),
        (clocks.format_rfc3339(NOW - 4 * HOUR), True),
        (clocks.format_rfc3339(NOW + 4 * HOUR), False),
        ("badvalue", True),
        ("", True),
    ],
)
def test_token_ends_at_its_time(text: str | None, is_over: bool) -> None:
    notes = {} if text is None else {hosted_key.TOKEN_EXPIRATION: text}
    assert token_secret.is_expired(notes, NOW) is is_over


def test_secrets_have_what_hypershift_writes(site: SecretSite) -> None:
    token, user_data = site.secrets[TOKEN], site.secrets[USER_DATA]
    assert get_notes(token) == {
        hosted_key.NODE_POOL: "clusters/np",
        hosted_key.TARGET_CONFIG: FIRST,
        hosted_key.TOKEN_TIME: clocks.format_micro_time(NOW),
        token_secret.UPGRADE_TYPE: "Replace",
    }
    data = token["data"]
    assert isinstance(data, dict)
    assert {*data} == {
        "token", "config", "release", "release-version", "os-image", "pull-secret-hash",
        "additional-trust-bundle-hash", "reason", "message",
    }  # fmt: skip
    assert decode(token, "release-version") == "4.22.0"
    assert decode(token, "reason") == "AsExpected"
    document = hosted_payload.unpack_secret(token, 10_000)
    config = machineconfig.MachineConfig.from_json(document)
    assert config.name == f"rendered-np-{FIRST}"
    assert decode(user_data, "disableTemplating") == base64.b64encode(b"true").decode()
    bearer = base64.b64encode(b"uuid-1").decode()
    assert site.read_pointer(USER_DATA) == {
        "ignition": {
            "version": "3.2.0",
            "config": {
                "merge": [
                    {
                        "source": "https://ignition.example:22623/ignition",
                        "httpHeaders": [
                            {"name": "Authorization", "value": f"Bearer {bearer}"},
                            {"name": "NodePool", "value": "clusters/np"},
                            {"name": "TargetConfigVersionHash", "value": FIRST},
                        ],
                    }
                ]
            },
        }
    }


def test_pointer_has_authorities(site: SecretSite) -> None:
    authority = b"-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n"
    site.run(authorities=authority)
    section = site.read_pointer(USER_DATA)["ignition"]
    assert isinstance(section, dict)
    assert "BEGIN%20CERTIFICATE" in json.dumps(section["security"])


def test_renewal_keeps_the_token_before(site: SecretSite) -> None:
    site.now += RENEWAL_S
    site.run()
    assert site.read_tokens() == ("uuid-2", "uuid-1")
    assert site.read_bearer(USER_DATA) == "uuid-2"
    assert get_notes(site.secrets[TOKEN])[hosted_key.TOKEN_TIME] == clocks.format_micro_time(
        site.now
    )
    site.now += RENEWAL_S - 1
    assert site.run().recheck_s == pytest.approx(1)
    assert site.read_tokens() == ("uuid-2", "uuid-1")


@pytest.mark.parametrize("kept", [None, ""])
def test_empty_token_is_replaced(site: SecretSite, kept: str | None) -> None:
    data = site.secrets[TOKEN]["data"]
    assert isinstance(data, dict)
    data |= {"token": kept} if kept is not None else {}
    if kept is None:
        del data["token"]
    site.apply(site.plan())
    token, old = site.read_tokens()
    assert (token, old) == ("uuid-2", "")
    assert "old_token" not in data
    assert site.read_bearer(USER_DATA) == "uuid-2"


def test_clock_that_jumps_back_ends_no_token(site: SecretSite) -> None:
    site.now += RENEWAL_S
    site.run()
    site.now -= 300 * HOUR
    site.run()
    assert site.read_tokens() == ("uuid-2", "uuid-1")
    site.now += RENEWAL_S
    site.run()
    assert site.read_tokens() == ("uuid-3", "uuid-2")


def test_kill_between_writes_gives_the_whole_time(site: SecretSite) -> None:
    """User data with the old token must not lose it before machines that have it are older."""
    site.now += RENEWAL_S
    site.apply(site.plan(), writes=1)
    assert (site.read_tokens()[1], site.read_bearer(USER_DATA)) == ("uuid-1", "uuid-1")
    site.now += RENEWAL_S - 1  # a machine booted just now
    site.run()
    assert site.read_tokens() == ("uuid-2", "uuid-1")
    site.now += RENEWAL_S - 1
    site.run()
    assert site.read_tokens() == ("uuid-2", "uuid-1")
    assert site.read_bearer(USER_DATA) == "uuid-2"


def test_tokens_are_renewed_without_a_config(site: SecretSite) -> None:
    site.now += RENEWAL_S
    site.run(config=None)
    assert site.read_tokens() == ("uuid-2", "uuid-1")
    assert site.read_bearer(USER_DATA) == "uuid-2"


def test_pool_that_never_had_a_config_has_no_secrets() -> None:
    site = SecretSite()
    plan = site.plan(config=None, rolled_hash="")
    assert (plan.writes, plan.deletions) == ((), ())


def test_refresh_keeps_the_name_of_user_data(site: SecretSite) -> None:
    site.run(config=make_config(SECOND))
    assert site.names == [TOKEN, f"token-np-{SECOND}", USER_DATA]
    assert site.read_bearer(USER_DATA) == site.read_tokens(SECOND)[0]
    assert site.read_expiry_s(FIRST) == token_secrets.EXPIRY_S
    site.now += token_secrets.EXPIRY_S + 1
    site.run()
    assert site.names == [f"token-np-{SECOND}", USER_DATA]


def test_rollout_makes_new_names(site: SecretSite) -> None:
    new = f"user-data-np-{SECOND}"
    machines = [make_machine("a", USER_DATA, site.now - 99 * HOUR, node="a")]
    site.run(config=make_config(SECOND), rolled_hash=SECOND, machines=machines)
    assert site.names == [TOKEN, f"token-np-{SECOND}", USER_DATA, new]
    assert site.read_bearer(new) == site.read_tokens(SECOND)[0]
    site.run(machines=[make_machine("b", new, site.now)])
    assert site.names == [TOKEN, f"token-np-{SECOND}", new]


def test_template_in_use_keeps_its_token(site: SecretSite) -> None:
    """A MachineSet makes a lost machine again, with its own template."""
    site.run(config=make_config(SECOND), rolled_hash=SECOND, templates=[USER_DATA])
    site.now += RENEWAL_S
    site.run()
    assert site.read_expiry_s(FIRST) is None
    assert site.read_bearer(USER_DATA) == site.read_tokens(FIRST)[0]
    assert site.read_tokens(FIRST)[1]
    site.run(templates=[])
    assert USER_DATA not in site.names
    assert site.read_expiry_s(FIRST) == token_secrets.EXPIRY_S


@pytest.mark.parametrize(
    ("created_h", "node", "ends_h"),
    [
        (-1.0, "", 4.5),  # it boots: 5.5 h from its creation
        (-4.0, "", 2.0),
        (-6.0, "", 2.0),  # too old
        (-1.0, "a", 2.0),  # it has its config
        (0.0, "", 5.5),
    ],
)
def test_replaced_token_ends_after_machines_have_fetched(
    site: SecretSite, created_h: float, node: str, ends_h: float
) -> None:
    machine = make_machine("a", USER_DATA, site.now + created_h * HOUR, node)
    site.run(config=make_config(SECOND), rolled_hash=SECOND, machines=[machine])
    assert site.read_expiry_s(FIRST) == ends_h * HOUR
    site.now += HOUR
    # A later machine cannot have the token.
    later = make_machine("b", f"user-data-np-{SECOND}", site.now)
    site.run(machines=[machine, later])
    assert site.read_expiry_s(FIRST) == (ends_h - 1) * HOUR


def test_token_that_is_needed_again_does_not_end(site: SecretSite) -> None:
    site.run(config=make_config(SECOND), rolled_hash=SECOND)
    site.now += HOUR
    site.run(config=make_config(FIRST), rolled_hash=FIRST)
    assert site.read_expiry_s(FIRST) is None
    assert site.read_bearer(USER_DATA) == site.read_tokens(FIRST)[0]


def test_replaced_token_with_unreadable_end_is_deleted(site: SecretSite) -> None:
    site.run(config=make_config(SECOND), rolled_hash=SECOND)
    notes = {**get_notes(site.secrets[TOKEN]), hosted_key.TOKEN_EXPIRATION: "soon"}
    site.annotate(TOKEN, notes)
    site.run()
    assert TOKEN not in site.names


@pytest.mark.parametrize(
    ("upgrade_type", "kept", "other"),
    [("InPlace", "payload", "config"), ("Replace", "config", "payload")],
)
def test_secret_has_the_config_once(upgrade_type: str, kept: str, other: str) -> None:
    """The payload of InPlace has the config too."""
    site = SecretSite(upgrade_type)
    site.run()
    secret = site.secrets[TOKEN]
    assert decode(secret, kept)
    assert not decode(secret, other)
    # Nodes of a Replace pool get a refresh from the payload, also of a config that is known.
    site.run(pool=make_pool(upgrade_type, annotations={hosted_key.REFRESH: "InPlace"}))
    assert decode(site.secrets[TOKEN], "payload")
    assert not decode(site.secrets[TOKEN], "config")
    site.run(pool=make_pool(upgrade_type))
    assert not decode(site.secrets[TOKEN], "config")


def test_config_of_a_hash_never_changes(site: SecretSite) -> None:
    before = decode(site.secrets[TOKEN], "config")
    site.run(config=make_config(FIRST, image="quay.example/os@sha256:0"))
    assert decode(site.secrets[TOKEN], "config") == before


def test_fetch_is_recorded_in_the_token_secret(site: SecretSite) -> None:
    site.run(reached=SECOND)
    assert token_secret.REACHED not in get_notes(site.secrets[TOKEN])
    site.run(reached=FIRST)
    site.run(reached="")
    assert get_notes(site.secrets[TOKEN])[token_secret.REACHED] == "True"


def test_secrets_of_others_stay(site: SecretSite) -> None:
    other = {hosted_key.NODE_POOL: "clusters/np-x"}
    labels = {token_secret.TOKEN_LABEL: ""}
    strangers = [
        {"name": "token-np-1b1b1b1b", "annotations": {hosted_key.NODE_POOL: "clusters/np"}},
        {"name": f"token-np-x-{FIRST}", "annotations": other, "labels": labels},
        {"name": "user-data-np-1b1b1b1b-userdata"},
        {"name": f"user-data-np-x-{FIRST}-userdata"},
    ]
    for metadata in strangers:
        site.put({"metadata": metadata})
    before = site.names
    site.run(config=make_config(SECOND), rolled_hash=SECOND)
    site.now += 30 * HOUR
    site.run()
    assert {*before} - {*site.names} == {TOKEN, USER_DATA}


def test_foreign_secret_of_the_same_name_is_reported() -> None:
    site = SecretSite()
    site.put({"metadata": {"name": TOKEN}})
    with pytest.raises(PoolConfigError, match="another program has made it") as caught:
        site.plan()
    assert caught.value.remedy == f"run: kubectl -n {PLANE} delete secret {TOKEN}"


@pytest.mark.parametrize(
    ("machine", "is_kept"),
    [
        (None, False),
        (make_machine("a", USER_DATA, NOW, node="a"), False),
        (make_machine("a", USER_DATA, NOW + RENEWAL_S), True),  # it may boot from the copy
        (make_machine("a", USER_DATA, NOW - 1), False),  # it cannot fetch any longer
    ],
)
def test_copy_with_an_old_token_is_deleted(
    site: SecretSite, machine: object, is_kept: bool
) -> None:
    """The provider copies once (hypershift#1634), and makes a deleted copy again."""
    site.put_copy(USER_DATA)
    site.run()
    assert COPY in site.names
    site.now += RENEWAL_S
    site.run(machines=[machine] if machine else [])
    assert (COPY in site.names) is is_kept
    if is_kept:
        site.now += RENEWAL_S
        site.run()
        assert COPY not in site.names


def test_copy_of_a_replaced_template_stays_while_its_token_is_accepted(site: SecretSite) -> None:
    site.put_copy(USER_DATA)
    site.run(config=make_config(SECOND), rolled_hash=SECOND)
    assert (COPY in site.names, USER_DATA in site.names) == (True, False)
    site.now += token_secrets.EXPIRY_S + 1
    site.run()
    assert COPY not in site.names


def test_copy_of_a_replaced_template_goes_with_its_token_and_machines(site: SecretSite) -> None:
    site.put_copy(USER_DATA)
    machine = make_machine("a", USER_DATA, NOW - 99 * HOUR, node="a")
    site.run(config=make_config(SECOND), rolled_hash=SECOND, machines=[machine])
    site.now += token_secrets.EXPIRY_S + 1
    site.run()
    assert (COPY in site.names, TOKEN in site.names) == (True, False)
    site.run(machines=[])
    assert COPY not in site.names


def test_reprs_have_no_token(site: SecretSite) -> None:
    site.now += RENEWAL_S
    plan = site.plan()
    for text in (repr(plan), repr(site.facts)):
        assert "uuid" not in text
        assert base64.b64encode(b"uuid-1").decode() not in text
