"""Count the tests of JUnit files and name the ten slowest: ``summarize.py FILE...``.

A later file replaces what an earlier one says of the same test.
"""

import sys
from xml.etree import ElementTree as ET

SLOWEST = 10
FAILED = frozenset({"failure", "error"})


def main(files: list[str]) -> int:
    """Print the summary; always 0, because pytest itself reports failures by its exit code."""
    results: dict[str, tuple[float, set[str]]] = {}
    for file in files:
        results |= read_results(file)
    print("slowest tests:")
    slowest = sorted(((duration, name) for name, (duration, _) in results.items()), reverse=True)
    for duration, name in slowest[:SLOWEST]:
        print(f"{duration:7.1f} s  {name}")
    failed = sum(bool(kinds & FAILED) for _, kinds in results.values())
    skipped = sum("skipped" in kinds and not kinds & FAILED for _, kinds in results.values())
    passed = len(results) - failed - skipped
    print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
    return 0


def read_results(file: str) -> dict[str, tuple[float, set[str]]]:
    """Return seconds and the tags of failure, error or skip for each test of a JUnit file."""
    results: dict[str, tuple[float, set[str]]] = {}
    for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote the file
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        duration, kinds = results.get(name, (0.0, set()))
        # A test that fails and then fails in its clean-up has two elements.
        results[name] = (
            duration + float(case.get("time", "0")),
            kinds | {child.tag for child in case},
        )
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
