"""docs/image-builds.md lists every reason, and says which ones are retried."""

import re
from pathlib import Path

from treenail.image.build_result import BuildReason, RetryClass, classify_retry
from treenail.image.input_checks import InputReason

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "image-builds.md").read_text("utf-8")
WORDS = {RetryClass.USER: "no", RetryClass.EXTERNAL: "yes", RetryClass.ONCE: "once"}


def read_section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_document_lists_every_reason_of_wrong_inputs() -> None:
    found = re.findall(r"^\| `(\w+)` \|", read_section("Wrong inputs"), re.MULTILINE)
    assert found == sorted(InputReason)


def test_document_lists_every_reason_of_a_build_with_its_retry() -> None:
    found = dict(
        re.findall(r"^\| `(\w+)` \| (\w+) \|", read_section("Failed builds"), re.MULTILINE)
    )
    assert found == {reason: WORDS[classify_retry(reason)] for reason in BuildReason}


def test_manual_names_every_reason() -> None:
    manual = (ROOT / "rpm" / "man" / "treenail-controller.8.md").read_text("utf-8")
    section = manual.partition("## IMAGE BUILDS\n")[2].partition("\n## ")[0]
    words = set(re.findall(r"\w+", section))
    assert {*BuildReason, *InputReason} <= words
