"""The contract by bootc, with the lab's systemd."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.bootc_contract import BootcContract
from tests.contract.bootc_machine import BootcMachine
from treenail_lab.machine.node.daemons import MachineDaemons


@pytest.mark.integration
class TestBootc(BootcContract):
    @pytest.fixture
    def machine(self) -> Iterator[BootcMachine]:
        with tempfile.TemporaryDirectory(prefix="tn", dir="/tmp") as folder:
            directory = Path(folder)
            daemons = MachineDaemons(
                directory,
                directory / "root",
                directory / "images.json",
                directory / "settings.json",
                on_request=lambda _line: None,
            )

            def power_cycle() -> None:
                daemons.stop(hard=False)
                daemons.start()

            machine = BootcMachine(directory, daemons.address, power_cycle)
            daemons.start()
            try:
                yield machine
            finally:
                machine.close()
                daemons.stop(hard=True)
