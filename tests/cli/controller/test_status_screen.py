"""The live table of ``treenail-controller status --watch``, and its log of changes."""

import io
import re
from pathlib import Path

import pytest

from tests.controllers.rollout.agents import add_nodes
from tests.controllers.rollout.world import World
from tests.fixtures.clusters import open_lab
from tests.fixtures.objects import add_pool
from tests.waiting import wait_until
from tools.picture import render_svg
from treenail.api import annotations as key
from treenail.cli.controller.status.command import WatchedPools, choose_pools, follow_status
from treenail.cli.controller.status.screen import (
    ChangeLog,
    LiveTable,
    create_view,
    print_table,
)
from treenail.cli.controller.status.text import StyledLine
from treenail.clocks import SystemClock
from treenail.controllers.status.leader_status import LeaderReport, LeaderState
from treenail.controllers.status.status_table import PoolRow, build_rows
from treenail.errors import ClusterError, UnreachableError, UsageError
from treenail.kube.resources import NODES


class Terminal(io.StringIO):
    """A terminal that interprets cursor-up and clear sequences."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        lines: list[str] = []
        at = 0
        text = re.sub(r"\x1b\[\?7[hl]", "", self.getvalue())
        for part in re.split(r"(\x1b\[\d*[AKJ]|\n)", text):
            if part.endswith("A") and part.startswith("\x1b"):
                at -= int(part[2:-1])
            elif part == "\x1b[J":
                del lines[at:]
            elif part == "\n":
                at += 1
            elif part and not re.fullmatch(r"\x1b\[\d*K", part):
                lines[at:] = [re.sub(r"\x1b\[[\d;]*m", "", part), *lines[at + 1 :]]
        return lines


class Ended(Exception):
    """Ends the endless status loop."""


class Pools:
    """Rows of a world; unreachable at the second read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reads = 0
        self.leader = LeaderReport(LeaderState.LEADING)

    def read_rows(self) -> tuple[PoolRow, ...]:
        self.reads += 1
        if self.reads == 2:
            raise UnreachableError("no answer from the API server")
        return build_rows(
            self.world.list_pools(), self.world.list_nodes(), now=0.0, leader=self.leader
        )

    def read_leader(self) -> LeaderReport:
        return self.leader

    def now(self) -> float:
        return 0.0

    monotonic = now

    def sleep(self, seconds: float) -> None:
        if self.reads == 2:
            raise Ended


@pytest.fixture(autouse=True)
def terminal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def make_lines(*texts: str, style: str = "") -> list[StyledLine]:
    return [StyledLine(((text, style),)) for text in texts]


def make_pools() -> Pools:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "new")
    world.deliver()
    return Pools(world)


def test_drawn_lines_replace_the_previous_ones() -> None:
    terminal = Terminal()
    table = LiveTable(terminal)
    table.draw_lines(make_lines("a", "b", "c"))
    table.draw_lines(make_lines("d"))
    table.draw_lines(make_lines("e", "f"))
    assert terminal.screen == ["e", "f"]


def test_unchanged_lines_are_not_drawn_again() -> None:
    terminal = Terminal()
    table = LiveTable(terminal)
    table.draw_lines(make_lines("a"))
    before = terminal.getvalue()
    table.draw_lines(make_lines("a"))
    assert terminal.getvalue() == before


def test_line_longer_than_the_terminal_is_truncated() -> None:
    terminal = Terminal()
    LiveTable(terminal).draw_lines(make_lines("x" * 10_000))
    assert terminal.screen == ["x" * 79 + "…"]


def test_control_characters_of_the_cluster_are_drawn_as_escapes() -> None:
    terminal = Terminal()
    LiveTable(terminal).draw_lines(make_lines("a\x1b[2Jb", "c\u202ed"))
    assert terminal.screen == [r"a\u001b[2Jb", r"c\u202ed"]


def test_table_taller_than_the_terminal_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    terminal = Terminal()
    LiveTable(terminal).draw_lines(make_lines(*map(str, range(9))))
    assert terminal.screen == [
        *("0", "1", "2"),
        "and 6 more lines; treenail-controller status prints all",
    ]
    assert terminal.getvalue().count("\n") == 4, "a fifth one would scroll"


def test_styles_become_colours() -> None:
    terminal = Terminal()
    print_table(make_lines("Done", style="good"), terminal)
    assert terminal.getvalue() == "\x1b[32mDone\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_and_dumb_terminal_get_no_sequence(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    terminal = Terminal()
    print_table(make_lines("Done", style="good"), terminal)
    assert terminal.getvalue() == "Done\n"


def test_pipe_gets_no_sequence() -> None:
    pipe = io.StringIO()
    print_table(make_lines("Done", style="good"), pipe)
    assert pipe.getvalue() == "Done\n"


@pytest.mark.parametrize(
    ("stream", "term", "view"),
    [
        (Terminal(), "xterm", LiveTable),
        (Terminal(), "dumb", ChangeLog),
        (io.StringIO(), "xterm", ChangeLog),
    ],
)
def test_view_fits_the_stream(stream: io.StringIO, term: str, view: type) -> None:
    assert isinstance(create_view(stream, {"TERM": term}), view)


def test_table_stays_while_the_api_server_is_unreachable() -> None:
    pools = make_pools()
    terminal = Terminal()
    with pytest.raises(Ended):
        follow_status(pools, pools, LiveTable(terminal))
    assert terminal.screen[0] == "cannot update the table: no answer from the API server"
    assert terminal.screen[-1].split() == ["n0", "Done", "-", "░" * 6, "0%", "waiting"]


def test_live_table_says_since_when_no_controller_leads() -> None:
    pools, terminal = make_pools(), Terminal()
    pools.leader = LeaderReport(LeaderState.NONE, holder="a", renewed_at=0.0)
    LiveTable(terminal).show_rows(pools.read_rows(), now=0.0, leader=pools.leader)
    assert terminal.screen[:2] == [
        "no controller leads since 1970-01-01 00:00:00 UTC: pools show old reports",
        "  run: kubectl -n treenail get pods",
    ]
    assert terminal.screen[2].startswith("worker: Unknown, last reported Unknown, ")


def test_log_says_once_that_no_controller_leads() -> None:
    stream = io.StringIO()
    view = ChangeLog(stream)
    gone = LeaderReport(LeaderState.NONE, renewed_at=0.0)
    for leader in (gone, gone, LeaderReport(LeaderState.LEADING)):
        view.show_rows((), now=0.0, leader=leader)
    assert len(stream.getvalue().splitlines()) == 1


def test_named_pools_are_chosen_and_a_missing_one_is_an_error() -> None:
    pools = make_pools()
    pools.world.set_pool("infra", "new")
    pools.world.deliver()
    rows = pools.read_rows()
    assert [row.name for row in choose_pools(rows, ())] == ["infra", "worker"]
    assert [row.name for row in choose_pools(rows, ("worker",))] == ["worker"]
    with pytest.raises(UsageError) as raised:
        choose_pools(rows, ("worker", "gpu"))
    assert str(raised.value) == ("cannot find MachineConfigPool gpu: the cluster has infra, worker")
    terminal = Terminal()
    with pytest.raises(Ended):
        follow_status(pools, pools, LiveTable(terminal), names=("infra",))
    assert "worker" not in terminal.getvalue()


def test_log_has_one_line_for_each_change() -> None:
    pools = make_pools()
    stream = io.StringIO()
    with pytest.raises(Ended):
        follow_status(pools, pools, ChangeLog(stream))
    assert stream.getvalue().splitlines() == [
        "1970-01-01T00:00:00Z worker: Unknown, number of updated nodes unknown",
        "1970-01-01T00:00:00Z n0: Done, -, waiting",
        "1970-01-01T00:00:00Z cannot update the table: no answer from the API server",
    ]


def test_picture_has_the_text_of_the_lines() -> None:
    picture = render_svg(make_lines("Done", style="good"), title="a rollout", width=40)
    assert picture.startswith("<svg ")
    assert "Done" in picture
    assert "a&#160;rollout" in picture


def test_followed_table_lists_the_nodes_once(tmp_path: Path) -> None:
    with open_lab(tmp_path) as (server, client):
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
        server.start()
        assert server.count_requests(verb="list", resource="nodes") == 1


def find_problem(pools: WatchedPools) -> str:
    try:
        pools.read_rows()
    except ClusterError as error:
        return str(error)
    return ""
