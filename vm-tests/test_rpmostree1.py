"""The part of rpm-ostree that the agent relies on, in the guest: interface and results."""

from collections.abc import Iterator
from typing import Any

import pytest
from gi.repository import Gio

from tests.contract.os_contract import OperatingSystemContract
from tests.contract.rpmostree_transactions import RpmOstreeContract
from treenail_lab.machine.bus.objects import load_interfaces
from vmlab.drivers import Driver
from vmlab.guest.names import STATEROOT
from vmlab.image.build import Builder, Built
from vmlab.remote import RemoteMachine, booted
from vmlab.tools import REPOSITORY

pytestmark = pytest.mark.usefixtures("with_rpm_ostree")

NAME = "org.projectatomic.rpmostree1"
PATH = "/org/projectatomic/rpmostree1"
USED = {
    f"{NAME}.Sysroot": {
        "RegisterClient": "(a{sv}) -> ()",
        "UnregisterClient": "(a{sv}) -> ()",
        "Reload": "() -> ()",
        "Booted": "o",
        "Deployments": "aa{sv}",
        "ActiveTransaction": "(sss)",
        "ActiveTransactionPath": "s",
    },
    f"{NAME}.OS": {
        "UpdateDeployment": "(a{sv}a{sv}) -> (s)",
        "KernelArgs": "(sasasasa{sv}) -> (s)",
        "Rollback": "(a{sv}) -> (s)",
        "Cleanup": "(as) -> (s)",
        "FinalizeDeployment": "(a{sv}) -> (s)",
        "GetDeploymentBootConfig": "(sb) -> (a{sv})",
    },
}
"""What the agent calls and reads; the transaction's interface is on no bus."""


@pytest.fixture
def machine(built: Built, builder: Builder, chosen: Driver) -> Iterator[RemoteMachine]:
    """Booted, with the registry's login, and no node."""
    with booted(REPOSITORY / "build/vm/rpmostree1", built, builder, chosen) as machine:
        yield machine


def test_guest_interface_has_all_that_the_agent_calls(machine: RemoteMachine) -> None:
    found = {
        **described(machine, f"{PATH}/Sysroot", f"{NAME}.Sysroot"),
        **described(machine, f"{PATH}/{STATEROOT.replace('-', '_')}", f"{NAME}.OS"),
    }
    assert {name: members(found[name]).items() >= used.items() for name, used in USED.items()} == {
        f"{NAME}.Sysroot": True,
        f"{NAME}.OS": True,
    }
    # What the lab says of itself is true of the real one, too.
    for name, own in load_interfaces("rpmostree1.xml").items():
        if name in found:
            assert members(own).items() <= members(found[name]).items()


class TestRpmOstree(OperatingSystemContract):
    """On real deployments of a machine that really reboots."""


class TestTransactions(RpmOstreeContract):
    """On real deployments of a machine that really reboots."""


def described(machine: RemoteMachine, path: str, interface: str) -> dict[str, Any]:
    """The interface as the guest's object describes it."""
    xml = machine.sh(f"busctl introspect --xml-interface {NAME} {path}")
    node = Gio.DBusNodeInfo.new_for_xml(xml)
    return {each.name: each for each in node.interfaces if each.name == interface}


def members(interface: Any) -> dict[str, str]:
    """Methods and properties with their types."""
    methods = {
        each.name: f"({types(each.in_args)}) -> ({types(each.out_args)})"
        for each in interface.methods
    }
    return methods | {each.name: each.signature for each in interface.properties}


def types(arguments: Any) -> str:
    return "".join(each.signature for each in arguments)
