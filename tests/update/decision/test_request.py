"""Requests of users, as documents."""

import json

import pytest

from treenail.errors import ConfigError
from treenail.update.decision.user_requests import RequestKind, UserRequest, from_json, to_json


@pytest.mark.parametrize(
    "request_",
    [
        UserRequest(RequestKind.CANCEL, "1" * 32),
        UserRequest(RequestKind.RETRY),
        UserRequest(RequestKind.REPAIR, paths=("/etc/a", "b.service")),
    ],
)
def test_request_survives_writing_and_reading(request_: UserRequest) -> None:
    assert from_json(json.loads(json.dumps(to_json(request_)))) == request_


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"version": 2, "kind": "cancel", "update": ""}, {"version": 1, "kind": "x"}],
)
def test_invalid_request_is_refused(document: object) -> None:
    with pytest.raises(ConfigError, match="cannot read the request: "):
        from_json(document)
