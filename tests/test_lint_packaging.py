"""The linters of `make check` find nothing, and find what is broken."""

from pathlib import Path

import pytest

from tools.lint_packaging import LintCommand, list_commands, run_linter


@pytest.mark.process
def test_linters_find_nothing(tmp_path: Path) -> None:
    installed = [each for each in list_commands(tmp_path) if each.is_installed()]
    found = {each.program: run_linter(each) for each in installed}
    assert {program: text for program, text in found.items() if text} == {}


BROKEN = [
    ("mandoc", "x.8", '.TH X 8 "" "" ""\n.SH NAME\n.UNKNOWN y\n', ("-T", "lint", "-W", "warning")),
    ("promtool", "x.yaml", "groups: [{name: a, rules: [{alert: A, expr: (}]}]", ("check", "rules")),
    ("systemd-analyze", "x.service", "[Service]\nExecStart=relative\n", ("verify", "--man=no")),
    ("shellcheck", "x", 'echo $1 "\n', ("-s", "sh")),
]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("program", "name", "content", "arguments"), BROKEN)
def test_linter_finds_broken_file(
    tmp_path: Path, program: str, name: str, content: str, arguments: tuple[str, ...],
) -> None:  # fmt: skip
    path = tmp_path / name
    path.write_text(content)
    linter = LintCommand(program, "", (*arguments, path))
    if not linter.is_installed():
        pytest.skip(f"no {program} here")
    assert run_linter(linter) != ""


def test_missing_linter_is_not_installed(tmp_path: Path) -> None:
    assert not LintCommand("no-such-linter", "none", ()).is_installed()
    assert not LintCommand("sh", "dash", (), needs=tmp_path / "missing").is_installed()
