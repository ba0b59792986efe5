"""Agents of other versions: a git revision's, or this clone's with other lines and modules."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmlab.image.layers import AGENT_SOURCES
from vmlab.tools import REPOSITORY, ToolError, run, say

OLDER = os.environ.get("TREENAIL_VM_OLDER", "")
"""The git revision of the older agent; empty for the newest release."""
PACKAGE = Path("agent/treenail")


@dataclass(frozen=True, slots=True)
class Edit:
    """One line of the agent that another version has in another form."""

    module: str
    line: str
    instead: str


def find_older_revision() -> str:
    """Return the revision of the older agent; empty without a release in the clone's history."""
    if OLDER:
        return OLDER
    try:
        return run("git", "-C", REPOSITORY, "describe", "--tags", "--abbrev=0", "HEAD^")
    except ToolError:
        return ""


def check_out_agent(revision: str, target: Path) -> Path:
    """Return the sources of a revision's agent, written to ``target``."""
    say(f"the older agent is of {revision}")
    _clear(target)
    script = 'git -C "$1" archive "$2" -- "$3" "$4" | tar -x -C "$5"'
    run("bash", "-o", "pipefail", "-c", script, "sh", REPOSITORY, revision, *AGENT_SOURCES, target)
    return target


def change_agent(target: Path, edits: tuple[Edit, ...], modules: Mapping[str, str]) -> Path:
    """Return the sources of this clone's agent after ``edits``, with more modules."""
    _clear(target)
    for name in AGENT_SOURCES:
        shutil.copytree(REPOSITORY / name, target / name)
    for edit in edits:
        path = target / PACKAGE / edit.module
        text = path.read_text()
        if text.count(edit.line) != 1:
            raise ToolError(f"{edit.module} has {edit.line!r} {text.count(edit.line)} times")
        path.write_text(text.replace(edit.line, edit.instead))
    for name, text in modules.items():
        (target / PACKAGE / name).write_text(text)
    return target


def _clear(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
