"""Every reader survives its seeds and the inputs that the fuzzer found; the fuzzer's own parts."""

import itertools
import json
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz.mutate import Mutator, collect_words, format_dictionary
from tests.fuzz.run import FuzzReport, format_report, minimize_input
from tests.fuzz.target import DATA, FuzzTarget, Grammar, list_recorded, run_input
from tests.fuzz.targets import load_all_targets
from treenail.errors import ConfigError

TARGETS = {name: target for name, (_, target) in load_all_targets().items()}
SEEDS = 4
"""Seeds of each target here; the fuzzer runs all."""
RECORDED = [
    pytest.param(target, path, id=f"{target.name}-{path.name}")
    for target in TARGETS.values()
    for path in list_recorded(target.name)
]


@pytest.mark.parametrize(("target", "path"), RECORDED)
def test_recorded_input_is_read_or_refused(target: FuzzTarget, path: Path) -> None:
    finding = run_input(target, path.read_bytes())
    assert finding is None, finding.details


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda each: each.name)
def test_seed_is_read_or_refused(target: FuzzTarget) -> None:
    for content in islice(target.seeds(), SEEDS):
        finding = run_input(target, content)
        assert finding is None, finding.details


def test_each_directory_of_recorded_inputs_has_a_target() -> None:
    assert {path.name for path in DATA.iterdir()} <= TARGETS.keys()


def read_strictly(content: bytes) -> Iterable[str]:
    """A reader with each fault that the fuzzer looks for."""
    match content[:1]:
        case b"r":
            raise ConfigError("refused \x1b[2J", remedy="wait")
        case b"k":
            raise KeyError(content)
        case b"m":
            raise ConfigError("x" * 10_000)
        case b"h":
            while True:
                pass
        case _:
            return ["shown \x1b[2J"]


def make_target(grammar: Grammar = Grammar.BYTES) -> FuzzTarget:
    return FuzzTarget("test", read_strictly, lambda: (), grammar)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"r", None),
        (b"", None),
        (b"k", "KeyError-unknown"),
        (b"m", "long-unknown"),
        (b"h", "slow-unknown"),
    ],
)
def test_fault_of_a_reader_is_a_finding(content: bytes, key: str | None) -> None:
    finding = run_input(make_target(), content, cpu_limit_s=0.05)
    assert (finding.key if finding else None) == key


def test_control_character_that_reaches_the_terminal_is_a_finding() -> None:
    finding = run_input(make_target(), b"r", open_terminal=lambda stream: stream)
    assert finding is not None
    assert finding.key == "control-character"


def test_minimized_input_keeps_its_finding() -> None:
    target = FuzzTarget("test", _fail_with_both, lambda: ())
    finding = run_input(target, b"xx{yyy}zz")
    assert finding is not None
    assert minimize_input(target, b"xx{yyy}zz", finding) == b"{}"


def _fail_with_both(content: bytes) -> None:
    if b"{" in content and b"}" in content:
        raise KeyError


@pytest.mark.parametrize("grammar", [Grammar.JSON, Grammar.YAML])
def test_mutated_document_mostly_stays_a_document(grammar: Grammar) -> None:
    seed = json.dumps({"a": [1, {"b": "text 12"}], "c": {"d": None}}).encode()
    mutator = Mutator(grammar, ("word",), [seed], lambda content, _limit: content[::-1])
    found = [mutator.mutate(seed, 2000, number) for number in range(200)]
    assert len(set(found)) > 100
    assert all(len(each) <= 2000 for each in found)
    valid = sum(mutator._load(each) is not None for each in found)
    assert valid > 120


@pytest.mark.parametrize(
    "seed",
    [
        b"a: &a [x, x, x, x]\n"
        + b"".join(
            f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n".encode()
            for before, name in itertools.pairwise("abcdefghijklm")
        ),
        b"a: &a [*a, *a]\n",
    ],
    ids=["long", "endless"],
)
def test_document_of_aliases_is_changed_by_bytes(seed: bytes) -> None:
    mutator = Mutator(Grammar.YAML, ("word",), [seed], lambda content, _limit: content[::-1])
    assert {mutator.mutate(seed, 2000, number) for number in range(20)} == {seed[::-1]}


def test_mutated_lines_stay_within_the_limit() -> None:
    choice = random.Random(1)
    mutator = Mutator(Grammar.LINES, ("FROM",), [], lambda content, _limit: content + b"xx")
    content = b"FROM a\nRUN b\n"
    for _ in range(200):
        content = mutator.mutate(content, 300, choice.randrange(2**32))
        assert len(content) <= 300


def test_dictionary_has_words_of_the_sources() -> None:
    words = collect_words("treenail.api.machineconfig")
    assert "osImageURL" in words
    assert '"a\\x2fb"\n' in format_dictionary(["a/b"])


def test_report_names_what_was_found() -> None:
    report = FuzzReport("yaml", 60.0, 55.0, 6000, 10, 20, 5, ("KeyError-x",), 0)
    assert "6000 inputs (  100/s)  coverage 10 to 20  found: KeyError-x" in format_report(report)
