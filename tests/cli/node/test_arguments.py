"""Invalid command lines are rejected before any other check."""

from pathlib import Path

import pytest

from treenail.cli.node.main import main

COMMANDS = (
    *(["run"], ["firstboot"], ["status"], ["plan"], ["drift"], ["why"], ["history"]),
    *(["cancel"], ["retry"], ["collect"], ["handback"], ["once", "file"]),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_root_option_empty_is_rejected(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--root", ""], ["--root="]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *arguments])
        assert ended.value.code == 64
        printed = capsys.readouterr().err
        assert "argument --root: expected a directory, found nothing" in printed


def test_root_option_not_a_directory_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for root in (file, tmp_path / "none"):
        with pytest.raises(SystemExit) as ended:
            main(["status", "--root", str(root)])
        assert ended.value.code == 64
        assert f"argument --root: there is no directory {root}" in capsys.readouterr().err
