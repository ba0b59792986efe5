"""The live table of ``treenail-controller status``."""

import io
import re

import pytest

from tests.controllers.rollout.world import World
from treenail.cli.controller.status import LiveTable, follow_status
from treenail.errors import UnreachableError
from treenail.kube.client import Listing
from treenail.kube.resources import Resource


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


class Cluster:
    """Lists the objects of a world; unreachable at the second read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reads = 0

    def list(self, resource: Resource) -> Listing:
        if resource.plural == "machineconfigpools":
            self.reads += 1
            if self.reads == 2:
                raise UnreachableError("no answer from the API server")
        return Listing(tuple(self.world.objects.get(resource.plural, {}).values()), "1")

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


def test_table_stays_while_the_api_server_is_unreachable() -> None:
    world = World()
    world.add_node("n0", "old")
    world.set_pool("worker", "new")
    cluster = Cluster(world)
    terminal = Terminal()
    with pytest.raises(Ended):
        follow_status(cluster, cluster, LiveTable(terminal))  # type: ignore[arg-type]
    assert terminal.screen[0] == "cannot update the table: no answer from the API server"
    assert terminal.screen[-1].split() == ["n0", "Done", "old"]
