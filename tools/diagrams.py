"""Write the diagrams of docs/: ``diagrams.py`` needs dot, of the package graphviz.

The diagram of the phases and its table come from the agent's own table of transitions. Each SVG
ends with the digest of the text that it was made from: by it a test finds an outdated diagram.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

from treenail.update.state.ledger_record import TRANSITIONS, Phase

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- phases: written by make diagrams -->", "<!-- end of phases -->"

_OUT_OF_SERVICE = {
    Phase.DRAINING, Phase.APPLYING, Phase.REBOOTING, Phase.VERIFYING, Phase.ROLLING_BACK,
}  # fmt: skip
_BACK = {Phase.CANCELLING, Phase.ROLLING_BACK}


def phases_dot() -> str:
    """Return the state diagram of an update in graphviz' language."""
    lines = [
        "// Written by make diagrams from agent/treenail/update/state/ledger_record.py.",
        "digraph phases {",
        '    graph [rankdir=TB, nodesep=0.5, ranksep=0.45, fontname="Helvetica", bgcolor="white"];',
        '    node [shape=box, style="rounded,filled", fontname="Helvetica", fillcolor="#ffffff"];',
        '    edge [fontname="Helvetica", color="#30506e"];',
        '    none [label="no update", fillcolor="#dff0d8"];',
    ]
    for phase in Phase:
        colour = (
            "#fdecea" if phase in _BACK else "#fff4d6" if phase in _OUT_OF_SERVICE else "#e8f1fa"
        )
        lines.append(f'    "{phase}" [fillcolor="{colour}"];')
    for start, targets in TRANSITIONS.items():
        for end in targets:
            style = ' [color="#b03a2e", style=dashed]' if end in _BACK else ""
            if start is not None and end is Phase.STAGING:
                style = ' [color="#999999", style=dotted, constraint=false]'
            lines.append(f'    "{start or "none"}" -> "{end or "none"}"{style};')
    return "\n".join([*lines, "}", ""])


def phases_table() -> str:
    """Return the table of transitions in Markdown."""
    rows = ["| from | to | when |", "|---|---|---|"]
    for start, targets in TRANSITIONS.items():
        for end, reason in targets.items():
            rows.append(f"| {start or 'no update'} | {end or 'no update'} | {reason} |")
    return "\n".join(rows)


def digest_comment(dot: str) -> str:
    """Return the last line of an SVG made from ``dot``."""
    return f"<!-- made from sha256:{hashlib.sha256(dot.encode()).hexdigest()} -->\n"


def document_with_phases(text: str) -> str:
    """Return ``text`` with its table of transitions replaced by today's."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{phases_table()}\n{END}{after}"


def main() -> int:
    """Write docs/*.svg and the table in docs/architecture.md."""
    (DOCS / "phases.dot").write_text(phases_dot())
    for source in sorted(DOCS.glob("*.dot")):
        dot = source.read_text()
        drawn = subprocess.run(
            ["dot", "-Tsvg"], input=dot, capture_output=True, check=True, text=True
        )
        source.with_suffix(".svg").write_text(drawn.stdout + digest_comment(dot))
    architecture = DOCS / "architecture.md"
    architecture.write_text(document_with_phases(architecture.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
