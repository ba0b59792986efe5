"""Agents that are wrong on purpose: the rules that all scenarios are held to notice them."""

from treenail.api import annotations as key
from vmlab.image.layers import Entry
from vmlab.site import Site


def noticed(site: Site) -> list[str]:
    """The rules that were broken, which this once is no failure."""
    found = list(site.story.violations)
    site.story.violations.clear()
    return found


def test_unsynced_ledger_breaks_a_rule(site: Site) -> None:
    site.misprogram("host/filesystem/disk.py", line="os.fsync(descriptor)", instead="pass")
    goal = site.goal(site.image("2"))
    site.hold_back_writes()
    site.ask(goal)
    asked = f"drain-{goal.config}"
    site.wait(lambda: site.notes().get(key.DESIRED_DRAIN) == asked, "the drain is requested", 300.0)
    site.cut_power()
    assert [each for each in noticed(site) if f"{asked} was requested" in each]


def test_report_before_verification_breaks_a_rule(site: Site) -> None:
    site.misprogram(
        "update/status.py",
        line="    record: LedgerRecord = facts.record\n",
        instead="    record = facts.record\n"
        "    if record.update is not None:\n"
        "        record = LedgerRecord(current=record.update.target)\n",
    )
    goal = site.goal(site.image("2"))
    site.ask(goal)
    site.wait(lambda: site.story.violations, "a rule is broken", 300.0)
    assert [each for each in noticed(site) if f"became {goal.pull_spec} while" in each]


def test_report_during_boot_trial_breaks_a_rule(site: Site) -> None:
    site.set_deadline(30.0)
    site.misprogram(
        "update/status.py",
        line="    record: LedgerRecord = facts.record\n",
        instead="    record = facts.record\n"
        "    if record.update and record.update.phase in (Phase.VERIFYING, Phase.ROLLING_BACK):\n"
        "        record = LedgerRecord(current=record.update.target)\n",
    )
    masked = {"usr/etc/systemd/system/kubelet.service": Entry(link="/dev/null")}
    goal = site.goal(site.image("bad", masked))
    site.ask(goal)
    site.wait(lambda: site.story.violations, "a rule is broken", 600.0)
    assert [each for each in noticed(site) if f"{goal.config} was reported, and" in each]
