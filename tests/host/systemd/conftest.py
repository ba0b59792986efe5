"""Fixtures for tests of the adapters of systemd."""

from collections.abc import Iterator

import pytest

from tests.fakes.services import Services
from treenail.host.systemd.system_bus import SystemBus


@pytest.fixture
def bus(services: Services) -> Iterator[SystemBus]:
    """A connection to the bus of the module's services."""
    bus = SystemBus(services.address)
    yield bus
    bus.close_connection()
