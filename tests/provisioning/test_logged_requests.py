"""The log of requests is bounded, survives its text, and merges the rows of several servers."""

import json
from dataclasses import replace

import pytest

from tests.provisioning.logged import NOW, make_logged, make_refusal
from treenail.provisioning.machines.logged_requests import (
    DATA_KEY,
    MAX_AGE_S,
    MAX_ANONYMOUS_ROWS,
    MAX_BYTES,
    MAX_ROWS,
    RequestOutcome,
    format_requests,
    log_request,
    merge_requests,
    parse_requests,
)


def test_rows_in_a_configmap_are_read_again() -> None:
    rows = (
        make_logged(),
        replace(log_request("b-1", make_refusal()), count=7, first_at=NOW - 60),
        replace(make_logged("c-1", image="quay.io/os@sha256:1"), is_checked=True, node="w1"),
    )
    assert parse_requests(format_requests(rows)) == rows


def test_lines_that_cannot_be_read_are_skipped() -> None:
    good = format_requests([make_logged()])[DATA_KEY]
    bad = ["{", "[]", '{"id": "x"}', '{"id":"y","time":"never"}', "9" * 20_000, '"\\ud800"']
    bad += [good.strip().replace("served", "unheard"), good.strip().replace("165000", '"many"')]
    text = "\n".join([*bad, good])
    assert parse_requests({DATA_KEY: text}) == (make_logged(),)
    assert parse_requests({DATA_KEY: 5}) == parse_requests({}) == ()


def test_merge_of_own_rows_is_idempotent_and_keeps_checks() -> None:
    checked = replace(make_logged("a-1"), is_checked=True, node="w1")
    own = (replace(make_logged("a-1"), count=2), make_logged("a-2", NOW + 1))
    once = merge_requests([checked, make_logged("b-1", NOW - 1)], own, NOW)
    assert once == merge_requests(once, own, NOW)
    assert [(each.id, each.count, each.node) for each in once] == [
        ("b-1", 1, ""),
        ("a-1", 2, "w1"),
        ("a-2", 1, ""),
    ]


def test_rows_older_than_a_day_are_dropped() -> None:
    rows = [make_logged("a-1", NOW - MAX_AGE_S), make_logged("a-2", NOW - MAX_AGE_S + 1)]
    assert [each.id for each in merge_requests(rows, (), NOW)] == ["a-2"]


def test_flood_without_token_does_not_displace_requests_with_one() -> None:
    known = [make_logged(f"k-{number:03}", NOW - 3600) for number in range(MAX_ROWS // 2)]
    flood = [
        log_request(f"f-{number}", make_refusal(NOW + number, address=f"10.1.{number}"))
        for number in range(3 * MAX_ROWS)
    ]
    merged = merge_requests(known, flood, NOW)
    assert len(merged) == len(known) + MAX_ANONYMOUS_ROWS
    assert {each.id for each in known} <= {each.id for each in merged}
    assert merged[-1].id == f"f-{3 * MAX_ROWS - 1}"


@pytest.mark.parametrize("character", ["x", "é", "\x1b", "😀"])
def test_longest_rows_stay_below_the_limit_of_a_configmap(character: str) -> None:
    long = character * 5000
    fields = dict.fromkeys(("address", "pool", "token", "machine", "image", "rendered"), long)
    rows = [
        make_logged(f"a-{number:04}", NOW + number, reason=long, **fields)
        for number in range(MAX_ROWS)
    ]
    text = format_requests(rows)[DATA_KEY]
    assert len(text.encode()) <= MAX_BYTES
    read = parse_requests({DATA_KEY: text})
    # The newest rows stay.
    assert read == tuple(rows[-len(read) :])
    assert len(read) > 40


def test_row_is_one_printable_line_without_credentials() -> None:
    text = format_requests([make_logged(reason="a\nb\x1b[2J https://me:secret@host/?token=secret")])
    line = text[DATA_KEY].removesuffix("\n")
    assert line.isprintable()
    assert "secret" not in line
    assert json.loads(line)["reason"].startswith(r"a\nb\u001b[2J https://host/")


@pytest.mark.parametrize("outcome", RequestOutcome)
def test_only_failed_requests_share_a_row(outcome: RequestOutcome) -> None:
    first, second = (make_logged(each, at, outcome=outcome) for each, at in (("a", 1), ("b", 2)))
    is_shared = outcome is not RequestOutcome.SERVED
    assert (first.coalescing_key is not None) == is_shared
    if is_shared:
        assert first.coalescing_key == second.coalescing_key
