"""What a person asks for is understood, or refused."""

import json

import pytest

from treenail.errors import ConfigError
from treenail.update.decision.request import Kind, Request, from_json, to_json


@pytest.mark.parametrize(
    "request_",
    [
        Request(Kind.CANCEL, "1" * 32),
        Request(Kind.FORGIVE),
        Request(Kind.HEAL, paths=("/etc/a", "b.service")),
    ],
)
def test_request_is_read_as_it_was_written(request_: Request) -> None:
    assert from_json(json.loads(json.dumps(to_json(request_)))) == request_


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"version": 2, "kind": "cancel", "update": ""}, {"version": 1, "kind": "x"}],
)
def test_what_is_no_request_is_refused(document: object) -> None:
    with pytest.raises(ConfigError, match="does not understand"):
        from_json(document)
