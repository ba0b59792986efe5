"""bootc's contract with a real systemd, as PID 1 of a container, and a real journal."""

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.bootc_contract import BootcContract
from tests.contract.bootc_machine import UNITS, BootcMachine
from tests.system.nspawn import Container, missing
from treenail.host.systemd.system_bus import SystemBus
from treenail.host.systemd.transient import TransientUnits

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(missing()), reason=f"no container: {missing()}"),
]


class TestBootcOnSystemd(BootcContract):
    @pytest.fixture
    def machine(self, container: Container) -> Iterator[BootcMachine]:
        directory = Path(tempfile.mkdtemp(dir=container.shared))

        def forget_units() -> None:
            bus = SystemBus(container.address)
            units = TransientUnits(bus)
            for unit in UNITS:
                units.stop_unit(unit, lambda: None)
            bus.close_connection()

        machine = BootcMachine(directory, container.address, forget_units)
        journalctl = machine.root / "usr/bin/journalctl"
        command = shlex.join(container.inside("journalctl"))
        journalctl.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        yield machine
        machine.close()
        forget_units()
