"""Texts that the demo prints beside the table: together they fit into 24 lines of 80 columns."""

import shutil
import textwrap
from typing import TextIO

from treenail.sanitize import escape_line
from treenail_lab.cluster import Lab
from treenail_lab.demo.rollout import DemoResult

_PLAN_WORDS = ("drain", "because", "takes")
_NEXT = (
    "Try next: make demo ARGS='--fail stage'   a rollout that halts, and says why",
    "          .venv/bin/treenail-lab up       a cluster for kubectl, until Ctrl-C",
    "          docs/install.md                 the same in your own cluster",
)


def print_plan(plan: str, stream: TextIO) -> None:
    """Print the lines of the plan that say what it costs, as the command prints them."""
    print(
        f"$ treenail-controller plan -f change.yaml | grep -E '{'|'.join(_PLAN_WORDS)}'",
        file=stream,
    )
    lines = [line for line in plan.splitlines() if any(word in line for word in _PLAN_WORDS)]
    for line in lines or plan.splitlines():
        print("\n".join(wrap_line(line, stream)), file=stream)
    stream.flush()


def print_containerfile(text: str, stream: TextIO) -> None:
    """Print the text from which the cluster builds the image."""
    print("$ cat Containerfile   # in the MachineOSConfig of the pool", file=stream)
    for line in text.splitlines():
        print("\n".join(wrap_line(escape_line(line), stream)), file=stream)
    stream.flush()


def print_result(result: DemoResult, journal: list[str]) -> None:
    """Print how the rollout ended, the journal if there is one, and what to try next."""
    print(
        f"\n{len(result.updated_nodes)} nodes updated in {result.seconds:.0f} s, "
        f"at most {result.max_out_of_service} out of service at once"
    )
    # The table shows the reasons of a halt.
    for node, reason in result.failures.items() if not result.halt_message else ():
        print(f"{node} failed: {reason}")
    if journal:
        print("\njournalctl TREENAIL_UPDATE=… of one node:")
        for line in journal:
            print(f"  {line}")
    print("\n".join(_NEXT))


def collect_journal(lab: Lab, result: DemoResult) -> list[str]:
    """Return the journal of the first failed or the last updated node, across its reboot."""
    node = next(iter(result.failures), None) or next(reversed(result.updated_nodes), None)
    if node not in lab.machines:
        return []
    entries = lab.machines[node].read_journal({"SYSLOG_IDENTIFIER": "treenail"})
    updates = [str(entry["TREENAIL_UPDATE"]) for entry in entries if entry.get("TREENAIL_UPDATE")]
    if not updates:
        return [str(entry.get("MESSAGE")) for entry in entries]
    return [
        f"{node} {entry.get('TREENAIL_PHASE', ''):<10} {entry.get('MESSAGE')}"
        for entry in entries
        if entry.get("TREENAIL_UPDATE") == updates[-1]
    ]


def wrap_line(line: str, stream: TextIO) -> list[str]:
    """Wrap a line on a terminal, below its own indent."""
    if not stream.isatty():
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.wrap(line, width, subsequent_indent=indent) or [""]
