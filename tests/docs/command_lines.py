"""Commands of the product in shell text, checked with the parsers of the product."""

import argparse
import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from treenail.cli.controller.main import create_parser as create_controller_parser
from treenail.cli.node.main import create_parser as create_node_parser

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "treenail": create_node_parser,
    "treenail-controller": create_controller_parser,
}
_OPERATORS = {";", "&", "&&", "|", "||", "(", ")"}
_REDIRECTION = re.compile(r"[<>]+&?|>&")
_WRAPPERS = {"sudo", "exec", "then", "do", "if", "!", "RUN"}
_SKIPPED_WORDS = {"chroot": 2, "ssh": 2}
"""How many words stand before the command that these run."""


def find_problems(text: str) -> list[str]:
    """Return what the parsers reject in the commands of shell text."""
    return [
        f"{shlex.join(words)}: {problem}"
        for words in find_commands(text)
        if (problem := parse_command(words))
    ]


def parse_command(words: Sequence[str]) -> str:
    """Return why the parser of the command rejects its arguments; empty if it accepts them."""
    errors = io.StringIO()
    arguments = list(words[1:])
    for number, word in enumerate(arguments[:-1]):
        # The directory need not exist on this machine.
        if word == "--root":
            arguments[number + 1] = "/"
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            _, unknown = PARSERS[words[0]]().parse_known_args(arguments)
        except SystemExit as end:
            return errors.getvalue().strip() if end.code else ""
    return f"unknown arguments: {shlex.join(unknown)}" if unknown else ""


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of the product, also inside of ssh, chroot and sh -c."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        for words in _split_commands(line):
            yield from _find_inside(words)


def _find_inside(words: list[str]) -> Iterator[list[str]]:
    while words and (words[0] in _WRAPPERS or re.match(r"[A-Za-z_]+=", words[0])):
        words = words[1:]
    if not words:
        return
    if words[0] in PARSERS:
        yield words
    elif words[0] in ("sh", "bash") and "-c" in words:
        yield from find_commands(words[words.index("-c") + 1])
    elif "--" in words:
        yield from _find_inside(words[words.index("--") + 1 :])
    elif words[0] in _SKIPPED_WORDS:
        yield from _find_inside(words[_SKIPPED_WORDS[words[0]] :])


def _split_commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        # A quoted text that continues in the next line is no command of the product.
        return []
    found: list[list[str]] = [[]]
    is_target = False
    for token in tokens:
        if token in _OPERATORS:
            found.append([])
        elif _REDIRECTION.fullmatch(token):
            is_target = True
        elif is_target:
            is_target = False
        else:
            found[-1].append(token)
    return found
