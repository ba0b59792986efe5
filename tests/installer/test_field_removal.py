"""Removal of one field: every other byte stays."""

import pytest

from treenail.api.documents import load_document
from treenail.errors import ConfigError
from treenail.installer.directory.install_config import remove_field

FIELD = "imageMode:\n  enabled: true  # c\n  pools:\n  - name: a\n"


def remove(text: str) -> str:
    return remove_field(text.encode(), "imageMode", where="x.yaml").decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a: 1  # one\n{FIELD}# two\nb: 2\n", "a: 1  # one\n# two\nb: 2\n"),
        (f"# top\n\n{FIELD}b: 2\n", "# top\n\nb: 2\n"),
        (f"a: 1\n{FIELD}", "a: 1\n"),
        (f"a: 1\n{FIELD}".rstrip(), "a: 1\n"),
        (f"a: 1\n{FIELD}b: 2\n".replace("\n", "\r\n"), "a: 1\r\nb: 2\r\n"),
        (f"\ufeffa: é\n{FIELD}b: 😀\n", "\ufeffa: é\nb: 😀\n"),
        (f"---\n{FIELD}a: 1\n...\n", "---\na: 1\n...\n"),
        (f"a: 1\n{FIELD}  # of the field\n\n# of b\nb: 2\n", "a: 1\n\n# of b\nb: 2\n"),
        # These would become part of the text before them.
        (f"a: |\n  x\n{FIELD}  # of the field\nb: 2\n", "a: |\n  x\nb: 2\n"),
        (f"a: |+\n  x\n{FIELD}\n\nb: 2\n", "a: |+\n  x\nb: 2\n"),
        ("a: 1\nimageMode: |\n  x\n  # y\n\nb: 2\n", "a: 1\nb: 2\n"),
        ("a: 1\nimageMode:\nb: 2\n", "a: 1\nb: 2\n"),
        ("a: 1\n'imageMode': {}\nb: 2\n", "a: 1\nb: 2\n"),
        ("a: 1\n? imageMode\n: {}\nb: 2\n", "a: 1\nb: 2\n"),
        ("a: 1\nimageMode:\n- x\n- y\nb: 2\n", "a: 1\nb: 2\n"),
        ("  a: 1\n  imageMode: {}\n  # of b\n  b: 2\n", "  a: 1\n  # of b\n  b: 2\n"),
        ("a: &x {enabled: true}\nimageMode: *x\nb: *x\n", "a: &x {enabled: true}\nb: *x\n"),
        ('{"a": 1, "imageMode": {"x": [1]}, "b": 2}\n', '{"a": 1, "b": 2}\n'),
        ('{"imageMode": {"x": 1}, "b": 2}', '{"b": 2}'),
        ('{\n  "b": 2,\n  "imageMode": {"x": 1}\n}\n', '{\n  "b": 2\n}\n'),
        ("{a: 1, imageMode: {b: 1,}, # x\n c: 1}\n", "{a: 1, # x\n c: 1}\n"),
        ('{"imageMode": 1}', "{}"),
        (FIELD, "{}\n"),
        ("a: 1\n", "a: 1\n"),
    ],
)
def test_field_is_removed_and_other_bytes_stay(text: str, expected: str) -> None:
    assert remove(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "imageMode: &x {enabled: true}\nb: *x\n",
        "imageMode:\n  pools: &x []\nb: *x\n",
        "base: &b\n  imageMode: 1\n<<: *b\nc: 1\n",
    ],
)
def test_field_that_others_need_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot remove the field imageMode from x") as info:
        remove(text)
    assert "without anchors" in info.value.remedy


def test_values_of_generated_files_survive_the_removal() -> None:
    parts = ["a: 1\n", "b:\n  c: [1]\n", "d: |\n  x\n\n", "# e\n", "f: 'g\n\n  h'\n", "\n", "- i"]
    for before in parts[:6]:
        for after in parts[:6]:
            text = f"z: 0\n{before}{FIELD}{after.replace('a:', 'k:').replace('b:', 'l:')}"
            try:
                document = load_document(text, where="x")
            except ConfigError:
                continue
            del document["imageMode"]
            assert load_document(remove(text), where="x") == document
