"""An update from one image to the next, with a real reboot."""

import pytest

from treenail.api import annotations as key
from treenail.log import MessageId
from treenail.update.state.ledger_record import Phase
from vmlab.site import Site

MOST_EXPOSED = 3.0
STORY = [
    MessageId.UPDATE_STARTED,
    MessageId.STAGED,
    MessageId.DRAINED,
    MessageId.REBOOTING,
    MessageId.BOOT_VERIFIED,
    MessageId.UPDATE_DONE,
]


@pytest.mark.smoke
def test_update_after_a_power_cut_is_in_the_journal_across_its_reboot(site: Site) -> None:
    # What no program syncs is lost, so that a missing sync shows.
    site.hold_back_writes()
    goal = site.goal(site.image("2"))
    # The drain that the agent requests must be in its ledger, and the staged deployment is lost.
    site.drains.stop()
    site.ask(goal)
    site.wait(lambda: site.notes().get(key.DESIRED_DRAIN), "a drain is requested", 300.0)
    assert site.cut_power() == Phase.DRAINING
    site.start_drains()
    site.settle(goal)
    assert site.machine.sh("cat /usr/lib/treenail-vm/version") == "2\n"
    assert [boot.digest for boot in site.story.boots] == [site.first.digest, goal.digest]
    now = site.machine.sh("cat /proc/sys/kernel/random/boot_id").strip().replace("-", "")
    *before, last = read_boots(site)
    assert last == (now, [MessageId.BOOT_VERIFIED, MessageId.UPDATE_DONE])
    # It does not wait for the drain if that is over when the image is staged again.
    assert [each for each in before[-1][1] if each != MessageId.DRAINED] == [
        MessageId.STAGED,
        MessageId.REBOOTING,
    ]
    # A machine of its own would take minutes under emulation.
    assert_sandboxed(site)


def test_update_is_in_the_journal_across_its_reboot(site: Site) -> None:
    goal = site.goal(site.image("2"))
    site.reach(goal)
    assert site.machine.sh("cat /usr/lib/treenail-vm/version") == "2\n"
    assert [boot.digest for boot in site.story.boots] == [goal.digest]
    boots = read_boots(site)
    now = site.machine.sh("cat /proc/sys/kernel/random/boot_id").strip()
    assert [message for _, messages in boots for message in messages] == STORY
    assert [boot for boot, _ in boots][1:] == [now.replace("-", "")]


def test_service_is_ready_and_sandboxed(site: Site) -> None:
    assert_sandboxed(site)


def read_boots(site: Site) -> list[tuple[str, list[str]]]:
    """Return the last update's messages in the journal, by the boots that logged them."""
    update = site.journal(f"MESSAGE_ID={MessageId.UPDATE_DONE}")[-1]["TREENAIL_UPDATE"]
    boots: dict[str, list[str]] = {}
    for entry in site.journal(f"TREENAIL_UPDATE={update}"):
        messages = boots.setdefault(entry["_BOOT_ID"], [])
        if "MESSAGE_ID" in entry:
            messages.append(entry["MESSAGE_ID"])
    return list(boots.items())


def assert_sandboxed(site: Site) -> None:
    shown = site.machine.sh("systemctl show -p Type,ActiveState,SubState,NRestarts treenail")
    assert sorted(shown.split()) == [
        "ActiveState=active",
        "NRestarts=0",
        "SubState=running",
        "Type=notify",
    ]
    exposure = site.machine.sh("systemd-analyze security treenail.service | tail -1")
    assert float(exposure.partition("service: ")[2].split()[0]) <= MOST_EXPOSED, exposure
    assert "treenail" not in site.machine.sh("systemctl --failed --plain --no-legend; true")
