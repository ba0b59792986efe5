"""Programs of the MCO that were built without what the tests need are named at the start."""

import pytest

from tests.mco.operator import parse_version


def test_version_of_build_is_parsed() -> None:
    assert parse_version("machine-config-controller v4.21.0-3-g7ff337a4f-7ff337a4fab\n") == (
        "v4.21.0-3-g7ff337a4f"
    )


def test_build_without_hash_is_named() -> None:
    with pytest.raises(AssertionError, match="expected VERSION-HASH"):
        parse_version("v0.0.0-was-not-built-properly-was-not-built-properly\n")
