"""Termination messages of build containers."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treenail.errors import ConfigError
from treenail.image.build_result import BuildPhase, BuildReason, BuildResult

DIGEST = "sha256:" + 64 * "a"
VALID: dict[str, Any] = {
    "phase": "push", "digest": DIGEST, "reason": "", "line": 0, "message": "",
    "seconds": {"push": 1.5},
}  # fmt: skip


def test_result_round_trips() -> None:
    result = BuildResult(
        BuildPhase.BUILD, "", BuildReason.INSTRUCTION_FAILED, 12, "exit status 1", {"build": 2.25}
    )
    assert BuildResult.from_text(result.to_text()) == result
    assert result.exit_code == 64
    assert not result.has_succeeded


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (None, 0),
        (BuildReason.CONTAINERFILE_INVALID, 64),
        (BuildReason.REGISTRY_BUSY, 75),
        (BuildReason.OUT_OF_MEMORY, 75),
    ],
)
def test_exit_code_follows_the_retry_class(reason: BuildReason | None, code: int) -> None:
    assert BuildResult(BuildPhase.PUSH, reason=reason).exit_code == code


@settings(max_examples=40)
@given(st.text(max_size=200), st.sampled_from(["", "\x1b", "ä", "\U0001f600", "\ud800", '"']))
def test_long_message_is_shortened_to_4096_bytes(text: str, repeated: str) -> None:
    message = text + 5000 * repeated
    encoded = BuildResult(BuildPhase.BUILD, reason=BuildReason.DISK_FULL, message=message).to_text()
    assert len(encoded.encode()) <= 4096
    found = BuildResult.from_text(encoded)
    assert found.reason is BuildReason.DISK_FULL
    if len(found.message) < len(message):
        assert "…" in found.message


def test_shortened_message_keeps_cause_and_end() -> None:
    message = "cannot run dnf: exit status 1\n" + "noise\n" * 2000 + "No space left on device"
    found = BuildResult.from_text(BuildResult(BuildPhase.BUILD, message=message).to_text())
    assert found.message.startswith("cannot run dnf: exit status 1")
    assert found.message.endswith("No space left on device")
    assert len(found.message) > 3000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not JSON"),
        ("panic: runtime error", "not JSON"),
        ("[]", "expected an object"),
        ("x" * 5000, "at most 4096 bytes"),
        (json.dumps({**VALID, "phase": "boot"}), "expected one of fetch, build, push"),
        (json.dumps({**VALID, "reason": "NewerReason"}), "found 'NewerReason'"),
        (json.dumps({**VALID, "digest": "sha256:1"}), "sha256: and 64 hex digits"),
        (json.dumps({**VALID, "line": -1}), "a line number"),
        (json.dumps({**VALID, "seconds": {"push": True}}), "expected a number, found true"),
        (json.dumps({**VALID, "seconds": {"push": -1}}), "a number of seconds"),
        (json.dumps(VALID).replace("1.5", "NaN"), "not JSON"),
        (json.dumps(VALID).replace("1.5", "1e999"), "expected a finite number"),
    ],
)
def test_anything_else_is_no_result(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        BuildResult.from_text(text)


def test_unknown_keys_are_ignored() -> None:
    found = BuildResult.from_text(json.dumps({**VALID, "later": 1}))
    assert found == BuildResult(BuildPhase.PUSH, DIGEST, seconds={"push": 1.5})
