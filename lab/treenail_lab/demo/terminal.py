"""Where the picture of a rollout is shown: redrawn on a terminal, line by line elsewhere."""

import shutil
from typing import TextIO

from treenail_lab.demo.table import NodeView, PoolView, format_table

_UP = "\x1b[{}A"
_CLEAR = "\x1b[K"
_COLOURS = {"Done": "32", "Working": "33", "Degraded": "31", "Unreconcilable": "31"}


class RolloutScreen:
    """One place on a stream that always shows the latest picture."""

    def __init__(self, stream: TextIO, *, title: str) -> None:
        self._stream = stream
        self._title = title
        self._is_terminal = stream.isatty()
        self._drawn_lines = 0
        self._last_summary = ""
        self._last_shown: dict[str, tuple[str, str, str, str]] = {}

    def print_text(self, text: str) -> None:
        """Print something before the picture."""
        self._stream.write(f"{text.rstrip()}\n\n")
        self._stream.flush()

    def show_rollout(self, nodes: list[NodeView], pool: PoolView, seconds: float) -> None:
        """Show how it is; elsewhere than on a terminal, what changed."""
        if self._is_terminal:
            self._draw_table(format_table(nodes, pool, title=self._title, seconds=seconds))
            return
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

    def finish(self) -> None:
        """Leave the last picture where it is."""
        if not self._is_terminal:
            self._stream.write("\n")
        self._drawn_lines = 0

    def _draw_table(self, picture: list[str]) -> None:
        # A line that wraps would be two, and the next picture would miss its place.
        width = shutil.get_terminal_size().columns
        up = _UP.format(self._drawn_lines) if self._drawn_lines else ""
        drawn = "".join(f"{_colour_line(line[:width])}{_CLEAR}\n" for line in picture)
        # Lines that the last picture had and this one has not.
        below = f"{_CLEAR}\n" * max(self._drawn_lines - len(picture), 0)
        self._stream.write(up + drawn + below)
        self._drawn_lines = max(self._drawn_lines, len(picture))
        self._stream.flush()


def _colour_line(line: str) -> str:
    for state, colour in _COLOURS.items():
        line = line.replace(f" {state} ", f" \x1b[{colour}m{state}\x1b[0m ", 1)
    return line
