"""Fixtures for tests of host adapters."""

from collections.abc import Iterator

import pytest

from tests.fakes.private_bus import PrivateBus


@pytest.fixture
def private_bus() -> Iterator[PrivateBus]:
    """Start a real bus; afterwards check that GLib's default context has no pending event."""
    from gi.repository import GLib

    with PrivateBus() as bus:
        yield bus
    assert not GLib.MainContext.default().pending()
