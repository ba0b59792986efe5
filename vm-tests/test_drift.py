"""Files that somebody changes by hand on the node."""

from treenail.api import annotations as key
from treenail.log import MessageId
from vmlab.configs import with_files
from vmlab.site import Site

GUARDED = "/etc/containers/registries.d/guarded.yaml"
HEALED = "/etc/containers/registries.d/healed.yaml"


def test_a_changed_file_is_told_of_or_healed_as_the_settings_say(site: Site) -> None:
    site.add_settings(f'[drift.paths]\n"{HEALED}" = "repair"\n')
    asked = with_files({GUARDED: "docker: {}", HEALED: "docker: {}"})
    site.reach(site.goal(site.first.pull_spec, asked, image_mode=False))

    site.machine.sh(f"echo changed >{HEALED}")
    site.wait(lambda: site.machine.sh(f"cat {HEALED}") == "docker: {}", "the file is healed")
    site.wait(lambda: HEALED in told(site, MessageId.DRIFT_REPAIRED), "the journal tells of it")
    assert HEALED in told(site, MessageId.DRIFT_DETECTED)

    site.machine.sh(f"echo changed >{GUARDED}")
    site.wait(lambda: site.notes()[key.STATE] == "Degraded", "the node is Degraded")
    assert GUARDED in site.notes()[key.REASON]
    assert GUARDED in told(site, MessageId.DRIFT_DETECTED)
    assert site.machine.sh(f"cat {GUARDED}") == "changed\n"

    site.machine.sh(f"treenail drift --repair {GUARDED}")
    site.wait(lambda: site.notes()[key.STATE] == "Done", "the node is as its config says")
    assert site.machine.sh(f"cat {GUARDED}") == "docker: {}"
    assert site.story.boots == []


def told(site: Site, message: MessageId) -> str:
    """What the journal has of these messages."""
    return "\n".join(each["MESSAGE"] for each in site.journal(f"MESSAGE_ID={message}"))
