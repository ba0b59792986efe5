"""Files that a user changes by hand on the node."""

from treenail.api import annotations as key
from treenail.log import MessageId
from vmlab.configs import with_files
from vmlab.site import Site

GUARDED = "/etc/containers/registries.d/guarded.yaml"
HEALED = "/etc/containers/registries.d/healed.yaml"


def test_changed_file_is_reported_or_repaired_by_its_setting(site: Site) -> None:
    site.add_settings(f'[drift.paths]\n"{HEALED}" = "repair"\n')
    asked = with_files({GUARDED: "docker: {}", HEALED: "docker: {}"})
    site.reach(site.goal(site.first.pull_spec, asked, image_mode=False))

    site.machine.sh(f"echo changed >{HEALED}")
    site.wait(lambda: site.machine.sh(f"cat {HEALED}") == "docker: {}", "the file is healed")
    site.wait(
        lambda: HEALED in read_messages(site, MessageId.DRIFT_REPAIRED), "the journal reports it"
    )
    assert HEALED in read_messages(site, MessageId.DRIFT_DETECTED)

    site.machine.sh(f"echo changed >{GUARDED}")
    site.wait(lambda: site.notes()[key.STATE] == "Degraded", "the node is Degraded")
    assert GUARDED in site.notes()[key.REASON]
    assert GUARDED in read_messages(site, MessageId.DRIFT_DETECTED)
    assert site.machine.sh(f"cat {GUARDED}") == "changed\n"

    site.machine.sh(f"treenail drift --repair {GUARDED}")
    site.wait(lambda: site.notes()[key.STATE] == "Done", "the node is as its config says")
    assert site.machine.sh(f"cat {GUARDED}") == "docker: {}"
    assert site.story.boots == []


def read_messages(site: Site, message: MessageId) -> str:
    """Return the journal's entries of one message."""
    return "\n".join(each["MESSAGE"] for each in site.journal(f"MESSAGE_ID={message}"))
