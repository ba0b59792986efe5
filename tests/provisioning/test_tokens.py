"""Access tokens: which requests they permit, and how the Secret keeps them."""

import base64
import json
from dataclasses import replace

import pytest

from treenail.errors import ConfigError
from treenail.provisioning.tokens.tokens import (
    MAX_TOKENS,
    Refusal,
    TokenRecord,
    TokenTable,
    TokenTableParser,
    UseState,
    claim_use,
    compute_digest,
    confirm_use,
    find_refusal,
    format_token_table,
    make_token,
    read_name,
    release_use,
)

NOW = 1_800_000_000.0
WINDOW_S = 600.0
WHERE = "Secret treenail/tokens"


def make(*, uses: int = 1, pool: str = "worker", lasts_s: float = 3600.0) -> TokenRecord:
    return make_token(pool, expires=NOW + lasts_s, uses=uses)[1]


def refusal(
    record: TokenRecord | None, address: str = "10.0.0.1", now: float = NOW, pool: str = "worker"
) -> Refusal | None:
    return find_refusal(record, pool, address, now, retry_window_s=WINDOW_S)


def use(record: TokenRecord, address: str, now: float = NOW) -> TokenRecord:
    """Serve one machine."""
    assert refusal(record, address, now) is None
    return confirm_use(claim_use(record, address, now, retry_window_s=WINDOW_S), address, now)


def test_token_is_found_only_as_a_whole() -> None:
    token, record = make_token("worker", expires=NOW)
    table = TokenTable().put(record)
    assert table.find(token) == record
    for wrong in (token[:-1], token + "A", token.upper(), f"tn_{record.name}_{'A' * 32}", "", "x"):
        assert table.find(wrong) is None
    assert token not in repr(table)
    assert compute_digest(token).hex() not in repr(record)


@pytest.mark.parametrize("name", ["", "a b", "../x", "W", "a" * 254, "x\x1b[31m"])
def test_token_for_an_impossible_name_is_refused(name: str) -> None:
    # With such an entry no token of the Secret could be read.
    with pytest.raises(ConfigError, match="expected the name of a pool"):
        make_token(name, expires=NOW)
    if name:
        with pytest.raises(ConfigError, match="expected the name of a machine"):
            make_token("worker", expires=NOW, machine=name)


def test_tokens_differ_and_have_a_public_name() -> None:
    made = [make_token("worker", expires=NOW) for _ in range(100)]
    assert len({token for token, _ in made}) == 100
    assert all(read_name(token) == record.name for token, record in made)


def test_token_permits_as_many_machines_as_it_has_uses() -> None:
    record = make(uses=2)
    record = use(use(record, "10.0.0.1"), "10.0.0.2")
    assert refusal(record, "10.0.0.3") is Refusal.USED_UP


def test_repeated_request_within_the_window_is_no_other_use() -> None:
    record = use(make(), "10.0.0.1")
    assert refusal(record, "10.0.0.1", NOW + WINDOW_S - 1) is None
    record = use(record, "10.0.0.1", NOW + WINDOW_S - 1)
    assert len(record.used) == 1
    # A repeated request does not extend the window.
    assert refusal(record, "10.0.0.1", NOW + WINDOW_S) is Refusal.USED_UP


def test_claim_blocks_other_machines_until_it_is_released() -> None:
    record = claim_use(make(), "10.0.0.1", NOW, retry_window_s=WINDOW_S)
    assert refusal(record, "10.0.0.2") is Refusal.USED_UP
    assert refusal(release_use(record, "10.0.0.1"), "10.0.0.2") is None


def test_claim_of_a_killed_server_is_free_for_its_address_only() -> None:
    record = claim_use(make(), "10.0.0.1", NOW, retry_window_s=WINDOW_S)
    # The server may have been killed after the last byte.
    assert refusal(record, "10.0.0.2", NOW + 3000) is Refusal.USED_UP
    assert refusal(record, "10.0.0.1", NOW + 3000) is None
    record = use(record, "10.0.0.1", NOW + 3000)
    assert [each.at for each in record.used] == [NOW + 3000]


def test_claim_lasts_until_the_last_of_its_responses_is_released() -> None:
    record = claim_use(make(), "10.0.0.1", NOW, retry_window_s=WINDOW_S)
    record = claim_use(record, "10.0.0.1", NOW, retry_window_s=WINDOW_S)
    assert TokenTableParser(WHERE).parse(
        {"data": format_token_table(TokenTable().put(record))}
    ).tokens == {record.name: record}
    record = release_use(record, "10.0.0.1")
    assert refusal(record, "10.0.0.2") is Refusal.USED_UP
    assert release_use(record, "10.0.0.1").used == ()


def test_completed_use_counts_although_its_claim_was_lost() -> None:
    record = confirm_use(make(), "10.0.0.1", NOW)
    assert [each.state for each in record.used] == [UseState.SENT]
    assert refusal(record, "10.0.0.2") is Refusal.USED_UP


def test_released_use_that_was_sent_stays() -> None:
    record = use(make(), "10.0.0.1")
    assert release_use(record, "10.0.0.1") == record


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, Refusal.UNKNOWN),
        (make(lasts_s=0.0), Refusal.EXPIRED),
        (make(pool="infra"), Refusal.OTHER_POOL),
    ],
)
def test_refusal_names_its_reason(record: TokenRecord | None, expected: Refusal) -> None:
    assert refusal(record) is expected


def test_clock_that_went_back_does_not_extend_the_window() -> None:
    record = use(make(), "10.0.0.1")
    assert refusal(record, "10.0.0.1", NOW - 3600.0) is Refusal.USED_UP


def test_secret_returns_what_was_written() -> None:
    first = replace(use(make(uses=3), "2001:db8::1"), machine="worker-7", nodes=("a", "b.example"))
    table = TokenTable().put(first).put(make(pool="infra"))
    data = format_token_table(table)
    assert TokenTableParser(WHERE).parse({"data": data}) == table
    assert TokenTableParser(WHERE).parse({}) == TokenTable()


def test_secret_with_the_same_content_is_not_parsed_again() -> None:
    parser = TokenTableParser(WHERE)
    data = format_token_table(TokenTable().put(make()))
    first = parser.parse({"data": data})
    assert parser.parse({"data": {**data}, "metadata": {"resourceVersion": "2"}}) is first
    assert parser.parse({"data": format_token_table(TokenTable())}).tokens == {}
    assert parser.parse({"data": data}) == first


def test_secret_has_room_for_ten_thousand_used_tokens() -> None:
    record = use(make(), "2001:db8:1234:5678:9abc:def0:1234:5678")
    tokens = {
        f"t{number:05}": replace(
            record,
            name=f"t{number:05}",
            digest=compute_digest(str(number)),
            machine="worker-1",
            nodes=(f"worker-{number}.cluster.example",),
        )
        for number in range(MAX_TOKENS)
    }
    data = format_token_table(TokenTable(tokens))
    assert TokenTableParser(WHERE).parse({"data": data}) == TokenTable(tokens)
    with pytest.raises(ConfigError, match="10001 access tokens"):
        format_token_table(TokenTable(tokens).put(record))


def test_old_tokens_are_dropped() -> None:
    table = TokenTable().put(make(lasts_s=-10.0)).put(make(lasts_s=10.0))
    assert len(table.prune(NOW - 5.0).tokens) == 1
    assert table.prune(NOW - 20.0) == table


def encode(document: object) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


DIGEST = "A" * 43


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("%", "it is not JSON in base64"),
        (base64.b64encode(b'{"format":1,"tok').decode(), "it is not JSON in base64"),
        (base64.b64encode(b"[" * 100_000).decode(), "it is not JSON in base64"),
        (base64.b64encode(b"x\x01damaged").decode(), "it is not JSON in base64"),
        (encode([]), "its format is not 1"),
        (encode({"format": 2, "tokens": []}), "its format is not 1"),
        (encode({"format": 1, "tokens": {}}), "no list of at most 10000 tokens"),
        (encode({"format": 1, "tokens": [0] * 10_001}), "no list of at most 10000 tokens"),
        (encode({"format": 1, "tokens": [["a"]]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": ["a A w 1 1 -"]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1.5 1 -"]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 0 -"]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 - x,1"]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 - x,1,lost"]}), "entry 1 is damaged"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w {'9' * 400} 1 -"]}),
         "expected an expiry in seconds from 0 to 253402300799"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 253402300800 1 -"]}), "an expiry"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w -1 1 -"]}), "an expiry"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1_0 -"]}),
         "expected uses from 1 to 1000"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1001 -"]}), "expected uses"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 - x,{'9' * 400},sent"]}),
         "a time in seconds"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 - x,1,claimed,-5"]}),
         "expected responses from 1"),
        (encode({"format": 1, "tokens": [f"../x {DIGEST} w 1 1 -"]}), "expected a name of"),
        (encode({"format": 1, "tokens": [f"a {DIGEST}  1 1 -"]}), "the names of a pool"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} \x1b[31m 1 1 -"]}), "the names of a pool"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 A"]}), "the names of a pool"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 - @A"]}), "the name of a Node"),
        (encode({"format": 1, "tokens": [f"a {DIGEST} w 1 1 -", f"a {DIGEST} w 2 1 -"]}),
         "two entries have the same name"),
        (encode({"format": 1, "tokens": [], "more": 1}), "it has 1 unknown fields"),
        ("A" * 3_000_000, "longer than"),
    ],
)  # fmt: skip
def test_damaged_secret_is_refused_without_its_content(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        TokenTableParser(WHERE).parse({"data": {"tokens": text}})
    assert WHERE in str(caught.value)
    assert text[:40] not in str(caught.value) or len(text) < 3
