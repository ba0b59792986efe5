"""Verbs that the rules of a role allow."""

from collections.abc import Iterable, Iterator
from typing import Any


def iter_granted_verbs(rules: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the resource and verb of everything that the rules allow."""
    for rule in rules:
        for group in rule.get("apiGroups", ()):
            for resource in rule.get("resources", ()):
                for verb in rule["verbs"]:
                    yield f"{resource}.{group}" if group else resource, verb
