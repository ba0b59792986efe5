"""One update of one node, from the wish to Done, and wishes that can't be obeyed."""

import base64
import gzip
import json
import stat
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.commands import status, treenail
from tests.integration.site import LOGIN, NODE, PASSWORD, Site
from tests.integration.witness import Sight
from treenail.api import annotations as key
from treenail.log import MessageId

pytestmark = pytest.mark.integration

STORY = [
    MessageId.UPDATE_STARTED,
    MessageId.STAGED,
    MessageId.DRAINED,
    MessageId.REBOOTING,
    MessageId.BOOT_VERIFIED,
    MessageId.UPDATE_DONE,
]


def changes(sights: list[Sight]) -> list[set[str]]:
    """Return the changes of the Node, write by write."""
    return [found for before, after in pairwise(sights) if (found := after.changes(before))]


def first(sights: list[Sight], name: str, value: str) -> Sight:
    """The sight in which an annotation took the value."""
    return next(sight for sight in sights if sight.notes.get(key.PREFIX + name) == value)


def test_every_step_comes_after_the_one_before_it(site: Site) -> None:
    before, goal = site.current, site.goal()
    site.reach(goal)
    sights = site.sights()
    assert changes(sights) == [
        {"desiredConfig", "desiredOSImage"},
        {"state"},
        {"desiredDrain"},
        {"cordoned"},
        {"lastAppliedDrain"},
        {"post-config-action"},
        {"currentConfig", "currentOSImage", "desiredDrain", "post-config-action"},
        {"cordoned", "lastAppliedDrain"},
        {"state"},
    ]
    assert [sight.notes[key.STATE] for sight in (sights[0], *sights[2:4], sights[-1])] == [
        "Done",
        "Working",
        "Working",
        "Done",
    ]
    asked = first(sights, "desiredDrain", f"drain-{goal.config}")
    assert (asked.staged, asked.locked, asked.cordoned) == (goal.image.digest, True, False)
    drained = first(sights, "lastAppliedDrain", f"drain-{goal.config}")
    assert (drained.staged, drained.locked, drained.cordoned) == (goal.image.digest, True, True)
    moved = first(sights, "currentConfig", goal.config)
    assert (moved.booted, moved.cordoned) == (goal.image.digest, True)
    assert moved.notes[key.DESIRED_DRAIN] == f"uncordon-{goal.config}"
    assert first(sights, "currentOSImage", goal.pull_spec) is moved
    assert {sight.booted for sight in sights[: sights.index(drained) + 1]} == {before.image.digest}
    assert site.machine.boot_count == site.boots + 1


def test_update_waits_until_drain_is_acknowledged(site: Site) -> None:
    goal = site.goal()
    with site.drains_held():
        site.ask(goal)
        site.wait_note(key.DESIRED_DRAIN, f"drain-{goal.config}")
        assert not site.machine.wait_for_boot(site.boots + 1, 1.0)
        assert site.machine.is_staged_locked
        assert site.phase() == "draining"
    site.settle(goal)


@pytest.mark.parametrize("spelling", key.IMAGE_SPELLINGS)
def test_reply_uses_spelling_of_request(site: Site, spelling: str) -> None:
    goal = site.goal()
    site.ask(goal, spelling=spelling)
    site.settle(goal)
    notes = site.notes()
    replies = {each: notes[each] for each in key.IMAGE_SPELLINGS.values() if each in notes}
    assert replies == {key.IMAGE_SPELLINGS[spelling]: goal.pull_spec}


def test_two_spellings_that_disagree_are_refused_by_name(site: Site) -> None:
    one, other = site.goal(), site.goal()
    site.annotate(
        {
            key.DESIRED_CONFIG: one.config,
            key.DESIRED_OS_IMAGE: one.pull_spec,
            key.DESIRED_IMAGE: other.pull_spec,
        }
    )
    reason = site.wait_degraded("the annotations name different ones")
    for words in (key.DESIRED_OS_IMAGE, one.pull_spec, key.DESIRED_IMAGE, other.pull_spec):
        assert words in reason
    assert untouched(site)
    site.reach(one)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("registry.example.com/os/node:latest", "@sha256:"),
        ("registry.example.com/os/node", "@sha256:"),
        ("oci-archive:/var/image.tar@sha256:" + "a" * 64, "registry"),
        ("registry.example.com/os/node@sha256:beef", "64"),
        ("; rm -rf /", "@sha256:"),
    ],
)
def test_invalid_pull_spec_is_quarantined_and_retried(site: Site, asked: str, words: str) -> None:
    goal = site.goal()
    site.annotate({key.DESIRED_CONFIG: goal.config, key.DESIRED_OS_IMAGE: asked})
    reason = site.wait_degraded(words)
    assert key.DESIRED_OS_IMAGE in reason
    assert untouched(site)
    site.reach(site.current)
    assert site.notes()[key.REASON] == ""


def untouched(site: Site) -> bool:
    """Return whether the machine is unchanged and the node stayed in service."""
    return (
        site.transactions() == []
        and site.machine.staged_deployment is None
        and not site.was_cordoned()
        and site.machine.boot_count == site.boots
    )


def test_journal_has_update_id_across_reboot(site: Site) -> None:
    goal = site.goal()
    site.reach(goal)
    began = site.journal(MESSAGE_ID=MessageId.UPDATE_STARTED)
    assert len(began) == 1
    entries = site.journal(TREENAIL_UPDATE=str(began[0]["TREENAIL_UPDATE"]))
    assert [entry["MESSAGE_ID"] for entry in entries if "MESSAGE_ID" in entry] == STORY
    assert {entry["TREENAIL_CONFIG"] for entry in entries} == {goal.config}
    assert len({str(entry["_BOOT_ID"]) for entry in entries}) == 2
    phases = [str(entry["TREENAIL_PHASE"]) for entry in entries]
    assert list(dict.fromkeys(phases)) == [
        "staging",
        "draining",
        "applying",
        "rebooting",
        "verifying",
        "uncordoning",
    ]
    assert site.machine.agent_log.read_text() == "", "with a journal there is nothing on stderr"


def test_systemd_status_shows_percentage(site: Site) -> None:
    goal = site.goal()
    with site.slow_pull():
        site.ask(goal)
        assert site.machine.agent.wait_until(
            lambda unit: f"staging {goal.config}" in unit.status, 10.0
        )
        assert site.machine.agent.wait_until(lambda unit: " % [" in unit.status, 10.0)
    site.settle(goal)
    assert site.machine.agent.wait_until(
        lambda unit: unit.status.startswith(f"at {goal.config}"), 5.0
    )


def test_no_secret_is_shown(site: Site, tmp_path: Path) -> None:
    with site.slow_pull():
        site.ask(goal := site.goal())
        site.wait_progress()
        shown = [
            status(site).stdout,
            status(site, "--json").stdout,
            json.dumps(site.lab.read_live_status(NODE)),
        ]
    site.settle(goal)
    shown += [
        status(site).stdout,
        json.dumps(site.lab.read_live_status(NODE)),
        site.machine.agent.status,
    ]
    shown += [json.dumps(site.machine.read_journal()), site.machine.agent_log.read_text()]
    shown += [json.dumps([sight.notes for sight in site.witness.sights]), everything(site)]
    shown += [treenail(site, name, "--json").stdout for name in ("plan", "why", "history")]
    shown.append(bundle(site, tmp_path / "bundle.tar.gz"))
    token = base64.b64encode(f"{LOGIN.username}:{PASSWORD}".encode()).decode()
    auth = (site.machine.root / "run/ostree/auth.json").resolve().read_text()
    assert token in auth, "the canary is where it belongs"
    for text in shown:
        assert PASSWORD not in text
        assert token not in text


def bundle(site: Site, path: Path) -> str:
    """All that a bug report has, unpacked."""
    output = treenail(site, "collect", "--json", "-o", str(path)).stdout
    assert {"ledger.json", "deployments.json", "plan.json"} <= set(json.loads(output)["parts"])
    return gzip.decompress(path.read_bytes()).decode()


def everything(site: Site) -> str:
    """All that the API server holds."""
    return site.server.call_api(
        lambda api: json.dumps(
            [list(api.store.list_objects(kind)) for kind in api.store.list_storages()]
        )
    )


def test_agent_files_are_readable_by_owner_only(site: Site) -> None:
    kept = site.machine.root / "var/lib/treenail"
    found = {path: path.stat() for path in kept.rglob("*")}
    assert {"ledger.json", "auth.json"} <= {path.name for path in found}
    directories = [each for each in found.values() if stat.S_ISDIR(each.st_mode)]
    files = [each for each in found.values() if stat.S_ISREG(each.st_mode)]
    assert {stat.S_IMODE(each.st_mode) for each in files} == {0o600}
    assert {stat.S_IMODE(each.st_mode) for each in directories} <= {0o700}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
