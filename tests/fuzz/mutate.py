"""Mutations that keep the structure of a document: most random bytes are refused at once."""

import ast
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from tests.fuzz.target import Grammar

ByteMutator = Callable[[bytes, int], bytes]
"""Returns changed bytes of at most the given number."""

_NASTY: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, 0.1, -0.0,
    "", " ", "0", "\x1b[2J", "\x00", "\u202e", "\ud800", "\r\n", "\n", "a\tb", "\u2028", "\x85",
    "/", "..", "../../etc/passwd", "//", "%", "%s", "{}", "a" * 300, "9" * 5000, "\uff11", "²",
    "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "NaN", "sha256:" + "0" * 64, "=", ":", "@",
    [], {}, [[]], [{}], {"": ""}, {"\x1b": 1}, [None], "-----BEGIN CERTIFICATE-----",
)  # fmt: skip
_TEXT = ("\x1b[0m", "\0", "\r", "\u202e", "\ufeff", "é", "\t", "\\", '"', "'", "#", "=", ":", "-")
_DIGITS = re.compile("[0-9]+")
_WORD_LIMIT = 40
_WORDS_MAX = 3000
_DONOR_MAX = 65536
_DEPTHS = (10, 99, 101, 300, 900)


class Mutator:
    """Changes inputs of one grammar; ``change_bytes`` is the fuzzer's own mutation."""

    def __init__(
        self,
        grammar: Grammar,
        words: Sequence[str],
        seeds: Sequence[bytes],
        change_bytes: ByteMutator,
    ) -> None:
        self._words = words or ("a",)
        self._change_bytes = change_bytes
        self._grammar = grammar
        self._donors = [
            found
            for each in seeds[:200]
            if (found := self._load(each)) is not None and not _is_longer(found, _DONOR_MAX)
        ]

    def mutate(self, content: bytes, limit: int, seed: int) -> bytes:
        """Return another input of at most ``limit`` bytes."""
        choice = random.Random(seed)
        if self._grammar == Grammar.BYTES or choice.random() < 0.15:
            return self._change_bytes(content, limit)[:limit]
        if self._grammar == Grammar.LINES:
            return self._change_lines(content, choice)[:limit]
        document = self._load(content)
        if document is None:
            return self._change_bytes(content, limit)
        try:
            for _ in range(choice.choice((1, 1, 1, 2, 3, 5))):
                if _is_longer(document, limit):
                    return self._change_bytes(content, limit)
                document = self._change(document, choice)
            if _is_longer(document, limit):
                return self._change_bytes(content, limit)
            changed = self._dump(document, choice)
        except (ValueError, TypeError, RecursionError, yaml.YAMLError):
            # A part that was moved below itself, or a type that JSON does not have.
            return self._change_bytes(content, limit)
        return changed if len(changed) <= limit else self._change_bytes(content, limit)

    def _load(self, content: bytes) -> object:
        try:
            return cast("object", json.loads(content))
        except (ValueError, RecursionError):
            pass
        if self._grammar != Grammar.YAML:
            return None
        try:
            return cast("object", yaml.load(content, Loader=yaml.CSafeLoader))
        except Exception:  # noqa: BLE001 - PyYAML raises ValueError and others for what it refuses
            return None

    def _dump(self, document: object, choice: random.Random) -> bytes:
        if self._grammar == Grammar.YAML and choice.random() < 0.5:
            text = yaml.dump(document, Dumper=yaml.CSafeDumper, allow_unicode=True)
            return cast("str", text).encode("utf-8", "backslashreplace")
        return json.dumps(document, ensure_ascii=choice.random() < 0.7).encode(
            "utf-8", "backslashreplace"
        )

    def _change(self, document: Any, choice: random.Random) -> Any:
        places = list(_list_places(document))
        if not places or choice.random() < 0.02:
            return self._make_value(choice)
        parent, key = choice.choice(places)
        value = parent[key]
        match choice.randrange(9):
            case 0:
                del parent[key]
            case 1:
                parent[key] = [value, *([value] * choice.randrange(3))]
            case 2 if isinstance(parent, dict):
                parent[choice.choice(self._words)] = parent.pop(key)
            case 3 if isinstance(value, dict):
                value[choice.choice(self._words)] = self._make_value(choice)
            case 3 if isinstance(value, list):
                value.insert(choice.randrange(len(value) + 1), self._make_value(choice))
            case 4 if isinstance(parent, list):
                parent.insert(choice.randrange(len(parent) + 1), value)
            case 5 | 6 if isinstance(value, str):
                parent[key] = self._change_text(value, choice)
            case 7:
                other, name = choice.choice(places)
                parent[key] = json.loads(json.dumps(other[name]))
            case 8 if self._donors:
                donors = list(_list_places(choice.choice(self._donors)))
                if donors:
                    donor, name = choice.choice(donors)
                    parent[key] = json.loads(json.dumps(donor[name], default=str))
            case _:
                parent[key] = self._make_value(choice)
        return document

    def _make_value(self, choice: random.Random) -> object:
        drawn = choice.random()
        if drawn < 0.4:
            return choice.choice(self._words)
        if drawn < 0.42:
            nested: object = 0
            for _ in range(choice.choice(_DEPTHS)):
                nested = [nested] if choice.random() < 0.5 else {"a": nested}
            return nested
        if drawn < 0.5:
            return {choice.choice(self._words): choice.choice(_NASTY)}
        return json.loads(json.dumps(choice.choice(_NASTY)))

    def _change_text(self, text: str, choice: random.Random) -> str:
        match choice.randrange(6):
            case 5 if found := _DIGITS.search(text):
                digits = choice.choice(("9" * 25, "9" * 5000, "\uff11", "²", "-1", "0x1f", "1e999"))
                return text[: found.start()] + digits + text[found.end() :]
            case 0:
                at = choice.randrange(len(text) + 1)
                return text[:at] + choice.choice((*_TEXT, choice.choice(self._words))) + text[at:]
            case 1 if text:
                at = choice.randrange(len(text))
                return text[:at] + text[at + choice.randrange(1, 8) :]
            case 2:
                return choice.choice(self._words)
            case _:
                changed = self._change_bytes(text.encode("utf-8", "replace"), len(text) + 16)
                return changed.decode("utf-8", "replace")

    def _change_lines(self, content: bytes, choice: random.Random) -> bytes:
        lines = content.split(b"\n")
        for _ in range(choice.choice((1, 1, 2, 3))):
            at = choice.randrange(len(lines))
            match choice.randrange(7):
                case 0 if len(lines) > 1:
                    del lines[at]
                case 1:
                    lines.insert(at, choice.choice(lines))
                case 2:
                    other = choice.randrange(len(lines))
                    lines[at], lines[other] = lines[other], lines[at]
                case 3:
                    word = choice.choice((*_TEXT, *(choice.choice(self._words) for _ in range(9))))
                    cut = choice.randrange(len(lines[at]) + 1)
                    lines[at] = lines[at][:cut] + word.encode() + lines[at][cut:]
                case 4:
                    words = lines[at].split(b" ")
                    words[choice.randrange(len(words))] = choice.choice(self._words).encode()
                    lines[at] = b" ".join(words)
                case 5:
                    nasty = choice.choice([each for each in _NASTY if isinstance(each, str)])
                    lines[at] += nasty.encode("utf-8", "replace")
                case _:
                    lines[at] = self._change_bytes(lines[at], len(lines[at]) + 16)
        return b"\n".join(lines)


def collect_words(prefix: str = "treenail") -> tuple[str, ...]:
    """Return short texts in the sources of imported modules: keys, kinds and enumerations."""
    found: dict[str, None] = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(prefix) or not getattr(module, "__file__", None):
            continue
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
            texts: list[str] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # The codec has paths such as spec.osImageURL.
                texts = [node.value, *node.value.split(".")]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                head, *rest = node.target.id.split("_")
                texts = [head + "".join(map(str.capitalize, rest))]
            for text in texts:
                if 0 < len(text) <= _WORD_LIMIT and text.count(" ") < 2 and text.isprintable():
                    found[text] = None
    return tuple(found)[:_WORDS_MAX]


def format_dictionary(words: Iterable[str]) -> str:
    """Format the words for libFuzzer."""
    return "".join(f'"{"".join(map(_format_byte, word.encode()))}"\n' for word in words)


def _format_byte(byte: int) -> str:
    return chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\x{byte:02x}"


def _is_longer(document: Any, limit: int) -> bool:
    """Return whether the document certainly needs more than ``limit`` bytes.

    Aliases of YAML can make a few bytes a document of gigabytes, or one without an end. JSON has
    no tuples and sets, so these count as too long.
    """
    size = 0
    for parent, key in _list_places(document):
        value = parent[key]
        size += sum(len(each) if isinstance(each, str | bytes) else 1 for each in (key, value))
        if size > limit or isinstance(value, tuple | set):
            return True
    return False


def _list_places(value: Any) -> Iterable[tuple[Any, Any]]:
    pending = [value]
    while pending:
        each = pending.pop()
        pairs = (
            list(each.items())
            if isinstance(each, dict)
            else list(enumerate(each))
            if isinstance(each, list)
            else []
        )
        for key, inner in pairs:
            yield each, key
            pending.append(inner)
