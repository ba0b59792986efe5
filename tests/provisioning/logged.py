"""Rows of the log of requests for tests."""

from typing import Any

from treenail.provisioning.machines.logged_requests import (
    LoggedRequest,
    RequestOutcome,
    RequestRow,
    log_request,
)

NOW = 1_700_000_000.0


def make_row(at: float = NOW, **fields: Any) -> RequestRow:
    """A request that was served, unless ``fields`` say otherwise."""
    found: dict[str, Any] = {
        "address": "10.0.0.5",
        "pool": "worker",
        "token": "abc",
        "machine": "",
        "version": "3.4.0",
        "outcome": RequestOutcome.SERVED,
        "image": "",
        "status": 200,
        "bytes": 165_000,
        "seconds": 0.25,
        "rendered": "rendered-worker-1",
    }
    return RequestRow(at=at, **{**found, **fields})


def make_refusal(at: float = NOW, **fields: Any) -> RequestRow:
    """A request without a valid token."""
    refused: dict[str, Any] = {
        "token": "", "version": "", "outcome": RequestOutcome.REFUSED, "status": 401, "bytes": 60,
        "rendered": "", "reason": "the token is unknown",
    }  # fmt: skip
    return make_row(at, **{**refused, **fields})


def make_logged(name: str = "a-1", at: float = NOW, **fields: Any) -> LoggedRequest:
    return log_request(name, make_row(at, **fields))
