"""What tests of this machine's adapters share."""

from collections.abc import Iterator

import pytest

from tests.fakes.private_bus import PrivateBus


@pytest.fixture
def private_bus() -> Iterator[PrivateBus]:
    """A real bus; afterwards nothing of the test waits in GLib's default context."""
    from gi.repository import GLib

    with PrivateBus() as bus:
        yield bus
    assert not GLib.MainContext.default().pending()
