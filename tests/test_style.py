"""The house rules that a linter does not know, read from the sources."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAX_LINES = 700

# Words that say nothing about the thing they name.
EMPTY_WORDS = {
    "common", "helper", "helpers", "impl", "misc", "util", "utils",
}  # fmt: skip
KUBERNETES_NAME = re.compile(r"field_?manager|string_?data", re.IGNORECASE)
EMPTY_NAME = re.compile(r"(do_[a-z]\w*|process_\w+|data|\w+_data|\w+Data)")

# A reason follows on the same line or stands above it, or the linter is right.
UNREASONED = re.compile(r"# noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*\s*$")

# Places that exist on one machine only. The agent may not even name a place that all users share.
WORKPLACE = re.compile(r"[/]work[/]|[.][.]/shared(?!/oracle)|[/]root/\.pyenv|file:[/]//opt")
SHARED_BY_ALL = re.compile(r"(/var)?/tmp/")

# Sentences that a reader from the field has to read twice; CONTRIBUTING.md has the plain words.
IDIOMS = re.compile(
    r"\b(told|asked for|nobody|somebody|whoever|anew|for good|in the way of|by itself|mend(s|ed)?"
    r"|(is|are|was|were) to (be|have)|put right|puts right|as a whole|given out|way back"
    r"|no more(?! than)|any more(?! than))\b",
    re.IGNORECASE,
)
RIDDLE = re.compile(r"(What|Have|Who|Whoever) ")

STAND_INS = {"monkeypatch.setattr", "time.sleep"}

SENTENCE_WORDS = 2
FUNCTIONS = {ast.FunctionDef, ast.AsyncFunctionDef}


@dataclass(frozen=True, slots=True)
class Definition:
    """A class, a function or the module itself."""

    kind: type[ast.AST]
    name: str
    line: int
    docstring: str
    decorators: tuple[str, ...] = ()


@cache
def list_definitions(text: str) -> tuple[Definition, ...]:
    """Return the module, its classes and functions: each source is parsed once for all rules."""
    tree = ast.parse(text)
    found = [Definition(ast.Module, "module", 1, ast.get_docstring(tree) or "")]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = tuple(map(ast.unparse, node.decorator_list))
            docstring = ast.get_docstring(node) or ""
            found.append(Definition(type(node), node.name, node.lineno, docstring, decorators))
    return tuple(found)


def list_functions(text: str) -> list[Definition]:
    return [each for each in list_definitions(text) if each.kind in FUNCTIONS]


def list_classes(text: str) -> list[Definition]:
    return [each for each in list_definitions(text) if each.kind is ast.ClassDef]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def findings(rule: str, paths: list[Path]) -> list[str]:
    """One line for each place below ``paths`` that breaks ``rule``."""
    return [
        f"{path.relative_to(ROOT)}:{found}"
        for path in paths
        for found in RULES[rule](path.stem, path.read_text())
    ]


def too_long(_stem: str, text: str) -> Iterator[str]:
    """A module that is not one noun."""
    if (lines := text.count("\n")) > MAX_LINES:
        yield f"{lines}: longer than {MAX_LINES} lines"


def nothing_said(_stem: str, text: str) -> Iterator[str]:
    """A module that does not say what it is for."""
    if text and not list_definitions(text)[0].docstring:
        yield "1: no docstring"


def empty_name(stem: str, text: str) -> Iterator[str]:
    """A name of a module, class or function that could be that of any other."""
    named = [(1, stem)]
    named += [(each.line, each.name) for each in list_definitions(text)[1:]]
    for line, whole in named:
        name = KUBERNETES_NAME.sub("", whole)
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        if words & EMPTY_WORDS or EMPTY_NAME.fullmatch(name):
            yield f"{line}: {whole} says nothing"


def idiom(_stem: str, text: str) -> Iterator[str]:
    """A phrase that plain technical English has an ordinary word for."""
    for number, line in enumerate(text.splitlines(), start=1):
        for found in IDIOMS.finditer(line):
            yield f"{number}: {found.group(0)}: {line.strip()}"


def riddle(_stem: str, text: str) -> Iterator[str]:
    """A docstring whose first line is neither an imperative nor a noun phrase."""
    for each in list_definitions(text):
        if RIDDLE.match(each.docstring):
            yield f"{each.line}: {each.name}: {each.docstring.splitlines()[0]}"


def open_value(_stem: str, text: str) -> Iterator[str]:
    """A value that somebody may change under its reader."""
    for each in list_classes(text):
        for decorator in each.decorators:
            if decorator.startswith("dataclass") and not (
                "frozen=True" in decorator and "slots=True" in decorator
            ):
                yield f"{each.line}: {each.name} is not frozen and slotted"


def unreasoned(_stem: str, text: str) -> Iterator[str]:
    """A linter overruled without a reason."""
    above = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if UNREASONED.search(line) and not above.lstrip().startswith("# "):
            yield f"{number}: no reason beside it"
        above = line


def workplace(_stem: str, text: str) -> Iterator[str]:
    """A path that exists on one machine only."""
    for number, line in enumerate(text.splitlines(), start=1):
        if WORKPLACE.search(line):
            yield f"{number}: {line.strip()}"


def shared_by_all(_stem: str, text: str) -> Iterator[str]:
    """A path in a directory where other users can plant links."""
    for number, line in enumerate(text.splitlines(), start=1):
        if SHARED_BY_ALL.search(line):
            yield f"{number}: {line.strip()}"


def stand_in(_stem: str, text: str) -> Iterator[str]:
    """A test that replaces code instead of passing a fake, or that sleeps.

    A ``wait_until`` may: it waits for a condition, with a limit.
    """
    tree = ast.parse(text)
    waiting = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "wait_until"
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if {"mock", "unittest.mock"} & set(names):
                yield f"{node.lineno}: imports mock"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and id(node) not in waiting
            and (name := f"{node.value.id}.{node.attr}") in STAND_INS
        ):
            yield f"{node.lineno}: {name}"


def no_sentence(_stem: str, text: str) -> Iterator[str]:
    """A test whose name does not say what holds."""
    for each in list_functions(text):
        if each.name.startswith("test_") and each.name.count("_") < SENTENCE_WORDS:
            yield f"{each.line}: {each.name} is no sentence"


RULES = {
    rule.__name__: rule
    for rule in (
        too_long, nothing_said, empty_name, open_value, unreasoned, workplace,
        shared_by_all, stand_in, no_sentence, idiom, riddle,
    )
}  # fmt: skip


@pytest.mark.parametrize("rule", ["too_long", "nothing_said", "empty_name"])
def test_modules_are_short_and_say_what_they_are(rule: str) -> None:
    assert findings(rule, sources("agent", "lab", "bench")) == []


def test_texts_for_users_are_plain_english() -> None:
    documents = [
        path
        for pattern in (
            "*.md",
            "docs/*.md",
            "rpm/man/*.md",
            "rpm/*.spec",
            "systemd/*",
            "vm-tests/*.md",
        )
        for path in sorted(ROOT.glob(pattern))
    ]
    assert findings("idiom", documents) == []


@pytest.mark.parametrize("rule", ["idiom", "riddle"])
def test_sources_are_plain_english(rule: str) -> None:
    paths = sources("agent", "lab", "bench", "tests", "vm-tests", "tools")
    assert findings(rule, [path for path in paths if path != Path(__file__)]) == []


def test_class_names_exist_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sources("agent", "lab"):
        for each in list_classes(path.read_text()):
            places.setdefault(each.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_values_of_the_pure_rows_never_change() -> None:
    pure = sources("agent/treenail/api", "agent/treenail/config", "agent/treenail/update")
    assert findings("open_value", pure) == []


def test_the_linter_is_overruled_with_a_reason() -> None:
    assert findings("unreasoned", sources("agent", "lab", "bench", "tests", "vm-tests")) == []


def test_the_agent_shares_no_directory_with_other_users() -> None:
    paths = sources("agent")
    assert findings("shared_by_all", paths) == []


def test_tests_use_fakes_and_do_not_sleep() -> None:
    assert findings("stand_in", sources("tests")) == []


def test_tests_are_named_as_sentences() -> None:
    assert findings("no_sentence", sources("tests", "vm-tests")) == []


@pytest.mark.process
@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_no_file_names_the_place_where_it_was_written() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert findings("workplace", [path for path in paths if path.is_file() and is_text(path)]) == []


def is_text(path: Path) -> bool:
    """Return whether a file is no image, archive or fuzzed input."""
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("too_long", "\n" * 701),
        ("nothing_said", "import os"),
        ("empty_name", "class UnitHelper: ..."),
        ("empty_name", "def process_node(): ..."),
        ("empty_name", "def node_utils(): ..."),
        ("empty_name", "class NodeData: ..."),
        ("open_value", "@dataclass(frozen=True)\nclass A: ..."),
        ("unreasoned", "x = 1  # noqa: S101"),
        ("workplace", "see /" + "work/main"),
        ("shared_by_all", "open('/tmp/a')"),
        ("stand_in", "from unittest.mock import Mock"),
        ("stand_in", "from unittest import mock"),
        ("stand_in", "time.sleep(1)"),
        ("stand_in", "monkeypatch.setattr(a, 'b', 1)"),
        ("no_sentence", "def test_plan(): ..."),
        ("idiom", "# the wish is " + "told"),
        ("idiom", "x = 'it is " + "to be" + " written'"),
        ("riddle", 'def f():\n    """What is done."""'),
    ],
)
def test_a_planted_lapse_is_found(rule: str, text: str) -> None:
    assert len(list(RULES[rule]("thing", text))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("empty_name", "def data_url(): ...\ndef processor(): ...\ndef field_manager(): ..."),
        ("open_value", "@dataclass(frozen=True, slots=True)\nclass A: ..."),
        ("unreasoned", "x = 1  # noqa: S101  # the reason"),
        ("unreasoned", "# The reason.\nx = 1  # noqa: S101"),
        ("stand_in", "clock.sleep(1)"),
        ("no_sentence", "def test_a_node_rests(): ..."),
        ("idiom", "x = 'no more than one'"),
        ("riddle", 'def f():\n    """Return what is done."""'),
    ],
)
def test_what_keeps_the_rules_is_not_found(rule: str, text: str) -> None:
    assert list(RULES[rule]("thing", text)) == []
