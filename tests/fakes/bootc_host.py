"""A `World` whose operating system bootc manages: systemd's transient units, and what they run.

What is under test is the agent's own adapter. A unit outlives the agent, gets on a little with
every question to systemd, and ends with the boot; ``bootc status`` waits for who holds the lock.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.clock import FakeClock
from tests.fakes.world import FakeMachine, System, Unit, World
from treenail.errors import BusError, CommandError
from treenail.host.bootc.backend import BootcBackend
from treenail.host.filesystem.root_directory import Root
from treenail.host.machine import Machine
from treenail.host.systemd.system_bus import BusInterface, BusSignal, UnitProperties

Json = dict[str, object]
_ASKS = "treenail-ask-"
_NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"


def bootc_of(world: World, clock: FakeClock, directory: str) -> BootcBackend:
    """The adapter, as a process has it that has just been started."""
    machine = Machine(Root(directory), clock=clock, bus=_Systemd(world))
    machine.programs = _Programs()
    machine.kernel = FakeMachine(world)
    return BootcBackend(machine)


class _Systemd:
    """The bus, as far as units are concerned."""

    def __init__(self, world: World) -> None:
        self._world = world

    def call_method(
        self, _target: BusInterface, member: str, *arguments: object, timeout_s: float
    ) -> object:
        del timeout_s
        self._get_on()
        if member == "GetUnit":
            name = str(arguments[0])
            if name not in self._world.units:
                raise BusError(f"{name} is not loaded", name=_NO_SUCH_UNIT)
            return name
        if member in ("Subscribe", "Unsubscribe"):
            return None
        # Questions change nothing: they are no effects.
        fault_point = (
            self._world.fault_point if _ASKS not in str(arguments[0]) else lambda _step: None
        )
        fault_point(member)
        match member, arguments:
            case "StartTransientUnit", (str(name), "fail", UnitProperties() as properties, _):
                self._start(name, properties)
            case "StopUnit", (str(name), _) if name in self._world.units:
                if self._world.units[name].result in ("", "success"):
                    del self._world.units[name]
            case (("ResetFailedUnit" | "UnrefUnit"), (str(name),)):
                self._world.units.pop(name, None)
        fault_point(f"{member} done")
        return None

    def read_properties(self, target: BusInterface, *, timeout_s: float) -> Json:
        del timeout_s
        unit = self._world.units.get(target.path)
        if unit is None:
            raise BusError(f"{target.path} is not loaded", name=_NO_SUCH_UNIT)
        if target.interface.endswith("Service"):
            return {"Result": unit.result or "success", "ExecMainStatus": 0}
        states = {"": "activating", "success": "active"}
        return {
            "LoadState": "loaded",
            "ActiveState": states.get(unit.result, "failed"),
            "Description": unit.what,
            "InvocationID": [0],
            "Job": (0, "/"),
        }

    @contextmanager
    def receive_signals(self, _target: BusInterface) -> Iterator["_Systemd"]:
        yield self

    def run_until(self, each: Callable[[BusSignal | None], bool]) -> bool:
        while True:
            self._world.on_wait()
            if each(None):
                return True

    def close_connection(self) -> None:
        """Nothing is held."""

    def _start(self, name: str, properties: UnitProperties) -> None:
        if name in self._world.units:
            raise BusError(f"{name} is there", name="org.freedesktop.systemd1.UnitExists")
        argv = list(properties.command)
        unit = Unit(str(properties.values["Description"]), tuple(argv), self._world.unit_steps)
        if _ASKS in name:
            *_shell, output, program = argv[:5]
            Path(output).write_bytes(_answer(self._world, [program, *argv[5:]]))
            unit.result = "success"
        self._world.units[name] = unit

    def _get_on(self) -> None:
        for unit in [each for each in self._world.units.values() if not each.result]:
            unit.left -= 1
            if unit.left <= 0:
                finish(self._world, unit)


def finish(world: World, unit: Unit) -> None:
    """Run the program's effect, and set the unit's result."""
    unit.result = "success" if _do(world, unit.argv) else "exit-code"


def _do(world: World, argv: Sequence[str]) -> bool:
    programs = ("bootc", "podman", "ostree")
    start = next(at for at, word in enumerate(argv) if _name(word) in programs)
    match [_name(argv[start]), *argv[start + 1 :]]:
        case ["podman", "pull", *_, image]:
            world.stored.add(image)
            return True
        case ["bootc", "switch", *_, image] if image in world.stored:
            _deploy(world, image.partition("@")[2])
            return True
        case ["bootc", "rollback"] if world.previous is not None:
            queued = world.rolled_back or world.tried_again
            world.staging, world.tried_again = None, False
            world.rolled_back = not queued
            return True
        case ["ostree", "admin", "undeploy", number]:
            return _undeploy(world, int(number))
        case _:
            return False


def _name(program: str) -> str:
    return program.rpartition("/")[2]


def _deploy(world: World, digest: str) -> None:
    if world.in_service:
        world.violations.append("deployed while the node was in service")
    if world.system.digest != digest:
        digest, world.staged_instead = world.staged_instead or digest, ""
        world.serials += 1
        world.staging = System(digest, world.system.arguments, world.serials)


def _undeploy(world: World, number: int) -> bool:
    previous_first = world.rolled_back or world.tried_again
    order = ["booted", "previous"] if world.previous else ["booted"]
    if previous_first:
        order.reverse()
    if world.pending:
        order.insert(0, "pending")
    if world.staging:
        order.insert(0, "staging")
    match order[number] if number < len(order) else "":
        case "staging":
            world.staging = None
        case "pending":
            world.pending = None
        case "previous":
            world.previous, world.rolled_back, world.tried_again = None, False, False
        case _:
            return False
    return True


class _Programs:
    """Programs that run to their end; their output does not matter here."""

    def run_command(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> bytes:
        del timeout_s, stdin
        if _name(argv[0]) == "journalctl":
            return b""
        raise CommandError(f"{argv[0]} has nothing to say")


def _answer(world: World, argv: Sequence[str]) -> bytes:
    match [_name(argv[0]), *argv[1:]]:
        case ["bootc", "status", *_]:
            for unit in world.units.values():
                # One that has only just been started does not have the lock yet.
                started = unit.left < world.unit_steps
                if started and not unit.result and "podman" not in unit.argv[0]:
                    finish(world, unit)
            return json.dumps(_status(world)).encode()
        case ["podman", "image", "rm", *_, image]:
            world.fault_point("image rm")
            world.stored.discard(image)
            world.fault_point("image removed")
            return b""
        case _:
            return b"[]"


def _status(world: World) -> Json:
    return {
        "apiVersion": "org.containers.bootc/v1",
        "status": {
            "staged": _entry(world.staging),
            "booted": _entry(world.system),
            "rollback": _entry(world.pending or world.previous),
            "otherDeployments": [_entry(each) for each in world.others],
            "rollbackQueued": bool(world.rolled_back or world.tried_again or world.pending),
            "type": "bootcHost",
        },
    }


def _entry(system: System | None) -> Json | None:
    if system is None:
        return None
    image = f"registry.example.com/os/node@{system.digest}"
    return {
        "image": {
            "image": {"image": image, "transport": "registry"},
            "imageDigest": system.digest,
        },
        "ostree": {
            "stateroot": "os",
            "checksum": system.digest[7:],
            "deploySerial": system.serial,
        },
    }
