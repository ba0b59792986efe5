"""Count the tests of JUnit files and name the ten slowest: ``summarize.py FILE...``."""

import sys
from xml.etree import ElementTree as ET

SLOWEST = 10


def main(files: list[str]) -> int:
    """Print the summary; always 0, because pytest itself reports failures by its exit code."""
    failed = skipped = passed = 0
    seconds: list[tuple[float, str]] = []
    for file in files:
        for case in ET.parse(file).iter("testcase"):  # noqa: S314 - pytest wrote the file
            kinds = {child.tag for child in case}
            is_failed = bool(kinds & {"failure", "error"})
            failed += is_failed
            skipped += "skipped" in kinds
            passed += not is_failed and "skipped" not in kinds
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            seconds.append((float(case.get("time", "0")), name))
    print("slowest tests:")
    for duration, name in sorted(seconds, reverse=True)[:SLOWEST]:
        print(f"{duration:7.1f} s  {name}")
    print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
