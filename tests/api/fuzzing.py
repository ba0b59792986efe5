"""Duration of the property tests: seconds by default, hours on request."""

import copy
import os
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("TREENAIL_FUZZ_EXAMPLES", "0"))

T = TypeVar("T", bound=Callable[..., None])


def fuzz(test: T) -> T:
    """Decorate a property test; TREENAIL_FUZZ_EXAMPLES sets its number of examples."""
    bounded = settings(
        max_examples=EXAMPLES or 100, database=None, suppress_health_check=list(HealthCheck)
    )(test)
    return pytest.mark.limit(EXAMPLES or 600.0)(bounded)


numbers = st.integers() | st.floats()
scalars = st.none() | st.booleans() | numbers | st.text(st.characters(codec=None))
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


@st.composite
def damaged(draw: st.DrawFn, good: dict[str, object]) -> object:
    """Generate the document with one or two values replaced or removed."""
    document = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 2))):
        if not (places := list(_places(document))):
            break
        parent, key = draw(st.sampled_from(places))
        if draw(st.booleans()):
            parent[key] = draw(json_values)
        else:
            del parent[key]
    return document


def _places(value: object) -> list[tuple[dict[object, object], object]]:
    found: list[tuple[dict[object, object], object]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    else:
        return found
    for key, inner in pairs:
        found.append((value, key))
        found += _places(inner)
    return found
