"""Problems of a Containerfile that need no build to be found.

Only what every builder rejects is a problem, and what cannot work in a composed build: a short
image name, because no registry is searched, and a stage by number, because other stages precede
the user's.
"""

import difflib
import re
from collections.abc import Collection, Iterator

from treenail.api.documents import LineProblem
from treenail.api.machineosconfig import CONTAINERFILE_LIMIT
from treenail.image import containerfile

CONFIGS_STAGE = "configs"
"""Stage of the system with its extensions, on which the user's text builds."""
_SCRATCH = "scratch"

KEYWORDS = frozenset({
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL",
    "MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
})  # fmt: skip
_WITH_PAIRS = frozenset({"ENV", "LABEL"})
_WITH_SOURCE = frozenset({"ADD", "COPY"})
_STAGE_NAME = re.compile(r"[a-z][a-z0-9-_.]*")
_FIRST_OPERANDS = 2
MAX_PROBLEMS = 20
"""Later problems are left out: one mistake at the top often causes many."""


def find_containerfile_problems(
    text: str, *, stages: Collection[str] = (CONFIGS_STAGE,), limit: int = CONTAINERFILE_LIMIT
) -> tuple[LineProblem, ...]:
    """Find the problems of a user's Containerfile, in the order of its lines.

    ``stages`` are the stages before the text. A text without instructions has no problem: nothing
    is built from it.
    """
    if len(text) > limit:
        return (
            LineProblem(
                0,
                f"expected at most {limit} characters, found {len(text)}",
                "move files into the ConfigMap that the annotation treenail.io/context names, "
                "and copy them",
            ),
        )
    parsed = containerfile.parse_containerfile(text)
    if not parsed.instructions:
        return ()
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        return (
            LineProblem(line, "it has a NUL character, and is no text", "save the file as UTF-8"),
        )
    problems = [
        *_find_directive_problems(parsed),
        *_find_instruction_problems(parsed),
        *_find_stage_problems(parsed, stages),
    ]
    problems.sort(key=lambda problem: problem.line)
    return tuple(problems[:MAX_PROBLEMS])


def _find_directive_problems(parsed: containerfile.Containerfile) -> Iterator[LineProblem]:
    names: set[str] = set()
    for number, line in enumerate(parsed.directives, 1):
        name, _, value = line.lstrip("# \t").partition("=")
        name, value = name.strip().lower(), value.strip()
        if name in names:
            yield LineProblem(number, f"the directive {name} appears twice", "remove one of them")
        names.add(name)
        if name == "escape" and value not in ("\\", "`"):
            yield LineProblem(
                number, f"expected escape=\\ or escape=`, found {value!r:.20}", "correct it"
            )


def _find_instruction_problems(
    parsed: containerfile.Containerfile,
) -> Iterator[LineProblem]:
    for instruction in parsed.instructions:
        if instruction.keyword not in KEYWORDS:
            yield _describe_unknown(instruction)
        elif not instruction.operands:
            yield LineProblem(
                instruction.line,
                f"{instruction.keyword} has no argument",
                f"write what {instruction.keyword} applies to, or remove the line",
            )
        elif instruction.keyword == "SHELL" and not instruction.operands.startswith("["):
            yield LineProblem(
                instruction.line,
                f'SHELL: expected ["PROGRAM", "OPTION"], found {instruction.operands!r:.40}',
                "write it as a list in JSON",
            )
        elif instruction.keyword in _WITH_PAIRS:
            yield from _check_pairs(instruction, parsed.escape)
        elif instruction.keyword in _WITH_SOURCE:
            yield from _check_source(instruction)
        for heredoc in instruction.heredocs:
            if not heredoc.is_closed:
                yield LineProblem(
                    instruction.line,
                    f"the here-document {heredoc.name:.40} has no end",
                    f"add a line with only {heredoc.name:.40}",
                )


def _describe_unknown(instruction: containerfile.Instruction) -> LineProblem:
    close = difflib.get_close_matches(instruction.keyword[:40], sorted(KEYWORDS), 1)
    return LineProblem(
        instruction.line,
        f"unknown instruction {instruction.keyword!r:.40}",
        f"write {close[0]}" if close else "end the line before it with \\ if it continues that one",
    )


def _check_pairs(instruction: containerfile.Instruction, escape: str) -> Iterator[LineProblem]:
    words = containerfile.split_words(instruction.operands, escape)
    # The older form: ENV NAME VALUE.
    is_older = "=" not in words[0]
    wrong = [word for word in words if "=" not in word]
    if is_older and len(words) >= _FIRST_OPERANDS:
        return
    if is_older or wrong:
        yield LineProblem(
            instruction.line,
            f"{instruction.keyword}: expected NAME=VALUE, found {wrong[0]!r:.40}",
            "quote values with spaces",
        )


def _check_source(instruction: containerfile.Instruction) -> Iterator[LineProblem]:
    if len(instruction.operands.split()) < _FIRST_OPERANDS and not instruction.operands.startswith(
        "["
    ):
        yield LineProblem(
            instruction.line,
            f"{instruction.keyword}: expected a source and a destination, found one argument",
            f"write {instruction.keyword} SOURCE DESTINATION",
        )


def _find_stage_problems(
    parsed: containerfile.Containerfile, stages: Collection[str]
) -> Iterator[LineProblem]:
    first = next(
        (instruction for instruction in parsed.instructions if instruction.keyword != "ARG"), None
    )
    if not parsed.stages:
        yield LineProblem(0, "there is no FROM", f"begin with: FROM {CONFIGS_STAGE} AS final")
        return
    if first is not None and first.keyword in KEYWORDS and first.keyword != "FROM":
        yield LineProblem(
            first.line,
            f"{first.keyword} stands before the first FROM",
            "move it below FROM; only ARG may stand before it",
        )
    known = {*stages, _SCRATCH}
    by_line = {stage.line: stage for stage in parsed.stages}
    for instruction in parsed.instructions:
        if instruction.keyword == "FROM" and instruction.operands:
            stage = by_line[instruction.line]
            yield from _check_from(instruction, stage, known)
            known.add(stage.name or _SCRATCH)
        for reference in find_image_references(instruction):
            yield from _check_reference(instruction, reference, known)


def find_image_references(instruction: containerfile.Instruction) -> tuple[str, ...]:
    """Return the stages and images that COPY, ADD and RUN read files from."""
    names: list[str] = []
    if instruction.keyword in _WITH_SOURCE:
        names.append(instruction.find_flag("from"))
    if instruction.keyword == "RUN":
        for flag in instruction.flags:
            options = flag.removeprefix("--mount=").split(",") if "--mount=" in flag else []
            names += [
                option.removeprefix("from=") for option in options if option.startswith("from=")
            ]
    return tuple(name for name in names if name)


def _check_from(
    instruction: containerfile.Instruction, stage: containerfile.Stage, known: set[str]
) -> Iterator[LineProblem]:
    words = instruction.operands.split()
    if len(words) > 1 and not stage.name:
        yield LineProblem(
            instruction.line,
            f"expected FROM IMAGE AS NAME, found {instruction.operands!r:.60}",
            "correct it",
        )
    elif stage.name and not _STAGE_NAME.fullmatch(stage.name.lower()):
        yield LineProblem(
            instruction.line,
            f"{stage.name!r:.60} is not a name of a stage",
            "use letters, digits, - _ and . after a letter",
        )
    if not stage.image:
        yield LineProblem(
            instruction.line,
            f"{words[0]!r:.60} is empty: no ARG before the first FROM sets it",
            "set it with ARG NAME=VALUE at the top",
        )
    elif stage.image not in known and not is_qualified(stage.image):
        yield _describe_short_name(instruction, "FROM", stage.image, known)


def _check_reference(
    instruction: containerfile.Instruction, reference: str, known: set[str]
) -> Iterator[LineProblem]:
    if reference.isdecimal():
        yield LineProblem(
            instruction.line,
            f"{instruction.keyword} names stage {reference:.10} by its number, and other stages "
            "precede the text",
            "name the stage: FROM IMAGE AS NAME",
        )
    elif reference not in known and not is_qualified(reference) and "$" not in reference:
        yield _describe_short_name(instruction, f"{instruction.keyword} from", reference, known)


def _describe_short_name(
    instruction: containerfile.Instruction, what: str, name: str, known: set[str]
) -> LineProblem:
    close = sorted(stage for stage in known if stage.lower() == name.lower())
    return LineProblem(
        instruction.line,
        f"{what} {name:.100} names no earlier stage, and no image with its registry",
        f"write {close[0]}: case matters in names of stages"
        if close
        else f"write {CONFIGS_STAGE} for the OS of the nodes, or REGISTRY/REPOSITORY",
    )


def is_qualified(image: str) -> bool:
    """Return whether an image name begins with a registry, so that none must be searched."""
    registry, slash, _ = image.partition("/")
    return bool(slash) and ("." in registry or ":" in registry or registry == "localhost")
