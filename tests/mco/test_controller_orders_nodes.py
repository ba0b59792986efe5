"""The real machine-config-controller counts agents as it counts its own daemons."""

import pytest

from tests.mco.pool import LIMIT_S, Pool
from tests.waiting import wait_until
from treenail.api import annotations as key

pytestmark = [pytest.mark.integration]

NAMES = ["n1", "n2"]


@pytest.fixture(scope="module")
def node_names() -> list[str]:
    return NAMES


def test_second_node_waits_for_the_first(pool: Pool) -> None:
    pool.add_file("50-order", "/etc/treenail-test/order", "1\n")
    target = pool.wait_rendered()
    most = 0

    def is_complete() -> bool:
        nonlocal most
        nodes = [pool.nodes.read_node(name) for name in NAMES]
        most = max(most, sum(is_out_of_service(node) for node in nodes))
        return all(pool.nodes.is_at(name, target) for name in NAMES)

    wait_until(is_complete, limit_s=2 * LIMIT_S)
    pool.wait_updated()
    assert most == 1


def is_out_of_service(node: dict[str, dict[str, object]]) -> bool:
    notes = node["metadata"].get("annotations")
    assert isinstance(notes, dict)
    is_outdated = notes.get(key.CURRENT_CONFIG) != notes.get(key.DESIRED_CONFIG)
    return bool(node["spec"].get("unschedulable")) or is_outdated


def test_failed_node_holds_the_second_until_the_config_is_fixed(pool: Pool) -> None:
    before = pool.wait_updated()
    for machine in pool.nodes.machines.values():
        (machine.root / "etc/treenail-test/taken").mkdir(parents=True)
    pool.add_file("50-bad", "/etc/treenail-test/taken", "a file\n")
    pool.wait_rendered()

    def find_failed() -> list[str]:
        notes = {name: pool.nodes.read_notes(name) for name in NAMES}
        return [name for name in NAMES if notes[name].get(key.STATE) == "Degraded"]

    (failed,) = wait_until(find_failed, limit_s=LIMIT_S)
    wait_until(lambda: pool.read_condition("Degraded")["status"] == "True", limit_s=LIMIT_S)
    (other,) = set(NAMES) - {failed}
    assert pool.nodes.read_notes(other)[key.DESIRED_CONFIG] == before
    pool.add_file("50-bad", "/etc/treenail-test/free", "a file\n")
    pool.wait_updated()
    for machine in pool.nodes.machines.values():
        (machine.root / "etc/treenail-test/taken").rmdir()
