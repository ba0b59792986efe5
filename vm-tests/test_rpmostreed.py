"""An update by the agent while rpm-ostreed exits."""

import pytest

from vmlab.site import Site

pytestmark = pytest.mark.usefixtures("with_rpm_ostree")

NAME, PATH = "org.projectatomic.rpmostree1", "/org/projectatomic/rpmostree1/Sysroot"
UNTIL_ACTIVE = f"""\
until busctl get-property {NAME} {PATH} {NAME}.Sysroot ActiveTransactionPath | grep -q unix
do sleep 0.2
done
"""
EXITED = "rpm-ostreed exited"


def test_update_succeeds_after_rpmostreed_is_killed_and_restarted(site: Site) -> None:
    goal = site.goal(site.image("2"))
    site.ask(goal)
    for command in ("kill --signal=KILL", "restart"):
        site.machine.sh(UNTIL_ACTIVE, limit_s=600.0)
        site.machine.sh(f"systemctl {command} rpm-ostreed")
    site.settle(goal)
    assert [boot.digest for boot in site.story.boots] == [goal.digest]
    messages = [each["MESSAGE"] for each in site.journal("_SYSTEMD_UNIT=treenail.service")]
    assert any(EXITED in message for message in messages), messages
