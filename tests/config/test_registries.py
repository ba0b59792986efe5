"""Tests that registries.conf changes without a drain only when all image sources stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.fuzzing import fuzz
from treenail.config.image_mirrors import is_safe_change

BASE = """
unqualified-search-registries = ["a.example.com", "b.example.com"]

[[registry]]
prefix = ""
location = "quay.example.com/team"

[[registry.mirror]]
location = "mirror.example.com/team"
pull-from-mirror = "digest-only"

[[registry.mirror]]
location = "tags.example.com/team"
"""
DIGEST_MIRROR = '[[registry.mirror]]\nlocation = "m"\npull-from-mirror = "digest-only"\n'
ANY_MIRROR = '[[registry.mirror]]\nlocation = "m"\n'
ENTRY = '[[registry]]\nlocation = "new.example.com"\n'


def safe(new: str, old: str = BASE) -> bool:
    return is_safe_change(old.encode(), new.encode())


@pytest.mark.parametrize(
    "new",
    [
        BASE,
        BASE + "# a comment\n",
        BASE.replace('"b.example.com"]', '"b.example.com", "c.example.com"]'),
        BASE + DIGEST_MIRROR,
        BASE + ENTRY,
        BASE + ENTRY + DIGEST_MIRROR,
        # The Machine Config Operator rates this one unsafe and the equivalent mirror field safe.
        BASE + ENTRY + "mirror-by-digest-only = true\n" + ANY_MIRROR,
        BASE + 'pull-from-mirror = "digest-only"\n',
    ],
)
def test_change_that_only_adds_mirrors_for_digests_is_safe(new: str) -> None:
    assert safe(new)


@pytest.mark.parametrize(
    "new",
    [
        "",
        "[[registry",
        "registry = 7",
        BASE.replace('"a.example.com", ', ""),
        BASE.replace('"a.example.com", "b.example.com"', '"b.example.com", "a.example.com"'),
        BASE.replace("quay.example.com/team", "quay.example.com/other"),
        BASE.replace('prefix = ""', 'prefix = "*.example.com"'),
        BASE.replace('prefix = ""', "blocked = true"),
        BASE.replace('prefix = ""', "insecure = true"),
        BASE.replace("mirror.example.com/team", "mirror.example.com/other"),
        BASE.replace('pull-from-mirror = "digest-only"', 'pull-from-mirror = "all"'),
        BASE + 'pull-from-mirror = "tag-only"\n',
        BASE + "insecure = true\n",
        BASE + ANY_MIRROR,
        BASE + ENTRY + ANY_MIRROR,
        BASE + ENTRY + "blocked = true\n",
        BASE + ENTRY + 'prefix = "docker.io"\n',
    ],
)
def test_change_of_image_source_is_not_safe(new: str) -> None:
    assert not safe(new)


def test_change_from_digests_to_tags_is_not_safe() -> None:
    old = ENTRY + "mirror-by-digest-only = true\n" + ANY_MIRROR
    assert safe(old, old)
    assert not safe(ENTRY + ANY_MIRROR, old)


@fuzz
@given(st.binary() | st.text(st.sampled_from("[]registy.mo=\"'{}\n#= 0a")).map(str.encode))
def test_any_contents_raise_no_error(contents: bytes) -> None:
    is_safe_change(contents, contents)
    assert not is_safe_change(BASE.encode(), contents)
