"""Help texts of ``treenail-lab``, with the examples before the options."""

import argparse

_EXAMPLES = "examples:\n"


class LabParser(argparse.ArgumentParser):
    """Parser whose help has the examples first."""

    def __init__(self, *, examples: tuple[tuple[str, str], ...] = (), **options: object) -> None:
        """Take purposes and command lines."""
        super().__init__(formatter_class=LabHelpFormatter, **options)  # type: ignore[arg-type]  # of argparse
        lines = (f"  # {purpose}\n  {command}\n" for purpose, command in examples)
        self._examples = _EXAMPLES + "".join(lines) if examples else ""

    def format_help(self) -> str:
        """Format usage, description, examples and options."""
        usage, separator, rest = super().format_help().partition("\noptions:\n")
        return f"{usage}\n{self._examples}{separator}{rest}"


class LabHelpFormatter(argparse.HelpFormatter):
    """Aligns the names of commands, which argparse indents further than it reserves columns."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += self._indent_increment
