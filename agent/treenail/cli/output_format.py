"""Output formats of commands: the option ``-o``, tables, and documents with a version.

Section OUTPUT FORMATS of treenail-controller(8) documents what scripts can rely on.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from treenail.cli import terminal
from treenail.sanitize import escape_line

if TYPE_CHECKING:
    from treenail.kube.resources import Resource

API_VERSION = "cli.treenail.io/v1"
"""Version of all documents. A later release adds keys, and neither removes nor changes one.

It changes the version first. No API server serves this group.
"""

_GAP = "   "


class OutputFormat(StrEnum):
    """A format of a command's output."""

    TEXT = "text"
    TABLE = "table"
    WIDE = "wide"
    YAML = "yaml"
    JSON = "json"
    NAME = "name"


TABLE_FORMATS = (
    OutputFormat.TABLE,
    OutputFormat.WIDE,
    OutputFormat.YAML,
    OutputFormat.JSON,
    OutputFormat.NAME,
)
"""Formats of a command that lists objects; the first is the default."""
TEXT_FORMATS = (OutputFormat.TEXT, OutputFormat.YAML, OutputFormat.JSON)
"""Formats of a command that prints sentences; the first is the default."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table; a wide one is shown with ``-o wide`` only."""

    heading: str
    is_wide: bool = False


def add_format_arguments(
    parser: argparse.ArgumentParser,
    formats: Sequence[OutputFormat] = TABLE_FORMATS,
    *,
    options: Sequence[str] = ("-o", "--output"),
) -> None:
    """Add ``-o FORMAT``, with the first format as default, and ``--json`` for ``-o json``.

    The parsed ``output`` is an `OutputFormat`. ``options`` are the names of the option.
    """
    listed = ", ".join(formats)

    def parse_format(text: str) -> OutputFormat:
        if text not in list(formats):
            raise argparse.ArgumentTypeError(f"expected one of {listed}, found {text!r:.80}")
        return OutputFormat(text)

    parser.add_argument(
        *options,
        dest="output",
        # For completions: argparse would print their representation.
        choices=formats,
        type=parse_format,
        default=formats[0],
        metavar="FORMAT",
        help=f"output format: {listed} (default: {formats[0]})",
    )
    parser.add_argument(
        "--json",
        dest="output",
        action="store_const",
        const=OutputFormat.JSON,
        help="print one JSON document, as -o json does",
    )


def build_document(kind: str, content: Mapping[str, object]) -> dict[str, object]:
    """Return the document with its version and kind in front."""
    return {"apiVersion": API_VERSION, "kind": kind, **content}


def print_document(chosen: OutputFormat, kind: str, content: Mapping[str, object]) -> None:
    """Print the document as YAML or as JSON."""
    print(format_document(chosen, build_document(kind, content)), end="")


def format_document(chosen: OutputFormat, document: Mapping[str, object]) -> str:
    """Format the document as YAML or as JSON, with a newline at the end."""
    text = json.dumps(document, indent=2)
    if chosen is not OutputFormat.YAML:
        return f"{text}\n"
    # Imported late: the agent prints no document.
    from treenail.api import documents

    # Through JSON: the YAML writer takes no tuples and no enumerations.
    return documents.dump_document(json.loads(text))


def format_object_name(resource: "Resource", name: str) -> str:
    """Format the name of an object as ``kubectl get -o name`` does."""
    group = f".{resource.group}" if resource.group else ""
    return f"{resource.kind.lower()}{group}/{name}"


def print_output(
    chosen: OutputFormat,
    *,
    kind: str,
    content: Callable[[], Mapping[str, object]],
    lines: Callable[[], Iterable[str]],
    names: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Print in the chosen format; only the function of this format is called.

    ``names`` come from `format_object_name`. ``lines`` serves text, table and
    wide.
    """
    match chosen:
        case OutputFormat.YAML | OutputFormat.JSON:
            print_document(chosen, kind, content())
        case OutputFormat.NAME:
            for name in names():
                print(escape_line(name))
        case OutputFormat.TEXT | OutputFormat.TABLE | OutputFormat.WIDE:
            terminal.print_lines(lines())


def print_table(
    chosen: OutputFormat, columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]
) -> None:
    """Print a table as kubectl does; on a terminal, cut its lines at the last column."""
    width = terminal.find_width(sys.stdout)
    for line in format_table_lines(columns, rows, is_wide=chosen is OutputFormat.WIDE, width=width):
        print(line)


def print_table_with_notes(
    columns: Sequence[TableColumn],
    rows: Iterable[Sequence[str]],
    notes: Iterable[Iterable[str]],
    *,
    is_wide: bool = False,
) -> None:
    """Print a table, with the whole notes of a row on the lines below it."""
    width = terminal.find_width(sys.stdout)
    lines = format_table_lines(columns, rows, is_wide=is_wide, width=width)
    for line, texts in zip(lines, chain([()], notes), strict=True):
        print(line)
        for text in filter(None, texts):
            for part in terminal.wrap_text(escape_line(text), width, indent="  ", hanging="  "):
                print(part)


def format_table_lines(
    columns: Sequence[TableColumn],
    rows: Iterable[Sequence[str]],
    *,
    is_wide: bool = False,
    width: int | None = None,
) -> Iterator[str]:
    """Yield heading and rows, with one text for each column, at most ``width`` columns wide.

    None cuts nothing.
    """
    shown = [index for index, column in enumerate(columns) if is_wide or not column.is_wide]
    cells = [[columns[index].heading for index in shown]]
    cells += [[escape_line(row[index]) or "-" for index in shown] for row in rows]
    widths = [max(map(terminal.measure_text, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = _GAP.join(map(terminal.pad_text, row, widths)).rstrip()
        yield line if width is None else terminal.shorten_text(line, width)
