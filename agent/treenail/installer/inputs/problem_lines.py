"""Lines of problems: that of the field, not that where its object begins. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from treenail.api import documents
from treenail.api.yaml_positions import FieldPath, YamlPositions, find_positions
from treenail.errors import ConfigError
from treenail.installer.inputs.install_problem import InstallProblem

_PATH = re.compile(
    r"(?:[A-Z][A-Za-z]* \S{1,300}?: |Secret \S{1,300}, )?"
    r"((?:metadata|spec|data|stringData|type|status|kind|apiVersion)"
    r"(?:\.[\w-]{1,100}|\[[0-9]{1,6}\]|\[\"[^\"]{1,300}\"\])*)(?=[:, ]|$)"
)
_ANNOTATION = re.compile(r"(?:[A-Z][A-Za-z]* \S{1,300}?: )?annotation ([\w./-]{1,300}): ")
_PART = re.compile(r"\[([0-9]+)\]|\[\"([^\"]+)\"\]|([\w-]+)")


def find_field_path(text: str) -> FieldPath:
    """Return the field with which the text of a problem begins; empty without one."""
    if annotation := _ANNOTATION.match(text):
        return ("metadata", "annotations", annotation[1])
    found = _PATH.match(text)
    if not found:
        return ()
    return tuple(
        int(index) if index else key or name for index, key, name in _PART.findall(found[1])
    )


def locate_problems(
    problems: Sequence[InstallProblem], read: Callable[[str], bytes | None]
) -> list[InstallProblem]:
    """Return the problems with the lines of their fields.

    ``read`` returns the content of a file; None for one that cannot be read.
    """
    known: dict[tuple[str, int], YamlPositions | None] = {}
    found = []
    for each in problems:
        place = (each.file, each.line)
        if each.path and place not in known:
            known[place] = _find_positions(read(each.file), each)
        positions = known.get(place) if each.path else None
        if positions is None:
            found.append(each)
        else:
            found.append(replace(each, line=positions.find_line(*each.path), path=()))
    return found


def _find_positions(content: bytes | None, problem: InstallProblem) -> YamlPositions | None:
    if content is None:
        return None
    try:
        text = documents.decode_text(content, problem.file)
        return find_positions(text, where=problem.file, line=problem.line)
    except ConfigError:
        return None
