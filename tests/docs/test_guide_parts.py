"""The parts that read guides: their blocks, their commands, and their output."""

from pathlib import Path

import pytest

from tests.docs.command_lines import find_commands, parse_command
from tests.docs.guide import GuideError, read_guide
from tests.docs.printed_output import compare_output

GUIDE = """
<!-- run: worker-0, exit 3 -->
```console
$ first 'of
two' \\
    lines
output
$ second
```
"""


def write_guide(directory: Path, text: str) -> Path:
    path = directory / "guide.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_console_block_has_commands_output_and_exit_code_of_the_last(tmp_path: Path) -> None:
    (step,) = read_guide(write_guide(tmp_path, GUIDE))
    assert step.place == "worker-0"
    assert [(each.text, each.output, each.exit_code) for each in step.commands] == [
        ("first 'of\ntwo' \\\n    lines", ("output",), 0),
        ("second", (), 3),
    ]


def test_block_without_comment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuideError, match="without a comment"):
        read_guide(write_guide(tmp_path, "text\n```\nblock\n```\n"))


@pytest.mark.parametrize(
    ("printed", "actual"),
    [
        (["at 2026-01-31T12:00:00Z"], "at 2027-11-02T01:02:03Z\n"),
        (["rendered-worker-6da92b29… done"], "rendered-worker-1234567890 done"),
        (["first", "…", "last"], "first\nand\nmore\nlast\n"),
        (["first", "…"], "first\n"),
        (["left  right"], "left      right"),
    ],
)  # fmt: skip
def test_output_that_differs_in_masked_parts_is_equal(printed: list[str], actual: str) -> None:
    assert compare_output(printed, actual) == ""


@pytest.mark.parametrize(
    ("printed", "actual"),
    [(["Done"], "Degraded"), (["one"], "one\ntwo"), (["exit code 1"], "exit code 2")],
)
def test_output_that_differs_elsewhere_is_shown_as_diff(printed: list[str], actual: str) -> None:
    assert f"+{actual.splitlines()[-1]}" in compare_output(printed, actual)


@pytest.mark.parametrize(
    "text",
    [
        "treenail status",
        "sudo treenail status > file",
        "other | treenail status && true",
        "ssh core@worker-0 sudo treenail status",
        "oc debug node/NODE -- chroot /host sh -c 'systemctl stop treenail && treenail status'",
        "RUN true && \\\n    treenail status",
    ],
)
def test_command_inside_of_others_is_found(text: str) -> None:
    assert [*find_commands(text)] == [["treenail", "status"]]


def test_name_of_unit_is_no_command() -> None:
    assert [
        *find_commands("systemctl stop treenail; journalctl -u treenail # treenail status")
    ] == []


def test_unknown_option_is_rejected() -> None:
    assert "--colour" in parse_command(["treenail", "status", "--colour"])
    assert "invalid choice" in parse_command(["treenail-controller", "rollout", "stop"])
    assert parse_command(["treenail", "once", "--root", "/no/such/directory", "file"]) == ""
