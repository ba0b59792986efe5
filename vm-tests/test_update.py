"""An update from one image to the next, with a real reboot."""

import pytest

from treenail.log import MessageId
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
def test_update_is_in_the_journal_across_its_reboot(site: Site) -> None:
    goal = site.goal(site.image("2"))
    site.reach(goal)
    assert site.machine.sh("cat /usr/lib/treenail-vm/version") == "2\n"
    assert [boot.digest for boot in site.story.boots] == [goal.digest]
    update = site.journal(f"MESSAGE_ID={MessageId.UPDATE_DONE}")[-1]["TREENAIL_UPDATE"]
    entries = site.journal(f"TREENAIL_UPDATE={update}")
    assert [each["MESSAGE_ID"] for each in entries if "MESSAGE_ID" in each] == list(STORY)
    boots = list(dict.fromkeys(each["_BOOT_ID"] for each in entries))
    now = site.machine.sh("cat /proc/sys/kernel/random/boot_id").strip()
    assert len(boots) == 2
    assert boots[1] == now.replace("-", "")
    # Another machine would take half a minute of the smoke test.
    assert_sandboxed(site)


def test_service_is_ready_and_sandboxed(site: Site) -> None:
    assert_sandboxed(site)


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
