"""Containerfile reader: instructions with their lines, here-documents and stages.

It reads as BuildKit and buildah do: parser directives at the top, an escape character, comments
between continued lines, here-documents in ADD, COPY and RUN. It never fails.

`find_containerfile_problems` finds what is wrong with a text, without a build.
"""

import difflib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from treenail.api import annotations as key
from treenail.api import documents, machineosconfig, node

_DIRECTIVE = re.compile(r"#[ \t]*([a-zA-Z][a-zA-Z0-9]*)[ \t]*=[ \t]*(.+?)[ \t]*")
_KNOWN_DIRECTIVES = frozenset({"escape", "syntax", "check"})
_HEREDOC = re.compile(r"(\d*)<<(-?)([^<]*)")
_WITH_HEREDOC = frozenset({"ADD", "COPY", "RUN"})
_FLAG = re.compile(r"--[a-zA-Z][a-zA-Z0-9-]*(=|$)")
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::(?P<operator>[-+])(?P<word>[^}]*))?\})"
)
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?(?:/{_COMPONENT})+(?::\w[\w.-]{{0,127}})?"
    r"(?:@sha256:[a-f0-9]{64})?",
    re.ASCII,
)
_BLANK = " \t\v\f\r"
MAX_EXPANDED = 4096
"""Maximum characters of an expanded text: variables in the values of others multiply."""


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document: the text up to a line with its name."""

    name: str
    content: str
    is_closed: bool = True


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``line`` and ``end_line`` count from 1."""

    line: int
    keyword: str
    """In capitals."""
    arguments: str
    """Flags and arguments as one line, without here-documents."""
    end_line: int = 0
    heredocs: tuple[Heredoc, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags before the arguments: ``--from=base``."""
        return _split_flags(self.arguments)[0]

    @property
    def operands(self) -> str:
        """The arguments after the flags."""
        return _split_flags(self.arguments)[1]

    def find_flag(self, name: str) -> str:
        """Return the value of a flag; empty without it."""
        prefix = f"--{name}="
        values = (flag.removeprefix(prefix) for flag in self.flags if flag.startswith(prefix))
        return next(values, "")


@dataclass(frozen=True, slots=True)
class Stage:
    """One build stage, from its FROM to the next one."""

    index: int
    line: int
    image: str
    """The name after FROM, with the values of global arguments; may name an earlier stage."""
    name: str = ""
    """The name after AS as it is written; empty for none. buildah distinguishes case."""


@dataclass(frozen=True, slots=True)
class Containerfile:
    """A parsed Containerfile."""

    instructions: tuple[Instruction, ...] = ()
    stages: tuple[Stage, ...] = ()
    escape: str = "\\"
    directives: tuple[str, ...] = ()
    """The lines with parser directives at the top."""
    length: int = 0
    """Characters of the text."""

    @property
    def global_arguments(self) -> tuple[Instruction, ...]:
        """The ARG instructions before the first FROM; they apply to every FROM."""
        arguments = []
        for instruction in self.instructions:
            if instruction.keyword == "FROM":
                break
            if instruction.keyword == "ARG":
                arguments.append(instruction)
        return tuple(arguments)


# A controller reads the same texts in each pass: a long one takes 1 ms.
@lru_cache(maxsize=128)
def parse_containerfile(text: str) -> Containerfile:
    """Read a Containerfile; any text has a result."""
    lines = text.removeprefix(documents.BYTE_ORDER_MARK).split("\n")
    if lines[-1] == "":
        lines.pop()
    lines = [line.removesuffix("\r") for line in lines]
    directives, escape = _read_directives(lines)
    instructions = tuple(_read_instructions(lines, escape))
    return Containerfile(
        instructions, tuple(_read_stages(instructions)), escape, directives, len(text)
    )


def expand_variables(text: str, values: Mapping[str, str]) -> str:
    """Expand ``$NAME``, ``${NAME}``, ``${NAME:-DEFAULT}`` and ``${NAME:+OTHER}``."""

    def expand(match: re.Match[str]) -> str:
        value = values.get(match["plain"] or match["name"], "")
        if match["operator"] == "-":
            return value or match["word"]
        if match["operator"] == "+":
            return match["word"] if value else ""
        return value

    return _VARIABLE.sub(expand, text)[:MAX_EXPANDED]


def _scan_quotes(text: str, escape: str = "\\") -> Iterator[tuple[str, str, str]]:
    """Yield each character with its escape, as a shell reads it, and the quote that is open."""
    quote, position = "", 0
    while position < len(text):
        raw = char = text[position]
        if char == escape and quote != "'" and position + 1 < len(text):
            char = text[position + 1]
            raw += char
        elif char == quote:
            char = quote = ""
        elif not quote and char in "\"'":
            char, quote = "", char
        yield raw, char, quote
        position += len(raw)


def split_words(text: str, escape: str = "\\") -> list[str]:
    """Split at white space outside of quotes; quotes and escapes stay."""
    words = [""]
    for raw, _, quote in _scan_quotes(text, escape):
        if raw.isspace() and not quote:
            words.append("")
        else:
            words[-1] += raw
    return [word for word in words if word]


def has_open_quote(text: str) -> bool:
    """Return whether a quote is not closed."""
    return any([quote for _, _, quote in _scan_quotes(text)][-1:])


def strip_quotes(word: str) -> str:
    """Return a word as a shell reads it, without its quotes and escapes."""
    return "".join(char for _, char, _ in _scan_quotes(word))


def _read_directives(lines: list[str]) -> tuple[tuple[str, ...], str]:
    """Return the lines with directives, and the escape character."""
    directives: list[str] = []
    escape = "\\"
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip(_BLANK))
        if match is None:
            break
        name = match[1].lower()
        if name not in _KNOWN_DIRECTIVES:
            break
        if name == "escape" and match[2] in ("\\", "`"):
            escape = match[2]
        directives.append(line)
    return tuple(directives), escape


def _read_instructions(lines: list[str], escape: str) -> Iterator[Instruction]:
    escaped = re.escape(escape)
    continued = re.compile(rf"(.*[^{escaped}])?{escaped}[ \t]*", re.DOTALL)
    position = 0
    while position < len(lines):
        start = position
        position += 1
        text = lines[start].lstrip(_BLANK)
        if not text or text.startswith("#"):
            continue
        match = continued.fullmatch(text)
        text, is_open = ((match[1] or ""), True) if match else (text, False)
        while is_open and position < len(lines):
            line = lines[position]
            position += 1
            # Comments and empty lines between continued lines are left out.
            if not line.strip(_BLANK) or line.lstrip(_BLANK).startswith("#"):
                continue
            match = continued.fullmatch(line)
            more, is_open = ((match[1] or ""), True) if match else (line, False)
            text += more
        heredocs, position = _read_heredocs(text, lines, position)
        keyword, _, arguments = _partition_space(text.strip())
        yield Instruction(start + 1, keyword.upper(), arguments, position, heredocs)


def _partition_space(text: str) -> tuple[str, str, str]:
    match = re.search(r"\s+", text)
    if match is None:
        return text, "", ""
    return text[: match.start()], " ", text[match.end() :].strip()


def _read_heredocs(text: str, lines: list[str], position: int) -> tuple[tuple[Heredoc, ...], int]:
    """Read the here-documents that an instruction begins; return them and the next position."""
    keyword, _, arguments = _partition_space(text.strip())
    if keyword.upper() == "ONBUILD":
        keyword, _, arguments = _partition_space(arguments)
    if keyword.upper() not in _WITH_HEREDOC or "<<" not in arguments or _is_exec_form(arguments):
        return (), position
    heredocs: list[Heredoc] = []
    # A shell reads these words: its escape character is that of no directive.
    if has_open_quote(arguments):
        return (), position
    for word in split_words(arguments):
        match = _HEREDOC.fullmatch(word)
        name = strip_quotes(match[3]) if match else ""
        if match is None or not name:
            continue
        content: list[str] = []
        is_closed = False
        while position < len(lines) and not is_closed:
            line = lines[position]
            position += 1
            is_closed = (line.lstrip("\t") if match[2] else line) == name
            if not is_closed:
                content.append(line + "\n")
        heredocs.append(Heredoc(name, "".join(content), is_closed))
    return tuple(heredocs), position


def _is_exec_form(arguments: str) -> bool:
    operands = _split_flags(arguments)[1]
    return operands.startswith("[") and operands.endswith("]")


def _split_flags(arguments: str) -> tuple[tuple[str, ...], str]:
    flags: list[str] = []
    rest = arguments
    while True:
        word, _, after = _partition_space(rest)
        if not _FLAG.match(word):
            return tuple(flags), rest
        flags.append(word)
        rest = after


def _read_stages(instructions: Iterable[Instruction]) -> Iterator[Stage]:
    index = 0
    for instruction, names in list_images(instructions, node.DEFAULT_ARCHITECTURE):
        if instruction.keyword == "FROM":
            yield Stage(index, instruction.line, "".join(names), _read_stage_name(instruction))
            index += 1


def _read_stage_name(instruction: Instruction) -> str:
    words = instruction.operands.split()
    has_name = len(words) == _FROM_AS_WORDS and words[1].upper() == "AS"
    return words[2] if has_name else ""


def list_images(
    instructions: Iterable[Instruction], architecture: str
) -> Iterator[tuple[Instruction, tuple[str, ...]]]:
    """Yield each instruction with the images and stages that it names, as buildah 1.28 does.

    FROM has the values of ARG before the first FROM, COPY those of ARG in its stage, and RUN also
    those of ENV, which win. An ARG without a value has the one before the first FROM, or that of
    the platform. ENV of a base image is not known.
    """
    values = {"PLATFORM": f"linux/{architecture}", "OS": "linux", "ARCH": architecture}
    # buildah runs on the architecture that it builds for.
    platform = {
        f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in values.items()
    }
    platform |= {"TARGETVARIANT": "", "BUILDVARIANT": ""}
    heading: dict[str, str] = {}
    arguments, environment = heading, dict[str, str]()
    environments: dict[str, dict[str, str]] = {}
    for instruction in instructions:
        keyword = instruction.keyword
        names: tuple[str, ...] = ()
        if keyword == "FROM":
            words = instruction.operands.split()
            names = tuple(strip_quotes(expand_variables(word, heading)) for word in words[:1])
            arguments = {}
            environment = dict(environments.get("".join(names), {}))
            environments[_read_stage_name(instruction)] = environment
        elif keyword == "ARG":
            outer = platform if arguments is heading else {**platform, **heading}
            for word in split_words(instruction.arguments):
                name, equals, value = word.partition("=")
                if equals:
                    values = {**environment, **arguments}
                    arguments[name] = expand_variables(strip_quotes(value), values)
                elif name in outer:
                    arguments.setdefault(name, outer[name])
        elif keyword == "ENV":
            words = split_words(instruction.operands)
            if words and "=" not in words[0]:  # the older form: ENV NAME VALUE
                words = ["=".join((words[0], *words[1:]))]
            for word in words:
                name, _, value = word.partition("=")
                values = {**arguments, **environment}
                environment[name] = expand_variables(strip_quotes(value), values)
        else:
            values = {**arguments, **environment} if keyword == "RUN" else arguments
            names = tuple(
                strip_quotes(expand_variables(name, values))
                for name in _find_image_options(instruction)
            )
        yield instruction, names


def _find_image_options(instruction: Instruction) -> list[str]:
    """Return the value of ``--from``, and those of ``from`` in each ``--mount``."""
    if instruction.keyword in _WITH_SOURCE:
        prefix = "--from="
        return [flag.removeprefix(prefix) for flag in instruction.flags if flag.startswith(prefix)]
    return [
        option.removeprefix("from=")
        for flag in instruction.flags
        if instruction.keyword == "RUN" and flag.startswith("--mount=")
        for option in flag.removeprefix("--mount=").split(",")
        if option.startswith("from=")
    ]


_FROM_AS_WORDS = 3


OWN_PREFIX = ".treenail-"
"""Names of our own files in the context begin with this."""


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
    text: str,
    *,
    stages: Collection[str] = (CONFIGS_STAGE,),
    limit: int = machineosconfig.CONTAINERFILE_LIMIT,
) -> tuple[documents.LineProblem, ...]:
    """Find the problems of a user's Containerfile, in the order of its lines.

    ``stages`` are the stages before the text. A text without instructions has no problem: nothing
    is built from it.
    """
    if len(text) > limit:
        return (
            documents.LineProblem(
                0,
                f"expected at most {limit} characters, found {len(text)}",
                "move files into the ConfigMap that the annotation treenail.io/context names, "
                "and copy them",
            ),
        )
    parsed = parse_containerfile(text)
    if not parsed.instructions:
        return ()
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        return (
            documents.LineProblem(
                line, "it has a NUL character, and is no text", "save the file as UTF-8"
            ),
        )
    problems = [
        *_find_directive_problems(parsed),
        *_find_instruction_problems(parsed),
        *_find_stage_problems(parsed, stages),
    ]
    problems.sort(key=lambda problem: problem.line)
    return tuple(problems[:MAX_PROBLEMS])


def _find_directive_problems(parsed: Containerfile) -> Iterator[documents.LineProblem]:
    names: set[str] = set()
    for number, line in enumerate(parsed.directives, 1):
        name, _, value = line.lstrip("# \t").partition("=")
        name, value = name.strip().lower(), value.strip()
        if name in names:
            yield documents.LineProblem(
                number, f"the directive {name} appears twice", "remove one of them"
            )
        names.add(name)
        if name == "escape" and value not in ("\\", "`"):
            yield documents.LineProblem(
                number, f"expected escape=\\ or escape=`, found {value!r:.20}", "correct it"
            )


def _find_instruction_problems(
    parsed: Containerfile,
) -> Iterator[documents.LineProblem]:
    for instruction in parsed.instructions:
        if instruction.keyword not in KEYWORDS:
            yield _describe_unknown(instruction)
        elif not instruction.operands:
            yield documents.LineProblem(
                instruction.line,
                f"{instruction.keyword} has no argument",
                f"write what {instruction.keyword} applies to, or remove the line",
            )
        elif instruction.keyword == "SHELL" and not instruction.operands.startswith("["):
            yield documents.LineProblem(
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
                yield documents.LineProblem(
                    instruction.line,
                    f"the here-document {heredoc.name:.40} has no end",
                    f"add a line with only {heredoc.name:.40}",
                )


def _describe_unknown(instruction: Instruction) -> documents.LineProblem:
    close = difflib.get_close_matches(instruction.keyword[:40], sorted(KEYWORDS), 1)
    return documents.LineProblem(
        instruction.line,
        f"unknown instruction {instruction.keyword!r:.40}",
        f"write {close[0]}" if close else "end the line before it with \\ if it continues that one",
    )


def _check_pairs(instruction: Instruction, escape: str) -> Iterator[documents.LineProblem]:
    words = split_words(instruction.operands, escape)
    # The older form: ENV NAME VALUE.
    is_older = "=" not in words[0]
    wrong = [word for word in words if "=" not in word]
    if is_older and len(words) >= _FIRST_OPERANDS:
        return
    if is_older or wrong:
        yield documents.LineProblem(
            instruction.line,
            f"{instruction.keyword}: expected NAME=VALUE, found {wrong[0]!r:.40}",
            "quote values with spaces",
        )


def _check_source(instruction: Instruction) -> Iterator[documents.LineProblem]:
    if len(instruction.operands.split()) < _FIRST_OPERANDS and not instruction.operands.startswith(
        "["
    ):
        yield documents.LineProblem(
            instruction.line,
            f"{instruction.keyword}: expected a source and a destination, found one argument",
            f"write {instruction.keyword} SOURCE DESTINATION",
        )


def _find_stage_problems(
    parsed: Containerfile, stages: Collection[str]
) -> Iterator[documents.LineProblem]:
    first = next(
        (instruction for instruction in parsed.instructions if instruction.keyword != "ARG"), None
    )
    if not parsed.stages:
        yield documents.LineProblem(
            0, "there is no FROM", f"begin with: FROM {CONFIGS_STAGE} AS final"
        )
        return
    if first is not None and first.keyword in KEYWORDS and first.keyword != "FROM":
        yield documents.LineProblem(
            first.line,
            f"{first.keyword} stands before the first FROM",
            "move it below FROM; only ARG may stand before it",
        )
    known = {*stages, _SCRATCH}
    by_line = {stage.line: stage for stage in parsed.stages}
    for instruction, names in list_images(parsed.instructions, node.DEFAULT_ARCHITECTURE):
        if instruction.keyword == "FROM" and instruction.operands:
            stage = by_line[instruction.line]
            yield from _check_from(instruction, stage, known)
            known.add(stage.name or _SCRATCH)
            continue
        for name in names:
            yield from _check_reference(instruction, name, known)


def _check_from(
    instruction: Instruction, stage: Stage, known: set[str]
) -> Iterator[documents.LineProblem]:
    words = instruction.operands.split()
    if len(words) > 1 and not stage.name:
        yield documents.LineProblem(
            instruction.line,
            f"expected FROM IMAGE AS NAME, found {instruction.operands!r:.60}",
            "correct it",
        )
    elif stage.name and not _STAGE_NAME.fullmatch(stage.name.lower()):
        yield documents.LineProblem(
            instruction.line,
            f"{stage.name!r:.60} is not a name of a stage",
            "use letters, digits, - _ and . after a letter",
        )
    if not stage.image:
        yield documents.LineProblem(
            instruction.line,
            f"{words[0]!r:.60} is empty: no ARG before the first FROM sets it",
            "set it with ARG NAME=VALUE at the top",
        )
    else:
        yield from _check_image(instruction, "FROM", stage.image, known)


def _check_reference(
    instruction: Instruction, reference: str, known: set[str]
) -> Iterator[documents.LineProblem]:
    if reference.isdecimal():
        yield documents.LineProblem(
            instruction.line,
            f"{instruction.keyword} names stage {reference:.10} by its number, and other stages "
            "precede the text",
            "name the stage: FROM IMAGE AS NAME",
        )
    elif not reference:
        yield documents.LineProblem(
            instruction.line,
            f"{instruction.keyword} names no image: no ARG of this stage sets the variable",
            "write ARG NAME=VALUE between FROM and this line; for a value before the first FROM "
            "write ARG NAME there",
        )
    else:
        yield from _check_image(instruction, f"{instruction.keyword} from", reference, known)


def _check_image(
    instruction: Instruction, what: str, name: str, known: set[str]
) -> Iterator[documents.LineProblem]:
    if name in known:
        return
    if not is_qualified(name) and "$" not in name:
        yield _describe_short_name(instruction, what, name, known)
    elif not _IMAGE.fullmatch(name):
        yield documents.LineProblem(
            instruction.line,
            f"{what} {name!r:.100} is no name of an image",
            "write a variable with a default as ${NAME:-DEFAULT}"
            if "$" in name
            else "write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:DIGEST, after the "
            "values of variables, too",
        )


def _describe_short_name(
    instruction: Instruction, what: str, name: str, known: set[str]
) -> documents.LineProblem:
    close = sorted(stage for stage in known if stage.lower() == name.lower())
    return documents.LineProblem(
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


_WHOLE_CONTEXT = (".", "/")


def find_source_problems(text: str, context: Collection[str]) -> Iterator[documents.LineProblem]:
    """Yield the sources of COPY and ADD that are not among the files of the context."""
    for instruction in parse_containerfile(text).instructions:
        if instruction.keyword not in _WITH_SOURCE or instruction.find_flag("from"):
            continue
        for source in _list_sources(instruction):
            name = posixpath.normpath(source).lstrip("/") or "."
            if name in _WHOLE_CONTEXT or name.startswith(OWN_PREFIX):
                continue
            if not any(fnmatchcase(file, name) for file in context):
                yield documents.LineProblem(
                    instruction.line,
                    f"{instruction.keyword} {source:.100}: the build has no such file: its context "
                    f"is the ConfigMap of the annotation {key.BUILD_CONTEXT}, and no directory",
                    "put the file into this ConfigMap, or use COPY --from=IMAGE",
                )


def _list_sources(instruction: Instruction) -> list[str]:
    """Return the sources whose names are plain: no here-documents, URLs and variables."""
    operands = instruction.operands
    words: list[str] = []
    if operands.startswith("["):
        try:
            decoded = json.loads(operands)
        except (ValueError, RecursionError):
            return []
        words = [word for word in decoded if isinstance(word, str)]
    elif not has_open_quote(operands):
        words = [strip_quotes(word) for word in split_words(operands)]
    return [
        word
        for word in words[:-1]
        if word and "<<" not in word and "$" not in word and "://" not in word and "@" not in word
    ]
