"""The live table of ``treenail-controller status``."""

import io
import re
from pathlib import Path

import pytest

from tests.controllers.rollout.agents import add_nodes, add_pool, start_client
from tests.controllers.rollout.world import World
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.cli.controller.status import LiveTable, WatchedPools, follow_status
from treenail.cli.controller.status_text import format_table
from treenail.clock import SystemClock
from treenail.controllers.plan.status_table import PoolRow, build_rows, convert_to_json
from treenail.errors import ClusterError, UnreachableError
from treenail.kube.resources import NODES
from treenail_lab.apiserver.serving.server import LabServer


class Terminal(io.StringIO):
    """A terminal that interprets cursor-up and clear sequences."""

    @property
    def screen(self) -> list[str]:
        lines: list[str] = []
        at = 0
        for part in re.split(r"(\x1b\[\d*[AKJ]|\n)", self.getvalue()):
            if part.endswith("A") and part.startswith("\x1b"):
                at -= int(part[2:-1])
            elif part == "\x1b[J":
                del lines[at:]
            elif part == "\n":
                at += 1
            elif part and not part.startswith("\x1b"):
                lines[at:] = [part, *lines[at + 1 :]]
        return lines


class Ended(Exception):
    """Ends the endless status loop."""


class Pools:
    """Rows of a world; unreachable at the second read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reads = 0

    def read_rows(self) -> tuple[PoolRow, ...]:
        self.reads += 1
        if self.reads == 2:
            raise UnreachableError("no answer from the API server")
        return build_rows(self.world.list_pools(), self.world.list_nodes())

    def now(self) -> float:
        return 0.0

    monotonic = now

    def sleep(self, seconds: float) -> None:
        if self.reads == 2:
            raise Ended


def test_drawn_lines_replace_the_previous_ones() -> None:
    terminal = Terminal()
    table = LiveTable(terminal)
    table.draw_lines(["a", "b", "c"])
    table.draw_lines(["d"])
    table.draw_lines(["e", "f"])
    assert terminal.screen == ["e", "f"]


def test_line_longer_than_the_terminal_is_truncated() -> None:
    terminal = Terminal()
    LiveTable(terminal).draw_lines(["x" * 10_000])
    assert len(terminal.screen[0]) < 10_000


def test_control_characters_of_the_cluster_are_drawn_as_escapes() -> None:
    terminal = Terminal()
    LiveTable(terminal).draw_lines(["a\x1b[2Jb", "c\u202ed"])
    assert terminal.screen == [r"a\u001b[2Jb", r"c\u202ed"]


def test_newline_in_a_state_begins_no_row() -> None:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "old")
    forged = {key.STATE: "Done\n  n9  Done", key.CURRENT_CONFIG: "old\n  n8"}
    world.change("nodes", "n0", {"metadata": {"annotations": forged}})
    world.deliver()
    lines = list(format_table(build_rows(world.list_pools(), world.list_nodes())))
    assert not [line for line in lines if "\n" in line]
    assert r"Done\n  n9  Done" in lines[-1]


def test_table_stays_while_the_api_server_is_unreachable() -> None:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "new")
    world.deliver()
    pools = Pools(world)
    terminal = Terminal()
    with pytest.raises(Ended):
        follow_status(pools, pools, LiveTable(terminal))
    assert terminal.screen[0] == "cannot update the table: no answer from the API server"
    assert terminal.screen[-1].split() == ["n0", "Done", "░" * 10, "waiting", "old"]


def test_followed_table_lists_the_nodes_once(tmp_path: Path) -> None:
    with LabServer(tmp_path) as server:
        client, transport = start_client(server)
        add_nodes(client, ["n0"], "old")
        add_pool(client, "worker", "old")
        with WatchedPools(client, SystemClock()) as pools:
            (row,) = pools.read_rows()
            assert [node.state for node in row.nodes] == ["Done"]
            working = {"metadata": {"annotations": {key.STATE: "Working"}}}
            client.patch(NODES, "n0", working)
            wait_until(lambda: pools.read_rows()[0].nodes[0].state == "Working")
            server.stop()
            wait_until(lambda: "disconnected" in find_problem(pools))
        transport.close()
        server.start()
        assert server.count_requests(verb="list", resource="nodes") == 1


def find_problem(pools: WatchedPools) -> str:
    try:
        pools.read_rows()
    except ClusterError as error:
        return str(error)
    return ""


HASH = "0123456789abcdef" * 2
REASON = "cannot stage quay.example/os@sha256:" + "1" * 64 + ": no space left on /boot; remove it"


def show(world: World, width: int) -> list[str]:
    return list(format_table(build_rows(world.list_pools(), world.list_nodes()), width))


def test_json_has_config_and_image_of_each_target_separately() -> None:
    world = World()
    world.add_node("n0", "old")
    image = f"quay.example/os@sha256:{'1' * 64}"
    notes = {key.DESIRED_CONFIG: "new", key.DESIRED_OS_IMAGE: image}
    world.change("nodes", "n0", {"metadata": {"annotations": notes}})
    world.set_pool("worker", "new")
    world.deliver()
    (pool,) = convert_to_json(build_rows(world.list_pools(), world.list_nodes()))["pools"]  # type: ignore[misc]  # a list
    assert pool["nodes"][0]["current"] == {"config": "old", "image": ""}
    assert pool["nodes"][0]["desired"] == {"config": "new", "image": image}


def test_message_of_a_stalled_pool_is_shown() -> None:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "new")
    stalled = {"type": "Stalled", "status": "True", "reason": "ProgressDeadlineExceeded"}
    conditions = [{**stalled, "message": "no progress for more than 60 min"}]
    world.change("machineconfigpools", "worker", {"status": {"conditions": conditions}})
    world.deliver()
    (row,) = build_rows(world.list_pools(), world.list_nodes())
    assert (row.stalled_status, row.message) == ("True", "no progress for more than 60 min")


def test_halt_reason_is_complete_at_80_columns() -> None:
    world = World()
    long_name = "ip-10-0-131-207.eu-central-1.compute.internal"
    world.add_node(long_name, f"rendered-worker-{HASH}")
    world.set_pool("worker", f"rendered-worker-{HASH[::-1]}")
    failed = {
        key.STATE: "Degraded",
        key.REASON: REASON,
        key.DESIRED_CONFIG: f"rendered-worker-{HASH[::-1]}",
    }
    world.change("nodes", long_name, {"metadata": {"annotations": failed}})
    condition = {"type": "Degraded", "status": "True", "reason": "Halted", "message": REASON}
    world.change("machineconfigpools", "worker", {"status": {"conditions": [condition]}})
    world.deliver()
    lines = show(world, 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(map(str.strip, lines))
    assert text.count("cannot stage quay.example/os@sha256:111111111111…: no space left") == 2
    assert text.count("remove it") == 2
    assert "ip-10-0-131-207  Degraded       ░░░░░░░░░░ failed       01234567" in text


@pytest.mark.parametrize(
    ("annotations", "phase"),
    [
        ({key.STATE: "Working"}, "staging"),
        ({key.STATE: "Working", key.DESIRED_DRAIN: "drain-a"}, "draining"),
        (
            {key.STATE: "Working", key.DESIRED_DRAIN: "drain-a", key.LAST_APPLIED_DRAIN: "drain-a"},
            "applying",
        ),
        (
            {
                key.STATE: "Working",
                key.DESIRED_DRAIN: "drain-a",
                key.LAST_APPLIED_DRAIN: "drain-a",
                key.POST_CONFIG_ACTION: "Rebooting",
            },
            "rebooting",
        ),
        (
            {key.STATE: "Working", key.DESIRED_DRAIN: "uncordon-a", key.LAST_APPLIED_DRAIN: "b"},
            "uncordoning",
        ),
        ({key.STATE: "Done"}, "waiting"),
    ],
)
def test_phase_of_a_node_follows_its_annotations(annotations: dict[str, str], phase: str) -> None:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "new")
    world.change(
        "nodes", "n0", {"metadata": {"annotations": {key.DESIRED_CONFIG: "new", **annotations}}}
    )
    world.deliver()
    ((row,),) = [pool.nodes for pool in build_rows(world.list_pools(), world.list_nodes())]
    assert row.phase == phase


def test_table_taller_than_the_terminal_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    LiveTable(terminal).draw_lines([str(number) for number in range(9)])
    assert terminal.screen == ["0", "1", "2", "and 6 more lines; --once prints all"]
