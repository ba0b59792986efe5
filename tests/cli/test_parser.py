"""Command lines as users write them who never read the manual."""

from collections.abc import Callable

import pytest

from treenail.cli.controller.main import create_parser, run_kubectl_plugin
from treenail.cli.controller.main import main as run_controller
from treenail.cli.node.main import main as run_treenail
from treenail.cli.output import EXIT_USAGE

Run = Callable[[list[str]], int]


def call(run: Run, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run([*arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("run", "words", "usage"),
    [
        (run_treenail, ("help", "status"), "usage: treenail status "),
        (run_treenail, ("help",), "usage: treenail "),
        (run_controller, ("help", "rollout", "status"), "usage: treenail-controller rollout "),
        (run_kubectl_plugin, ("help", "plan"), "usage: kubectl treenail plan "),
        (run_kubectl_plugin, ("help", "machines"), "usage: kubectl treenail machines "),
        (run_treenail, ("version",), "treenail "),
        (run_controller, ("version",), "treenail "),
    ],
)
def test_help_and_version_are_also_words(
    run: Run, words: tuple[str, ...], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run, *words) == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(
    ("run", "words", "program"),
    [
        (run_treenail, ("status", "--format", "json"), "treenail status"),
        (run_controller, ("rollout", "status", "--all"), "treenail-controller rollout status"),
        (run_kubectl_plugin, ("status", "-A"), "kubectl treenail status"),
    ],
)
def test_unknown_argument_names_the_help_of_its_command(
    run: Run, words: tuple[str, ...], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run, *words) == EXIT_USAGE
    printed = capsys.readouterr().err
    assert printed.startswith(f"{program}: unknown arguments: ")
    assert printed.endswith(f"  see: {program} --help\n")


@pytest.mark.parametrize("run", [run_treenail, run_controller, run_kubectl_plugin])
def test_misspelt_command_is_an_error_and_no_state(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run, "statsu") == EXIT_USAGE
    assert "choose from" in capsys.readouterr().err


def test_plugin_has_no_command_that_changes_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "manifests", "render"):
        assert call(run_kubectl_plugin, command) == EXIT_USAGE
    capsys.readouterr()


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--enable=render"),
        ("manifests",),
        ("serve", "--certificate=a", "--key=b"),
        ("machines",),
        ("status",),
        ("token", "list"),
    ],
    ids=lambda words: words[0],
)
def test_namespace_has_the_letter_of_kubectl(words: tuple[str, ...]) -> None:
    found = create_parser().parse_command_line([*words, "-n", "other"])
    assert found.namespace == "other"
