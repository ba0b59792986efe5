"""Completions of ``kubectl treenail``: kubectl runs ``kubectl_complete-treenail WORDS``.

The last word is the one to complete, and may be empty. The output is that of cobra's __complete
command, which kubectl passes on: a candidate and its description on each line, then a directive.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from treenail.cli.argument_parser import list_actions
from treenail.cli.controller.main import create_kubectl_parser

_FILES = ":0"
_NO_FILES = ":4"


def main(arguments: list[str] | None = None) -> int:
    """Print the candidates."""
    words = sys.argv[1:] if arguments is None else arguments
    print("\n".join(list_lines(create_kubectl_parser(), words or [""])))
    return 0


def list_lines(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the lines for kubectl; ``words`` has at least one."""
    *earlier, last = words
    for word in earlier:
        parser = _find_commands(parser).get(word, (parser, ""))[0]
    option = _find_option(parser, earlier[-1]) if earlier else None
    if option is not None and option.nargs is None:
        choices = (str(choice) for choice in option.choices or ())
        yield from (choice for choice in choices if choice.startswith(last))
        yield _FILES if option.metavar == "FILE" else _NO_FILES
        return
    candidates = (
        _list_options(parser)
        if last.startswith("-")
        else ((name, summary) for name, (_, summary) in _find_commands(parser).items())
    )
    yield from (f"{name}\t{text}" for name, text in candidates if name.startswith(last))
    yield _NO_FILES


def _find_commands(
    parser: argparse.ArgumentParser,
) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return parser and summary of each command, by name."""
    commands: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for action in list_actions(parser):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  it has no public name
            subactions = action._get_subactions()  # noqa: SLF001  as above
            summaries = {subaction.dest: subaction.help or "" for subaction in subactions}
            commands |= {
                name: (subparser, summaries[name]) for name, subparser in action.choices.items()
            }
    return commands


def _find_option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    return next((action for action in list_actions(parser) if word in action.option_strings), None)


def _list_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in list_actions(parser):
        if action.help != argparse.SUPPRESS:
            text = " ".join((action.help or "").split())
            yield from ((option, text) for option in action.option_strings)
