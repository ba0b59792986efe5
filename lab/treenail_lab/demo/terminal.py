"""Shows a rollout: a table that is redrawn on a terminal, a line for each change elsewhere."""

import os
import shutil
from collections.abc import Mapping
from typing import TextIO

from treenail_lab.demo.table import NodeView, PoolView, format_table

_UP = "\x1b[{}A"
_CLEAR = "\x1b[K"
_COLOURS = {"Done": "32", "Working": "33", "Degraded": "31", "Unreconcilable": "31"}


class RolloutScreen:
    """The part of a stream that shows the latest table.

    Without colours when NO_COLOR is set (no-color.org). TERM=dumb names a terminal that cannot
    move its cursor: there the changes are printed line by line, as into a file.
    """

    def __init__(
        self, stream: TextIO, *, title: str, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._stream = stream
        self._title = title
        self._can_redraw = stream.isatty() and environment.get("TERM", "dumb") != "dumb"
        self._has_colours = not environment.get("NO_COLOR")
        self._drawn_lines = 0
        self._last_summary = ""
        self._last_shown: dict[str, tuple[str, str, str, str]] = {}
        self._latest: tuple[list[NodeView], PoolView, float] | None = None

    def print_text(self, text: str) -> None:
        """Print a paragraph above the table."""
        self._stream.write(f"{text.rstrip()}\n\n")
        self._stream.flush()

    def show_rollout(self, nodes: list[NodeView], pool: PoolView, seconds: float) -> None:
        """Show the latest state of the nodes and the pool."""
        self._latest = (nodes, pool, seconds)
        if self._can_redraw:
            # One line stays free for the cursor: a table as tall as the terminal would scroll,
            # and each redraw would leave a copy of its first line in the scrollback.
            max_lines = max(shutil.get_terminal_size().lines - 1, 1)
            self._draw_table(max_lines)
        else:
            self._print_changes(nodes, pool, seconds)

    def finish(self) -> None:
        """Leave the whole table on the screen, also when it is taller than the terminal."""
        if not self._can_redraw:
            self._stream.write("\n")
        elif self._latest is not None:
            self._draw_table(max_lines=0)
        self._drawn_lines = 0
        self._stream.flush()

    def _print_changes(self, nodes: list[NodeView], pool: PoolView, seconds: float) -> None:
        if self._last_summary != pool.summary:
            self._last_summary = pool.summary
            self._stream.write(f"{seconds:6.1f} s  pool {pool.name}: {pool.summary}\n")
        for node in nodes:
            now = (node.state, node.phase, node.version, node.reason)
            if self._last_shown.get(node.name) != now:
                self._last_shown[node.name] = now
                phase = node.phase or ("done" if node.is_updated else "waiting")
                reason = f": {node.reason}" if node.reason else ""
                booted = node.version or "down"
                self._stream.write(
                    f"{seconds:6.1f} s  {node.name:<10} {node.state:<9} {booted:<12} "
                    f"{phase}{reason}\n"
                )
        self._stream.flush()

    def _draw_table(self, max_lines: int) -> None:
        if self._latest is None:
            return
        nodes, pool, seconds = self._latest
        table = format_table(nodes, pool, title=self._title, seconds=seconds, max_lines=max_lines)
        size = shutil.get_terminal_size()
        # A line that wraps would take two, and the next table would begin at the wrong place.
        lines = [self._colour_line(line[: size.columns]) + _CLEAR for line in table]
        # Clear the lines that the previous table had and this one has not.
        lines += [_CLEAR] * (self._drawn_lines - len(table))
        # A terminal that has become smaller cannot move the cursor above its first line.
        up = min(self._drawn_lines, size.lines - 1)
        self._stream.write((_UP.format(up) if up else "") + "".join(f"{line}\n" for line in lines))
        self._drawn_lines = len(lines)
        self._stream.flush()

    def _colour_line(self, line: str) -> str:
        if not self._has_colours:
            return line
        for state, colour in _COLOURS.items():
            line = line.replace(f" {state} ", f" \x1b[{colour}m{state}\x1b[0m ", 1)
        return line
