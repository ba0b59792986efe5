"""The machine below a root, for commands: its context, inspector and step runner."""

from typing import TYPE_CHECKING

from treenail.clock import SystemClock
from treenail.host.filesystem.root import Root
from treenail.host.machine import Machine

if TYPE_CHECKING:
    from treenail.daemon.configuration.inspect import MachineInspector, UnitStateSource
    from treenail.daemon.configuration.step_runner import StepRunner
    from treenail.host.systemd.bus import SystemBus


def open_machine(path: str | None, bus: "SystemBus | None" = None) -> Machine:
    """Open the machine below the directory (None: ``/``); it connects to the bus on first use."""
    return Machine(Root(path or "/"), clock=SystemClock(), bus=bus)


# Imported late below: commands that only read the ledger need neither inspector nor runner.


def create_unit_states(machine: Machine, *, is_running: bool) -> "UnitStateSource":
    """Create the source of unit states: systemd if the machine is running, else unit files."""
    from treenail.daemon.configuration.inspect import SystemdUnitStates

    return SystemdUnitStates(machine.systemd) if is_running else machine.unit_files


def create_inspector_and_runner(
    machine: Machine, *, is_running: bool
) -> "tuple[MachineInspector, StepRunner]":
    """Create inspector and step runner; they use systemd only if the machine is running."""
    from treenail.daemon.configuration.inspect import MachineInspector
    from treenail.daemon.configuration.step_runner import StepRunner

    states = create_unit_states(machine, is_running=is_running)
    services = machine.systemd if is_running else None
    return MachineInspector(machine, states), StepRunner(machine, services)
