"""Files that a Containerfile copies, and that no build has. Pure.

The only files of a build are those of the ConfigMap that the MachineOSConfig names; the directory
of the Containerfile is no context.
"""

import json
import posixpath
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from treenail.api import annotations as key
from treenail.image.containerfile import (
    Instruction,
    has_open_quote,
    parse_containerfile,
    split_words,
    strip_quotes,
)
from treenail.image.inputs.containerfile_problems import CONFIGS_STAGE, ContainerfileProblem
from treenail.image.inputs.own_files import OWN_PREFIX

_WHOLE_CONTEXT = (".", "/")


def find_source_problems(text: str, context: Collection[str]) -> Iterator[ContainerfileProblem]:
    """Yield the sources of COPY and ADD that are not among the files of the context."""
    for instruction in parse_containerfile(text).instructions:
        if instruction.keyword not in ("ADD", "COPY") or instruction.find_flag("from"):
            continue
        for source in _list_sources(instruction):
            name = posixpath.normpath(source).lstrip("/") or "."
            if name in _WHOLE_CONTEXT or name.startswith(OWN_PREFIX):
                continue
            if not any(fnmatchcase(each, name) for each in context):
                yield ContainerfileProblem(
                    instruction.line,
                    f"{instruction.keyword} {source:.100}: the build has no such file, because the "
                    "install directory is no context of the build",
                    f"put it into a ConfigMap that annotation {key.BUILD_CONTEXT} of a "
                    "MachineOSConfig names, or use COPY --from=IMAGE",
                )


def is_based_on_system(text: str) -> bool:
    """Return whether the last stage has the system of the pool as base, also through others."""
    stages = parse_containerfile(text).stages
    if not stages:
        return True
    earlier = {each.name: each for each in stages[:-1] if each.name}
    image, seen = stages[-1].image, {stages[-1].name}
    while image in earlier and image not in seen:
        seen.add(image)
        image = earlier[image].image
    return image == CONFIGS_STAGE


def _list_sources(instruction: Instruction) -> list[str]:
    """Return the sources whose names are plain: no here-documents, URLs and variables."""
    operands = instruction.operands
    words: list[str] = []
    if operands.startswith("["):
        try:
            decoded = json.loads(operands)
        except (ValueError, RecursionError):
            return []
        words = [each for each in decoded if isinstance(each, str)]
    elif not has_open_quote(operands):
        words = [strip_quotes(each) for each in split_words(operands)]
    return [
        each
        for each in words[:-1]
        if each and "<<" not in each and "$" not in each and "://" not in each and "@" not in each
    ]
