"""Write completions for bash, zsh and fish from the parsers of the commands.

``python -m tools.completions DIR`` writes DIR/bash, DIR/zsh and DIR/fish, with the file names that
the shells look for.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import shtab

from treenail.cli.argument_parser import list_actions, list_parsers
from treenail.cli.controller.main import create_kubectl_parser
from treenail.cli.controller.main import create_parser as create_controller_parser
from treenail.cli.node.main import create_parser as create_node_parser
from treenail_lab.command import create_parser as create_lab_parser

FILE_NAMES: Mapping[str, str] = {"bash": "{}", "zsh": "_{}", "fish": "{}.fish"}
"""File name of a command's completions, by shell."""
_KINDS = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "PATH": shtab.FILE}


def main() -> int:
    """Write all completions; print the directory."""
    arguments = argparse.ArgumentParser(prog="tools.completions", description=__doc__)
    arguments.add_argument("directory", metavar="DIR", type=Path)
    folder: Path = arguments.parse_args().directory
    for path, text in format_completions():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    print(folder)
    return 0


def format_completions() -> Iterator[tuple[str, str]]:
    """Yield path and text of each file."""
    for program, parser in create_parsers().items():
        for shell, name in FILE_NAMES.items():
            yield f"{shell}/{name.format(program)}", shtab.complete(parser, shell=shell)


def create_parsers() -> dict[str, argparse.ArgumentParser]:
    """Create the parser of each program, with hints where files and directories are expected."""
    parsers: dict[str, argparse.ArgumentParser] = {
        "treenail": create_node_parser(),
        "treenail-controller": create_controller_parser(),
        "kubectl-treenail": create_kubectl_parser(),
        "treenail-lab": create_lab_parser(),
    }
    for program, parser in parsers.items():
        # A shell completes the name of the program, also where kubectl shows another one.
        parser.prog = program
        for each in list_parsers(parser):
            for action in list_actions(each):
                if isinstance(action.metavar, str) and action.metavar in _KINDS:
                    action.complete = _KINDS[action.metavar]  # type: ignore[attr-defined]  # shtab reads it
    return parsers


if __name__ == "__main__":
    sys.exit(main())
