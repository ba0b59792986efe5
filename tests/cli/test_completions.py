"""Completions for the shells, which are made from the parsers."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.completions import create_parsers, format_completions
from treenail.cli.argument_parser import list_actions, list_parsers
from treenail.cli.controller.complete import main

# Calls the completion function as bash does, and prints one candidate a line.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function=$(complete -p "$1" | sed 's/.* -F \\([^ ]*\\).*/\\1/')
"$function" "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""
CHECKS = {"bash": ("bash", "-n"), "zsh": ("zsh", "-n"), "fish": ("fish", "--no-execute")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completions")
    for path, text in format_completions():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_each_program_has_a_file_for_each_shell(folder: Path) -> None:
    programs = {"treenail", "treenail-controller", "kubectl-treenail", "treenail-lab"}
    assert {path.name for path in (folder / "bash").iterdir()} == programs
    assert {path.name for path in (folder / "zsh").iterdir()} == {f"_{name}" for name in programs}
    assert {path.name for path in (folder / "fish").iterdir()} == {
        f"{name}.fish" for name in programs
    }


def test_every_option_is_in_the_completions(folder: Path) -> None:
    for program, parser in create_parsers().items():
        text = (folder / "bash" / program).read_text()
        options = {
            option
            for each in list_parsers(parser)
            for action in list_actions(each)
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
        }
        assert {option for option in options if option not in text} == set()


@pytest.mark.process
@pytest.mark.parametrize("shell", CHECKS)
def test_completions_are_valid_for_the_shell(folder: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    for path in (folder / shell).iterdir():
        done = subprocess.run(
            [*CHECKS[shell], path], capture_output=True, text=True, check=False, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        (("treenail-controller", "rollout", ""), {"status"}),
        (("treenail-controller", "rollout", "status", "--w"), {"--wait"}),
        (("kubectl-treenail", ""), {"status", "plan", "rollout", "machines"}),
        (("treenail", "status", "-o", ""), {"text", "yaml", "json"}),
        (("treenail", "plan", "/etc/passw"), {"/etc/passwd", "/etc/passwd-"}),
        (("treenail-lab", "demo", "--fail", ""), {"stage", "drain", "reboot"}),
    ],
)
def test_bash_completes_commands_options_and_files(
    folder: Path, line: tuple[str, ...], candidates: set[str]
) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", folder / "bash" / line[0], *line],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    found = set(done.stdout.split())
    assert found
    assert found <= candidates


@pytest.mark.parametrize(
    ("words", "candidates", "directive"),
    [
        ([], ["status", "plan", "rollout", "machines"], 4),
        (["ro"], ["rollout"], 4),
        (["rollout", ""], ["status"], 4),
        (["rollout", "status", "--wa"], ["--wait"], 4),
        (["rollout", "status", "worker", "-o", "y"], ["yaml"], 4),
        (["plan", "-f", "pool"], [], 0),
        (["plan", "--context", ""], [], 4),
        (["unknown", "x"], [], 4),
    ],
)
def test_kubectl_gets_candidates_and_a_directive(
    words: list[str], candidates: list[str], directive: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert ([line.split("\t")[0] for line in lines], last) == (candidates, f":{directive}")
