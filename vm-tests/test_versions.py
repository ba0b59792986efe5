"""Agents of different versions on one node: each reads the ledger that the other one wrote."""

import json
from pathlib import Path
from typing import Any

from treenail.api import annotations as key
from vmlab.agents import Edit, change_agent, check_out_agent, find_older_revision
from vmlab.image.layers import OTHER_AGENT, Entry
from vmlab.site import Site
from vmlab.tools import REPOSITORY

DEADLINE_S = 60.0
ROLLBACK_LIMIT_S = 900.0
GOLDEN = sorted((REPOSITORY / "tests/data").glob("ledger-*.json"))
"""The ledgers of released versions."""
RECORD, STATE_FILE = "update/state/ledger_record.py", "host/system/state_file.py"
OLDER_MODULE = '''\
"""The ledger of an older version: without the keys that came later."""

GOLDEN = {golden!r}


def keep(value, model=GOLDEN):
    if isinstance(value, dict) and isinstance(model, dict):
        return {{
            name: value[name] if name == "phaseSeconds" else keep(value[name], model[name])
            for name in value
            if name in model
        }}
    if isinstance(value, list) and isinstance(model, list) and model:
        return [keep(each, model[0]) for each in value]
    return value
'''
OLDER_EDITS = (
    Edit(
        RECORD, "    return codec.encode(record)\n", "    return older.keep(codec.encode(record))\n"
    ),
    Edit(RECORD, "from treenail import codec\n", "from treenail import codec, older\n"),
    Edit(STATE_FILE, "{**document, _CHECKSUM: _compute_checksum(document)}", "document"),
)
NEWER_MODULE = '''\
"""The ledger of a newer version: with more keys, another outcome, and phases of other names."""

PHASES = {"verifying": "soaking", "rolling-back": "reverting"}
KNOWN = {name: phase for phase, name in PHASES.items()}


def extend(document):
    document["added"] = {"x": 1}
    if update := document["update"]:
        update["thaw"] = [1]
        update["phaseSeconds"]["defrosting"] = 1.0
        update["phase"] = PHASES.get(update["phase"], update["phase"])
    for past in document["history"][:1]:
        past["outcome"] = "postponed"
    return document


def read(document):
    if update := document["update"]:
        update["phase"] = KNOWN.get(update["phase"], update["phase"])
    return document
'''
NEWER_EDITS = (
    Edit(
        RECORD,
        "    return codec.encode(record)\n",
        "    return newer.extend(codec.encode(record))\n",
    ),
    Edit(RECORD, "(LedgerRecord, document)\n", "(LedgerRecord, newer.read(document))\n"),
    Edit(RECORD, "from treenail import codec\n", "from treenail import codec, newer\n"),
)
MASKED = {"usr/etc/systemd/system/kubelet.service": Entry(link="/dev/null")}


def make_older_agent(site: Site) -> Path:
    """Return the sources of the newest release, or of this agent with the ledger it had."""
    target = site.agent_sources("older")
    if revision := find_older_revision():
        return check_out_agent(revision, target)
    modules = {"older.py": OLDER_MODULE.format(golden=read_golden())}
    return change_agent(target, OLDER_EDITS, modules)


def test_newer_agent_reads_the_ledger_of_an_older_one_after_the_upgrade(site: Site) -> None:
    older = site.goal(site.image_with_agent("older", make_older_agent(site)))
    # A downgrade that a user asks for: the older agent finishes what the newer one began.
    site.reach(older)
    began = OTHER_AGENT in list_code_paths(site)
    goal = site.goal(site.image("2"))
    site.reach(goal)
    assert began
    assert [boot.digest for boot in site.story.boots] == [older.digest, goal.digest]
    ledger = site.story.boots[-1].ledger
    assert isinstance(ledger, dict)
    assert ledger["update"]["phase"] == "rebooting"
    if not find_older_revision():
        assert "checksum" not in ledger
        assert set(ledger) <= set(read_golden())
    history = read_ledger(site)["history"]
    assert [(each["target"]["config"], each["outcome"]) for each in history[:2]] == [
        (goal.config, "done"),
        (older.config, "done"),
    ]
    assert not any("state = Degraded" in event for event in site.story.events)


def test_older_agent_reads_the_ledger_of_a_newer_one_after_the_rollback(site: Site) -> None:
    site.set_deadline(DEADLINE_S)
    agent = change_agent(site.agent_sources("newer"), NEWER_EDITS, {"newer.py": NEWER_MODULE})
    bad = site.goal(site.image_with_agent("newer", agent, MASKED))
    site.ask(bad)
    site.wait(lambda: len(site.story.boots) == 2, "the node boots twice", ROLLBACK_LIMIT_S)
    site.wait(lambda: not site.node()["spec"].get("unschedulable"), "the node serves again", 300.0)
    assert [boot.digest for boot in site.story.boots] == [bad.digest, site.first.digest]
    ledger = site.story.boots[-1].ledger
    assert isinstance(ledger, dict)
    assert ledger["added"] == {"x": 1}
    assert ledger["update"]["phase"] == "reverting"

    # The agent closes the update once it saw the node in service.
    site.wait(lambda: read_ledger(site)["update"] is None, "the ledger is closed", 120.0)
    notes = site.notes()
    assert notes[key.STATE] == "Degraded"
    assert notes[key.CURRENT_CONFIG] == site.first.config
    assert "Kubelet failed" in notes[key.REASON]
    found = read_ledger(site)
    assert found["quarantined"]["target"]["config"] == bad.config
    assert found["history"][0]["outcome"] == "failed"
    assert "added" not in found
    site.reach(site.first)
    assert len(site.story.boots) == 2


def read_ledger(site: Site) -> Any:
    """Return the ledger's document as it is now."""
    return json.loads(site.machine.sh("cat /var/lib/treenail/ledger.json"))


def read_golden() -> Any:
    """Return the ledger of the newest release."""
    return json.loads(GOLDEN[-1].read_bytes())


def list_code_paths(site: Site) -> str:
    """Return where the agent of this boot runs from, as its log entries say."""
    return "\n".join(each.get("CODE_FILE", "") for each in site.journal("-b", "-u treenail"))
