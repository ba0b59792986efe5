"""Documents are read as Go's clients read them: k8s.io/apimachinery and sigs.k8s.io/yaml.

TREENAIL_TEST_GO_YAML names a program around NewYAMLOrJSONDecoder. It reads ``{"mode": "stream",
"text": TEXT}`` a line, and answers ``{"values": [...], "error": TEXT}`` a line.
TREENAIL_TEST_GO_YAML_DOCUMENTS is the number of documents (default: 5000), and
TREENAIL_TEST_GO_YAML_SEED the first seed. docs/fidelity.md counts the differences.
"""

import collections
import json
import logging
import os
import random
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from treenail.api import documents
from treenail.errors import ConfigError

log = logging.getLogger(__name__)

VARIABLE = "TREENAIL_TEST_GO_YAML"
PROGRAM = os.environ.get(VARIABLE, "")
COUNT = int(os.environ.get(f"{VARIABLE}_DOCUMENTS", "5000"))
SEED = int(os.environ.get(f"{VARIABLE}_SEED", "0"))

# Documents and their values; kubectl and the Machine Config Operator read the same.
CASES = [
    pytest.param("a: |\n  x\n  y", [{"a": "x\ny\n"}], id="literal"),
    pytest.param("a: >\n  x\n  y", [{"a": "x y\n"}], id="folded"),
    pytest.param("a: |+\n  x", [{"a": "x\n"}], id="kept"),
    pytest.param("a: |+\n  x\n\n", [{"a": "x\n\n"}], id="kept-lines"),
    pytest.param("a: |-\n  x", [{"a": "x"}], id="stripped"),
    pytest.param("a: |2\n    x", [{"a": "  x\n"}], id="indented"),
    pytest.param("a: |\n  x\n  ", [{"a": "x\n"}], id="spaces-at-the-end"),
    pytest.param("a: |", [{"a": ""}], id="empty-block"),
    pytest.param("a:\r\n- |\r\n  x\r\n  y", [{"a": ["x\ny\n"]}], id="line-ends-of-windows"),
    pytest.param("a: |\n  x\n---\nb: |\n  y", [{"a": "x\n"}, {"b": "y\n"}], id="two-documents"),
    pytest.param("a: 'x\n  y'", [{"a": "x y"}], id="quoted"),
    pytest.param("a: x\n  y", [{"a": "x y"}], id="plain"),
    pytest.param("a: 1 # c", [{"a": 1}], id="comment"),
    pytest.param('{"a":1}\n{"b":"y"}', [{"a": 1}, {"b": "y"}], id="stream-of-json"),
    pytest.param(' \n{"a":1}{"b":2}\n', [{"a": 1}, {"b": 2}], id="stream-without-line-ends"),
    pytest.param('{"a":1}\n---\nb: y\n', [{"a": 1}, {"b": True}], id="json-and-yaml"),
    pytest.param("<<: {c: 2}\nc: 1", [{"c": 1}], id="merge-before-a-key"),
    pytest.param("c: 1\n<<: {c: 2}", [{"c": 2}], id="merge-after-a-key"),
    pytest.param("c: 0\n<<: [{c: 1}, {c: 2, d: 3}]", [{"c": 1, "d": 3}], id="merge-of-a-list"),
    pytest.param("{a: y}", [{"a": True}], id="flow"),
]


@pytest.mark.parametrize(("text", "values"), CASES)
def test_document_has_the_values_that_clients_in_go_read(text: str, values: list[object]) -> None:
    assert documents.load_documents(text, where="f") == values
    assert documents.load_documents(text.encode(), where="f") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a":1}\n{"b":2,,}',
            "f, line 2, column 1: not YAML: did not find expected <document start>",
        ),
        ("a: {{ .Port }}", "f, line 1, column 5: a template that was not rendered"),
        ("{{ .Kind }}: x", "f, line 1, column 2: a template that was not rendered"),
        ("a: 1\n{{- if .b }}\n", "f, line 3, column 1: a template that was not rendered"),
        ("a:\n  {% if b %}", "f, line 2, column 4: a template that was not rendered"),
        ("? {a: 1}\n: x", "f, line 1, column 3: a key that is not a string; quote it"),
        ("<<:", "f, line 1, column 4: a merge key needs a mapping"),
        ("1e7: x", "f, line 1, column 1: a key that is not a string; quote it"),
        ("1e20: x", "f, line 1, column 1: a key that is not a string; quote it"),
        ("18446744073709551615: x", "f, line 1, column 1: a key that is not a string"),
    ],
)
def test_document_that_is_refused_has_its_cause(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        documents.load_documents(text, where="f")
    assert str(caught.value).startswith(message)


WORDS = r"""a b c x y n 0 1 -1 1.5 ~ . - = << yes No on OFF true NULL null 0o17 017 0x1F 0b11 1e3
1_000 1:20 .5 +.5 .inf -.inf .nan 2020-01-01 2001-12-14T21:59:43.10-05:00 08 0.1 1e400
18446744073709551615 99999999999999999999 a#b #a é \u2028 @a %a &a *a !a | > [ } it's
say"x" \ a\n ? : , a,b http://x/y?z /etc/a.conf {{x}}"""
SCALARS = (*WORDS.split(), "", " ", "a b", "a: b", "a #b", "a\tb", 'say "x"')
TAGS = ("!!str", "!!int", "!!float", "!!bool", "!!null", "!", "!!binary", "!x")
LINES = (
    "[Service]",
    "ExecStart=/bin/true %i",
    "  indented",
    "",
    "# c",
    "a: b",
    "\ttab",
    "- x",
    "é",
)


class _RandomText:
    """A random document in all styles of YAML, and sometimes with a few wrong characters."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._anchors = 0

    def make(self) -> str:
        pick = self._random
        kinds: list[Callable[[], str]] = [self._document] * 8 + [self._stream, self._json]
        text = pick.choice(kinds)()
        if pick.random() < 0.25:
            text = text.replace("\n", "\r\n")
        if pick.random() < 0.5:
            text = text.rstrip("\n")
        for _ in range(pick.choice((0, 0, 0, 1, 3)) if text else 0):
            at = pick.randrange(len(text) + 1)
            wrong = pick.choice(":-?#&*!|>'\"%@`[]{},\t \n~<=ab1")
            text = text[:at] + wrong + text[at + pick.randrange(2) :]
        return text

    def _stream(self) -> str:
        ends = ("---\n", "--- \n", "--- # c\n", "...\n---\n", "---\n---\n")
        parts = [self._document() for _ in range(self._random.randrange(1, 4))]
        return self._random.choice(("", "---\n")) + self._random.choice(ends).join(parts)

    def _json(self) -> str:
        pick = self._random
        objects = [
            json.dumps({"a": pick.choice(SCALARS), "b": [pick.randrange(9), None, 1.5, True]})
            for _ in range(pick.randrange(1, 4))
        ]
        return pick.choice(("\n", "", "\n---\n", " \n\n")).join(objects) + "\n"

    def _document(self) -> str:
        return self._mapping(0)

    def _mapping(self, depth: int) -> str:
        pick, indent, lines = self._random, "  " * depth, []
        for name in pick.sample("abcdefgh", pick.randrange(1, 5)):
            key = pick.choice(
                (name, name, name, f'"{name}"', f"'{name}'", f"{name} ", pick.choice(SCALARS))
            )
            if pick.random() < 0.1:
                lines.append(f"{indent}# comment")
            if pick.random() < 0.05:
                lines.append(f"{indent}<<: {pick.choice(('{a: 1, b: 2}', '[{a: 3}, {c: 4}]'))}")
            lines.append(f"{indent}{key}:{self._value(depth)}")
        return "\n".join(lines) + "\n"

    def _value(self, depth: int) -> str:
        pick = self._random
        choice = pick.random()
        if depth < 3 and choice < 0.15:
            return "\n" + self._mapping(depth + 1).rstrip("\n")
        if depth < 3 and choice < 0.3:
            indent = "  " * (depth + pick.randrange(2))
            return "".join(
                f"\n{indent}-{self._value(depth + 1)}" for _ in range(pick.randrange(1, 4))
            )
        if choice < 0.5:
            return self._block(depth)
        if choice < 0.6:
            return f" {self._flow(0)}"
        if choice < 0.66 and self._anchors:
            return f" *a{pick.randrange(self._anchors)}"
        scalar = self._scalar()
        if choice < 0.72:
            self._anchors += 1
            return f" &a{self._anchors - 1} {scalar}"
        if choice < 0.76:
            return f" {pick.choice(TAGS)} {scalar}"
        return f" {scalar}{pick.choice(('', '', '', ' # c', ' '))}"

    def _scalar(self) -> str:
        pick, text = self._random, self._random.choice(SCALARS)
        style = pick.randrange(5)
        if style == 0:
            return json.dumps(text, ensure_ascii=pick.random() < 0.5)
        if style == 1:
            return "'" + text.replace("'", "''") + "'"
        return text

    def _block(self, depth: int) -> str:
        pick = self._random
        indent = "  " * (depth + 1)
        head = pick.choice("|>") + pick.choice(("", "", "", "-", "+", "2", "2-", "+1"))
        lines = [
            f"{indent}{line}" if line else pick.choice(("", indent, " "))
            for line in pick.choices(LINES, k=pick.randrange(5))
        ]
        return "\n".join([f" {head}{pick.choice(('', '', ' # c'))}", *lines])

    def _flow(self, depth: int) -> str:
        pick = self._random
        if depth > 2 or pick.random() < 0.4:
            return self._scalar() or "''"
        parts = [self._flow(depth + 1) for _ in range(pick.randrange(4))]
        if pick.random() < 0.5:
            return f"[{', '.join(parts)}]"
        named = (f"{name}: {part}" for name, part in zip("abcd", parts, strict=False))
        return "{" + ", ".join(named) + "}"


DIFFERENCES = {
    "refused: duplicate key": "duplicate key",
    "refused: a tag without a JSON type": "a tag without a JSON type",
    "refused: a merge key without a mapping": "a merge key needs",
    "refused: a number outside of JSON": "a number outside of JSON",
    "refused: a value without the type of its tag": "does not match its tag",
    "refused: a number or a list as a key": "a key that is not a string",
    "refused: text behind a document": "<document start>",
    "refused: a tag that ends in a bracket": "expected whitespace or line break",
    "refused: a bracket in a tag": "did not find expected tag URI",
    "refused: a colon at the end of a text in brackets": "found unexpected ':'",
    "accepted: ? in a plain text in brackets": "did not find expected ',' or",
    "refused: a template": "a template that was not rendered",
    "accepted: YAML behind JSON": "json: offset",
    "accepted: a number with the tag of another kind": "as a !!",
    "accepted: text behind ---": "invalid Yaml document separator",
}
"""Names of the differences, by a part of the error of the program that refuses the text."""


def compare(text: str, answer: dict[str, Any]) -> str:
    """Return the kind of difference between what Go and treenail read; empty for none."""
    error = answer.get("error", "")
    values = [value for value in answer["values"] or () if value is not None]
    if not all(isinstance(value, dict) for value in values):
        error = "expected an object at the top"  # a client refuses another value
    try:
        own = documents.load_documents(text, where="f")
    except ConfigError as refusal:
        return "" if error else _name_difference("refused", str(refusal))
    if error:
        return _name_difference("accepted", error)
    return "" if own == values else "other values"


def _name_difference(verb: str, error: str) -> str:
    for name, part in DIFFERENCES.items():
        if name.startswith(verb) and part in error:
            return name
    return f"{verb}: {error}"


@pytest.mark.process
@pytest.mark.skipif(not PROGRAM, reason=f"{VARIABLE} is not set")
def test_random_documents_have_no_other_values_than_in_go() -> None:
    texts = [str(case.values[0]) for case in CASES]
    texts += [_RandomText(SEED + number).make() for number in range(COUNT)]
    questions = "".join(f"{json.dumps({'mode': 'stream', 'text': text})}\n" for text in texts)
    done = subprocess.run(
        [PROGRAM], input=questions, capture_output=True, text=True, check=True, timeout=300
    )
    answers = map(json.loads, done.stdout.splitlines())
    kinds = [(compare(text, answer), text) for text, answer in zip(texts, answers, strict=True)]
    counts = collections.Counter(kind for kind, _ in kinds if kind)
    log.info("%s documents: %s", len(texts), dict(counts))
    assert [(kind, text) for kind, text in kinds if kind and kind not in DIFFERENCES] == []
