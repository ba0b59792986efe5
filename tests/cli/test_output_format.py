"""Output formats: tables, documents with a version, and the option that chooses one."""

import argparse
import json
from collections.abc import Sequence

import pytest

from treenail.api.documents import load_document
from treenail.cli.output_format import (
    API_VERSION,
    TEXT_FORMATS,
    OutputFormat,
    TableColumn,
    add_format_arguments,
    build_document,
    format_document,
    format_object_name,
    format_table_lines,
    print_output,
)
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES

COLUMNS = (TableColumn("NAME"), TableColumn("IMAGE", is_wide=True), TableColumn("STATE"))
ROWS = (("worker-0", "q.example/os", "Done"), ("w", "", ""))
DOCUMENT = {"items": [{"name": "yes", "ratio": 0.5, "at": None, "format": OutputFormat.WIDE}]}


def parse(*arguments: str, formats: Sequence[OutputFormat] = TEXT_FORMATS) -> OutputFormat:
    parser = argparse.ArgumentParser()
    add_format_arguments(parser, formats)
    chosen = parser.parse_args(arguments).output
    assert isinstance(chosen, OutputFormat)
    return chosen


def test_json_option_equals_format_json() -> None:
    assert parse() is OutputFormat.TEXT
    assert parse("--json") is parse("-o", "json") is parse("-ojson") is OutputFormat.JSON
    assert parse("--output=yaml") is OutputFormat.YAML


@pytest.mark.parametrize("chosen", ["wide", "jsonpath", ""])
def test_other_format_is_rejected_with_the_known_ones(
    chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("-o", chosen)
    assert "expected one of text, yaml, json, found" in capsys.readouterr().err


@pytest.mark.parametrize("chosen", [OutputFormat.JSON, OutputFormat.YAML])
def test_document_begins_with_version_and_kind(chosen: OutputFormat) -> None:
    text = format_document(chosen, build_document("PoolStatus", DOCUMENT))
    found = load_document(text, where="output")
    assert found == {
        "apiVersion": API_VERSION,
        "kind": "PoolStatus",
        "items": [{"name": "yes", "ratio": 0.5, "at": None, "format": "wide"}],
    }
    assert text.endswith("\n")


def test_table_has_a_column_more_with_wide() -> None:
    assert list(format_table_lines(COLUMNS, ROWS)) == [
        "NAME       STATE",
        "worker-0   Done",
        "w          -",
    ]
    assert list(format_table_lines(COLUMNS, ROWS, is_wide=True)) == [
        "NAME       IMAGE          STATE",
        "worker-0   q.example/os   Done",
        "w          -              -",
    ]


def test_table_is_cut_at_the_width_and_escapes_control_characters() -> None:
    lines = list(format_table_lines(COLUMNS, [("a\x1b[31m\nb", "", "Done")], width=12))
    assert max(map(len, lines)) <= 12
    assert "\x1b" not in "".join(lines)
    assert len(lines) == 2


def test_object_is_named_as_kubectl_names_it() -> None:
    assert format_object_name(NODES, "worker-0") == "node/worker-0"
    assert (
        format_object_name(MACHINECONFIGPOOLS, "worker")
        == "machineconfigpool.machineconfiguration.openshift.io/worker"
    )


def test_table_without_rows_has_a_heading() -> None:
    assert list(format_table_lines(COLUMNS, [])) == ["NAME   STATE"]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (OutputFormat.NAME, "node/a\nnode/b\n"),
        (OutputFormat.TABLE, "a table\n"),
        (OutputFormat.JSON, None),
    ],
)
def test_only_the_chosen_format_is_printed(
    chosen: OutputFormat, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_output(
        chosen,
        kind="NodeList",
        content=lambda: {"items": []},
        lines=lambda: ["a table"],
        names=lambda: ["node/a", "node/b"],
    )
    printed = capsys.readouterr().out
    if expected is None:
        assert json.loads(printed) == {"apiVersion": API_VERSION, "kind": "NodeList", "items": []}
    else:
        assert printed == expected
