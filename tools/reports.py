"""Write docs/what-it-survives.md, docs/what-it-costs.md, docs/costs.svg and a table of identities.

The table says what each identity may do; it is between two marks in docs/security.md.
Their sources are in docs/records: records of suites of tests (``TREENAIL_RECORDS=docs/records``),
and of benchmarks (``make bench ARGS="--record"``). docs/records/misses.json says why a figure is
over its limit.
"""

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RECORDS = DOCS / "records"
SUITES = {
    "crash": "Power cuts and kills at every write",
    "machines": "Power cuts in virtual machines",
    "cluster": "A cluster that lies",
    "host": "Faults of the host",
    "fuzz": "Hostile input",
    "privilege": "Least privilege",
    "long-run": "Long run",
}
"""The records of tests and their headings, in the order of the document."""

Record = Mapping[str, object]

_ROW = 22
_LEFT, _BARS, _WIDTH = 470, 300, 920


def read_suite(name: str, folder: Path = RECORDS) -> list[Record]:
    """Return the records of one suite; none before it ran."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []  # type: ignore[no-any-return]


def describe_survival(suites: Mapping[str, Sequence[Record]]) -> str:
    """Return the document on faults: a table for each suite."""
    lines = [
        "# What it survives",
        "",
        "Written by `make reports` from the records of test runs. A line shows what was tried, how",
        "often, and the command that repeats it. What has no line here was not tried",
        "or did not pass. [architecture.md](architecture.md) says why it holds.",
    ]
    for name, title in SUITES.items():
        lines += ["", f"## {title}", ""]
        if not suites[name]:
            lines.append("Not recorded yet.")
            continue
        lines += ["| tried | cases | result | command | day, commit |", "|---|---|---|---|---|"]
        for each in suites[name]:
            count = "" if each["count"] is None else f"{each['count']:,}"
            lines.append(
                f"| {_cell(each['what'])} | {count} | {_cell(each['result'])} "
                f"| `{_cell(each['command'])}` | {each['day']}, {each['revision']} |"
            )
        lines += [
            f"| **{_cell(what)}: all** | **{count:,}** | | | |"
            for what, count in _sum_counts(suites[name]).items()
        ]
    return "\n".join([*lines, ""])


def _sum_counts(records: Sequence[Record]) -> dict[str, int]:
    """Return the cases of all records whose names have the same text before the colon."""
    counts: dict[str, list[int]] = {}
    for each in records:
        what, colon, _ = str(each["what"]).partition(": ")
        if colon and isinstance(each["count"], int):
            counts.setdefault(what, []).append(each["count"])
    return {what: sum(found) for what, found in counts.items() if len(found) > 1}


IDENTITIES_BEGIN = "<!-- identities: written by `make reports` -->"
IDENTITIES_END = "<!-- end of identities -->"
_READS = {"get", "list", "watch", "GET", "HEAD"}


def describe_identities(records: Sequence[Record]) -> str:
    """Return a table of the recorded identities: what each may read and change, as attempted."""
    identities: dict[str, list[Record]] = {}
    for each in records:
        if "identity" in each:
            identities.setdefault(str(each["identity"]), []).append(each)
    lines = ["| identity | reads | changes | attempts |", "|---|---|---|---|"]
    for identity, found in identities.items():
        # Of one identity on two servers; a real one lists more kinds.
        whole = max(found, key=lambda each: int(str(each["count"])))
        reads, changes = [], []
        allowed = whole["allowed"]
        for what, verbs in allowed.items() if isinstance(allowed, dict) else ():
            name = f"`{_shorten(what)}`"
            reading = [verb for verb in verbs.split() if verb in _READS]
            if reading:
                is_all = {*reading} in ({"get", "list", "watch"}, {"GET", "HEAD"})
                reads.append(name if is_all else f"{name} ({', '.join(reading)})")
            if changing := [verb for verb in verbs.split() if verb not in _READS]:
                changes.append(f"{name} ({', '.join(changing)})")
        attempts = " and ".join(f"{each['count']:,}" for each in found)
        lines.append(
            f"| {_cell(identity)} | {', '.join(reads) or 'nothing'} "
            f"| {', '.join(changes) or 'nothing'} | {attempts} |"
        )
    return "\n".join(lines)


def _shorten(what: str) -> str:
    """Drop the groups of the API: no two kinds here have one name."""
    resource, *rest = what.split(" ", 1)
    return " ".join([resource.partition(".")[0] if resource[0] != "/" else resource, *rest])


def replace_identities(document: str, records: Sequence[Record]) -> str:
    """Return the document with the table between the marks."""
    before, begin, rest = document.partition(IDENTITIES_BEGIN)
    _, end, after = rest.partition(IDENTITIES_END)
    if not (begin and end):
        raise SystemExit(f"docs/security.md: expected {IDENTITIES_BEGIN} and {IDENTITIES_END}")
    return f"{before}{begin}\n{describe_identities(records)}\n{end}{after}"


def describe_costs(records: Sequence[Record], misses: Mapping[str, str]) -> str:
    """Return the document on costs: a table for each benchmark, and why limits are missed."""
    lines = [
        "# What it costs",
        "",
        'Written by `make reports` from figures of `make bench ARGS="NAME --record"`. The ratio',
        "divides a time by that of fixed work in Python, and memory by that of a bare interpreter,",
        "both measured in the same run: compare ratios between machines, not values. `make bench`",
        "prints how a figure changed against these.",
        "",
        "![Each figure with a limit, as a part of its limit](costs.svg)",
    ]
    for module in dict.fromkeys(str(each["module"]) for each in records):
        found = [each for each in records if each["module"] == module]
        lines += ["", f"## {_read_title(module)}", "", f"`{found[0]['command']}`", ""]
        lines += ["| figure | value | limit | ratio | day, commit |", "|---|---|---|---|---|"]
        for each in found:
            name = str(each["name"])
            indent = "&nbsp;&nbsp;" if name.startswith(" ") else ""
            lines.append(
                f"| {indent}{_cell(name.strip())} | {_format(each['value'])} {each['unit']} "
                f"| {_format_limit(each)} | {_format(each['ratio'])} "
                f"| {each['day']}, {each['revision']} |"
            )
    missed = [each for each in records if _is_missed(each)]
    lines += ["", "## Limits that are missed", ""]
    if not missed:
        lines.append("None.")
    reasons: dict[str, list[Record]] = {}
    for each in missed:
        reasons.setdefault(misses.get(str(each["key"]), "Not explained yet."), []).append(each)
    for reason, found in reasons.items():
        lines.append(f"- {reason}")
        lines += [
            f"  - **{str(each['name']).strip()}** ({each['module']}): "
            f"{_format(each['value'])} {each['unit']}, limit {_format(each['target'])}"
            for each in found
        ]
    return "\n".join([*lines, ""])


def draw_costs(records: Sequence[Record]) -> str:
    """Return a chart in SVG: a bar for each figure with a limit, as a part of that limit."""
    limited = [each for each in records if _find_share(each) is not None]
    height = _ROW * (len(limited) + 2)
    limit_x = _LEFT + _BARS // 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        "<style>text {font: 12px Helvetica, Arial, sans-serif}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{limit_x}" y="15" text-anchor="middle" fill="#555">limit</text>',
    ]
    for row, each in enumerate(limited, start=1):
        share = _find_share(each) or 0.0
        top = row * _ROW
        width = max(1, round(min(share, 2.0) * _BARS / 2))
        colour = "#b03a2e" if _is_missed(each) else "#3b7a57"
        title = escape(f"{each['module']}: {str(each['name']).strip()}"[:72])
        value = f"{_format(each['value'])} {each['unit']}, limit {_format(each['target'])}"
        lines += [
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{title}</text>',
            f'<rect x="{_LEFT}" y="{top + 4}" width="{width}" height="14" fill="{colour}"/>',
            f'<text x="{_LEFT + _BARS + 8}" y="{top + 15}" fill="#333">{escape(value)}</text>',
        ]
    lines.append(f'<path d="M{limit_x} 20V{height - 8}" stroke="#555" stroke-dasharray="4 3"/>')
    return "\n".join([*lines, "</svg>", ""])


def write_reports(records: Path = RECORDS) -> dict[str, str]:
    """Return the text of each document below docs/ by its name."""
    bench = records / "bench.json"
    costs = json.loads(bench.read_text()) if bench.exists() else []
    misses = records / "misses.json"
    reasons = json.loads(misses.read_text()) if misses.exists() else {}
    return {
        "what-it-survives.md": describe_survival(
            {name: read_suite(name, records) for name in SUITES}
        ),
        "what-it-costs.md": describe_costs(costs, reasons),
        "costs.svg": draw_costs(costs),
        "security.md": replace_identities(
            (DOCS / "security.md").read_text(), read_suite("privilege", records)
        ),
    }


def main() -> int:
    """Write the documents."""
    for name, text in write_reports().items():
        (DOCS / name).write_text(text)
        print(f"wrote docs/{name}")
    return 0


def _read_title(module: str) -> str:
    """Return the first line of the benchmark's docstring."""
    tree = ast.parse((ROOT / "bench" / f"{module}.py").read_text())
    text = (ast.get_docstring(tree) or module).splitlines()[0].rstrip(".")
    return text.removeprefix("Benchmark of ").removeprefix("Measure ").replace("``", "`")


def _find_share(record: Record) -> float | None:
    value, limit = record["value"], record["target"]
    if not isinstance(value, int | float) or not isinstance(limit, int | float) or not limit:
        return None
    return value / limit


def _is_missed(record: Record) -> bool:
    value, limit = record["value"], record["target"]
    return isinstance(value, int | float) and isinstance(limit, int | float) and value > limit


def _format(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, int | float) else ""


def _format_limit(record: Record) -> str:
    if record["target"] is None:
        return ""
    return f"{_format(record['target'])}{', missed' if _is_missed(record) else ''}"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
