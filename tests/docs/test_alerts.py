"""The guide to alerts has a section for each alert, and for no other."""

import re

from tests.docs.lab_actions import GUIDES
from treenail.manifests.monitoring import build_rule_groups


def test_every_alert_has_section_that_says_what_to_do() -> None:
    _, *sections = re.split(
        r"^## (?=Treenail)", (GUIDES / "alerts.md").read_text("utf-8"), flags=re.MULTILINE
    )
    found = {section.split("\n", 1)[0]: section for section in sections}
    groups = build_rule_groups()["groups"]
    assert isinstance(groups, list)
    assert [*found] == [rule["alert"] for group in groups for rule in group["rules"]]
    for name, section in found.items():
        for word in ("- Look", "- Do:", "- Ends:"):
            assert word in section, f"{name}: {word}"
